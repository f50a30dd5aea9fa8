"""Weights in 8-bit floats, and their products on GPUs, where rows are rounded to them, too."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from specsot_model.decoding import Codes

NormWeight = tuple[Tensor, float]  # weight [in] and epsilon of an RMSNorm
KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max
ADA = (8, 9)  # compute capability from which GPUs multiply fp8
FP8_WEIGHTS_AT_A_TIME = 1 << 20  # weights converted at a time, which bounds the extra memory; not measured


class ShortRows(NamedTuple):
    """Rows [rows, size] in 8 bits, and what each is to be multiplied by: of floats fp32 [rows], of whole
    numbers [groups of inputs, rows].
    """

    short: Tensor
    scales: Tensor


class Unscaled(NamedTuple):
    """A product [rows, out], and what each of its rows and columns is still to be multiplied by, in fp32."""

    product: Tensor
    rows: Tensor
    columns: Tensor


class Fp8:
    """[out, in] float8_e4m3fn with a scale for each output; a bias [out] where there is one.

    On GPUs that multiply such numbers each row of the activations is rounded to them by a scale of its own,
    whatever its company.
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
        """So many become floats at a time as stay in a processor's cache."""
        return max(FP8_WEIGHTS_AT_A_TIME // self._whole.shape[1], 1)

    @property
    def captured(self) -> bool:
        """Whether it is fit for a captured graph: all but `__call__` are for those."""
        return not any(size % 16 for size in self._whole.shape) and multiplies_fp8(self._whole.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]. On a CPU it needs no Triton."""
        if not self.captured or not len(x):
            return self._multiply_plainly(x)
        from specsot_kernels.gpu.rows import lengthen_rows

        return self._biased(lengthen_rows(*self._multiply(x)), x.dtype)

    def normed(self, hidden: Tensor, norm: NormWeight, rows: ShortRows | None = None) -> Tensor:
        """An RMSNorm of hidden [rows, in], then the product: [rows, out]. rows: those, if rounded."""
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import lengthen_rows

        if len(hidden) == 1:
            return multiply_short_row(hidden, self._whole, self._scales, norm, self.bias)
        return self._biased(lengthen_rows(*self._multiply(hidden, norm, rows)), hidden.dtype)

    def wide(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """The same in fp32, as it is summed."""
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
        """`normed`, or without a norm, for `turn_and_store`, which can scale it: [rows, out]."""
        if len(x) > 1 and self.bias is None and _wide(x.dtype) == x.dtype:
            return self._multiply(x, norm, rows)
        return self(x) if norm is None else self.normed(x, norm, rows)

    def gated(self, hidden: Tensor, norm: NormWeight, rows: ShortRows | None = None) -> Tensor | ShortRows:
        """As `normed`, then silu(first half) * second half, as `add_to` takes it. A bias is not asked for."""
        from specsot_kernels.gpu.products import multiply_short_row
        from specsot_kernels.gpu.rows import shorten_gated

        if len(hidden) == 1:
            return multiply_short_row(hidden, self._whole, self._scales, norm, gated=True)
        return ShortRows(*shorten_gated(*self._multiply(hidden, norm, rows)))

    def add_to(
        self, hidden: Tensor, x: Tensor | ShortRows, following: NormWeight | None = None
    ) -> ShortRows | None:
        """Add x [rows, in] times the weight to hidden [rows, out], in place. A bias is not asked for.

        following: a norm; what it makes of hidden is returned where that costs no launch of its own.
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
        """The product of x's rows, which `rows` are, where they are rounded already.

        Not scaled at once: cuBLAS without takes 90 us for the four matrices of an 8B layer and 8 rows on an
        H100, PyTorch's kernel that takes both scales 119.
        """
        from specsot_kernels.gpu.rows import shorten_rows

        return self._product(*(rows or shorten_rows(x, norm)), _wide(x.dtype))

    def _product(self, short: Tensor, scales: Tensor, dtype: torch.dtype) -> Unscaled:
        product = torch.ops.aten._scaled_mm(  # noqa: SLF001
            short, self._whole.t(), self._one, self._one, out_dtype=dtype, use_fast_accum=True
        )
        return Unscaled(product, scales, self._scales)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of a product before its scales, which may be too large for fp16."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


@cache
def multiplies_fp8(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= ADA
