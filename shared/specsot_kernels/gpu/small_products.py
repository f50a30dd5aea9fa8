"""Matrix product of a small step: every row's sums run in one order, whatever the other rows are.

A small step has at most MAX_SMALL_ROWS rows. One program computes a few outputs of all rows, so that the
products of a row are added by the same tensor-core instructions, in the same order, for one row and for 32.
A matrix of few outputs has too few programs to keep the device's memory busy. Its inputs are divided into
parts of equal length, whose sums the next kernel adds up in order. The number of parts depends on the matrix
alone. The next kernel is `add_parts`, or one that also does what follows the product: `add_and_norm`, or
`rows.turn_and_store` for heads without norms. The bits are the same.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from functools import cache
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
    power_of_two,
)
from specsot_kernels.gpu.ordered import add_parts, sum_of_parts
from specsot_kernels.gpu.rows import NORM_WARPS, norm_row, norm_rows
from specsot_kernels.line_tables import MAX_SMALL_ROWS

# Rows. Tiles of rows: a step runs in the smallest tile that holds it. Tiles differ in how many rows they
# hold, not in the order of a row's sums, which the tests marked `gpu` verify.
ROW_TILES: Final = (16, 32)
# Inputs. A matrix needs a multiple of it, so that 16 bytes are loaded at a time.
INPUT_MULTIPLE: Final = 16
# Programs. A matrix with fewer programs is divided into parts, as long as every program has a multiprocessor
# of its own. An H100 and an H200 have 132 multiprocessors.
MULTIPROCESSORS: Final = 132
# Numbers. How many sums a program adds up. Chosen by measurement: with 1,024, a step of one row takes 1.02
# times as long (1.5B, H200).
SUMS_AT_ONCE: Final = 256
# Bytes. The shared memory that a program may use on an H200.
SHARED_MEMORY: Final = 232_448


class SmallTile(NamedTuple):
    """What one program multiplies at a time.

    outputs: outputs of the tile.
    inputs: inputs of the tile.
    warps: warps of the program.
    stages: loop iterations whose loads are in flight.
    parts: number of equal parts that the inputs are divided into. If there are several, the length of a part
        must be a multiple of `inputs`.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1


def suits(x: Tensor) -> bool:
    """Return whether these rows are multiplied as those of a small step: 1 to MAX_SMALL_ROWS rows of 16-bit
    numbers.

    The number of inputs must be a multiple of INPUT_MULTIPLE.

    x: [rows, inputs], the input.
    """
    return 0 < len(x) <= MAX_SMALL_ROWS and x.itemsize == 2 and x.shape[1] % INPUT_MULTIPLE == 0


def small_tile_for(outputs: int, inputs: int, itemsize: int, gated: bool) -> SmallTile:
    """Return the tile for a matrix. It depends on the matrix alone, never on the rows.

    Chosen by a sweep over 600 tiles on an H200, with 1 and 25 rows, for the matrices of a 1.5B model, and by
    whole steps.

    outputs: outputs of the product, half of the matrix's if gated.
    inputs: number of inputs.
    itemsize: bytes of a number.
    gated: whether the product is gated.

    Inputs are not divided if the product is gated, if the numbers have 32 bits, or if the inputs are no
    multiple of 128.

    For example, 1,536 outputs are 24 programs of 64 outputs, and 8,960 inputs are 70 blocks of 128. 5 is the
    largest divisor of 70 with at most 132 programs (24 * 5 = 120), so that there are 5 parts.
    """
    if itemsize > 2:
        return SmallTile(16, 64, 4, 2)
    tiles = -(-outputs // 64)
    if gated or tiles > MULTIPROCESSORS:
        return SmallTile(64, 64, 4, 5)
    blocks, rest = divmod(inputs, 128)
    most = MULTIPROCESSORS // tiles if rest == 0 else 1
    return SmallTile(64, 128, 4, 6, max(parts for parts in range(1, most + 1) if blocks % parts == 0))


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use on a device; for a CPU, where kernels are
    interpreted, those of an H200.

    device: the device.
    """
    if device.type != "cuda":
        return SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    # ROCm has no larger size that a program may ask for.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


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

    x: [rows, inputs], the numbers of a row are adjacent.
    weight: [outputs, inputs], contiguous.
    norm: weight [inputs] and epsilon of an RMSNorm of x that is applied first, in a kernel of its own; None:
        no norm.
    bias: [outputs]; None: none is added. It is added after the gate.
    gated: the result is silu(first half) * second half, [rows, outputs / 2].
    into: [rows, outputs], or half as many outputs if gated; the result is added to this tensor, in place.
        None: the result is a new tensor of `dtype`.
    dtype: type of a new result; None: x's type.
    tile: overrides `small_tile_for`; None: it does not. If `gated`, its `parts` must be 1, which is not
        checked.
    """
    if norm:
        x = norm_rows(x.contiguous(), *norm)
    (rows, inputs) = x.shape
    wanted = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty((rows, wanted), dtype=dtype) if into is None else into
    addend = out if bias is None else bias
    tile = tile or small_tile_for(wanted, inputs, x.itemsize, gated)
    if tile.parts == 1:
        _launch(x, weight, addend, out, tile, bias is not None, gated, into is not None)
        return out
    sums = sum_in_parts(x, weight, tile=tile)
    with on_device_of(x):
        add_parts[(rows, -(-wanted // SUMS_AT_ONCE))](
            sums, addend, out, wanted, SUMS_AT_ONCE, tile.parts, bias is not None, False, into is not None,
            num_warps=4, enable_fp_fusion=False, **pdl_options(x),
        )  # fmt: skip
    return out


def has_parts(weight: Tensor) -> bool:
    """Return whether the inputs of a product that is not gated are divided into several parts.

    weight: [outputs, inputs], the weight.
    """
    (outputs, inputs) = weight.shape
    return small_tile_for(outputs, inputs, weight.itemsize, False).parts > 1


def sum_in_parts(
    x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None = None, tile: SmallTile | None = None
) -> Tensor:
    """Return the sums of x @ weight.T over each part of the inputs, fp32 [parts, rows, outputs].

    `multiply_small` adds them from the first part to the last, then adds the bias, then what is in `into`,
    and rounds once.

    x: [rows, inputs], the numbers of a row are adjacent.
    weight: [outputs, inputs], contiguous. Its inputs must have several parts (`has_parts`).
    norm: weight [inputs] and epsilon of an RMSNorm of x that is applied first, in a kernel of its own; None:
        no norm.
    tile: overrides `small_tile_for`; None: it does not.
    """
    if norm:
        x = norm_rows(x.contiguous(), *norm)
    (outputs, inputs) = weight.shape
    tile = tile or small_tile_for(outputs, inputs, x.itemsize, False)
    sums = x.new_empty((tile.parts, len(x), outputs), dtype=torch.float32)
    _launch(x, weight, sums, sums, tile)
    return sums


def add_and_norm(sums: Tensor, hidden: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """Add a product to the hidden states, in place, and return their RMSNorm, [rows, size] in their type.

    The bits of both are those of `multiply_small` into `hidden` and `norm_rows`.

    sums: fp32 [parts, rows, size], the product as `sum_in_parts` returns it.
    hidden: [rows, size], contiguous, the residual stream.
    norm: weight [size] and epsilon of the RMSNorm.
    """
    parts, rows, size = sums.shape
    normed = hidden.new_empty(hidden.shape)
    # Multiplications and additions may be fused, as in `norm_rows`, whose bits these are. Nothing multiplies
    # the sums of parts, which `add_parts` adds without fusing.
    with on_device_of(hidden):
        _add_and_norm[(rows,)](
            sums, hidden, norm[0], normed, size, norm[1], power_of_two(size), parts, num_warps=NORM_WARPS,
            **pdl_options(hidden),
        )  # fmt: skip
    return normed


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    tile: SmallTile,
    biased: bool = False,
    gated: bool = False,
    added: bool = False,
) -> None:
    """Launch `_multiply`.

    x: [rows, inputs], the input.
    weight: [outputs, inputs], both halves of the outputs if gated.
    bias: [outputs], if `biased`; otherwise any tensor.
    out: [rows, outputs], receives the product; fp32 [parts, rows, outputs] if the tile has several parts,
        receives the sums alone.
    tile: the tile.
    biased: whether there is a bias.
    gated: whether the product is gated.
    added: whether the product is added to `out`.
    """
    (rows, inputs) = x.shape
    wanted = out.shape[-1]
    high, wide, warps, stages, parts = tile
    many = next(size for size in ROW_TILES if rows <= size)
    # Fewer stages only wait longer for loads; the order of sums stays.
    bytes_per_stage = x.itemsize * wide * (high * (1 + gated) + many)
    stages = max(min(stages, _shared_memory(x.device) // bytes_per_stage), 1)
    whole = inputs % wide == 0 and wanted % high == 0
    with on_device_of(x):
        _multiply[(-(-wanted // high), parts)](
            x, weight, bias, out, rows, wanted, inputs, inputs // parts, x.stride(0), many, high, wide,
            whole, biased, gated, added, parts > 1,
            num_warps=warps, num_stages=stages, enable_fp_fusion=False, **pdl_options(x),
        )  # fmt: skip


@kernel_for_any("rows")
def _multiply(
    x, weight, bias, out, rows, outputs, inputs, length, from_x, many: tl.constexpr, high: tl.constexpr,
    wide: tl.constexpr, whole: tl.constexpr, biased: tl.constexpr, gated: tl.constexpr, added: tl.constexpr,
    divided: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Compute `high` outputs of all rows over one part of the inputs. The first weights are loaded before the
    preceding kernel has ended.

    x: [rows, inputs], the input.
    weight: [outputs, inputs], both halves of the outputs if gated.
    bias: [outputs], if `biased`.
    out: [rows, outputs], receives the product; fp32 [parts, rows, outputs] if `divided`, receives the sums
        alone.
    rows: number of rows, at most `many`.
    outputs: number of outputs, half of the matrix's if gated.
    inputs: number of inputs.
    length: number of inputs of a part.
    from_x: numbers from one row of x to the next.
    many: rows of the tile.
    high: outputs of the tile.
    wide: inputs of the tile.
    whole: whether tiles fit the matrix, so that loads of weights need no mask.
    biased: whether there is a bias.
    gated: whether the product is gated.
    added: whether the product is added to `out`.
    divided: whether the inputs are divided into several parts.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    output = tl.program_id(0) * high + tl.arange(0, high)
    part = tl.program_id(1)
    row = tl.arange(0, many)
    column = tl.arange(0, wide)
    live = row < rows
    there = output < outputs
    first = part * length
    line = weight + tl.where(there, output, 0).to(tl.int64)[:, None] * inputs + (first + column)[None, :]
    other = outputs.to(tl.int64) * inputs
    source = x + row.to(tl.int64)[None, :] * from_x + (first + column)[:, None]
    tile = _fetch(line, (column < length)[None, :], whole)
    twin = _fetch(line + other, (column < length)[None, :], whole) if gated else tile
    total = tl.zeros((high, many), tl.float32)
    second_half = tl.zeros((high, many), tl.float32)
    await_preceding_kernel(early)
    values = tl.load(source, mask=(column < length)[:, None] & live[None, :], other=0.0)
    total = tl.dot(tile, values, total, input_precision="ieee")
    if gated:
        second_half = tl.dot(twin, values, second_half, input_precision="ieee")
    for left in range(wide, length, wide):
        held = left + column < length
        values = tl.load(source + left, mask=held[:, None] & live[None, :], other=0.0)
        tile = _fetch(line + left, held[None, :], whole)
        total = tl.dot(tile, values, total, input_precision="ieee")
        if gated:
            twin = _fetch(line + other + left, held[None, :], whole)
            second_half = tl.dot(twin, values, second_half, input_precision="ieee")
    kept = there[:, None] & live[None, :]
    if divided:
        place = out + (part * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(place, total, mask=kept)
    else:
        if gated:
            total = total / (1 + tl.exp(-total)) * second_half
        if biased:
            total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
        place = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        if added:
            total += tl.load(place, mask=kept, other=0.0).to(tl.float32)
        tl.store(place, total.to(out.dtype.element_ty), mask=kept)


@kernel
def _fetch(place, inside, whole: tl.constexpr):
    """Load numbers, with a mask only if some are missing.

    place: addresses of the numbers, of any shape.
    inside: which of them exist; the others become 0.
    whole: whether all exist.
    """
    return tl.load(place) if whole else tl.load(place, mask=inside, other=0.0)


@kernel
def _add_and_norm(
    sums, hidden, weight, normed, size, eps, room: tl.constexpr, parts: tl.constexpr, early: tl.constexpr
):  # fmt: skip
    """Add up the parts of one row of a product, add the result to the hidden states, and norm the row.

    The row is normed as it is stored, after rounding, and in the order of sums of `norm_rows`.

    sums: fp32 [parts, rows, size], the sums of the product over each part of its inputs.
    hidden: [rows, size], the product is added to it.
    weight: [size], weight of the norm.
    normed: [rows, size], receives the normed rows.
    size: numbers of a row.
    eps: added to the mean square.
    room: `size`, rounded up to a power of two.
    parts: number of parts.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    there = column < size
    scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    await_preceding_kernel(early)
    begin = row * size
    place = hidden + begin + column
    total = sum_of_parts(sums + begin + column, tl.num_programs(0).to(tl.int64) * size, there, parts)
    total += tl.load(place, mask=there, other=0.0).to(tl.float32)
    values = total.to(hidden.dtype.element_ty)
    tl.store(place, values, mask=there)
    values = norm_row(values.to(tl.float32), scale, size, eps)
    tl.store(normed + begin + column, values.to(normed.dtype.element_ty), mask=there)
