"""Weights in int8 on GPUs, and their products with activations that are rounded to int8 as well."""

from __future__ import annotations

import torch
from torch import Tensor

from specsot_model.decoding import Codes
from specsot_model.fp8 import NormedRows, NormWeight, ShortRows, multiply_plainly, runs_kernels

# Weights. How many are floats at a time; bounds the extra memory. Untuned.
WEIGHTS_AT_A_TIME = 1 << 24
# Divisor in place of a scale of zero, so that an output without weights stays zero. Untuned.
TINY = 1e-30


class Int8:
    """A weight [out, in] in int8 with a scale per output, and an optional bias [out].

    Activations are rounded to int8 as well, each row with a scale per 64 inputs, and the integer sums are
    exact. A row's result is therefore the same in any batch, bit for bit.

    weight: [out, in], floats or `Codes` of int8 with a scale per output.
    bias: [out]; None: no bias is added.
    """

    __slots__ = ("_counts", "_int8_weight", "_scales", "bias")

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None = None) -> None:
        """Round the weight to int8, or take codes as they are.

        Each output gets the scale of its largest absolute weight, divided by 127; an output of zeros stays
        zero.

        weight: [out, in], floats or `Codes` of int8 with a scale per output.
        bias: [out]; None: no bias is added.
        """
        self.bias = bias
        if isinstance(weight, Codes):
            self._int8_weight = weight.values.contiguous()
            self._scales = weight.scale.flatten()
        else:
            self._scales = weight.abs().amax(1).float() / 127
            self._int8_weight = torch.empty_like(weight, dtype=torch.int8)
            for first in range(0, len(weight), step := self._outputs_at_a_time):
                part = slice(first, first + step)
                scales = self._scales[part, None].clamp_min(TINY)
                self._int8_weight[part] = (weight[part].float() / scales).round_()
        self._counts = torch.zeros(len(self._int8_weight), dtype=torch.int32, device=weight.device)

    @property
    def _outputs_at_a_time(self) -> int:
        """Return how many outputs become floats at a time; at least 1."""
        return max(WEIGHTS_AT_A_TIME // self._int8_weight.shape[1], 1)

    @property
    def capturable(self) -> bool:
        """Tell whether a CUDA graph can capture the product; all methods but `__call__` need that."""
        return self._int8_weight.shape[1] % 16 == 0 and runs_kernels(self._int8_weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in] -> [rows, out]; it works on any device.

        x: [rows, in], in floats. No rows are allowed.
        """
        if self.capturable and len(x):
            return self.heads(x)
        return multiply_plainly(x, self._int8_weight, self._scales, self.bias, self._outputs_at_a_time)

    def wide(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """Return the product of the RMSNorm of the hidden states in fp32, as it is summed: [rows, out].

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        """
        return self._multiply(self._round(hidden, norm), torch.float32)

    def normed(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """Return the product of the RMSNorm of the hidden states, in their type: [rows, out].

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        """
        return self.heads(hidden, norm)

    def heads(self, x: Tensor, norm: NormWeight | None = None, rows: NormedRows | None = None) -> Tensor:
        """Return the product of x, after an RMSNorm if one is given: [rows, out].

        x: [rows, in], in floats; its type is that of the result.
        norm: Weight [in] and epsilon of the RMSNorm; None: x is normalized already.
        rows: The normed x, used if it is in int8 already; otherwise it is computed here.
        """
        short = rows if isinstance(rows, ShortRows) else self._round(x, norm)
        return self._multiply(short, x.dtype)

    def gated(self, hidden: Tensor, norm: NormWeight, rows: NormedRows | None = None) -> ShortRows:
        """Return silu(first half) * second half of what `normed` returns, in int8: [rows, out / 2]. A bias is
        not added.

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        rows: The normed rows, used if they are in int8 already; otherwise they are computed here.
        """
        from specsot_kernels.gpu.whole import multiply_gated_whole

        short = rows if isinstance(rows, ShortRows) else self._round(hidden, norm)
        return ShortRows(*multiply_gated_whole(*short, self._int8_weight, self._scales))

    def add_to(self, hidden: Tensor, x: Tensor | ShortRows, next_norm: NormWeight | None = None) -> None:
        """Add the product of x to the hidden states, in place, and return None. A bias is added as well.

        hidden: [rows, out], the residual stream.
        x: [rows, in], in floats or rounded to int8 already.
        next_norm: Not used; fp8 products return the normed `hidden` in fp8.
        """
        self._multiply(x if isinstance(x, ShortRows) else self._round(x), hidden.dtype, hidden)

    def _round(self, x: Tensor, norm: NormWeight | None = None) -> ShortRows:
        """Return x in int8, each row with a scale per 64 inputs.

        x: [rows, in], in floats.
        norm: Weight [in] and epsilon of an RMSNorm that is applied first; None: no norm.
        """
        from specsot_kernels.gpu.whole import round_rows

        return ShortRows(*round_rows(x, norm))

    def _multiply(self, rows: ShortRows, dtype: torch.dtype, target: Tensor | None = None) -> Tensor:
        """Multiply rounded rows, add the bias, and return the result [rows, out].

        rows: The rows in int8, with their scales.
        dtype: Type of the result.
        target: [rows, out], a tensor to which the product is added, in place; it is the result then. None: a
            new tensor.
        """
        from specsot_kernels.gpu.whole import multiply_whole

        weight = self._int8_weight, self._scales, self._counts
        return multiply_whole(*rows, *weight, self.bias, target, dtype)
