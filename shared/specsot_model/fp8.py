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
KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max
# Compute capability (Ada) from which GPUs multiply fp8.
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


class Unscaled(NamedTuple):
    """A product before its scales are applied.

    product: [rows, out].
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
    """

    __slots__ = ("_one", "_scales", "_whole", "bias")

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None = None) -> None:
        self.bias = bias
        self._one = torch.ones((), device=weight.device)
        if isinstance(weight, Codes):
            self._whole = weight.whole.view(KIND)
            self._scales = weight.scale.flatten()
            return
        peaks = weight.abs().amax(1, keepdim=True).float()
        scales = torch.where(peaks > 0, peaks / LARGEST, 1.0)
        self._whole = torch.empty_like(weight, dtype=KIND)
        for first in range(0, len(weight), step := self._outputs_at_a_time):
            self._whole[first : first + step] = weight[first : first + step] / scales[first : first + step]
        self._scales = scales.flatten()

    @property
    def _outputs_at_a_time(self) -> int:
        """How many outputs become floats at a time, so that they stay in the processor's cache."""
        return max(FP8_WEIGHTS_AT_A_TIME // self._whole.shape[1], 1)

    @property
    def captured(self) -> bool:
        """Tell whether a CUDA graph can capture the product; all methods but `__call__` need that."""
        return not any(size % 16 for size in self._whole.shape) and multiplies_fp8(self._whole.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in] -> [rows, out]; it works on any device."""
        if not self.captured or not len(x):
            return self._multiply_plainly(x)
        from specsot_kernels.gpu.rows import lengthen_rows

        return self._biased(lengthen_rows(*self._multiply(x)), x.dtype)

    def normed(self, hidden: Tensor, norm: NormWeight, rows: ShortRows | None = None) -> Tensor:
        """Return the product of the RMSNorm of hidden [rows, in]: [rows, out].

        rows: The normed rows in fp8, if they are computed already.
        """
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import lengthen_rows

        if len(hidden) == 1:
            return multiply_short_row(hidden, self._whole, self._scales, norm, self.bias)
        return self._biased(lengthen_rows(*self._multiply(hidden, norm, rows)), hidden.dtype)

    def wide(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """Do what `normed` does, but return fp32, as the product is summed."""
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import lengthen_rows, shorten_rows

        if len(hidden) == 1:
            out = hidden.new_empty((1, len(self._whole)), dtype=torch.float32)
            return multiply_short_row(hidden, self._whole, self._scales, norm, self.bias, into=out)
        sums = self._product(*shorten_rows(hidden, norm), torch.float32)
        return self._biased(lengthen_rows(*sums), torch.float32)

    def heads(
        self, x: Tensor, norm: NormWeight | None = None, rows: ShortRows | None = None
    ) -> Tensor | Unscaled:
        """Return queries, keys and values [rows, out] of x [rows, in], after a norm if one is given.

        The scales may be left to `turn_and_store`, which applies them in the same kernel.
        """
        if len(x) > 1 and self.bias is None and _wide(x.dtype) == x.dtype:
            return self._multiply(x, norm, rows)
        return self(x) if norm is None else self.normed(x, norm, rows)

    def gated(self, hidden: Tensor, norm: NormWeight, rows: ShortRows | None = None) -> Tensor | ShortRows:
        """Return silu(first half) * second half of what `normed` returns, in a form that `add_to` takes.

        A bias is not added.
        """
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import shorten_gated

        if len(hidden) == 1:
            return multiply_short_row(hidden, self._whole, self._scales, norm, gated=True)
        return ShortRows(*shorten_gated(*self._multiply(hidden, norm, rows)))

    def add_to(
        self, hidden: Tensor, x: Tensor | ShortRows, following: NormWeight | None = None
    ) -> ShortRows | None:
        """Add x [rows, in] times the weight to hidden [rows, out], in place. A bias is not added.

        following: The norm of the next product. The normed `hidden` is returned in fp8, unless there is only
            one row: then None is returned, because it would cost a kernel launch of its own.
        """
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import lengthen_rows, shorten_rows

        if isinstance(x, Tensor) and len(x) == 1:
            multiply_short_row(x, self._whole, self._scales, add=hidden, into=hidden)
            return None
        product = self._multiply(x) if isinstance(x, Tensor) else self._multiply(hidden, rows=x)
        if following is not None:
            return ShortRows(*shorten_rows(hidden, following, product))
        lengthen_rows(*product, into=hidden)
        return None

    def _multiply_plainly(self, x: Tensor) -> Tensor:
        parts = self._whole.split(self._outputs_at_a_time)
        product = torch.cat([x @ part.to(x.dtype).t() for part in parts], 1).mul_(self._scales.to(x.dtype))
        return self._biased(product, x.dtype)

    def _biased(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        product = product.to(dtype)
        return product if self.bias is None else product.add_(self.bias)

    def _multiply(self, x: Tensor, norm: NormWeight | None = None, rows: ShortRows | None = None) -> Unscaled:
        """Multiply x, or `rows` if they are rounded already, and leave the scales to the caller.

        For the four matrices of an 8B layer and 8 rows on an H100, cuBLAS without scales takes 90 us, and
        PyTorch's kernel with both scales takes 119 us.
        """
        from specsot_kernels.gpu.rows import shorten_rows

        return self._product(*(rows or shorten_rows(x, norm)), _wide(x.dtype))

    def _product(self, short: Tensor, scales: Tensor, dtype: torch.dtype) -> Unscaled:
        product = torch.ops.aten._scaled_mm(  # noqa: SLF001
            short, self._whole.t(), self._one, self._one, out_dtype=dtype, use_fast_accum=True
        )
        return Unscaled(product, scales, self._scales)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a product before its scales are applied, because fp16 may overflow there."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Tell whether this device multiplies fp8 and has Triton."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= ADA
