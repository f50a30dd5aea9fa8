"""A few rows times a weight on a GPU, by whichever product is fastest for so many.

Refuses to know layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from specsot.model.fp8 import Fp8
from specsot.model.linear import Linear


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
