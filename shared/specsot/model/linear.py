"""Matrix products of a layer: plain or quantised weights, and the fastest kernel for few rows on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.members import Quantization
from specsot.model.precision import Fp8, quantise

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


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A weight [out, in] and its bias [out]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        """x [rows, in] -> [rows, out]; gated: silu(first half) * second half, [rows, out / 2]."""
        from specsot.kernels.gpu.products import multiply_rows, pays
        from specsot.kernels.gpu.rows import gate
        from specsot.kernels.gpu.vector import multiply_row

        if len(x) == 1:
            return multiply_row(x, self.weight, None, self.bias, gated)
        if pays(len(x), len(self.weight), gated):
            return multiply_rows(x, self.weight, self.bias, gated)
        whole = F.linear(x, self.weight, self.bias)
        return gate(whole) if gated else whole

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add x [rows, in] times the weight to hidden [rows, out], in place. A bias is not asked for."""
        from specsot.kernels.gpu.vector import multiply_row

        if len(x) == 1:
            multiply_row(x, self.weight, add=hidden, into=hidden)
        else:
            hidden.addmm_(x, self.weight.t())


class InvariantRowProduct(RowProduct):
    """What a row gets is the same in any company, bit for bit: one kernel serves any number of rows."""

    __slots__ = ()

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        from specsot.kernels.gpu.products import multiply_rows

        return multiply_rows(x, self.weight, self.bias, gated, invariant=True)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        hidden.add_(self(x))


def product_of(linear: Linear, invariant: bool = False) -> RowProduct:
    """The product of a plain linear layer."""
    assert linear.weight is not None, "packed for a CPU, or quantised"
    return (InvariantRowProduct if invariant else RowProduct)(linear.weight, linear.bias)


def captured_product(linear: Linear) -> RowProduct | Fp8 | None:
    """What a captured graph multiplies with, plain or in 8-bit floats; None where it cannot."""
    if isinstance(linear.multiply, Fp8):
        return linear.multiply if linear.multiply.captured else None
    return product_of(linear) if linear.weight is not None else None
