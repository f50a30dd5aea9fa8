"""Matrix product of a small step: every row's sums run in one order, whatever the other rows are.

A small step has at most MAX_SMALL_ROWS rows. One program computes a few outputs of all rows over all inputs,
so that the products of a row are added by the same tensor-core instructions, in the same order, for one row
and for 32. The norm before the product is fused (the sum of squares is gathered along the way, and the result
is scaled at the end), and so are the gate, the bias and the addition to the residual stream after it. A step
of one row therefore needs no more kernels than with `products.py`, and reads the matrix as fast.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    kernel_for_any,
    let_next_begin,
    on_device_of,
    pdl_options,
)
from specsot_kernels.gpu.rows import norm_rows
from specsot_kernels.line_tables import MAX_SMALL_ROWS

# Rows. Tiles of rows: a step runs in the smallest tile that holds it. Tiles differ in how many rows they
# hold, not in the order of a row's sums, which the tests marked `gpu` verify.
ROW_TILES: Final = (16, 32)
# Inputs. A matrix needs a multiple of it, so that 16 bytes are loaded at a time.
INPUT_MULTIPLE: Final = 16
# Outputs. A matrix of more outputs than this has so many programs that larger tiles are faster. Untuned.
TALL_OUTPUTS: Final = 32768
# Programs. A matrix of fewer programs has at most one on each multiprocessor, so that each needs more loads
# in flight. An H100 and an H200 have 132 multiprocessors.
MULTIPROCESSORS: Final = 132


class SmallTile(NamedTuple):
    """What one program multiplies at a time.

    outputs: outputs of the tile.
    inputs: inputs of the tile.
    warps: warps of the program.
    stages: loop iterations whose loads are in flight.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int


def suits(x: Tensor) -> bool:
    """Return whether these rows are multiplied as those of a small step: 1 to MAX_SMALL_ROWS rows of 16-bit
    numbers.

    The number of inputs must be a multiple of INPUT_MULTIPLE.

    x: [rows, inputs], the input.
    """
    return 0 < len(x) <= MAX_SMALL_ROWS and x.itemsize == 2 and x.shape[1] % INPUT_MULTIPLE == 0


def small_tile_for(outputs: int, inputs: int, itemsize: int, gated: bool) -> SmallTile:
    """Return the tile for a matrix. It depends on the matrix alone, never on the rows. Not measured yet.

    outputs: outputs of the product, half of the matrix's if gated.
    inputs: number of inputs.
    itemsize: bytes of a number.
    gated: whether the product is gated.
    """
    high = 32 if outputs > TALL_OUTPUTS else 16
    largest = 64 if gated or itemsize > 2 else 256
    wide = next((size for size in (256, 128, 64) if size <= largest and inputs % size == 0), 64)
    stages = 6 if -(-outputs // high) <= MULTIPROCESSORS and itemsize == 2 else 4
    return SmallTile(high, wide, 4, stages)


def multiply_small(
    x: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: SmallTile | None = None,
) -> Tensor:
    """Return x @ weight.T + bias, [rows, outputs], summed in fp32.

    A row's result is the same bits for any number of rows up to MAX_SMALL_ROWS, and at any place among them.
    A norm in fp16 runs in a kernel of its own, since numbers that are not normed yet may exceed fp16.

    x: [rows, inputs], the numbers of a row are adjacent.
    weight: [outputs, inputs], contiguous.
    norm: weight [inputs] and epsilon of an RMSNorm of x that is applied first; None: no norm.
    bias: [outputs]; None: none is added. It is added after the gate.
    gated: the result is silu(first half) * second half, [rows, outputs / 2].
    into: [rows, outputs], or half as many outputs if gated; the result is added to this tensor, in place.
        None: the result is a new tensor of `dtype`.
    dtype: type of a new result; None: x's type.
    tile: overrides `small_tile_for`; None: it does not.
    """
    if norm and x.dtype == torch.float16:
        x = norm_rows(x.contiguous(), *norm)
        norm = None
    (rows, inputs) = x.shape
    outputs = weight.shape[0]
    wanted = outputs // 2 if gated else outputs
    out = x.new_empty((rows, wanted), dtype=dtype) if into is None else into
    high, wide, warps, stages = tile or small_tile_for(wanted, inputs, x.itemsize, gated)
    many = next(size for size in ROW_TILES if rows <= size)
    scale, eps = norm or (weight, 0.0)
    whole = inputs % wide == 0 and wanted % high == 0
    with on_device_of(x):
        _multiply[(-(-wanted // high),)](
            x, scale, weight, out if bias is None else bias, out, rows, wanted, inputs, x.stride(0), eps,
            many, high, wide, whole, norm is not None, bias is not None, gated, into is not None,
            num_warps=warps, num_stages=stages, enable_fp_fusion=False, **pdl_options(x),
        )  # fmt: skip
    return out


@kernel_for_any("rows")
def _multiply(
    x, scale, weight, bias, out, rows, outputs, inputs, from_x, eps, many: tl.constexpr, high: tl.constexpr,
    wide: tl.constexpr, whole: tl.constexpr, normed: tl.constexpr, biased: tl.constexpr, gated: tl.constexpr,
    added: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Compute `high` outputs of all rows. The first weights are loaded before the preceding kernel has ended.

    x: [rows, inputs], the input.
    scale: [inputs], weight of the norm, if `normed`.
    weight: [outputs, inputs], both halves of the outputs if gated.
    bias: [outputs], if `biased`.
    out: [rows, outputs], receives the product.
    rows: number of rows, at most `many`.
    outputs: number of outputs, half of the matrix's if gated.
    inputs: number of inputs.
    from_x: numbers from one row of x to the next.
    eps: epsilon of the norm.
    many: rows of the tile.
    high: outputs of the tile.
    wide: inputs of the tile.
    whole: whether tiles fit the matrix, so that loads of weights need no mask.
    normed: whether there is a norm.
    biased: whether there is a bias.
    gated: whether the product is gated.
    added: whether the product is added to `out`.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    output = tl.program_id(0) * high + tl.arange(0, high)
    row = tl.arange(0, many)
    column = tl.arange(0, wide)
    live = row < rows
    there = output < outputs
    line = weight + tl.where(there, output, 0).to(tl.int64)[:, None] * inputs + column[None, :]
    other = outputs.to(tl.int64) * inputs
    source = x + row.to(tl.int64)[None, :] * from_x + column[:, None]
    tile = _fetch(line, (column < inputs)[None, :], whole)
    twin = _fetch(line + other, (column < inputs)[None, :], whole) if gated else tile
    total = tl.zeros((high, many), tl.float32)
    second_half = tl.zeros((high, many), tl.float32)
    squares = tl.zeros((wide, many), tl.float32)
    await_preceding_kernel(early)
    values = tl.load(source, mask=(column < inputs)[:, None] & live[None, :], other=0.0)
    if normed:
        squares, values = _gather(squares, values, scale + column, column < inputs, whole)
    total = tl.dot(tile, values, total, input_precision="ieee")
    if gated:
        second_half = tl.dot(twin, values, second_half, input_precision="ieee")
    for left in range(wide, inputs, wide):
        held = left + column < inputs
        values = tl.load(source + left, mask=held[:, None] & live[None, :], other=0.0)
        tile = _fetch(line + left, held[None, :], whole)
        if normed:
            squares, values = _gather(squares, values, scale + left + column, held, whole)
        total = tl.dot(tile, values, total, input_precision="ieee")
        if gated:
            twin = _fetch(line + other + left, held[None, :], whole)
            second_half = tl.dot(twin, values, second_half, input_precision="ieee")
    if normed:
        short = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)[None, :]
        total *= short
        second_half *= short
    if gated:
        total = total / (1 + tl.exp(-total)) * second_half
    if biased:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
    place = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    kept = there[:, None] & live[None, :]
    if added:
        total += tl.load(place, mask=kept, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=kept)


@kernel
def _gather(squares, values, place, held, whole: tl.constexpr):
    """Return the sums of squares with those of more inputs, and the inputs times the norm's weight.

    squares: fp32 [wide, many], sums of squares so far.
    values: [wide, many], the inputs.
    place: [wide], addresses of the norm's weights.
    held: [wide], which of them exist.
    whole: whether all exist.
    """
    wide_values = values.to(tl.float32)
    squares += wide_values * wide_values
    factor = _fetch(place, held, whole).to(tl.float32)
    return squares, (wide_values * factor[:, None]).to(values.dtype)


@kernel
def _fetch(place, inside, whole: tl.constexpr):
    """Load numbers, with a mask only if some are missing.

    place: addresses of the numbers, of any shape.
    inside: which of them exist; the others become 0.
    whole: whether all exist.
    """
    return tl.load(place) if whole else tl.load(place, mask=inside, other=0.0)
