"""Products of 8-bit whole numbers: a scale for each row's 64 inputs, sums that are exact in any order.

A row's result is the same bits in any company: whole numbers are added up within a group of inputs, groups in
the order of the inputs within each part of them, and the parts in order, whatever the tile.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    await_before,
    copies_blocks,
    early_start,
    kernel,
    kernel_for_any,
    let_next_begin,
    on_device_of,
    power_of_two,
)

GROUP = tl.constexpr(64)  # inputs of a row that share a scale, as on CPUs
HALF_WAY = tl.constexpr(1.5 * 2.0**23)  # a float in fp32 has no fraction beside it
HALF_WAY_BITS = tl.constexpr(0x4B400000)


class WholeTile(NamedTuple):
    """What one program multiplies: outputs, rows; groups of inputs at a time, warps, steps in flight.

    asked: weights of so many steps are asked for before the kernel before is over: 0, 1, 2, 4, ...
    """

    outputs: int
    rows: int
    groups: int
    warps: int
    stages: int
    asked: int = 0


def whole_tile_of(rows: int, outputs: int, gated: bool) -> WholeTile:
    """What was fastest of some twenty on an H100, for the matrices of an 8B model."""
    if rows > 64:
        return WholeTile(64, 128, 1, 4, 4) if gated else WholeTile(128, 128, 2, 8, 3)
    if rows > 16:
        return WholeTile(64, power_of_two(rows), 2, 8, 4) if outputs < MANY else WholeTile(128, 64, 2, 4, 4)
    return WholeTile(64, 16, 4, 4, 3, asked=1)


def fitting(tile: WholeTile, device: torch.device) -> WholeTile:
    """A multiprocessor has 228 KiB for tiles from Hopper on; before, and on AMD's GPUs, 64 to 164."""
    if copies_blocks(device):
        return tile
    return tile._replace(groups=max(tile.groups // 2, 1), stages=min(tile.stages, 3))


MANY = 64 * 1024  # outputs that only an lm_head has
FILLED = 192  # programs from which a GPU is filled (an H100 has 132 multiprocessors)
PARTS = 4
MOST_APART = 512  # rows whose parts have programs of their own; more fill a GPU anyway


def parts_of(outputs: int, inputs: int, gated: bool) -> int:
    """Into how many the inputs are cut, so that few outputs keep a whole GPU busy; by the weight alone."""
    few = not gated and outputs < FILLED * 64 and inputs >= PARTS * 4 * GROUP.value
    return PARTS if few else 1


def round_rows(x: Tensor, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """[rows, size] as int8, and the scales of each 64 of a row, fp32 [groups, rows].

    The numbers of a row of x lie side by side. norm: weight [size] and epsilon of an RMSNorm before. What is
    not finite gets a scale that is not.
    """
    rows, size = x.shape
    groups = -(-size // GROUP.value)
    codes = x.new_empty((rows, size), dtype=torch.int8)
    scales = x.new_empty((groups, rows), dtype=torch.float32)
    weight, eps = norm or (x, 0.0)
    with on_device_of(x):
        _round[(rows,)](
            x, weight, codes, scales, rows, size, x.stride(0), eps, power_of_two(groups), norm is not None,
            num_warps=8, **early_start(x),
        )  # fmt: skip
    return codes, scales


@kernel_for_any("rows")
def _round(
    x, weight, codes, scales, rows, size, from_x, eps, room: tl.constexpr, normed: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    let_next_begin(early)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, room)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = column < size
    if normed:
        gains = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    await_before(early)
    values = tl.load(x + row * from_x + column, mask=there, other=0.0).to(tl.float32)
    if normed:
        values *= tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / size + eps) * gains
    whole, scale = _shorten(values, 1)
    tl.store(codes + row * size + column, whole, mask=there)
    tl.store(scales + group * rows + row, scale, mask=group * GROUP < size)


@kernel
def _shorten(values, axis: tl.constexpr):
    """Whole numbers within 127 along an axis, and what they are multiplied by."""
    peak = tl.max(tl.abs(values), axis)
    unreal = tl.sum(values - values, axis)  # 0, or NaN where one is not finite
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
    """The product of rounded rows: [rows, outputs] of `dtype`.

    codes, scales: as `round_rows` has them. weight: [outputs, inputs] int8, contiguous; columns: fp32
    [outputs], its scales; bias: [outputs]. counts: int32 [outputs], zeros, which stay so; for no two products
    at once. into: [rows, outputs] to which the product is added, in place.
    """
    out = codes.new_empty((len(codes), len(weight)), dtype=dtype) if into is None else into
    _launch(codes, scales, weight, columns, counts, bias, out, None, into is not None, tile)
    return out


def multiply_gated_whole(
    codes: Tensor, scales: Tensor, weight: Tensor, columns: Tensor, tile: WholeTile | None = None
) -> tuple[Tensor, Tensor]:
    """silu(first half) * second half of the product, rounded as by `round_rows`."""
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
    rows, inputs = codes.shape
    gated = steps is not None
    outputs = len(weight) // (1 + gated)
    tile = tile or fitting(whole_tile_of(rows, outputs, gated), codes.device)
    high, many, together, warps, stages, asked = tile
    parts = parts_of(outputs, inputs, gated)
    apart = parts > 1 and rows <= MOST_APART
    sums = scales.new_empty((parts, rows, outputs)) if apart else scales
    groups = -(-inputs // (GROUP.value * parts))
    with on_device_of(codes):
        _multiply[(-(-outputs // high), -(-rows // many), parts if apart else 1)](
            codes, scales, weight, columns, columns if bias is None else bias, out,
            scales if steps is None else steps, sums, counts, rows, outputs, inputs, groups * GROUP.value,
            high, many, together, parts, inputs % (GROUP.value * together * parts) == 0,
            many > 64 and not gated, many <= 16 or not gated, bias is not None, gated, added, apart,
            asked if asked * together <= groups and outputs % high == 0 else 0,
            num_warps=warps, num_stages=stages, **early_start(codes),
        )  # fmt: skip


@kernel_for_any("rows")
def _multiply(
    codes, scales, weight, columns, bias, out, steps, sums, counts, rows, outputs, inputs, long,
    high: tl.constexpr, many: tl.constexpr, together: tl.constexpr, parts: tl.constexpr,
    whole: tl.constexpr, tall: tl.constexpr, as_bits: tl.constexpr, biased: tl.constexpr,
    gated: tl.constexpr, added: tl.constexpr, apart: tl.constexpr, asked: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """long: inputs of a part. apart: each part has a program; the last one that is done adds them up. tall:
    a tile's first axis are rows, else outputs: 64 of those a multiprocessor multiplies at once. as_bits: see
    `_sum_up`.
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
    beside = _zeros(high, many, tall)
    if asked and whole:
        _ask_for(weight, output, inputs, first * long, asked * together * GROUP, early)
        if gated:
            _ask_for(weight, outputs + output, inputs, first * long, asked * together * GROUP, early)
    await_before(early)
    for part in range(first, first + (1 if apart else parts)):
        sum_ = _zeros(high, many, tall)
        other = _zeros(high, many, tall)
        end = tl.minimum((part + 1) * long, inputs)
        for left in range(part * long, end, GROUP * together):
            sizes = ()
            for step in tl.static_range(together):  # all at once: each is waited for
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
            beside = beside + other
        else:
            total = sum_
            beside = other
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
            total = total / (1 + tl.exp(-total)) * (beside * others)
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
    """`width` bytes of these outputs' weights are on their way to the L2 cache; nobody waits for them."""
    if early:
        column = tl.arange(0, (width + 127) // 128) * 128
        place = weight + output.to(tl.int64)[:, None] * inputs + (begin + column)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place.to(tl.int64)], tl.int32, False, 1
        )


@kernel
def _zeros(high: tl.constexpr, many: tl.constexpr, tall: tl.constexpr):
    return tl.zeros((many if tall else high, high if tall else many), tl.float32)


@kernel
def _fetch(place, inside, whole: tl.constexpr):
    if whole:
        return tl.load(place)
    return tl.load(place, mask=inside, other=0)


@kernel
def _sum_up(line, values, tall: tl.constexpr, as_bits: tl.constexpr):
    """Products of a group as a float. as_bits: below 2 ** 22, they are added to the bits of HALF_WAY, and so
    to it: where that is faster than a conversion.
    """
    sums = tl.dot(values, line.T, out_dtype=tl.int32) if tall else tl.dot(line, values.T, out_dtype=tl.int32)
    if as_bits:
        return (sums + HALF_WAY_BITS).to(tl.float32, bitcast=True) - HALF_WAY
    return sums.to(tl.float32)
