"""Attention of a small step: a row's result is the same bits whatever the other rows of the step are.

A row's sums run along its line, the columns that it sees in the order of its sequence, and every line is cut
into pieces at the same columns (`line_tables.SMALL_STEP_PIECES`). Rows of one tree read the pieces before
their first node together, a tile of rows at a time. The pieces that follow each row reads by itself, because
its ancestors lie among the other nodes of the tree. One launch does both; a second one merges the pieces of
each row in order. Tiles never change their size, so that one row alone and 32 rows run through the same
instructions.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.attention_tables import WORD, sinces_of
from specsot_kernels.gpu.attention import LOOPING_PROGRAMS, LOWEST, launch_of, send_tables
from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    kernel_for_any,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)
from specsot_kernels.gpu.lines import empty_state, load_queries, read_block, store_state
from specsot_kernels.line_tables import (
    SMALL_STEP_PIECES,
    cut_lines,
    line_sights,
    small_tile_of,
)
from specsot_kernels.segments import RowSpan

# Pieces. How many partial results of a row the second launch loads at a time. Untuned.
PIECES_MERGED_AT_ONCE: Final = 8
# Bits. What the mask of a row is padded to, so that one compiled kernel serves the graphs of 1 to 32 rows.
MIN_LANES: Final = 64
# The sizes of pieces, as kernels read them.
NEAR = tl.constexpr(SMALL_STEP_PIECES.near)
NEAR_END = tl.constexpr(SMALL_STEP_PIECES.near_end)
MIDDLE = tl.constexpr(SMALL_STEP_PIECES.middle)
MIDDLE_END = tl.constexpr(SMALL_STEP_PIECES.middle_end)
FAR = tl.constexpr(SMALL_STEP_PIECES.far)
NUM_NEAR = tl.constexpr(SMALL_STEP_PIECES.near_end // SMALL_STEP_PIECES.near)
NUM_MIDDLE = tl.constexpr(
    (SMALL_STEP_PIECES.middle_end - SMALL_STEP_PIECES.near_end) // SMALL_STEP_PIECES.middle
)


@dataclass(frozen=True, slots=True)
class SmallStepPlan:
    """A plan on the device. Valid for one step, or for as long as the caller refills its tables.

    tables: int32 tensors in the order of `LineRoom.shapes`.
    slots: number of partial results.
    page_rows: columns of a page.
    sinces: int32 [rows], the first column of its line that each row sees; None if all rows see column 0.
    """

    tables: tuple[Tensor, ...]
    slots: int
    page_rows: int
    sinces: Tensor | None = None


def plan_small_step(
    spans: Sequence[RowSpan],
    page_rows: int,
    heads_per_kv: int,
    device: torch.device | str,
    window: int | None = None,
) -> SmallStepPlan:
    """Return the plan of one small step's attention, with one copy to the device.

    spans: one span per segment of the step, in row order; at least one, with at most MAX_SMALL_ROWS rows
        together.
    page_rows: columns of a page.
    heads_per_kv: query heads of each KV head.
    device: device of the tables.
    window: each row sees its own position and the `window` - 1 positions before it; None: all positions.
    """
    sights = line_sights(spans, SMALL_STEP_PIECES)
    tile_rows = small_tile_of(heads_per_kv) // heads_per_kv
    cut = cut_lines(spans, sights.leads, page_rows, tile_rows, SMALL_STEP_PIECES)
    window_tables = () if window is None else (sinces_of(spans, window),)
    sent = send_tables((*window_tables, *cut.in_order(sights)), device)
    num_tables = len(window_tables)
    return SmallStepPlan(sent[num_tables:], cut.slots, page_rows, sent[0] if window_tables else None)


def attend_small(q: Tensor, kv_layer: Tensor, plan: SmallStepPlan) -> Tensor:
    """Return the attention output of every row, [rows, kv_heads * g * head_dim].

    A row without columns gets zeros.

    q: [rows, kv_heads, g, head_dim], already scaled; rows and heads may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], keys and values, not quantized.
    plan: the plan of the step.
    """
    rows, kv_heads, g, dim = q.shape
    pieces, leads, bases, bits, starts, wheres, pages = plan.tables
    parts = q.new_empty((plan.slots, kv_heads * g, dim), dtype=torch.float32)
    weights = q.new_empty((plan.slots, kv_heads * g, 2), dtype=torch.float32)
    out = q.new_empty((rows, kv_heads * g * dim))
    room = max(power_of_two(dim), 16)
    tile = small_tile_of(g)
    wide, warps, stages = launch_of(tile, room, q.itemsize)
    windowed = plan.sinces is not None
    sinces = leads if plan.sinces is None else plan.sinces
    words = bits.shape[1]
    lanes = max(MIN_LANES, power_of_two(words * WORD))
    programs = rows + min(len(pieces), max(LOOPING_PROGRAMS // kv_heads, 1))
    with on_device_of(q):
        _read[(kv_heads, programs)](
            q, kv_layer, pieces, pages, leads, bases, bits, sinces, starts, wheres, parts, weights,
            *q.stride()[:3], *kv_layer.stride()[:4], rows, len(pieces), g, plan.page_rows, words, dim, room,
            tile, wide, lanes, plan.page_rows % wide == 0, windowed, num_warps=warps, num_stages=stages,
            enable_fp_fusion=False, **pdl_options(q),
        )  # fmt: skip
        _merge[(rows, kv_heads * g)](
            parts, weights, leads, bases, bits, starts, out, words, dim, room, lanes, PIECES_MERGED_AT_ONCE,
            num_warps=1, enable_fp_fusion=False, **pdl_options(q),
        )  # fmt: skip
    return out


@kernel_for_any("rows", "many", "words")
def _read(
    q, kv, pieces, pages, leads, bases, bits, sinces, starts, wheres, parts, weights, q_row, q_group, q_head,
    kv_half, kv_page, kv_head, kv_row, rows, many, g, page_rows, words, dim: tl.constexpr, room: tl.constexpr,
    tile: tl.constexpr, wide: tl.constexpr, lanes: tl.constexpr, on_one_page: tl.constexpr,
    windowed: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Read what one row reads by itself (the first `rows` programs of a KV head), or piece after piece.

    Unused pieces come last and have no rows.

    q: [rows, kv_heads, g, dim], the scaled queries.
    kv: [2, pages, kv_heads, page_rows, dim], keys and values of the layer.
    pieces: int32 [pieces, 5], the pieces that rows read together; see `LineCut`.
    pages: int32, page numbers of all sequences.
    leads: int32 [rows], number of columns that each row reads in `pieces`.
    bases: int32 [rows], the column that bit 0 of each row's bits stands for.
    bits: int32 [rows, words], which later columns each row sees.
    sinces: int32 [rows], the first column of its line that each row sees, if `windowed`.
    starts: int32 [rows], first slot of each row.
    wheres: int32 [rows], index in `pages` of the first page of each row's sequence.
    parts: fp32 [slots, heads, dim], receives weighted values.
    weights: fp32 [slots, heads, 2], receives highest score and sum of weights.
    q_row: numbers from one row of `q` to the next.
    q_group: numbers from the queries of one KV head to those of the next.
    q_head: numbers from one query head to the next.
    kv_half: numbers from the keys to the values.
    kv_page: numbers from one page to the next.
    kv_head: numbers from one KV head to the next.
    kv_row: numbers from one row of a page to the next.
    rows: number of rows.
    many: number of pieces.
    g: query heads of each KV head.
    page_rows: columns of a page.
    words: mask words of a row.
    dim: numbers of a head.
    room: numbers of a head, rounded up to a power of two.
    tile: queries of a tile.
    wide: columns that are read at a time.
    lanes: bits of a row, rounded up to a power of two.
    on_one_page: whether the columns of a block lie on one page.
    windowed: whether rows have a first visible column.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    head = tl.program_id(0)
    number = tl.program_id(1)
    line = tl.arange(0, tile)
    d = tl.arange(0, room)
    heads = tl.num_programs(0) * g
    kv = kv + head * kv_head
    if number < rows:
        live = line < g
        lead = tl.load(leads + number)
        base = tl.load(bases + number)
        first_slot = tl.load(starts + number)
        pages += tl.load(wheres + number)
        since = 0
        if windowed:
            since = tl.load(sinces + number)
        await_preceding_kernel(early)
        lane = tl.arange(0, lanes)
        bit = _bits_of(bits, number, lane, words)
        # Node j of the row's own path is the bit of rank j: bits 0b10110 -> ranks 0, 1, 2 of columns base +
        # 1, base + 2, base + 4.
        rank = tl.where(bit == 1, tl.cumsum(bit, 0) - 1, -1)
        end = tl.maximum(base, lead) + tl.sum(bit, 0)
        queries = load_queries(q, number, live, line, head, g, d, dim, q_row, q_group, q_head)
        at = lead
        while at < end:
            piece = _piece_of(at)
            stop = tl.minimum(end, _start_of(piece + 1))
            state = empty_state(tile, room)
            for left in range(at, stop, wide):
                column = left + tl.arange(0, wide)
                node = tl.where(rank[None, :] == (column - base)[:, None], lane[None, :], 0)
                physical = tl.where(column < base, column, base + tl.sum(node, 1))
                page = tl.load(pages + physical // page_rows, mask=column < stop, other=0).to(tl.int64)
                place = page * kv_page + (physical % page_rows) * kv_row
                seen = (column < stop) & (column >= since)
                state = read_block(
                    state, queries, kv, place, column < stop, seen[None, :], kv_half, d, dim
                )  # fmt: skip
            slot = (first_slot + piece).to(tl.int64)
            store_state(state, weights, parts, slot * heads + head * g + line, live, d, dim)
            at = stop
    else:
        number -= rows
        high = tl.load(pieces + number * 5 + 1)
        await_preceding_kernel(early)
        while high > 0:
            top = tl.load(pieces + number * 5)
            where = tl.load(pieces + number * 5 + 2)
            at = tl.load(pieces + number * 5 + 3)
            stop = tl.load(pieces + number * 5 + 4)
            row = top + line // g
            live = line < high * g
            lead = tl.load(leads + row, mask=live, other=0)
            since = tl.zeros_like(lead)
            begin = at
            if windowed:
                since = tl.load(sinces + row, mask=live, other=0)
                nearest = tl.min(tl.where(live, since, stop), 0)
                # Blocks that the window hides from all rows are left out, counted from the piece's start.
                begin = at + tl.maximum(nearest - at, 0) // wide * wide
            queries = load_queries(q, row, live, line, head, g, d, dim, q_row, q_group, q_head)
            state = empty_state(tile, room)
            for left in range(begin, stop, wide):
                column = left + tl.arange(0, wide)
                if on_one_page:
                    page = tl.load(pages + where + left // page_rows).to(tl.int64)
                else:
                    page = tl.load(pages + where + column // page_rows, mask=column < stop, other=0).to(
                        tl.int64
                    )
                place = page * kv_page + (column % page_rows) * kv_row
                seen = (column[None, :] < lead[:, None]) & (column[None, :] >= since[:, None])
                state = read_block(state, queries, kv, place, column < stop, seen, kv_half, d, dim)
            slot = (tl.load(starts + row, mask=live, other=0) + _piece_of(at)).to(tl.int64)
            places = slot * heads + head * g + line % g
            store_state(state, weights, parts, places, live & (at < lead), d, dim)
            number += tl.num_programs(1) - rows
            high = tl.load(pieces + number * 5 + 1, mask=number < many, other=0)


@kernel_for_any("words")
def _merge(
    parts, weights, leads, bases, bits, starts, out, words, dim: tl.constexpr, room: tl.constexpr,
    lanes: tl.constexpr, at_once: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one head of one row, in order. A row without columns gets zeros.

    parts: fp32 [slots, heads, dim], weighted values.
    weights: fp32 [slots, heads, 2], highest score and sum of weights.
    leads: int32 [rows], number of columns that each row reads in pieces.
    bases: int32 [rows], the column that bit 0 of each row's bits stands for.
    bits: int32 [rows, words], which later columns each row sees.
    starts: int32 [rows], first slot of each row.
    out: [rows, heads, dim], receives the outputs.
    words: mask words of a row.
    dim: numbers of a head.
    room: numbers of a head, rounded up to a power of two.
    lanes: bits of a row, rounded up to a power of two.
    at_once: pieces whose loads do not wait for each other.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    d = tl.arange(0, room)
    lead = tl.load(leads + row)
    base = tl.load(bases + row)
    start = tl.load(starts + row).to(tl.int64)
    await_preceding_kernel(early)
    end = tl.maximum(base, lead) + tl.sum(_bits_of(bits, row, tl.arange(0, lanes), words), 0)
    # A line of no columns has no piece, and `_piece_of` of column -1 is not asked for.
    count = tl.where(end > 0, _piece_of(tl.maximum(end - 1, 0)) + 1, 0)
    highest = LOWEST
    total = 0.0
    sums = tl.zeros((room,), tl.float32)
    for left in range(0, count, at_once):
        for step in tl.static_range(at_once):
            there = left + step < count
            place = (start + left + step) * heads + head
            high = tl.load(weights + 2 * place, mask=there, other=LOWEST)
            amount = tl.load(weights + 2 * place + 1, mask=there, other=0.0)
            more = tl.load(parts + place * dim + d, mask=there & (d < dim), other=0.0)
            higher = tl.maximum(highest, high)
            kept = tl.exp2(highest - higher)
            share = tl.where(there, tl.exp2(high - higher), 0.0)
            total = total * kept + amount * share
            sums = sums * kept + more * share
            highest = higher
    sums = sums / tl.where(total > 0, total, 1.0)
    target = out + (row.to(tl.int64) * heads + head) * dim + d
    tl.store(target, sums.to(out.dtype.element_ty), mask=d < dim)


@kernel
def _bits_of(bits, row, lane, words):
    """Return one row's bits, 0 or 1 each, [lanes].

    bits: int32 [rows, words], which columns after its base each row sees.
    row: number of the row.
    lane: [lanes], numbers of the bits.
    words: mask words of a row; bits outside of them are 0.
    """
    word = tl.load(bits + row * words + lane // 32, mask=lane // 32 < words, other=0)
    return (word >> (lane % 32)) & 1


@kernel
def _piece_of(column):
    """Return the number of the piece that a column lies in; see `PieceSizes.number_of`.

    column: number of the column on its line.
    """
    middle = NUM_NEAR + (column - NEAR_END) // MIDDLE
    far = NUM_NEAR + NUM_MIDDLE + (column - MIDDLE_END) // FAR
    return tl.where(column < NEAR_END, column // NEAR, tl.where(column < MIDDLE_END, middle, far))


@kernel
def _start_of(piece):
    """Return the first column of a piece; see `PieceSizes.start_of`.

    piece: number of the piece.
    """
    middle = NEAR_END + (piece - NUM_NEAR) * MIDDLE
    far = MIDDLE_END + (piece - NUM_NEAR - NUM_MIDDLE) * FAR
    return tl.where(piece < NUM_NEAR, piece * NEAR, tl.where(piece < NUM_NEAR + NUM_MIDDLE, middle, far))
