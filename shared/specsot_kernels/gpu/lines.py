"""Batch-invariant attention: a row's result is the same bits in every batch (see `line_tables`).

Tiles never change their size, and a row's sums run along its line (the columns that it sees, in order). Rows
read pieces together, and the state of each piece (maximum, sum, weighted values) is stored as it is. Each row
then continues from its last piece with the columns that only this row reads, and adds up its pieces in order.
Products of a masked column are exact zeros, wherever the column lies in its block.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.attention_tables import QUERIES, WORD, sinces_of
from specsot_kernels.gpu.attention import (
    LOOPING_PROGRAMS,
    LOWEST,
    MAX_MERGE_PROGRAMS,
    launch_of,
    send_tables,
    update_softmax,
)
from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)
from specsot_kernels.line_tables import BLOCK, PIECE_COLUMNS, cut_lines, line_sights, tile_rows_of
from specsot_kernels.segments import RowSpan

# Queries. What one warp holds.
WARP = 16


@dataclass(frozen=True, slots=True)
class LinePlan:
    """A plan on the device. Valid for one frame, or for as long as the caller refills its tables and calls
    `lay`.

    tables: int32 tensors in the order of `LineRoom.shapes`.
    slots: number of partial results.
    page_rows: columns of a page.
    own: int32 [rows, ...], KV slots of the columns of each row's line from its lead on.
    counts: int32 [rows], how many such columns each row has.
    sinces: int32 [rows], the first column that each row sees; None if all rows see column 0.
    """

    tables: tuple[Tensor, ...]
    slots: int
    page_rows: int
    own: Tensor
    counts: Tensor
    sinces: Tensor | None = None

    def lay(self) -> None:
        """Compute `own` and `counts` from the tables: once a frame, before the first `attend_lines`.

        A row with lead 192, base 200 and bits 0b101 owns the columns 192..199, 200 and 202; with one page of
        1024 rows numbered 3, their slots are 3 * 1024 + 192 and so on, and the count is 10.
        """
        _, leads, bases, bits, _, wheres, pages = self.tables
        rows, words = bits.shape
        with on_device_of(bits):
            _lay[(rows,)](
                leads, bases, bits, wheres, pages, self.own, self.counts, self.page_rows, words,
                self.own.shape[1], power_of_two(words * WORD), BLOCK, **pdl_options(bits),
            )  # fmt: skip


def plan_over_lines(
    tables: Sequence[Tensor], slots: int, page_rows: int, sinces: Tensor | None = None
) -> LinePlan:
    """Return a plan over tables that the caller fills before each use; then `lay` has to be called.

    tables: int32 tensors of `LineRoom.shapes`.
    slots: number of partial results.
    page_rows: columns of a page.
    sinces: int32 [rows], the first column that each row sees; None: all rows see column 0.
    """
    rows, words = tables[3].shape
    own = tables[3].new_empty((rows, BLOCK + words * WORD))
    counts = tables[3].new_empty(rows)
    return LinePlan(tuple(tables), slots, page_rows, own, counts, sinces)


def plan_lines(
    spans: Sequence[RowSpan],
    page_rows: int,
    heads_per_kv: int,
    device: torch.device | str,
    window: int | None = None,
) -> LinePlan:
    """Return the plan of one frame's attention, with one copy to the device.

    `lay` has been called already, so that the plan can be used at once.

    page_rows: columns of a page.
    heads_per_kv: query heads of each KV head.
    window: each row sees its own position and the `window` - 1 positions before it; None: all positions.
    spans: one span per segment of the frame, in row order; at least one.
    device: device of the tables.
    """
    sights = line_sights(spans)
    cut = cut_lines(spans, sights.leads, page_rows, tile_rows_of(heads_per_kv))
    window_tables = () if window is None else (sinces_of(spans, window),)
    sent = send_tables((*window_tables, *cut.in_order(sights)), device)
    plan = plan_over_lines(
        sent[len(window_tables) :], cut.slots, page_rows, sent[0] if window_tables else None
    )
    plan.lay()
    return plan


def attend_lines(q: Tensor, kv_layer: Tensor, plan: LinePlan) -> Tensor:
    """Return the attention output of every row, [rows, kv_heads * g * head_dim].

    A row without columns gets zeros. `lay` of the plan must have been called for this frame.

    q: [rows, kv_heads, g, head_dim], already scaled; rows and heads may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], keys and values, not quantized.
    plan: the plan of the frame.
    """
    rows, kv_heads, g, dim = q.shape
    pieces, leads, _, _, starts, _, pages = plan.tables
    parts = q.new_empty((plan.slots, kv_heads * g, dim), dtype=torch.float32)
    weights = q.new_empty((plan.slots, kv_heads * g, 2), dtype=torch.float32)
    out = q.new_empty((rows, kv_heads * g * dim))
    room = max(power_of_two(dim), 16)
    windowed = plan.sinces is not None
    sinces = plan.sinces if plan.sinces is not None else leads
    wide, *together = launch_of(QUERIES, room, q.itemsize)
    strides = (*q.stride()[:3], *kv_layer.stride()[:4])
    given = (g, plan.page_rows, dim, room)
    tile, *alone = _own_launch(g, *together) if q.itemsize == 2 else (QUERIES, *together)
    with on_device_of(q):
        if len(pieces):
            _read_pieces[(kv_heads, min(len(pieces), max(LOOPING_PROGRAMS // kv_heads, 1)))](
                q, kv_layer, pieces, pages, leads, sinces, starts, parts, weights, *strides, len(pieces),
                *given, QUERIES, wide, PIECE_COLUMNS, plan.page_rows % wide == 0, windowed,
                **_exactly(q, *together),
            )  # fmt: skip
        _read_own[(rows, kv_heads)](
            q, kv_layer, leads, sinces, starts, plan.own, plan.counts, parts, weights, *strides,
            plan.own.shape[1], *given, tile, wide, PIECE_COLUMNS, windowed, **_exactly(q, *alone),
        )  # fmt: skip
        each = power_of_two(-(-rows * kv_heads * g // MAX_MERGE_PROGRAMS))
        _add_pieces[(rows, -(-kv_heads * g // each))](
            parts, weights, leads, starts, plan.counts, out, kv_heads * g, dim, room, each, PIECE_COLUMNS,
            **_exactly(q, 1, 2),
        )  # fmt: skip
    return out


def _own_launch(g: int, warps: int, stages: int) -> tuple[int, int, int]:
    """Return queries of a tile, warps and stages for the columns that one row reads by itself.

    For more than WARP query heads per KV head, and for other launches than four warps, it is the launch of
    pieces with QUERIES queries.

    warps: warps of a program that reads pieces. On tensor cores, one warp with 16 queries gives a row the
        same bits as four warps with 64 queries; two warps with 32 queries did not on an H100.
    stages: loop iterations in flight of a program that reads pieces.
    g: query heads of each KV head.
    """
    return (WARP, 1, 2) if g <= WARP and warps == QUERIES // WARP else (QUERIES, warps, stages)


def _exactly(q: Tensor, warps: int, stages: int) -> dict[str, Any]:
    """Return launch options under which each written operation is rounded by itself.

    Compilers fuse some multiplications and additions, and which ones depends on the surrounding code.

    q: the queries, for their device.
    warps: warps of a program.
    stages: loop iterations in flight.
    """
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, **pdl_options(q)}


@kernel
def _lay(
    leads, bases, bits, wheres, pages, own, counts, page_rows, words, width, room: tl.constexpr,
    block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Write one row's slots: of the columns from its lead to its base, then of the columns whose
    bit is set.

    leads: int32 [rows], number of columns that each row reads in pieces; see `LineRoom.shapes`.
    bases: int32 [rows], the column that bit 0 of each row's bits stands for.
    bits: int32 [rows, words], which later columns each row sees.
    wheres: int32 [rows], index in `pages` of the first page of each row's sequence.
    pages: int32, page numbers of all sequences.
    own: int32 [rows, width], receives the slots.
    counts: int32 [rows], receives their number.
    page_rows: columns of a page.
    words: mask words of a row.
    width: slots of a row for which there is room.
    room: bits of a row, rounded up to a power of two.
    block: BLOCK, the largest number of columns between lead and base.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0)
    await_preceding_kernel(early)
    lead = tl.load(leads + row)
    base = tl.load(bases + row)
    pages += tl.load(wheres + row)
    own += row.to(tl.int64) * width
    column = lead + tl.arange(0, block)
    page = tl.load(pages + column // page_rows, mask=column < base, other=0)
    tl.store(own + column - lead, page * page_rows + column % page_rows, mask=column < base)
    place = tl.arange(0, room)
    word = tl.load(bits + row * words + place // 32, mask=place // 32 < words, other=0)
    bit = (word >> (place % 32)) & 1
    # Columns with a set bit are stored without gaps: bits 0b10110 -> ranks 0, 1, 2 of columns base + 1, + 2,
    # + 4.
    rank = tl.cumsum(bit, 0) - 1
    column = base + place
    page = tl.load(pages + column // page_rows, mask=bit == 1, other=0)
    tl.store(own + base - lead + rank, page * page_rows + column % page_rows, mask=bit == 1)
    tl.store(counts + row, tl.maximum(base - lead, 0) + tl.sum(bit, 0))


@kernel
def _read_pieces(
    q, kv, pieces, pages, leads, sinces, starts, parts, weights, q_row, q_group, q_head, kv_half, kv_page,
    kv_head, kv_row, many, g, page_rows, dim: tl.constexpr, room: tl.constexpr, tile: tl.constexpr,
    wide: tl.constexpr, piece: tl.constexpr, on_one_page: tl.constexpr, windowed: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Read piece after piece under one KV head. Unused pieces come last and have no rows.

    q: [rows, kv_heads, g, dim], the scaled queries.
    kv: [2, pages, kv_heads, page_rows, dim], keys and values of the layer.
    pieces: int32 [pieces, 5], the pieces of the frame; see `LineCut`.
    pages: int32, page numbers of all sequences.
    leads: int32 [rows], number of columns that each row reads in pieces.
    starts: int32 [rows], first slot of each row.
    sinces: [rows], the first column that each row sees, if `windowed`.
    parts: fp32 [slots, heads, dim], receives weighted values.
    weights: fp32 [slots, heads, 2], receives highest score and sum of weights.
    q_row: numbers from one row of `q` to the next.
    q_group: numbers from the queries of one KV head to those of the next.
    q_head: numbers from one query head to the next.
    kv_half: numbers from the keys to the values.
    kv_page: numbers from one page to the next.
    kv_head: numbers from one KV head to the next.
    kv_row: numbers from one row of a page to the next.
    many: number of pieces.
    g: query heads of each KV head.
    page_rows: columns of a page.
    dim: numbers of a head.
    room: `dim`, rounded up to a power of two.
    tile: queries of a tile.
    wide: columns that are read at a time.
    piece: PIECE_COLUMNS, the columns of a slot.
    on_one_page: whether the columns of a tile lie on one page.
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
        queries = load_queries(q, row, live, line, head, g, d, dim, q_row, q_group, q_head)
        state = empty_state(tile, room)
        begin = at
        since = tl.zeros_like(lead)
        if windowed:
            since = tl.load(sinces + row, mask=live, other=0)
            begin = tl.maximum(at, tl.min(tl.where(live, since, stop), 0) // wide * wide)
        for left in range(begin, stop, wide):
            column = left + tl.arange(0, wide)
            if on_one_page:
                page = tl.load(pages + where + left // page_rows).to(tl.int64)
            else:
                page = tl.load(pages + where + column // page_rows, mask=column < stop, other=0).to(tl.int64)
            place = page * kv_page + (column % page_rows) * kv_row
            seen = (column[None, :] < lead[:, None]) & (column[None, :] >= since[:, None])
            state = read_block(state, queries, kv, place, column < stop, seen, kv_half, d, dim)
        slot = (tl.load(starts + row, mask=live, other=0) + at // piece).to(tl.int64)
        store_state(state, weights, parts, slot * heads + head * g + line % g, live & (at < lead), d, dim)
        number += tl.num_programs(1)
        high = tl.load(pieces + number * 5 + 1, mask=number < many, other=0)


@kernel
def _read_own(
    q, kv, leads, sinces, starts, own, counts, parts, weights, q_row, q_group, q_head, kv_half, kv_page,
    kv_head, kv_row, width, g, page_rows, dim: tl.constexpr, room: tl.constexpr, tile: tl.constexpr,
    wide: tl.constexpr, piece: tl.constexpr, windowed: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Continue one row under one KV head with the columns that it reads by itself, from the state of its last
    piece.

    A row without such columns writes nothing.

    q: [rows, kv_heads, g, dim], the scaled queries.
    kv: [2, pages, kv_heads, page_rows, dim], keys and values of the layer.
    leads: int32 [rows], number of columns that each row reads in pieces.
    sinces: int32 [rows], the first column that each row sees, if `windowed`.
    starts: int32 [rows], first slot of each row.
    own: int32 [rows, width], KV slots of the columns that each row reads by itself; see `LinePlan`.
    counts: int32 [rows], their number.
    parts: fp32 [slots, heads, dim], weighted values of all slots; those of the row's last piece are read, and
        then overwritten.
    weights: fp32 [slots, heads, 2], highest score and sum of weights of all slots; as `parts`.
    q_row: numbers from one row of `q` to the next.
    q_group: numbers from the queries of one KV head to those of the next.
    q_head: numbers from one query head to the next.
    kv_half: numbers from the keys to the values.
    kv_page: numbers from one page to the next.
    kv_head: numbers from one KV head to the next.
    kv_row: numbers from one row of a page to the next.
    width: slots of a row in `own`.
    g: query heads of each KV head.
    page_rows: columns of a page.
    dim: numbers of a head.
    room: `dim`, rounded up to a power of two.
    tile: queries of a tile.
    wide: columns that are read at a time.
    piece: PIECE_COLUMNS, the columns of a slot.
    windowed: whether rows have a first visible column.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0)
    head = tl.program_id(1)
    line = tl.arange(0, tile)
    d = tl.arange(0, room)
    live = line < g
    heads = tl.num_programs(1) * g
    kv = kv + head * kv_head
    lead = tl.load(leads + row)
    slot = tl.load(starts + row)
    await_preceding_kernel(early)
    end = lead + tl.load(counts + row)
    since = 0
    if windowed:
        since = tl.load(sinces + row)
    own += row.to(tl.int64) * width - lead
    queries = load_queries(q, row, live, line, head, g, d, dim, q_row, q_group, q_head)
    at = lead
    while at < end:
        number = at // piece
        stop = tl.minimum(end, (number + 1) * piece)
        continued = live & (number * piece < at)
        given = (slot + number).to(tl.int64) * heads + head * g + line
        highest = tl.load(weights + 2 * given, mask=continued, other=LOWEST)
        total = tl.load(weights + 2 * given + 1, mask=continued, other=0.0)
        held = continued[:, None] & (d < dim)[None, :]
        state = (highest, total, tl.load(parts + given[:, None] * dim + d[None, :], mask=held, other=0.0))
        for left in range(at, stop, wide):
            column = left + tl.arange(0, wide)
            place = tl.load(own + column, mask=column < stop, other=0)
            place = (place // page_rows).to(tl.int64) * kv_page + (place % page_rows) * kv_row
            seen = (column < stop) & (column >= since)
            state = read_block(state, queries, kv, place, column < stop, seen[None, :], kv_half, d, dim)
        store_state(state, weights, parts, given, live, d, dim)
        at = stop


@kernel
def _add_pieces(
    parts, weights, leads, starts, counts, out, heads, dim: tl.constexpr, room: tl.constexpr,
    each: tl.constexpr, piece: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of `each` heads of one row, in order. A row without columns gets zeros.

    parts: fp32 [slots, heads, dim], weighted values.
    weights: fp32 [slots, heads, 2], highest score and sum of weights.
    leads: int32 [rows], number of columns that each row reads in pieces.
    starts: int32 [rows], first slot of each row.
    counts: int32 [rows], number of columns that each row reads by itself.
    out: [rows, heads, dim], receives the outputs.
    heads: number of query heads.
    dim: numbers of a head.
    room: `dim`, rounded up to a power of two.
    each: heads of one program.
    piece: PIECE_COLUMNS, the columns of a slot.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0)
    head = tl.program_id(1) * each + tl.arange(0, each)
    d = tl.arange(0, room)
    mine = head < heads
    whole = mine[:, None] & (d < dim)[None, :]
    lead = tl.load(leads + row)
    given = tl.load(starts + row).to(tl.int64) * heads + head
    await_preceding_kernel(early)
    highest, total, sums = empty_state(each, room)
    for _ in range(0, tl.cdiv(lead + tl.load(counts + row), piece)):
        high = tl.load(weights + 2 * given, mask=mine, other=LOWEST)
        count = tl.load(weights + 2 * given + 1, mask=mine, other=0.0)
        more = tl.load(parts + given[:, None] * dim + d[None, :], mask=whole, other=0.0)
        higher = tl.maximum(highest, high)
        left, right = tl.exp2(highest - higher), tl.exp2(high - higher)
        total = total * left + count * right
        sums = sums * left[:, None] + more * right[:, None]
        highest = higher
        given = given + heads
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    place = out + (row.to(tl.int64) * heads + head)[:, None] * dim + d[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=whole)


@kernel
def store_state(state, weights, parts, places, live, d, dim: tl.constexpr):
    """Store the state of a piece without normalizing it.

    state: highest score, sum of weights and weighted values of a tile.
    weights: fp32 [slots, heads, 2], each slot's highest score and sum of weights.
    parts: fp32 [slots, heads, dim], each slot's weighted values.
    places: [tile], slot * heads + head of each line of the tile.
    live: [tile], which lines are stored.
    d: [room], numbers of a head.
    dim: numbers of a head.
    """
    highest, total, sums = state
    tl.store(weights + 2 * places, highest, mask=live)
    tl.store(weights + 2 * places + 1, total, mask=live)
    tl.store(parts + places[:, None] * dim + d[None, :], sums, mask=live[:, None] & (d < dim)[None, :])


@kernel
def load_queries(q, row, live, line, head, g, d, dim: tl.constexpr, q_row, q_group, q_head):
    """Load the queries of a tile, [tile, room].

    q: the scaled queries.
    row: [tile], row of each line of the tile.
    live: [tile], which lines exist; the others become 0.
    line: [tile], number of each line.
    head: number of the KV head.
    g: query heads of each KV head.
    d: [room], numbers of a head.
    dim: numbers of a head.
    q_row: numbers from one row of `q` to the next.
    q_group: numbers from the queries of one KV head to those of the next.
    q_head: numbers from one query head to the next.
    """
    source = q + row.to(tl.int64) * q_row + head * q_group + (line % g) * q_head
    return tl.load(source[:, None] + d[None, :], mask=live[:, None] & (d < dim)[None, :], other=0.0)


@kernel
def empty_state(tile: tl.constexpr, room: tl.constexpr):
    """Return the state before any column: highest score, sum of weights, weighted values.

    tile: lines of the tile.
    room: numbers of a head, rounded up to a power of two.
    """
    return (
        tl.full((tile,), LOWEST, tl.float32),
        tl.zeros((tile,), tl.float32),
        tl.zeros((tile, room), tl.float32),
    )


@kernel
def read_block(state, queries, kv, place, there, seen, kv_half, d, dim: tl.constexpr):
    """Return the state, updated with a block of columns.

    A row that has seen no column yet keeps the highest score LOWEST, a sum of 0 and values of 0.

    state: highest score, sum of weights and weighted values of a tile.
    queries: [tile, room], the queries.
    kv: address of the KV head's keys in page 0.
    place: [wide], where the key of each column begins.
    there: [wide], which columns exist.
    seen: [tile or 1, wide], which columns each line sees.
    kv_half: numbers from keys to values.
    d: [room], numbers of a head.
    dim: numbers of a head.
    """
    held = there[:, None] & (d < dim)[None, :]
    where = (kv + place)[:, None] + d[None, :]
    keys, values = tl.load(where, mask=held, other=0.0), tl.load(where + kv_half, mask=held, other=0.0)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    return update_softmax(state, tl.where(seen, scores, LOWEST), values, 1.0, False)
