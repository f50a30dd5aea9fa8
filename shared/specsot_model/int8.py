"""Weights in int8 on GPUs, and their products with activations that are rounded to int8 as well."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from specsot_model.decoding import Codes
from specsot_model.fp8 import NormWeight, ShortRows

# Weights. How many are floats at a time; bounds the extra memory.
WEIGHTS_AT_A_TIME = 1 << 24
# Divisor in place of a scale of zero.
TINY = 1e-30


class Int8:
    """A weight [out, in] in int8 with a scale per output, and an optional bias [out].

    Activations are rounded to int8 as well, each row with a scale per 64 inputs, and the integer sums are
    exact. A row's result is therefore the same in any batch, bit for bit.
    """

    __slots__ = ("_counts", "_scales", "_whole", "bias")

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None = None) -> None:
        self.bias = bias
        if isinstance(weight, Codes):
            self._whole = weight.whole.contiguous()
            self._scales = weight.scale.flatten()
        else:
            self._scales = weight.abs().amax(1).float() / 127
            self._whole = torch.empty_like(weight, dtype=torch.int8)
            for first in range(0, len(weight), step := self._outputs_at_a_time):
                part = slice(first, first + step)
                scales = self._scales[part, None].clamp_min(TINY)
                self._whole[part] = (weight[part].float() / scales).round_()
        self._counts = torch.zeros(len(self._whole), dtype=torch.int32, device=weight.device)

    @property
    def _outputs_at_a_time(self) -> int:
        """How many outputs become floats at a time."""
        return max(WEIGHTS_AT_A_TIME // self._whole.shape[1], 1)

    @property
    def captured(self) -> bool:
        """Tell whether a CUDA graph can capture the product; all methods but `__call__` need that."""
        return self._whole.shape[1] % 16 == 0 and multiplies_int8(self._whole.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in] -> [rows, out]; it works on any device."""
        return self.heads(x) if self.captured and len(x) else self._multiply_plainly(x)

    def wide(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """Return the product of the RMSNorm of hidden [rows, in], in fp32 as it is summed: [rows, out]."""
        return self._multiply(self._round(hidden, norm), torch.float32)

    def normed(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """Return the product of the RMSNorm of hidden [rows, in], in the type of hidden: [rows, out]."""
        return self.heads(hidden, norm)

    def heads(self, x: Tensor, norm: NormWeight | None = None, rows: ShortRows | None = None) -> Tensor:
        """Return the product of x [rows, in], after an RMSNorm if one is given: [rows, out].

        rows: The normed x in int8, if it is computed already.
        """
        return self._multiply(rows or self._round(x, norm), x.dtype)

    def gated(self, hidden: Tensor, norm: NormWeight, rows: ShortRows | None = None) -> ShortRows:
        """Return silu(first half) * second half of what `normed` returns, in int8. A bias is not added."""
        from specsot_kernels.gpu.whole import multiply_gated_whole

        short = rows or self._round(hidden, norm)
        return ShortRows(*multiply_gated_whole(*short, self._whole, self._scales))

    def add_to(self, hidden: Tensor, x: Tensor | ShortRows, following: NormWeight | None = None) -> None:
        """Add x [rows, in] times the weight to hidden [rows, out], in place. A bias is not added."""
        self._multiply(x if isinstance(x, ShortRows) else self._round(x), hidden.dtype, hidden)

    def _round(self, x: Tensor, norm: NormWeight | None = None) -> ShortRows:
        from specsot_kernels.gpu.whole import round_rows

        return ShortRows(*round_rows(x, norm))

    def _multiply(self, rows: ShortRows, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
        from specsot_kernels.gpu.whole import multiply_whole

        weight = self._whole, self._scales, self._counts
        return multiply_whole(*rows, *weight, self.bias, into, dtype)

    def _multiply_plainly(self, x: Tensor) -> Tensor:
        parts = self._whole.split(self._outputs_at_a_time)
        product = torch.cat([x @ part.to(x.dtype).t() for part in parts], 1).mul_(self._scales.to(x.dtype))
        return product if self.bias is None else product.add_(self.bias)


def multiplies_int8(device: torch.device) -> bool:
    """Tell whether the int8 kernels run on this device."""
    return device.type == "cuda" and find_spec("triton") is not None
