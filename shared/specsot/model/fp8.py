"""A weight held in 8-bit floats, and its product with a few rows.

Refuses to know layers and models.

One scale for the whole weight: the exponent of each number is its own. Where a GPU multiplies such numbers
(NVIDIA, from Ada on) the rows become 8-bit floats too, each with its own scale; elsewhere the weight becomes
what the rows are.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max
ADA = (8, 9)
FP8_WEIGHTS_AT_A_TIME = 1 << 20  # weights


class Fp8:
    """[out, in] float8_e4m3fn and one scale."""

    __slots__ = ("_one", "_scale", "_whole")

    def __init__(self, weight: Tensor) -> None:
        peak = weight.abs().amax().float()
        self._scale = torch.where(peak > 0, peak / LARGEST, 1.0)
        self._whole = (weight / self._scale.to(weight.dtype)).to(KIND)
        self._one = torch.ones_like(self._scale)

    @property
    def bytes(self) -> int:
        return self._whole.nbytes + self._scale.nbytes

    @property
    def captured(self) -> bool:
        """Whether it is fit for a captured graph: `gated` and `add_to` are for those."""
        return not any(size % 16 for size in self._whole.shape) and _multiplies(self._whole.device)

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        """x [rows, in] -> [rows, out]; gated: silu(first half) * second half, [rows, out / 2]."""
        if not self.captured or not len(x):
            return self._multiply_plainly(x)
        from specsot.kernels.gpu.eighths import lengthen_rows

        return lengthen_rows(*self._multiply(x), gated)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add x [rows, in] times the weight to hidden [rows, out], in place."""
        from specsot.kernels.gpu.eighths import lengthen_rows

        lengthen_rows(*self._multiply(x), into=hidden)

    def _multiply_plainly(self, x: Tensor) -> Tensor:
        """A part of the weight becomes floats at a time, few enough to stay in a processor's cache."""
        parts = self._whole.split(max(FP8_WEIGHTS_AT_A_TIME // self._whole.shape[1], 1))
        return torch.cat([x @ part.to(x.dtype).t() for part in parts], 1).mul_(self._scale.to(x.dtype))

    def _multiply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The product, and what each of its rows is still to be multiplied by."""
        from specsot.kernels.gpu.eighths import shorten_rows

        short, scales = shorten_rows(x)
        product = torch.ops.aten._scaled_mm(
            short, self._whole.t(), self._one, self._scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return product, scales


@cache
def _multiplies(device: torch.device) -> bool:
    """Whether this GPU has products of such numbers."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= ADA
