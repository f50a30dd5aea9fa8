"""Matrix product of a small step, whose result for a row has the same bits whatever the other rows are.

A small step has at most MAX_SMALL_ROWS rows. One program computes a few outputs of all rows, so that the
products of a row are added by the same tensor-core instructions, in the same order, for one row and for 32.

A matrix of few outputs has too few programs to keep the device's memory busy. Therefore the inputs of such a
matrix are divided into *parts* of equal length (split-K), one program computes the sums over one part, and
the next kernel adds these sums up in order. The number of parts depends on the matrix alone. The next kernel
is one of three, which give the same bits:

    add_parts               adds up the parts, then the bias or the residual stream
    add_and_norm            adds up the parts, then the residual stream, and norms the rows
    rows.turn_and_store     adds up the parts, then the bias, rotates heads without norms, and stores their KV
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    array_specialization,
    await_preceding_kernel,
    kernel,
    kernel_for_any,
    launch,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)
from specsot_kernels.gpu.ordered import add_parts, sum_of_parts
from specsot_kernels.gpu.rows import NORM_WARPS, norm_row, norm_rows
from specsot_kernels.line_tables import MAX_SMALL_ROWS

# Rows. The possible numbers of rows of a tile: a step runs in the smallest tile that holds all of its rows.
# Tiles differ in how many rows they hold, not in the order of a row's sums, which the tests marked `gpu`
# verify.
ROW_TILES: Final = (16, 32)
# Inputs. The number of inputs of a matrix must be a multiple of this, so that 16 bytes are loaded at a time.
INPUT_MULTIPLE: Final = 16
# Programs. A matrix with fewer programs is divided into as many parts as possible such that every program has
# a multiprocessor of its own. An H100 and an H200 have 132 multiprocessors.
MULTIPROCESSORS: Final = 132
# Outputs. For how many outputs of a row one program of `add_parts` adds up the parts. Chosen by measurement:
# with 1,024, a step of one row takes 1.02 times as long (1.5B, H200).
SUMS_AT_ONCE: Final = 256
# Bytes. The shared memory that a program may use on an H200. Used where kernels are interpreted.
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
    numbers, with a number of inputs that is a multiple of INPUT_MULTIPLE.

    x: [rows, inputs], the input.
    """
    return 0 < len(x) <= MAX_SMALL_ROWS and x.itemsize == 2 and x.shape[1] % INPUT_MULTIPLE == 0


def small_tile_for(outputs: int, inputs: int, itemsize: int, gated: bool) -> SmallTile:
    """Return the tile for a matrix. It depends on the matrix alone, never on the rows.

    The tiles were chosen by a sweep over 600 tiles on an H200, with 1 and 25 rows, for the matrices of a 1.5B
    model, and by the times of whole steps.

    outputs: number of outputs of the product, half of the matrix's if gated.
    inputs: number of inputs.
    itemsize: bytes of a number.
    gated: whether the product is gated.

    Inputs are not divided if the product is gated, if the numbers have 32 bits, if the number of inputs is
    no multiple of 128, or if there are more than MULTIPROCESSORS / 2 tiles of 64 outputs.

    Example: 1,536 outputs are 24 tiles of 64 outputs, and 8,960 inputs are 70 blocks of 128. At most
        132 // 24 = 5 parts leave a multiprocessor for every program, and 5 divides 70, so that there are 5
        parts of 14 blocks.
    """
    if itemsize > 2:
        return SmallTile(16, 64, 4, 2)
    tiles = -(-outputs // 64)
    if gated or tiles > MULTIPROCESSORS:
        return SmallTile(64, 64, 4, 5)
    blocks, rest = divmod(inputs, 128)
    max_parts = MULTIPROCESSORS // tiles if rest == 0 else 1
    parts = max(parts for parts in range(1, max_parts + 1) if blocks % parts == 0)
    return SmallTile(64, 128, 4, 6, parts)


@cache
def _shared_memory(device: torch.device) -> int:
    """Return the number of bytes of shared memory that one program may use on a device. Return that of an
    H200 for a CPU, where kernels are interpreted.

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
    into: [rows, outputs], contiguous, or half as many outputs if gated; the result is added to this tensor,
        in place, and this tensor is returned. None: the result is a new tensor of `dtype`.
    dtype: type of a new result; None: x's type.
    tile: replaces the tile of `small_tile_for`; None: that one is used. If `gated`, its `parts` must be 1,
        which is not checked.
    """
    if norm:
        x = norm_rows(x.contiguous(), *norm)
    (rows, inputs) = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty((rows, num_outputs), dtype=dtype) if into is None else into
    # Without a bias, the kernels need some tensor in its place, which they do not read.
    bias_or_any = out if bias is None else bias
    tile = tile or small_tile_for(num_outputs, inputs, x.itemsize, gated)
    if tile.parts == 1:
        _launch(x, weight, bias_or_any, out, tile, bias is not None, gated, into is not None)
        return out
    return add_up(sum_in_parts(x, weight, tile=tile), out, bias, into is not None)


def add_up(sums: Tensor, out: Tensor, bias: Tensor | None = None, added: bool = False) -> Tensor:
    """Add up the parts of a product, write the result to `out`, and return `out`. The parts are added from
    the first to the last, then the bias, then the values of `out` if `added`, all in fp32 with one rounding
    at the end.

    sums: fp32 [parts, rows, outputs], the product as `sum_in_parts` returns it.
    out: [rows, outputs], contiguous, receives the result.
    bias: [outputs]; None: none is added.
    added: whether the result is added to what `out` holds. Otherwise, `out` is overwritten.
    """
    parts, rows, num_outputs = sums.shape
    with on_device_of(sums):
        add_parts[(rows, -(-num_outputs // SUMS_AT_ONCE))](
            sums, out if bias is None else bias, out, num_outputs, SUMS_AT_ONCE, parts, bias is not None,
            False, added, num_warps=4, enable_fp_fusion=False, **pdl_options(sums),
        )  # fmt: skip
    return out


def has_parts(weight: Tensor) -> bool:
    """Return whether the inputs of a product with this weight are divided into several parts, if the product
    is not gated.

    weight: [outputs, inputs], of the type of the product's input.
    """
    (outputs, inputs) = weight.shape
    return small_tile_for(outputs, inputs, weight.itemsize, False).parts > 1


def sum_in_parts(
    x: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,
    tile: SmallTile | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return the sums of x @ weight.T over each part of the inputs, fp32 [parts, rows, outputs].

    A kernel that follows must add them up as `multiply_small` does: from the first part to the last, then the
    bias, then the residual stream, with one rounding at the end.

    x: [rows, inputs], the numbers of a row are adjacent. At most MAX_SMALL_ROWS rows.
    weight: [outputs, inputs], contiguous. Its inputs must be divided into several parts (`has_parts`).
    norm: weight [inputs] and epsilon of an RMSNorm of x that is applied first, in a kernel of its own; None:
        no norm.
    tile: replaces the tile of `small_tile_for`; None: that one is used.
    into: fp32 [parts, rows, outputs], the sums of another product with as many rows, outputs and parts. The
        sums of this product are added to these in place, and `into` is returned. None: the result is a new
        tensor.

    Example: inputs 4, 2 parts, x [[a b c d]], weight [[1 1 1 1]] -> [[[a + b]], [[c + d]]].
    """
    if norm:
        x = norm_rows(x.contiguous(), *norm)
    (outputs, inputs) = weight.shape
    tile = tile or small_tile_for(outputs, inputs, x.itemsize, False)
    sums = x.new_empty((tile.parts, len(x), outputs), dtype=torch.float32) if into is None else into
    _launch(x, weight, sums, sums, tile, added=into is not None)
    return sums


def add_and_norm(sums: Tensor, hidden: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """Add a product to the hidden states, in place, and return the RMSNorm of the result, [rows, size], in
    the type of `hidden`.

    The hidden states have the bits that `multiply_small` into `hidden` gives, and the returned rows have the
    bits that `norm_rows` gives for these hidden states.

    sums: fp32 [parts, rows, size], the product as `sum_in_parts` returns it.
    hidden: [rows, size], contiguous, the residual stream.
    norm: weight [size] and epsilon of the RMSNorm.
    """
    parts, rows, size = sums.shape
    normed = hidden.new_empty(hidden.shape)
    # The compiler may fuse multiplications and additions (FMA) in this kernel, because it may do so in
    # `norm_rows`, whose bits the norm must have. It may not in `add_parts`, but the bits of the sums are the
    # same, because they are added before anything is multiplied.
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

    x: [rows, inputs], the input; the numbers of a row are adjacent.
    weight: [outputs, inputs], contiguous; both halves of the outputs if gated.
    bias: [outputs], if `biased`; otherwise any tensor, which is not read.
    out: receives the product, [rows, outputs]. If the tile has several parts, it receives the sums over each
        part instead, fp32 [parts, rows, outputs], and `biased` and `gated` must be False.
    tile: what one program multiplies at a time.
    biased: whether `bias` is added.
    gated: whether the product is gated.
    added: whether the product, or the sums over each part, are added to `out`.
    """
    (rows, inputs) = x.shape
    num_outputs = out.shape[-1]
    tile_outputs, tile_inputs, warps, stages, parts = tile
    tile_rows = next(size for size in ROW_TILES if rows <= size)
    # Fewer stages only wait longer for loads; the order of sums stays.
    bytes_per_stage = x.itemsize * tile_inputs * (tile_outputs * (1 + gated) + tile_rows)
    stages = max(min(stages, _shared_memory(x.device) // bytes_per_stage), 1)
    unmasked = inputs % tile_inputs == 0 and num_outputs % tile_outputs == 0
    arrays = x, weight, bias, out
    sizes = num_outputs, inputs, inputs // parts, x.stride(0)
    options = pdl_options(x)
    # `launch` takes the kernel's arguments by position, and `early` is the last of them.
    early = options.pop("early")
    constants = tile_rows, tile_outputs, tile_inputs, unmasked, biased, gated, added, parts > 1, early
    with on_device_of(x):
        launch(
            _multiply, (-(-num_outputs // tile_outputs), parts, 1),
            (*array_specialization(*arrays), *sizes, *constants, warps, stages),
            (*arrays, rows, *sizes, *constants),
            num_warps=warps, num_stages=stages, enable_fp_fusion=False, **options,
        )  # fmt: skip


@kernel_for_any("rows")
def _multiply(
    x, weight, bias, out, rows, outputs, inputs, part_inputs, x_stride, tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr, tile_inputs: tl.constexpr, unmasked: tl.constexpr, biased: tl.constexpr,
    gated: tl.constexpr, added: tl.constexpr, divided: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Compute `tile_outputs` outputs of all rows over one part of the inputs. The first weights are loaded
    before the preceding kernel has ended, because that kernel does not write weights.

    Program (i, p) computes the outputs from i * tile_outputs on, over the inputs of part p. Tiles are
    [outputs, rows]: the transposed product, so that a few rows fill the narrow side of a tensor-core
    instruction.

    x: [rows, inputs], the input.
    weight: [outputs, inputs], both halves of the outputs if gated.
    bias: [outputs], read if `biased`.
    out: receives the product, [rows, outputs]; if `divided`, the sums over each part instead, fp32 [parts,
        rows, outputs], without bias and gate.
    rows: number of rows, at most `tile_rows`.
    outputs: number of outputs, half of the matrix's if gated.
    inputs: number of inputs.
    part_inputs: number of inputs of a part.
    x_stride: numbers from one row of x to the next.
    tile_rows: rows of the tile.
    tile_outputs: outputs of the tile.
    tile_inputs: inputs of the tile.
    unmasked: whether tiles divide the matrix without a rest, so that loads of weights need no mask.
    biased: whether `bias` is added.
    gated: whether the product is gated.
    added: whether the product, or the sums over each part, are added to `out`.
    divided: whether the inputs are divided into several parts.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    part = tl.program_id(1)
    row = tl.arange(0, tile_rows)
    column = tl.arange(0, tile_inputs)
    row_mask = row < rows
    output_mask = output < outputs
    first = part * part_inputs
    weight_row = tl.where(output_mask, output, 0).to(tl.int64)
    weight_block = weight + weight_row[:, None] * inputs + (first + column)[None, :]
    to_second_half = outputs.to(tl.int64) * inputs
    x_block = x + row.to(tl.int64)[None, :] * x_stride + (first + column)[:, None]
    first_mask = column < part_inputs
    tile = _fetch(weight_block, first_mask[None, :], unmasked)
    second_tile = _fetch(weight_block + to_second_half, first_mask[None, :], unmasked) if gated else tile
    total = tl.zeros((tile_outputs, tile_rows), tl.float32)
    second_half = tl.zeros((tile_outputs, tile_rows), tl.float32)
    await_preceding_kernel(early)
    values = tl.load(x_block, mask=first_mask[:, None] & row_mask[None, :], other=0.0)
    total = tl.dot(tile, values, total, input_precision="ieee")
    if gated:
        second_half = tl.dot(second_tile, values, second_half, input_precision="ieee")
    for offset in range(tile_inputs, part_inputs, tile_inputs):
        input_mask = offset + column < part_inputs
        values = tl.load(x_block + offset, mask=input_mask[:, None] & row_mask[None, :], other=0.0)
        tile = _fetch(weight_block + offset, input_mask[None, :], unmasked)
        total = tl.dot(tile, values, total, input_precision="ieee")
        if gated:
            second_tile = _fetch(weight_block + to_second_half + offset, input_mask[None, :], unmasked)
            second_half = tl.dot(second_tile, values, second_half, input_precision="ieee")
    mask = output_mask[:, None] & row_mask[None, :]
    if divided:
        addresses = out + (part * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
        if added:
            total += tl.load(addresses, mask=mask, other=0.0)
        tl.store(addresses, total, mask=mask)
    else:
        if gated:
            total = total / (1 + tl.exp(-total)) * second_half
        if biased:
            total += tl.load(bias + output, mask=output_mask, other=0.0).to(tl.float32)[:, None]
        addresses = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        if added:
            total += tl.load(addresses, mask=mask, other=0.0).to(tl.float32)
        tl.store(addresses, total.to(out.dtype.element_ty), mask=mask)


@kernel
def _fetch(addresses, mask, unmasked: tl.constexpr):
    """Load numbers, with a mask only if some are missing.

    addresses: addresses of the numbers, of any shape.
    mask: which of the numbers exist, of a shape that broadcasts to that of `addresses`; the others become 0.
    unmasked: whether all numbers exist, so that `mask` is ignored.
    """
    return tl.load(addresses) if unmasked else tl.load(addresses, mask=mask, other=0.0)


@kernel
def _add_and_norm(
    sums, hidden, weight, normed, size, eps, room: tl.constexpr, parts: tl.constexpr, early: tl.constexpr
):  # fmt: skip
    """Add up the parts of one row of a product, add the result to the hidden states, and norm the row.

    The norm is that of the stored row, after rounding. Its squares are added in the order of `norm_rows`.

    sums: fp32 [parts, rows, size], the sums of the product over each part of its inputs.
    hidden: [rows, size], the residual stream, to which the product is added.
    weight: [size], weight of the norm.
    normed: [rows, size], receives the normed rows.
    size: numbers of a row.
    eps: added to the mean square.
    room: `size`, rounded up to a power of two.
    parts: number of parts.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, room)
    in_row = column < size
    scale = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32)
    await_preceding_kernel(early)
    begin = row * size
    addresses = hidden + begin + column
    part_stride = tl.num_programs(0).to(tl.int64) * size
    total = sum_of_parts(sums + begin + column, part_stride, in_row, parts)
    total += tl.load(addresses, mask=in_row, other=0.0).to(tl.float32)
    stored = total.to(hidden.dtype.element_ty)
    tl.store(addresses, stored, mask=in_row)
    values = norm_row(stored.to(tl.float32), scale, size, eps)
    tl.store(normed + begin + column, values.to(normed.dtype.element_ty), mask=in_row)
