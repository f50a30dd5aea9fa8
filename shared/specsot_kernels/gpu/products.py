"""Multiplies one row with a matrix (GEMV) as fast as the matrix can be read.

The norm before the product is fused (the sum of squares is gathered along the way, and the result is scaled
at the end), and so are bias or residual and the gate of an MLP after the product. For more rows see
`ordered.py`.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from math import gcd
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)

# The largest finite float8_e4m3fn.
LARGEST = tl.constexpr(448.0)
# 8-bit numbers that a thread reads at a time.
LANES = tl.constexpr(16)


class RowTile(NamedTuple):
    """The tile of the matrix that one program reads at a time, and the program's warps.

    rows: outputs of the tile.
    columns: inputs of the tile.
    warps: warps of the program.
    """

    rows: int
    columns: int
    warps: int


def row_tile_of(inputs: int, normed: bool, gated: bool) -> RowTile:
    """Return the fastest of fourteen tiles on an H200 for the matrices of an 8B and a 4B model.

    The tile is 4 x 512 for gated products, 16 x 512 with a norm alone, and otherwise 8 x 1024 if 1024 divides
    the inputs, else 4 x 512.

    inputs: number of inputs.
    normed: whether x is normed first.
    gated: whether the product is gated.
    """
    if gated:
        return RowTile(4, 512, 4)
    if normed:
        return RowTile(16, 512, 4)
    return RowTile(8, 1024, 4) if inputs % 1024 == 0 else RowTile(4, 512, 4)


def multiply_row(
    x: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,
    add: Tensor | None = None,
    gated: bool = False,
    into: Tensor | None = None,
    tile: RowTile | None = None,
) -> Tensor:
    """Return weight @ x, [1, outputs], computed in fp32.

    The result has the type of x, or is `into`, whose type then counts.

    gated: the result is silu(first half) * second half, [1, outputs / 2].
    x: [1, inputs], the input.
    weight: [outputs, inputs], contiguous.
    norm: weight [inputs] and epsilon of an RMSNorm of x that is applied first; None: no norm.
    add: [outputs], bias or residual that is added; may be `into`. None: nothing is added.
    into: the tensor that receives the result; None: a new one.
    tile: overrides `row_tile_of`; None: it does not.
    """
    outputs, inputs = weight.shape
    wanted = outputs // 2 if gated else outputs
    out = x.new_empty((1, wanted)) if into is None else into
    rows, columns, warps = tile or row_tile_of(inputs, norm is not None, gated)
    scale, eps = norm or (weight, 0.0)
    with on_device_of(x):
        _multiply_one[(-(-wanted // rows),)](
            x, scale, weight, out if add is None else add, out, wanted, inputs, eps, rows, columns,
            inputs % columns == 0 and wanted % rows == 0, norm is not None, add is not None, gated,
            num_warps=warps, **pdl_options(x),
        )  # fmt: skip
    return out


@kernel
def _multiply_one(
    x, scale, weight, add, out, outputs, inputs, eps, high: tl.constexpr, wide: tl.constexpr,
    whole: tl.constexpr, normed: tl.constexpr, added: tl.constexpr, gated: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Compute `high` outputs. The first weight tile is loaded before the preceding kernel has ended.

    x: [inputs], the row.
    scale: [inputs], weight of the norm, if `normed`.
    weight: [outputs, inputs], both halves of the outputs if gated.
    add: [outputs], if `added`.
    out: [outputs], receives the product.
    outputs: number of outputs.
    inputs: number of inputs.
    eps: epsilon of the norm.
    high: outputs of the tile.
    wide: inputs of the tile.
    whole: whether tiles fit the matrix, so that loads need no mask.
    normed: whether there is a norm.
    added: whether there is an addition.
    gated: whether the product is gated.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0) * high + tl.arange(0, high)
    column = tl.arange(0, wide)
    place = weight + row.to(tl.int64)[:, None] * inputs + column[None, :]
    other = place + outputs.to(tl.int64) * inputs
    live = (row < outputs)[:, None]
    tile = _fetch(place, live & (column < inputs)[None, :], whole)
    if gated:
        twin = _fetch(other, live & (column < inputs)[None, :], whole)
    total = tl.zeros((high, wide), tl.float32)
    if gated:
        up_total = tl.zeros((high, wide), tl.float32)
    squares = tl.zeros((wide,), tl.float32)
    await_preceding_kernel(early)
    for left in range(0, inputs, wide):
        values = tl.load(x + left + column, mask=left + column < inputs, other=0.0).to(tl.float32)
        if normed:
            squares += values * values
            values *= tl.load(scale + left + column, mask=left + column < inputs, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * values[None, :]
        ahead = left + wide
        held = live & (ahead + column < inputs)[None, :]
        if gated:
            up_total += twin.to(tl.float32) * values[None, :]
            if ahead < inputs:
                twin = _fetch(other + ahead, held, whole)
        if ahead < inputs:
            tile = _fetch(place + ahead, held, whole)
    short = 1.0
    if normed:
        short = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    result = tl.sum(total, 1) * short
    if gated:
        result = result / (1 + tl.exp(-result)) * (tl.sum(up_total, 1) * short)
    if added:
        result += tl.load(add + row, mask=row < outputs, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < outputs)


@kernel
def _fetch(place, held, whole: tl.constexpr):
    """Load weights; they are read once, so that they need not stay in the cache.

    place: addresses of the numbers, of any shape.
    held: which weights exist; the others become 0.
    whole: whether all exist.
    """
    if whole:
        return tl.load(place, eviction_policy="evict_first")
    return tl.load(place, mask=held, other=0.0, eviction_policy="evict_first")


# Outputs. An lm_head has more, and therefore so many programs that smaller tiles are faster.
FEW_OUTPUTS = 16384


def short_tile_of(outputs: int, inputs: int, normed: bool, gated: bool) -> RowTile:
    """Return the tile that made an 8B model's step fastest on an H100, of eight for each matrix.

    The tile's columns divide `inputs`. The tile is 8 x 512 if no power of two from 256 on divides the inputs.

    outputs: number of outputs, both halves if gated.
    inputs: number of inputs.
    normed: whether x is normed first.
    gated: whether the product is gated.
    """
    if gated:
        rows, columns, warps = RowTile(8, 512, 4)
    elif not normed:
        rows, columns, warps = RowTile(16, 2048, 16)
    else:
        rows, columns, warps = RowTile(16, 1024, 8) if outputs <= FEW_OUTPUTS else RowTile(8, 1024, 4)
    whole = gcd(inputs, columns)
    return RowTile(rows, whole, max(warps * whole // columns, 4)) if whole >= 256 else RowTile(8, 512, 4)


def multiply_short_row(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    norm: tuple[Tensor, float] | None = None,
    add: Tensor | None = None,
    gated: bool = False,
    into: Tensor | None = None,
    tile: RowTile | None = None,
) -> Tensor:
    """Return weight @ x, [1, outputs], for 8-bit float weights, computed in fp32.

    x is quantized, with the scale of its own peak, as it is read. The result has the type of x, or is `into`,
    whose type then counts. A row of zeros is quantized with scale 1.

    x: [1, inputs], the input.
    weight: [outputs, inputs] float8_e4m3fn, contiguous.
    scales: fp32 [outputs], the scales of the weight's rows.
    norm: weight [inputs] and epsilon of an RMSNorm of x that is applied first; None: no norm.
    add: [outputs], bias or residual that is added; may be `into`. None: nothing is added.
    gated: the result is silu(first half) * second half, [1, outputs / 2].
    into: the tensor that receives the result; None: a new one.
    tile: overrides `short_tile_of`; None: it does not.
    """
    outputs, inputs = weight.shape
    wanted = outputs // 2 if gated else outputs
    out = x.new_empty((1, wanted)) if into is None else into
    rows, columns, warps = tile or short_tile_of(outputs, inputs, norm is not None, gated)
    gains, eps = norm or (scales, 0.0)
    with on_device_of(x):
        _multiply_short_one[(-(-wanted // rows),)](
            x, gains, weight, scales, out if add is None else add, out, wanted, inputs, eps, rows, columns,
            power_of_two(inputs), inputs % columns == 0 and wanted % rows == 0, norm is not None,
            add is not None, gated, num_warps=warps, **pdl_options(x),
        )  # fmt: skip
    return out


@kernel
def _multiply_short_one(
    x, gains, weight, scales, add, out, outputs, inputs, eps, high: tl.constexpr, wide: tl.constexpr,
    room: tl.constexpr, whole: tl.constexpr, normed: tl.constexpr, added: tl.constexpr, gated: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Compute `high` outputs. The first weight tile is loaded while the peak of the row is found.

    The factor of an RMSNorm goes into the row's scale; the quantized numbers do not depend on it.

    x: [inputs], the row.
    gains: [inputs], weight of the norm, if `normed`.
    weight: fp8 [outputs, inputs], both halves of the outputs if gated.
    scales: fp32, the scales of the weight's rows.
    add: [outputs], if `added`.
    out: [outputs], receives the product.
    outputs: number of outputs.
    inputs: number of inputs.
    room: `inputs`, rounded up to a power of two.
    eps: epsilon of the norm.
    high: outputs of the tile.
    wide: inputs of the tile.
    whole: whether tiles fit the matrix, so that loads need no mask.
    normed: whether there is a norm.
    added: whether there is an addition.
    gated: whether the product is gated.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0) * high + tl.arange(0, high)
    column = tl.arange(0, wide)
    every = tl.arange(0, room)
    place = weight + row.to(tl.int64)[:, None] * inputs + column[None, :]
    other = place + outputs.to(tl.int64) * inputs
    live = (row < outputs)[:, None]
    tile = _fetch(place, live & (column < inputs)[None, :], whole)
    if gated:
        twin = _fetch(other, live & (column < inputs)[None, :], whole)
    if normed:
        weights = tl.load(gains + every, mask=every < inputs, other=0.0).to(tl.float32)
    await_preceding_kernel(early)
    values = tl.load(x + every, mask=every < inputs, other=0.0).to(tl.float32)
    if normed:
        values *= weights
    peak = tl.max(tl.abs(values), 0)
    scale = tl.where(peak > 0, peak / LARGEST, 1.0)
    larger = tl.where(peak > 0, LARGEST / peak, 1.0)
    total = tl.zeros((high, wide // LANES), tl.float32)
    if gated:
        up_total = tl.zeros((high, wide // LANES), tl.float32)
    squares = tl.zeros((wide,), tl.float32)
    for left in range(0, inputs, wide):
        held = left + column < inputs
        part = _load(x + left + column, held, whole).to(tl.float32)
        if normed:
            squares += part * part
            part *= _load(gains + left + column, held, whole).to(tl.float32)
        part = (part * larger).to(weight.dtype.element_ty).to(tl.float32)
        total += _add_up(tile, part, high, wide)
        ahead = left + wide
        if gated:
            up_total += _add_up(twin, part, high, wide)
            if ahead < inputs:
                twin = _fetch(other + ahead, live & (ahead + column < inputs)[None, :], whole)
        if ahead < inputs:
            tile = _fetch(place + ahead, live & (ahead + column < inputs)[None, :], whole)
    if normed:
        scale *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    there = row < outputs
    result = tl.sum(total, 1) * (scale * tl.load(scales + row, mask=there, other=0.0))
    if gated:
        up = tl.sum(up_total, 1) * (scale * tl.load(scales + outputs + row, mask=there, other=0.0))
        result = result / (1 + tl.exp(-result)) * up
    if added:
        result += tl.load(add + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=there)


@kernel
def _load(place, held, whole: tl.constexpr):
    """Load without a mask if every column exists.

    Masks that are always true would keep the compiler from separating the last iteration of the loop from the
    others.

    place: addresses of the numbers, of any shape.
    held: which numbers exist; the others become 0.
    whole: whether all exist.
    """
    if whole:
        return tl.load(place)
    return tl.load(place, mask=held, other=0.0)


@kernel
def _add_up(tile, part, high: tl.constexpr, wide: tl.constexpr):
    """Sum the products of each matrix row over the LANES numbers of a thread, so that the sums take few
    registers.

    tile: fp8 [high, wide], weights.
    part: fp32 [wide], inputs.
    high: outputs of the tile.
    wide: inputs of the tile.
    """
    product = tile.to(tl.float32) * part[None, :]
    return tl.sum(tl.reshape(product, (high, wide // LANES, LANES)), 2)
