"""Multiplies int8 rows with int8 matrices: each row has a scale for every 64 inputs; integer sums are exact.

A row's result is the same bits in every batch: integers are summed within a group of 64 inputs, the groups
are added in the order of the inputs within each part, and the parts in order, whatever the tile.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

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

# Inputs of a row that share a scale, as on CPUs.
GROUP = tl.constexpr(64)
# Adding and subtracting this number rounds an fp32 number to a whole one: a sum of this size has no fraction
# bits.
HALF_WAY = tl.constexpr(1.5 * 2.0**23)
# The bits of HALF_WAY as fp32.
HALF_WAY_BITS = tl.constexpr(0x4B400000)


class WholeTile(NamedTuple):
    """What one program multiplies.

    outputs: outputs of the tile.
    rows: rows of the tile.
    groups: groups of GROUP inputs at a time.
    warps: warps of the program.
    stages: loop iterations in flight.
    asked: how many iterations' weights are prefetched before the preceding kernel has ended: 0, 1, 2, 4, ...
    """

    outputs: int
    rows: int
    groups: int
    warps: int
    stages: int
    asked: int = 0


def whole_tile_of(rows: int, outputs: int, gated: bool) -> WholeTile:
    """Return the fastest of about twenty tiles on an H100 for the matrices of an 8B model.

    rows: number of rows.
    outputs: number of outputs of the product, after the gate.
    gated: whether the product is gated.
    """
    if rows > 64:
        return WholeTile(64, 128, 1, 4, 4) if gated else WholeTile(128, 128, 2, 8, 3)
    if rows > 16:
        return (
            WholeTile(64, power_of_two(rows), 2, 8, 4)
            if outputs < LM_HEAD_OUTPUTS
            else WholeTile(128, 64, 2, 4, 4)
        )
    return WholeTile(64, 16, 4, 4, 3, asked=1)


def fitting(tile: WholeTile, device: torch.device) -> WholeTile:
    """Return the tile, reduced where the device has less shared memory than an H100.

    A multiprocessor has 228 KiB from Hopper on; older GPUs and AMD's have 64 to 164 KiB.

    tile: a tile for an H100.
    device: the torch device in question.
    """
    if copies_blocks(device):
        return tile
    return tile._replace(groups=max(tile.groups // 2, 1), stages=min(tile.stages, 3))


# Outputs. Only an lm_head has so many.
LM_HEAD_OUTPUTS = 64 * 1024
# Programs. From so many on, a GPU is filled (an H100 has 132 multiprocessors).
FULL_GPU_PROGRAMS = 192
# Parts. How many the inputs of a matrix with few outputs are cut into.
PARTS = 4
# Rows. Up to so many, each part has its own program; more rows fill a GPU anyway.
MAX_SPLIT_ROWS = 512


def parts_of(outputs: int, inputs: int, gated: bool) -> int:
    """Return into how many parts the inputs are cut, so that few outputs still occupy a whole GPU.

    It depends on the weight's shape alone, since it decides the order of additions.

    outputs: number of outputs.
    inputs: number of inputs.
    gated: whether the product is gated.
    """
    few = not gated and outputs < FULL_GPU_PROGRAMS * 64 and inputs >= PARTS * 4 * GROUP.value
    return PARTS if few else 1


def round_rows(x: Tensor, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows: return int8 [rows, size], and the scales of each 64 numbers of a row, fp32 [groups,
    rows].

    A group of zeros gets scale 0, and a group with a number that is not finite a scale of NaN.

    x: [rows, size]; the numbers of a row are adjacent.
    norm: weight [size] and epsilon of an RMSNorm that is applied first; None: no norm.

    A row of 130 numbers has 3 groups: 0..63, 64..127 and 128..129.
    """
    rows, size = x.shape
    groups = -(-size // GROUP.value)
    codes = x.new_empty((rows, size), dtype=torch.int8)
    scales = x.new_empty((groups, rows), dtype=torch.float32)
    weight, eps = norm or (x, 0.0)
    with on_device_of(x):
        _round[(rows,)](
            x, weight, codes, scales, rows, size, x.stride(0), eps, power_of_two(groups), norm is not None,
            num_warps=8, **pdl_options(x),
        )  # fmt: skip
    return codes, scales


@kernel_for_any("rows")
def _round(
    x, weight, codes, scales, rows, size, from_x, eps, room: tl.constexpr, normed: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Quantize one row.

    x: [rows, size], the rows; `from_x` numbers from one row to the next.
    weight: [size], weight of the norm, if `normed`.
    codes: int8 [rows, size], receives the quantized rows.
    scales: fp32 [groups, rows], receives their scales.
    rows: number of rows.
    size: numbers of a row.
    from_x: numbers from one row of x to the next.
    eps: epsilon of the norm.
    room: groups of a row, rounded up to a power of two.
    normed: whether to norm.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, room)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = column < size
    if normed:
        gains = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    await_preceding_kernel(early)
    values = tl.load(x + row * from_x + column, mask=there, other=0.0).to(tl.float32)
    if normed:
        values *= tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / size + eps) * gains
    whole, scale = _shorten(values, 1)
    tl.store(codes + row * size + column, whole, mask=there)
    tl.store(scales + group * rows + row, scale, mask=group * GROUP < size)


@kernel
def _shorten(values, axis: tl.constexpr):
    """Quantize along an axis: return whole numbers within -127 .. 127, and the scale that they are multiplied
    by.

    Numbers that are all 0 get scale 0; if one is not finite, the scale is NaN.

    values: fp32, a tile.
    axis: the axis along which numbers share a scale.
    """
    peak = tl.max(tl.abs(values), axis)
    # 0 if all numbers are finite, else NaN: then the scale is NaN too.
    unreal = tl.sum(values - values, axis)
    larger = tl.where(peak > 0, tl.div_rn(tl.full(peak.shape, 127.0, tl.float32), peak), 0.0)
    whole = (values * tl.expand_dims(larger, axis) + HALF_WAY) - HALF_WAY
    return whole.to(tl.int8), tl.div_rn(peak, tl.full(peak.shape, 127.0, tl.float32)) + unreal


def multiply_whole(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    columns: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    into: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tile: WholeTile | None = None,
) -> Tensor:
    """Return the product of quantized rows, [rows, outputs] of `dtype`.

    A row's result is the same bits for every number of rows.

    weight: int8 [outputs, inputs], contiguous.
    columns: fp32 [outputs], the scales of the weight's rows.
    counts: int32 [outputs], zeros, and zeros again afterwards; two products must not use it at the same time.
    tile: overrides `whole_tile_of`; None: it does not.
    codes: int8 [rows, inputs], from `round_rows`.
    scales: fp32 [groups, rows], from `round_rows`.
    bias: [outputs]; None: none is added.
    into: [rows, outputs]; the product is added to it, in place. None: the result is a new tensor.
    dtype: type of a new tensor.
    """
    out = codes.new_empty((len(codes), len(weight)), dtype=dtype) if into is None else into
    _launch(codes, scales, weight, columns, counts, bias, out, None, into is not None, tile)
    return out


def multiply_gated_whole(
    codes: Tensor, scales: Tensor, weight: Tensor, columns: Tensor, tile: WholeTile | None = None
) -> tuple[Tensor, Tensor]:
    """Return silu(first half) * second half of the product, quantized as by `round_rows`: (codes, scales).

    No bias is added.

    codes: int8 [rows, inputs], from `round_rows`.
    scales: fp32 [groups, rows], from `round_rows`.
    weight: int8 [2 * outputs, inputs], contiguous.
    columns: fp32 [2 * outputs], the scales of the weight's rows.
    tile: overrides `whole_tile_of`; None: it does not.
    """
    rows = len(codes)
    wanted = len(weight) // 2
    out = codes.new_empty((rows, wanted))
    steps = scales.new_empty((-(-wanted // GROUP.value), rows))
    _launch(codes, scales, weight, columns, columns, None, out, steps, False, tile)
    return out, steps


def _launch(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    columns: Tensor,
    counts: Tensor,
    bias: Tensor | None,
    out: Tensor,
    steps: Tensor | None,
    added: bool,
    tile: WholeTile | None,
) -> None:
    """Launch a product, gated if there are `steps` (the scales of its quantized result).

    codes: int8 [rows, inputs], the quantized rows, from `round_rows`.
    scales: fp32 [groups, rows], their scales.
    weight: int8 [outputs, or twice as many if gated, inputs], the weight.
    columns: fp32, the scales of the weight's rows.
    counts: int32 [outputs], zeros; see `multiply_whole`.
    bias: [outputs]; None: none is added.
    out: [rows, outputs], receives the product.
    steps: fp32 [groups of outputs, rows], receives the scales of a gated product; None: the product is not
        gated.
    added: whether the product is added to out.
    tile: overrides `whole_tile_of`; None: it does not.
    """
    rows, inputs = codes.shape
    gated = steps is not None
    outputs = len(weight) // (1 + gated)
    tile = tile or fitting(whole_tile_of(rows, outputs, gated), codes.device)
    high, many, together, warps, stages, asked = tile
    parts = parts_of(outputs, inputs, gated)
    apart = parts > 1 and rows <= MAX_SPLIT_ROWS
    sums = scales.new_empty((parts, rows, outputs)) if apart else scales
    groups = -(-inputs // (GROUP.value * parts))
    with on_device_of(codes):
        _multiply[(-(-outputs // high), -(-rows // many), parts if apart else 1)](
            codes, scales, weight, columns, columns if bias is None else bias, out,
            scales if steps is None else steps, sums, counts, rows, outputs, inputs, groups * GROUP.value,
            high, many, together, parts, inputs % (GROUP.value * together * parts) == 0,
            many > 64 and not gated, many <= 16 or not gated, bias is not None, gated, added, apart,
            asked if asked * together <= groups and outputs % high == 0 else 0,
            num_warps=warps, num_stages=stages, **pdl_options(codes),
        )  # fmt: skip


@kernel_for_any("rows")
def _multiply(
    codes, scales, weight, columns, bias, out, steps, sums, counts, rows, outputs, inputs, long,
    high: tl.constexpr, many: tl.constexpr, together: tl.constexpr, parts: tl.constexpr,
    whole: tl.constexpr, tall: tl.constexpr, as_bits: tl.constexpr, biased: tl.constexpr,
    gated: tl.constexpr, added: tl.constexpr, apart: tl.constexpr, asked: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs and rows.

    Tiles beyond the last row or output write nothing.

    long: inputs of a part.
    apart: each part has a program; the last one that finishes adds the parts up.
    tall: the first axis of a tile are rows, else outputs: a multiprocessor multiplies 64 of that axis at
        once.
    as_bits: whether integer sums become floats by their bits, see `_sum_up`.
    codes: int8 [rows, inputs], the quantized rows.
    scales: fp32 [groups, rows], their scales.
    weight: int8 [outputs, inputs], the quantized weight.
    columns: fp32 [outputs], the scales of its rows.
    bias: [outputs], if `biased`.
    out: [rows, outputs], receives the product.
    steps: fp32 [groups of outputs, rows], receives the scales of the result, if `gated`.
    sums: fp32 [parts, rows, outputs], scratch, if `apart`.
    counts: int32, how many parts of each tile have finished, if `apart`.
    rows: number of rows.
    outputs: number of outputs.
    inputs: number of inputs.
    high: outputs of the tile.
    many: rows of the tile.
    together: groups of inputs at a time.
    parts: into how many parts the inputs are cut.
    whole: whether all inputs exist, so that loads need no mask.
    biased: whether there is a bias.
    gated: whether the product is gated.
    added: whether the product is added to out.
    asked: how many iterations' weights are prefetched.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    output = tl.program_id(0) * high + tl.arange(0, high)
    row, column = tl.program_id(1) * many + tl.arange(0, many), tl.arange(0, GROUP)
    there = output < outputs
    live = row < rows
    at = weight + tl.where(there, output, 0).to(tl.int64)[:, None] * inputs + column[None, :]
    twin = at + outputs.to(tl.int64) * inputs
    first = tl.program_id(2) if apart else 0
    gains = tl.expand_dims(tl.load(columns + output, mask=there, other=0.0), 1 - tall)
    if gated:
        others = tl.expand_dims(tl.load(columns + outputs + output, mask=there, other=0.0), 1 - tall)
    given = tl.where(live, row, 0)
    source = codes + given.to(tl.int64)[:, None] * inputs + column[None, :]
    steps_of = scales + given
    total = _zeros(high, many, tall)
    up_total = _zeros(high, many, tall)
    if asked and whole:
        _ask_for(weight, output, inputs, first * long, asked * together * GROUP, early)
        if gated:
            _ask_for(weight, outputs + output, inputs, first * long, asked * together * GROUP, early)
    await_preceding_kernel(early)
    for part in range(first, first + (1 if apart else parts)):
        sum_ = _zeros(high, many, tall)
        other = _zeros(high, many, tall)
        end = tl.minimum((part + 1) * long, inputs)
        for left in range(part * long, end, GROUP * together):
            sizes = ()
            # All scales are requested together, since the program waits for each.
            for step in tl.static_range(together):
                here = left // GROUP + step
                size = _fetch(steps_of + here * rows, here * GROUP < end, whole)
                sizes += (tl.expand_dims(size, 0 + tall),)
            for step in tl.static_range(together):
                here = left + step * GROUP
                inside = (here + column < end)[None, :]
                values = _fetch(source + here, inside, whole)
                line = _fetch(at + here, inside, whole)
                sum_ = tl.fma(_sum_up(line, values, tall, as_bits), sizes[step], sum_)
                if gated:
                    line = _fetch(twin + here, inside, whole)
                    other = tl.fma(_sum_up(line, values, tall, as_bits), sizes[step], other)
        if parts > 1:
            total = total + sum_
            up_total = up_total + other
        else:
            total = sum_
            up_total = other
    r, o = tl.expand_dims(row, 0 + tall).to(tl.int64), tl.expand_dims(output, 1 - tall)
    held = (r < rows) & (o < outputs)
    place = r * outputs + o
    done = True
    if apart:
        apart_by = rows.to(tl.int64) * outputs
        tl.store(sums + first * apart_by + place, total, mask=held)
        tl.debug_barrier()
        count = counts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        done = tl.atomic_add(count, 1) == parts - 1
        if done:
            tl.store(count, 0)
            total = _zeros(high, many, tall)
            for part in range(parts):
                total += tl.load(sums + part * apart_by + place, mask=held, other=0.0, cache_modifier=".cg")
    if done:
        total *= gains
        if gated:
            total = total / (1 + tl.exp(-total)) * (up_total * others)
            short, scale = _shorten(tl.where(held, total, 0.0), 0 + tall)
            tl.store(out + place, short, mask=held)
            tl.store(steps + tl.program_id(0) * rows + row, scale, mask=live)
        else:
            if biased:
                more = tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
                total += tl.expand_dims(more, 1 - tall)
            if added:
                total += tl.load(out + place, mask=held, other=0.0).to(tl.float32)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=held)


@kernel
def _ask_for(weight, output, inputs, begin, width: tl.constexpr, early: tl.constexpr):
    """Prefetch the weights of some outputs into the L2 cache without waiting for them.

    weight: int8 [outputs, inputs], the weight.
    output: [high], numbers of the outputs.
    inputs: number of inputs of the weight.
    begin: number of the first input that is prefetched.
    width: bytes of each output.
    early: whether the device is an NVIDIA GPU of Hopper or later; nothing is prefetched on others.
    """
    if early:
        column = tl.arange(0, (width + 127) // 128) * 128
        place = weight + output.to(tl.int64)[:, None] * inputs + (begin + column)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place.to(tl.int64)], tl.int32, False, 1
        )


@kernel
def _zeros(high: tl.constexpr, many: tl.constexpr, tall: tl.constexpr):
    """Return a zeroed tile, fp32 [high, many], or [many, high] if `tall`.

    high: outputs of the tile.
    many: rows of the tile.
    tall: whether rows come first.
    """
    return tl.zeros((many if tall else high, high if tall else many), tl.float32)


@kernel
def _fetch(place, inside, whole: tl.constexpr):
    """Load numbers, with a mask only if some inputs are missing.

    place: addresses of the numbers, of any shape.
    inside: which inputs exist; the others become 0.
    whole: whether all inputs exist.
    """
    if whole:
        return tl.load(place)
    return tl.load(place, mask=inside, other=0)


@kernel
def _sum_up(line, values, tall: tl.constexpr, as_bits: tl.constexpr):
    """Return the products of a group, summed, as floats.

    as_bits: integer sums below 2 ** 22 are added to the bits of HALF_WAY, which adds them to its value: this
        replaces a conversion where that is slower.
    line: int8 [outputs, group], weights.
    values: int8 [rows, group], inputs.
    tall: whether the result has rows first.
    """
    sums = tl.dot(values, line.T, out_dtype=tl.int32) if tall else tl.dot(line, values.T, out_dtype=tl.int32)
    if as_bits:
        return (sums + HALF_WAY_BITS).to(tl.float32, bitcast=True) - HALF_WAY
    return sums.to(tl.float32)
