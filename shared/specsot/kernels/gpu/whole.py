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

from specsot.kernels.gpu.launching import (
    await_before,
    early_start,
    kernel,
    kernel_for_any,
    let_next_begin,
    on_device_of,
    power_of_two,
)

GROUP = tl.constexpr(64)  # inputs of a row that share a scale, as on CPUs
HALF_WAY = tl.constexpr(1.5 * 2.0**23)  # a float in fp32 has no fraction beside it


class WholeTile(NamedTuple):
    """What one program multiplies: outputs, rows; groups of inputs at a time, warps, steps in flight."""

    outputs: int
    rows: int
    groups: int
    warps: int
    stages: int


def whole_tile_of(rows: int, gated: bool) -> WholeTile:
    """Not measured yet."""
    if rows > 64:
        return WholeTile(64, 64, 1, 4, 4) if gated else WholeTile(128, 64, 1, 8, 4)
    return WholeTile(64, max(power_of_two(rows), 16), 2, 4, 4)


FILLED = 192  # programs from which a GPU is filled (an H100 has 132 multiprocessors)
PARTS = 4


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
    codes, scales = (
        x.new_empty((rows, size), dtype=torch.int8),
        x.new_empty((groups, rows), dtype=torch.float32),
    )
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
    [outputs], its scales; bias: [outputs]. counts: zeros, int32, which stay so: one for each tile of one row
    where `parts_of` says more than one, and for no two products at once. into: [rows, outputs] to which the
    product is added, in place.
    """
    out = codes.new_empty((len(codes), len(weight)), dtype=dtype) if into is None else into
    _launch(codes, scales, weight, columns, counts, bias, out, None, into is not None, tile)
    return out


def multiply_gated_whole(
    codes: Tensor, scales: Tensor, weight: Tensor, columns: Tensor, tile: WholeTile | None = None
) -> tuple[Tensor, Tensor]:
    """silu(first half) * second half of the product, rounded as by `round_rows`."""
    rows, wanted = len(codes), len(weight) // 2
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
    high, many, together, warps, stages = tile or whole_tile_of(rows, gated)
    parts = parts_of(outputs, inputs, gated)
    apart = parts > 1 and rows <= many
    sums = scales.new_empty((parts, rows, outputs)) if apart else scales
    groups = -(-inputs // (GROUP.value * parts))
    with on_device_of(codes):
        _multiply[(-(-outputs // high), -(-rows // many), parts if apart else 1)](
            codes, scales, weight, columns, columns if bias is None else bias, out,
            scales if steps is None else steps, sums, counts, rows, outputs, inputs, groups * GROUP.value,
            high, many, together, parts, inputs % (GROUP.value * together * parts) == 0, bias is not None,
            gated, added, apart, num_warps=warps, num_stages=stages, **early_start(codes),
        )  # fmt: skip


@kernel_for_any("rows")
def _multiply(
    codes, scales, weight, columns, bias, out, steps, sums, counts, rows, outputs, inputs, long,
    high: tl.constexpr, many: tl.constexpr, together: tl.constexpr, parts: tl.constexpr,
    whole: tl.constexpr, biased: tl.constexpr, gated: tl.constexpr, added: tl.constexpr,
    apart: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """long: inputs of a part. apart: each part has a program; the last one that is done adds them up."""
    let_next_begin(early)
    output = tl.program_id(0) * high + tl.arange(0, high)
    row, column = tl.program_id(1) * many + tl.arange(0, many), tl.arange(0, GROUP)
    there, live = output < outputs, row < rows
    at = weight + tl.where(there, output, 0).to(tl.int64)[:, None] * inputs + column[None, :]
    twin = at + outputs.to(tl.int64) * inputs
    given = tl.where(live, row, 0)
    gains = tl.load(columns + output, mask=there, other=0.0)[:, None]
    if gated:
        others = tl.load(columns + outputs + output, mask=there, other=0.0)[:, None]
    source = codes + given.to(tl.int64)[None, :] * inputs + column[:, None]
    steps_of = scales + given
    total, beside = tl.zeros((high, many), tl.float32), tl.zeros((high, many), tl.float32)
    await_before(early)
    first = tl.program_id(2) if apart else 0
    for part in range(first, first + (1 if apart else parts)):
        sum_, other = tl.zeros((high, many), tl.float32), tl.zeros((high, many), tl.float32)
        end = tl.minimum((part + 1) * long, inputs)
        for left in range(part * long, end, GROUP * together):
            sizes = ()
            for step in tl.static_range(together):  # all at once: each is waited for
                here = left // GROUP + step
                sizes += (_fetch(steps_of + here * rows, here * GROUP < end, whole)[None, :],)
            for step in tl.static_range(together):
                inside = left + step * GROUP + column < end
                values = _fetch(source + left + step * GROUP, inside[:, None], whole)
                line = _fetch(at + left + step * GROUP, inside[None, :], whole)
                found = tl.dot(line, values, out_dtype=tl.int32).to(tl.float32)
                sum_ = tl.fma(found, sizes[step], sum_)
                if gated:
                    line = _fetch(twin + left + step * GROUP, inside[None, :], whole)
                    found = tl.dot(line, values, out_dtype=tl.int32).to(tl.float32)
                    other = tl.fma(found, sizes[step], other)
        total, beside = total + sum_, beside + other
    held = there[:, None] & live[None, :]
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    done = True
    if apart:
        size = rows.to(tl.int64) * outputs
        tl.store(sums + first * size + place, total, mask=held)
        tl.debug_barrier()
        count = counts + tl.program_id(0)
        done = tl.atomic_add(count, 1) == parts - 1
        if done:
            tl.store(count, 0)
            total = tl.zeros((high, many), tl.float32)
            for part in range(parts):
                total += tl.load(sums + part * size + place, mask=held, other=0.0, cache_modifier=".cg")
    if done:
        total *= gains
        if gated:
            total = total / (1 + tl.exp(-total)) * (beside * others)
            short, scale = _shorten(tl.where(held, total, 0.0), 0)
            tl.store(out + place, short, mask=held)
            tl.store(steps + tl.program_id(0) * rows + row, scale, mask=live)
        else:
            if biased:
                total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
            if added:
                total += tl.load(out + place, mask=held, other=0.0).to(tl.float32)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=held)


@kernel
def _fetch(place, inside, whole: tl.constexpr):
    if whole:
        return tl.load(place)
    return tl.load(place, mask=inside, other=0)
