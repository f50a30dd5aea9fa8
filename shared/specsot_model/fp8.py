"""Weights in 8-bit floats (fp8), and their products on GPUs, where activations are rounded to fp8 as well."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from specsot_model.decoding import Codes

# Weight [in] and epsilon of an RMSNorm.
NormWeight = tuple[Tensor, float]
# Type of fp8 weights and activations.
FP8_DTYPE = torch.float8_e4m3fn
# Largest finite number of that type.
FP8_MAX = torch.finfo(FP8_DTYPE).max
# CUDA compute capability (Ada) from which GPUs multiply fp8.
ADA = (8, 9)
# Weights. How many are converted at a time; bounds the extra memory. Untuned.
FP8_WEIGHTS_AT_A_TIME = 1 << 20


class ShortRows(NamedTuple):
    """Activations in 8 bits, with their scales.

    short: [rows, size], fp8 or int8.
    scales: What the numbers are multiplied by: fp32 [rows] for fp8, [groups of inputs, rows] for int8.
    """

    short: Tensor
    scales: Tensor


# The rows of the residual stream that the preceding kernel has normed for the next product: `ShortRows` in 8
# bits, or a tensor [rows, size] in the type of the stream. A product uses only rows of the form that it
# multiplies; if it gets another form or None, it norms the stream itself.
NormedRows = ShortRows | Tensor


class Unscaled(NamedTuple):
    """A product before its scales are applied.

    product: [rows, out], the product.
    rows: fp32 [rows], what each row is still to be multiplied by.
    columns: fp32 [out], what each column is still to be multiplied by.
    """

    product: Tensor
    rows: Tensor
    columns: Tensor


class Fp8:
    """A weight [out, in] in float8_e4m3fn with a scale per output, and an optional bias [out].

    GPUs that multiply fp8 round the activations to fp8 as well, each row with a scale of its own, so the
    rounding of a row does not depend on the batch. Other devices convert the weight back to floats.

    weight: [out, in], floats or `Codes` of fp8 with a scale per output.
    bias: [out]; None: no bias is added.
    """

    __slots__ = ("_fp8_weight", "_scales", "_unit_scale", "bias")

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None = None) -> None:
        """Round the weight to fp8, or take codes as they are.

        Each output gets the scale of its largest absolute weight; an output of zeros gets scale 1.

        weight: [out, in], floats or `Codes` of fp8 with a scale per output.
        bias: [out]; None: no bias is added.
        """
        self.bias = bias
        self._unit_scale = torch.ones((), device=weight.device)
        if isinstance(weight, Codes):
            self._fp8_weight = weight.values.view(FP8_DTYPE)
            self._scales = weight.scale.flatten()
            return
        peaks = weight.abs().amax(1, keepdim=True).float()
        scales = torch.where(peaks > 0, peaks / FP8_MAX, 1.0)
        self._fp8_weight = torch.empty_like(weight, dtype=FP8_DTYPE)
        for first in range(0, len(weight), step := self._outputs_at_a_time):
            self._fp8_weight[first : first + step] = (
                weight[first : first + step] / scales[first : first + step]
            )
        self._scales = scales.flatten()

    @property
    def _outputs_at_a_time(self) -> int:
        """Return how many outputs become floats at a time (1 or more), so that they stay in cache."""
        return max(FP8_WEIGHTS_AT_A_TIME // self._fp8_weight.shape[1], 1)

    @property
    def capturable(self) -> bool:
        """Tell whether a CUDA graph can capture the product; all methods but `__call__` need that."""
        return not any(size % 16 for size in self._fp8_weight.shape) and multiplies_fp8(
            self._fp8_weight.device
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, in] -> [rows, out]; it works on any device.

        A bias is added if there is one. Activations stay in floats where a CUDA graph cannot capture the
        product, and for no rows.

        x: [rows, in], in floats. No rows are allowed.
        """
        if not self.capturable or not len(x):
            return multiply_plainly(x, self._fp8_weight, self._scales, self.bias, self._outputs_at_a_time)
        from specsot_kernels.gpu.rows import lengthen_rows

        return self._biased(lengthen_rows(*self._multiply(x)), x.dtype)

    def normed(self, hidden: Tensor, norm: NormWeight, rows: NormedRows | None = None) -> Tensor:
        """Return the product of the RMSNorm of the hidden states, [rows, out] in their type.

        A bias is added if there is one.

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        rows: The normed rows, used if they are in fp8 already; otherwise they are computed here.
        """
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import lengthen_rows

        if len(hidden) == 1:
            return multiply_short_row(hidden, self._fp8_weight, self._scales, norm, self.bias)
        return self._biased(lengthen_rows(*self._multiply(hidden, norm, rows)), hidden.dtype)

    def wide(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """Return the product of the RMSNorm of the hidden states in fp32, as it is summed: [rows, out].

        A bias is added if there is one.

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        """
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import lengthen_rows, shorten_rows

        if len(hidden) == 1:
            out = hidden.new_empty((1, len(self._fp8_weight)), dtype=torch.float32)
            return multiply_short_row(hidden, self._fp8_weight, self._scales, norm, self.bias, into=out)
        sums = self._product(*shorten_rows(hidden, norm), torch.float32)
        return self._biased(lengthen_rows(*sums), torch.float32)

    def heads(
        self, x: Tensor, norm: NormWeight | None = None, rows: NormedRows | None = None
    ) -> Tensor | Unscaled:
        """Return queries, keys and values [rows, out], after a norm if one is given.

        The result may be `Unscaled`: its scales are left to `turn_and_store`, which applies them in the same
        kernel. It is for more than one row, without a bias, and unless `x` is fp16. A bias is added to any
        other result.

        x: [rows, in], the input.
        norm: Weight [in] and epsilon of the RMSNorm; None: x is normalized already.
        rows: The normed rows, used if they are in fp8 already; otherwise they are computed here.
        """
        if len(x) > 1 and self.bias is None and _unscaled_dtype(x.dtype) == x.dtype:
            return self._multiply(x, norm, rows)
        return self(x) if norm is None else self.normed(x, norm, rows)

    def gated(self, hidden: Tensor, norm: NormWeight, rows: NormedRows | None = None) -> Tensor | ShortRows:
        """Return silu(first half) * second half of what `normed` returns, [rows, out / 2], in a form that
        `add_to` takes.

        A bias is not added. A single row gives floats, more rows give `ShortRows` in fp8.

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        rows: The normed rows, used if they are in fp8 already; otherwise they are computed here.
        """
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import shorten_gated

        if len(hidden) == 1:
            return multiply_short_row(hidden, self._fp8_weight, self._scales, norm, gated=True)
        return ShortRows(*shorten_gated(*self._multiply(hidden, norm, rows)))

    def add_to(
        self, hidden: Tensor, x: Tensor | ShortRows, next_norm: NormWeight | None = None
    ) -> ShortRows | None:
        """Add the product of x to the hidden states, in place, and return the normed result if it is asked
        for.

        A bias is not added. The result is the normed `hidden` in fp8 for the next product, or None if no
        `next_norm` is given or there is only one row, for which it would cost a kernel launch of its own.

        hidden: [rows, out], the residual stream.
        x: [rows, in], in floats or rounded to fp8 already.
        next_norm: The norm of the next product; None: nothing is normed.
        """
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import lengthen_rows, shorten_rows

        if isinstance(x, Tensor) and len(x) == 1:
            multiply_short_row(x, self._fp8_weight, self._scales, add=hidden, into=hidden)
            return None
        product = self._multiply(x) if isinstance(x, Tensor) else self._multiply(hidden, rows=x)
        if next_norm is not None:
            return ShortRows(*shorten_rows(hidden, next_norm, product))
        lengthen_rows(*product, into=hidden)
        return None

    def _biased(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product in `dtype`, with the bias added if there is one.

        product: [rows, out], the product.
        dtype: Type of the result.
        """
        product = product.to(dtype)
        return product if self.bias is None else product.add_(self.bias)

    def _multiply(
        self, x: Tensor, norm: NormWeight | None = None, rows: NormedRows | None = None
    ) -> Unscaled:
        """Multiply x, or `rows` if they are rounded already, and leave the scales to the caller.

        For the four matrices of an 8B layer and 8 rows on an H100, cuBLAS without scales takes 90 us, and
        PyTorch's kernel with both scales takes 119 us.

        x: [rows, in], in floats; its type is that of the product.
        norm: Weight [in] and epsilon of the RMSNorm; None: x is normalized already.
        rows: The rows, used if they are in fp8 already; otherwise they are computed here.
        """
        from specsot_kernels.gpu.rows import shorten_rows

        short = rows if isinstance(rows, ShortRows) else shorten_rows(x, norm)
        return self._product(*short, _unscaled_dtype(x.dtype))

    def _product(self, short: Tensor, scales: Tensor, dtype: torch.dtype) -> Unscaled:
        """Multiply rows that are rounded already, and leave the scales to the caller.

        short: fp8 [rows, in].
        scales: fp32 [rows], what each row is to be multiplied by.
        dtype: Type of the product.
        """
        product = torch.ops.aten._scaled_mm(  # noqa: SLF001
            short,
            self._fp8_weight.t(),
            self._unit_scale,
            self._unit_scale,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return Unscaled(product, scales, self._scales)


def _unscaled_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a product before its scales are applied: bf16 for fp16, which may overflow there.

    dtype: Type of the scaled product.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Tell whether this device multiplies fp8: an NVIDIA GPU of Ada or later, with Triton. False for all
    other devices.

    device: The torch device that is asked about.
    """
    if torch.version.cuda is None or not runs_kernels(device):
        return False
    return torch.cuda.get_device_capability(device) >= ADA


def runs_kernels(device: torch.device) -> bool:
    """Tell whether the GPU kernels run on this device.

    device: The torch device that is asked about.
    """
    return device.type == "cuda" and find_spec("triton") is not None


def multiply_plainly(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Multiply x [rows, in] -> [rows, out] with a weight in 8 bits, of which some outputs at a time are
    converted to floats, and add a bias.

    x: [rows, in], in floats.
    weight: [out, in], int8 or fp8.
    scales: fp32 [out], the scale of each output.
    bias: [out]; None: there is none.
    outputs: Number of outputs at a time.
    """
    product = torch.cat([x @ part.to(x.dtype).t() for part in weight.split(outputs)], 1)
    product = product.mul_(scales.to(x.dtype))
    return product if bias is None else product.add_(bias)
