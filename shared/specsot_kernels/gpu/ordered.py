"""Batch-invariant matrix product: sums run in the same order for any number of rows.

A row's result is the same bits in every batch. Since the kernel is also the fastest one for a few rows,
normal steps of few rows use it too. The inputs of a matrix are cut into parts by the matrix's sizes alone.
The products of a part are added from the first input to the last, then the sums of the parts in order: by
concurrent programs if there are few rows, by one program if there are many. Tiles differ in rows and outputs,
never in the inputs of one tensor-core instruction.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    copies_blocks,
    kernel,
    kernel_for_any,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)

# Outputs. Smallest tile: what one instruction multiplies.
MIN_TILE_OUTPUTS = 64
# Programs. The inputs are cut until at least so many programs read the matrix; an H100 has 132
# multiprocessors.
PROGRAMS = 144
# Inputs. A part is a multiple of it, and it is a multiple of a tile's inputs.
UNIT = 128
# Inputs. Smallest part. Untuned.
MIN_PART_INPUTS = 512
# Rows. Up to so many, each part has its own program; more rows are loaded in blocks by descriptors.
FEW_ROWS = 64
# Rows. Up to so many, cuBLAS is slower on an H100, whatever the matrix.
ALWAYS_FASTER_ROWS = 16
# Tiles of outputs. From so many on, cuBLAS is slower up to FEW rows. Untuned.
TALL_OUTPUT_TILES = 192
# Tiles of a gated matrix. With fewer, cuBLAS is never slower.
SHORT_GATED_TILES = 128
# Columns. Tile of a program that adds up parts. Untuned.
WIDE = 1024


class OrderedTile(NamedTuple):
    """What one program multiplies at a time.

    outputs: outputs of the tile.
    rows: rows of the tile.
    inputs: inputs of the tile.
    warps: warps of the program.
    stages: loop iterations in flight.
    ahead: the first weights are loaded before the preceding kernel has ended.
    """

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int
    ahead: bool = False


def tile_for(rows: int, itemsize: int, gated: bool) -> OrderedTile:
    """Return a good tile for an H100; single matrices have faster ones.

    A 32-bit product has a tile of its own; a 16-bit one has tiles for up to 16 rows, up to FEW_ROWS rows, and
    more.

    rows: number of rows.
    itemsize: bytes of a number.
    gated: whether the product is gated.
    """
    many = max(power_of_two(rows), 16)
    if itemsize > 2:
        return OrderedTile(MIN_TILE_OUTPUTS, min(many, 64), 32, 4, 2)
    if many == 16:
        return OrderedTile(MIN_TILE_OUTPUTS, 16, 128, 4, 2 if gated else 3, ahead=True)
    if many <= FEW_ROWS:
        return (
            OrderedTile(MIN_TILE_OUTPUTS, many, 64, 4, 3)
            if gated
            else OrderedTile(MIN_TILE_OUTPUTS, many, 128, 4, 4)
        )
    return OrderedTile(2 * MIN_TILE_OUTPUTS, 128, 64, 8, 4)


def is_faster(x: Tensor, outputs: int, gated: bool) -> bool:
    """Return whether this kernel is faster than cuBLAS for these rows.

    Tiles of odd widths are not loaded asynchronously, so that they are left to cuBLAS. False without rows,
    for numbers that are not 16-bit, and for inputs that are no multiple of 16. Otherwise it is faster up to
    FEW_ROWS rows for a weight of at least TALL_OUTPUT_TILES tiles, for no rows for a gated weight of fewer
    than SHORT_GATED_TILES tiles, and up to ALWAYS_FASTER_ROWS rows for all others.

    x: [rows, inputs], the input.
    outputs: number of outputs of the weight, both halves if gated.
    gated: whether the product is gated.
    """
    tiles = outputs // (MIN_TILE_OUTPUTS * (1 + gated))
    few = (
        FEW_ROWS
        if tiles >= TALL_OUTPUT_TILES
        else 0
        if gated and tiles < SHORT_GATED_TILES
        else ALWAYS_FASTER_ROWS
    )
    return x.itemsize == 2 and x.shape[1] % 16 == 0 and 0 < len(x) <= few


def parts_of(outputs: int, inputs: int) -> int:
    """Return into how many parts the inputs of a matrix are cut. The parts fix the order of its sums.

    A [4096, 4096] matrix has 64 tiles of outputs, so its inputs are cut into 4 parts (64 * 4 >= PROGRAMS).
    The number is a power of two. The inputs are cut further only as long as the parts keep MIN_PART_INPUTS
    inputs on average; 1 if there are enough outputs.

    outputs: number of outputs.
    inputs: number of inputs.
    """
    programs = -(-outputs // MIN_TILE_OUTPUTS)
    parts = 1
    while programs * parts < PROGRAMS and inputs >= 2 * parts * MIN_PART_INPUTS:
        parts *= 2
    return parts


def multiply_ordered(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: OrderedTile | None = None,
    parts: int | None = None,
) -> Tensor:
    """Return x @ weight.T + bias, [rows, outputs], summed in fp32.

    A row's result is the same bits for any number of rows. A bias is added after the gate.

    gated: the result is silu(first half) * second half, [rows, outputs / 2].
    into: [rows, outputs], or half as many outputs if gated; the result is added to this tensor, in place.
        None: the result is a new tensor of `dtype`, or x's type.
    x: [rows, inputs], the numbers of a row are adjacent.
    weight: [outputs, inputs], contiguous.
    bias: [outputs]; None: none is added.
    dtype: type of a new result; None: x's type.
    tile: overrides `tile_for`; None: it does not.
    parts: `parts_of` the matrix, if the caller knows it; None: it is computed.
    """
    (rows, inputs) = x.shape
    outputs = weight.shape[0]
    wanted = outputs // 2 if gated else outputs
    out = x.new_empty((rows, wanted), dtype=dtype) if into is None else into
    parts = parts or parts_of(outputs, inputs)
    high, many, wide, warps, stages, ahead = tile or tile_for(rows, x.itemsize, gated)
    apart = parts > 1 and rows <= FEW_ROWS
    sums = x.new_empty((parts, rows, outputs), dtype=torch.float32) if apart else out
    span = -(-inputs // (parts * UNIT)) * UNIT
    whole = inputs % wide == 0 and wanted % high == 0 and (parts - 1) * span < inputs
    extra = bias is not None, gated, into is not None
    source: Tensor | TensorDescriptor = x
    lines: Tensor | TensorDescriptor = weight
    if blocks := rows > FEW_ROWS and _in_blocks(x) and _in_blocks(weight):
        source = TensorDescriptor.from_tensor(x, [many, wide])
        lines = TensorDescriptor.from_tensor(weight, [high, wide])
    with on_device_of(x):
        _multiply[(-(-rows // many), -(-wanted // high), parts if apart else 1)](
            source, lines, out if bias is None else bias, out, sums, rows, wanted, inputs, x.stride(0), span,
            parts, many, high, wide, whole, blocks, apart, parts > 1, ahead and not blocks, *extra,
            num_warps=warps, num_stages=stages, enable_fp_fusion=False, **pdl_options(x),
        )  # fmt: skip
        if apart:
            add_parts[(rows, -(-wanted // WIDE))](
                sums, out if bias is None else bias, out, wanted, WIDE, parts, *extra, num_warps=4,
                enable_fp_fusion=False, **pdl_options(x),
            )  # fmt: skip
    return out


def _in_blocks(matrix: Tensor) -> bool:
    """Return whether blocks of the matrix can be loaded by tensor descriptors.

    matrix: [rows, columns], the matrix.
    """
    aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0
    return copies_blocks(matrix.device) and aligned and matrix.stride(1) == 1


@kernel_for_any("rows")
def _multiply(
    x, weight, bias, out, sums, rows, outputs, inputs, from_x, span, parts, many: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, whole: tl.constexpr, blocks: tl.constexpr, apart: tl.constexpr,
    cut: tl.constexpr, ahead: tl.constexpr, biased: tl.constexpr, gated: tl.constexpr, added: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the result, or of one part's sums if `apart`. Row tiles of the same outputs run one
    after another.

    x: [rows, inputs], or a tensor descriptor of it if `blocks`.
    weight: [outputs, inputs], or a tensor descriptor of it if `blocks`.
    bias: [outputs], if `biased`.
    out: [rows, outputs], receives the product.
    sums: fp32 [parts, rows, outputs], or [parts, rows, 2 * outputs] if gated; receives the sums of the parts,
        if `apart`.
    rows: number of rows.
    outputs: number of outputs.
    inputs: number of inputs.
    from_x: numbers from one row of x to the next.
    span: inputs of a part.
    parts: into how many parts the inputs are cut.
    many: rows of the tile.
    high: outputs of the tile.
    wide: inputs of the tile.
    whole: whether tiles fit the matrix, so that loads need no mask.
    blocks: whether x and weight are loaded by descriptors.
    apart: whether each part has a program of its own.
    cut: whether there are several parts.
    ahead: whether the first weights are loaded before the preceding kernel has ended.
    biased: whether there is a bias.
    gated: whether the product is gated.
    added: whether the product is added to `out`.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    top = tl.program_id(0) * many
    first = tl.program_id(1) * high
    part = tl.program_id(2)
    row = top + tl.arange(0, many)
    output = first + tl.arange(0, high)
    column = tl.arange(0, wide)
    live = row < rows
    there = output < outputs
    if blocks:
        given = x, weight, top, first, first + outputs
    else:
        line = weight + tl.where(there, output, 0).to(tl.int64)[:, None] * inputs + column[None, :]
        source = x + tl.where(live, row, 0).to(tl.int64)[None, :] * from_x + column[:, None]
        given = source, line, column, column, outputs.to(tl.int64) * inputs
    if not ahead:
        await_preceding_kernel(early)
    total, second_half = _sum_up(
        given, part * span, inputs, span, many, high, wide, whole, blocks, gated, ahead, early
    )  # fmt: skip
    if apart:
        size = outputs * (1 + gated)
        place = sums + (part * rows + row).to(tl.int64)[None, :] * size + output[:, None]
        held = there[:, None] & live[None, :]
        tl.store(place, total, mask=held)
        if gated:
            tl.store(place + outputs, second_half, mask=held)
    else:
        if cut:
            for number in range(1, parts):
                one, two = _sum_up(
                    given, number * span, inputs, span, many, high, wide, whole, blocks, gated, False, early
                )  # fmt: skip
                total += one
                second_half += two
        place = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        held = there[:, None] & live[None, :]
        addend = total
        if added:
            addend = tl.load(place, mask=held, other=0.0).to(tl.float32)
        offset = tl.zeros((high,), tl.float32)
        if biased:
            offset = tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
        result = _finish(total, second_half, offset[:, None], addend, biased, gated, added)
        tl.store(place, result.to(out.dtype.element_ty), mask=held)


@kernel
def _sum_up(
    arguments, begin, inputs, span, many: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    whole: tl.constexpr, blocks: tl.constexpr, gated: tl.constexpr, ahead: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Return the sums of the products of one part's inputs, fp32 [high, many], and those for the other half
    of the outputs.

    The second result is zero unless `gated`. A part that begins beyond the last input has sums of zero.

    ahead: the first weights are requested before this function waits for the preceding kernel.
    arguments: addresses of x and weight with their offsets, as `_multiply` makes them.
    begin: first input of the part.
    inputs: number of inputs.
    span: inputs of a part.
    many: rows of the tile.
    high: outputs of the tile.
    wide: inputs of the tile.
    whole: whether loads need no mask.
    blocks: whether x and weight are loaded by descriptors.
    gated: whether the other half of the outputs is summed, too.
    early: whether the device starts kernels early (see `launching`).
    """
    x, line, top, first, other = arguments
    total = tl.zeros((high, many), tl.float32)
    second_half = tl.zeros((high, many), tl.float32)
    end = tl.minimum(begin + span, inputs)
    if ahead:
        tile = _fetch(line + begin, (begin + first < inputs)[None, :], whole)
        twin = _fetch(line + other + begin, (begin + first < inputs)[None, :], whole) if gated else tile
        await_preceding_kernel(early)
        values = _fetch(x + begin, (begin + top < inputs)[:, None], whole)
        total = tl.dot(tile, values, total, input_precision="ieee")
        if gated:
            second_half = tl.dot(twin, values, second_half, input_precision="ieee")
        begin += wide
    for left in range(begin, end, wide):
        if blocks:
            values = x.load([top, left]).T
            tile = line.load([first, left])
        else:
            values = _fetch(x + left, (left + top < inputs)[:, None], whole)
            tile = _fetch(line + left, (left + first < inputs)[None, :], whole)
        total = tl.dot(tile, values, total, input_precision="ieee")
        if gated:
            if blocks:
                twin = line.load([other, left])
            else:
                twin = _fetch(line + other + left, (left + first < inputs)[None, :], whole)
            second_half = tl.dot(twin, values, second_half, input_precision="ieee")
    return total, second_half


@kernel
def _fetch(place, inside, whole: tl.constexpr):
    """Load numbers, with a mask only if some inputs are missing.

    place: addresses of the numbers, of any shape.
    inside: which inputs exist; the others become 0.
    whole: whether all inputs exist.
    """
    return tl.load(place) if whole else tl.load(place, mask=inside, other=0.0)


@kernel
def _finish(
    total, second_half, offset, addend, biased: tl.constexpr, gated: tl.constexpr, added: tl.constexpr
):  # fmt: skip
    """Return the sums after gate, bias and addition.

    total: fp32, the sums of a tile.
    second_half: fp32, the sums of the second half, if `gated`.
    offset: fp32, the bias, if `biased`.
    addend: fp32, what the result is added to, if `added`.
    biased: whether the bias is added.
    gated: whether the sums are gated.
    added: whether `addend` is added.
    """
    if gated:
        total = total / (1 + tl.exp(-total)) * second_half
    if biased:
        total += offset
    if added:
        total += addend
    return total


@kernel
def add_parts(
    sums, bias, out, outputs, wide: tl.constexpr, parts: tl.constexpr, biased: tl.constexpr,
    gated: tl.constexpr, added: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Add up the parts of some columns of one row, then apply the gate, the bias and the addition.

    Program (r, i) computes the columns from i * wide on of row r. There is one program for each row in the
    first dimension, from which the kernel takes the number of rows.

    sums: fp32, the sums of the product over each part of its inputs: [parts, rows, outputs], or [parts, rows,
        2 * outputs] if gated, first halves followed by second halves.
    bias: [outputs], read if `biased`.
    out: [rows, outputs], contiguous, receives the result.
    outputs: number of outputs of the result.
    wide: columns of one program.
    parts: number of parts, at least 1.
    biased: whether `bias` is added.
    gated: whether the product is gated.
    added: whether the product is added to `out`.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    mask = column < outputs
    row_size = outputs * (1 + gated)
    offset = tl.zeros((wide,), tl.float32)
    if biased:
        offset = tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    await_preceding_kernel(early)
    first_part = sums + row * row_size + column
    part_stride = tl.num_programs(0).to(tl.int64) * row_size
    total = sum_of_parts(first_part, part_stride, mask, parts)
    second_half = sum_of_parts(first_part + outputs, part_stride, mask, parts) if gated else total
    addend = total
    if added:
        addend = tl.load(out + row * outputs + column, mask=mask, other=0.0).to(tl.float32)
    result = _finish(total, second_half, offset, addend, biased, gated, added)
    tl.store(out + row * outputs + column, result.to(out.dtype.element_ty), mask=mask)


@kernel
def sum_of_parts(addresses, part_stride, mask, parts: tl.constexpr):
    """Return the sums of some outputs over all parts, fp32, in the shape of `addresses`. They are added from
    the first part to the last. The loop is unrolled, so that the loads of different parts do not wait for
    each other.

    addresses: addresses of the outputs' sums over the first part, of any shape.
    part_stride: numbers from the sums of one part to those of the next.
    mask: which outputs exist; the sums of the others are 0.
    parts: number of parts, at least 1.
    """
    total = tl.load(addresses, mask=mask, other=0.0)
    for _ in tl.static_range(1, parts):
        addresses += part_stride
        total += tl.load(addresses, mask=mask, other=0.0)
    return total
