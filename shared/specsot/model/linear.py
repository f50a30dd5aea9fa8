"""A matrix times a few rows, from weights laid out for it once at load.

Refuses to know layers and models.

Plain weights are read well at 1 row and from about 64 rows on; between (draft trees, parallel
branches) CPU libraries repack them on every call, which costs up to four times the memory floor.
Packed once by oneDNN, 16 rows cost 1.2 single ones (bf16 on AMX) to 2 (fp32 on AVX2, where MKL's packed
form took twice as long). Elsewhere (CUDA, other dtypes, builds without it) the plain weight is used. What is
to be held in fewer bits is `quantise`d instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.members import Quantization
from specsot.model.quantization import quantise

PACKED_FOR = 64  # rows the library is told at packing; the packed form serves every number (probed below)

Multiply = Callable[[Tensor], Tensor]


class Linear:
    """y = x W^T + b. weight [out, in], bias [out] or None; x [rows, in] -> [rows, out]."""

    __slots__ = ("bias", "multiply", "shape", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, quantization: Quantization | None = None
    ) -> None:
        self.shape = weight.shape
        choice = _quantised(quantization) if quantization else _choose(weight.dtype, weight.device.type)
        self.multiply = choice(weight, bias)
        # None where it was packed or quantised: then nobody but `__call__` can use it.
        self.weight, self.bias = (weight, bias) if choice is _plain else (None, None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)


def _plain(weight: Tensor, bias: Tensor | None) -> Multiply:
    return lambda x: F.linear(x, weight, bias)


def _onednn(weight: Tensor, bias: Tensor | None) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _quantised(kind: Quantization) -> Callable[[Tensor, Tensor | None], Multiply]:
    def hold(weight: Tensor, bias: Tensor | None) -> Multiply:
        held = quantise(weight, kind)
        return held if bias is None else lambda x: held(x).add_(bias)

    return hold


@cache
def _choose(dtype: torch.dtype, device: str) -> Callable[[Tensor, Tensor | None], Multiply]:
    """The packed product for this dtype, if this machine has it and it is right there.

    Tried, not trusted: the packed form is told one number of rows and serves all.
    """
    if dtype not in (torch.float32, torch.bfloat16) or device != "cpu":
        return _plain
    try:
        shapes = ((640, 384), (96, 1000), (33, 7))
        return _onednn if all(_agrees(dtype, shape) for shape in shapes) else _plain
    except (RuntimeError, AttributeError):
        return _plain


@torch.inference_mode()
def _agrees(dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    seeded = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(shape, generator=seeded).to(dtype),
        torch.randn(shape[0], generator=seeded).to(dtype),
    )
    ours, plain = _onednn(weight, bias), _plain(weight, bias)
    inputs = (torch.randn(rows, shape[1], generator=seeded).to(dtype) for rows in (1, 2, 5, 17, 130))
    allowed = 1e-5 if dtype == torch.float32 else 0.02  # of the largest output: the library orders sums
    pairs = ((ours(x).float(), plain(x).float()) for x in inputs)
    return all((a - b).abs().max() <= allowed * b.abs().max() for a, b in pairs)
