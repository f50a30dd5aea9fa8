"""A matrix times a few rows, from weights laid out for it once at load.

Refuses to know layers and models.

MKL's sgemm reads plain weights well at 1 row and from about 64 rows on; between (draft trees,
parallel branches) it repacks them on every call and costs up to four times the memory floor. Packed
once, 16 rows cost about 1.6 single ones. Elsewhere (other dtypes, CUDA, builds without MKL) the plain
weight is used.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FOR = 64  # rows MKL is told at packing; the packed form serves every number of rows (probed below)


class Linear:
    """y = x W^T + b. weight [out, in], bias [out] or None; x [rows, in] -> [rows, out]."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _pack(weight) if packs(weight) else None
        # The packed product only asks the plain weight for its shape: keep a view of one element.
        self._weight = weight if self._packed is None else weight.new_zeros(1).expand(weight.shape)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self._weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        return torch.ops.mkl._mkl_linear(x, self._packed, self._weight, self._bias, x.shape[0])


def packs(weight: Tensor) -> bool:
    """Whether this weight is worth packing, and packing is there and right on this machine."""
    plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and torch.backends.mkl.is_available() and _packing_is_right()


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_FOR)


@cache
def _packing_is_right() -> bool:
    """Try it: MKL documents the packed form for one number of rows only, so trust nothing."""
    try:
        return all(
            _agrees(shape, rows) for shape in ((640, 384), (96, 1000), (33, 7)) for rows in (1, 2, 5, 17, 130)
        )
    except (RuntimeError, AttributeError):
        return False


def _agrees(shape: tuple[int, int], rows: int) -> bool:
    weight = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)
    x = torch.linspace(1, -1, rows * shape[1]).reshape(rows, shape[1])
    packed = torch.ops.mkl._mkl_linear(x, _pack(weight), weight, None, rows)
    return torch.allclose(packed, F.linear(x, weight), rtol=1e-4, atol=1e-3)
