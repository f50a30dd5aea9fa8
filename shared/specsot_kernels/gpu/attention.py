"""Computes attention of a frame's rows over KV pages: pieces in parallel, then each row's pieces merged.

A row is one token of the batch, a column one KV position of a sequence; see `attention_tables`. The entry
points are those of `specsot_model.attention`: one plan for each frame, and `attend` for every layer. Scores,
sums and merges are fp32, whatever type the pages hold.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specsot_kernels.anchors import PolicySights, anchor_runs, policy_sights
from specsot_kernels.attention_tables import (
    SHORT,
    Numbers,
    TableRoom,
    num_head_blocks,
    sinces_of,
    tabulate,
    tile_of,
)
from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)
from specsot_kernels.gpu.prompts import PromptPlan, attend_prompts, plan_prompts, suits
from specsot_kernels.segments import RowSpan

# Columns. Largest tile of keys that a program reads at a time. Untuned.
COLUMNS = 64
# Columns. The same for numbers of 32 bits, whose products are no tensor-core instructions but single
# multiplications, all of them written out: with 64 columns a kernel took ten times as long to compile, and
# kept 31 KB of its registers in memory (ptxas for sm_90a, 64 queries, head_dim 128).
FP32_COLUMNS = 16
# Queries. Smallest tile, which frames of one or two rows have.
MIN_TILE = 16
# Pieces. How many partial results of a row `_merge` loads at a time. Chosen by measurement on an H100.
SLOTS_MERGED_AT_ONCE = 4
# Programs. Maximum number that merge; with more heads, a program merges several. Chosen by
# measurement on an H100.
MAX_MERGE_PROGRAMS = 4096
# Programs. If a frame has more than MAX_UNLOOPED_PIECES pieces (over all KV heads), LOOPING_PROGRAMS programs
# loop over them, since even programs without work occupy the GPU for a moment. With fewer pieces the loop
# costs more than it saves.
# Chosen by measurement on an H100.
MAX_UNLOOPED_PIECES = 2048
LOOPING_PROGRAMS = 512
# Rows. From so many rows of prompts on, tiles that are not cut into pieces fill a GPU.
MIN_PROMPT_ROWS = 512
# Integers. Tables begin at multiples of it, so that kernels compiled for one frame serve all frames.
ALIGNED = 4
# log2(e): scores are multiplied by it, so that weights are powers of two.
LOG2E = tl.constexpr(1.4426950408889634)
# The score of a hidden column. It is finite, so that a row that sees no column of a piece gets no NaN.
LOWEST = tl.constexpr(-1e30)


class Launch(NamedTuple):
    """Launch parameters of the reading kernel.

    columns: columns that a program reads at a time.
    warps: warps of a program.
    stages: loop iterations whose loads are in flight.
    """

    columns: int
    warps: int
    stages: int


def launch_of(
    tile: int,
    room: int,
    itemsize: int,
    int8_kv: bool = False,
    short: bool = False,
    by_descriptor: bool = False,
) -> Launch:
    """Return the fastest launch parameters for tiles of `tile` queries.

    room: head_dim, rounded up to a power of two.
    itemsize: bytes of a number.
    tile: queries of a tile.
    int8_kv: whether the KV is int8.
    short: whether there are many pieces of a few rows, see `TreePlan`.
    by_descriptor: whether columns are loaded by tensor descriptors, see `are_copied`.

    Small, short and copied tiles were measured on an H100, the others on an H200. With a head_dim above 128,
    fewer stages fit shared memory; untuned. In fp32 eight warps share the products of a tile; untuned.
    """
    if itemsize == 4:
        return Launch(FP32_COLUMNS, 4 if tile <= MIN_TILE and room <= 128 else 8, 2)
    if room <= 128:
        small_tile = (
            Launch(COLUMNS, 8, 3) if int8_kv else Launch(COLUMNS, 2, 1) if short else Launch(COLUMNS, 4, 2)
        )
        return (
            small_tile
            if tile <= MIN_TILE
            else Launch(COLUMNS, 4, 2 if tile == SHORT and not by_descriptor else 3)
        )
    return Launch(COLUMNS if room <= 256 else COLUMNS // 2, 8, 2)


class AnchorRows(NamedTuple):
    """Rows of sequences with a KV policy, on the device; see `PolicySights`.

    anchors: int32 [rows], number of anchor columns that each row sees.
    turns: int32 [rows], positions by which each row's query is rotated towards the anchors.
    rates: fp32 [head_dim / 2], radians that a pair rotates by for each position.
    cosines: fp32 [rows, head_dim / 2], cosines of the queries' rotation; `turn` computes them from `turns`.
    sines: fp32 [rows, head_dim / 2], the sines.
    """

    anchors: Tensor
    turns: Tensor
    rates: Tensor
    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, anchors: Tensor, turns: Tensor, rates: Tensor) -> AnchorRows:
        """Return the rows with zeroed cosines and sines; `turn` has to be called before they are used.

        anchors: int32 [rows], number of anchor columns that each row sees.
        turns: int32 [rows], positions by which each row's query is rotated towards the anchors.
        rates: fp32 [head_dim / 2], radians that a pair rotates by for each position.
        """
        return cls(anchors, turns, rates, *rates.new_zeros((2, len(turns), len(rates))))

    def turn(self) -> None:
        """Compute cosines and sines, once a frame, before the first `attend`.

        With the sines computed inside, the attention kernel took twice as long to compile.
        """
        angles = self.turns.float()[:, None] * self.rates
        torch.cos(angles, out=self.cosines)
        torch.sin(angles, out=self.sines)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """What `plan_attention` decided, on the device. Valid for one frame; callers do not look inside.

    tables: tensors in the order of `AttentionTables`.
    slots: number of partial results.
    page_rows: columns of a page.
    tile: queries of a tile.
    sinces: int32 [rows], the first column that each row sees; None if all rows see column 0.
    prompts: a plan for the prompt kernel, if the frame has prompts alone; used where that kernel `suits`.
    short: there are many pieces of a few rows, and most rows are in one piece alone.
    anchored: set if a policy hides columns from rows; then `sinces` is set, too.
    """

    tables: tuple[Tensor, ...]
    slots: int
    page_rows: int
    tile: int
    sinces: Tensor | None = None
    prompts: PromptPlan | None = None
    short: bool = False
    anchored: AnchorRows | None = None


def plan_attention(
    spans: Sequence[RowSpan],
    page_rows: int,
    heads_per_kv: int,
    device: torch.device | str,
    window: int | None = None,
    rates: Tensor | None = None,
) -> TreePlan:
    """Return the plan of one frame's attention, with one copy to the device (prompts need a second one).

    The plan has `prompts` if the frame has at least MIN_PROMPT_ROWS rows, consists of prompts alone, neither
    a window nor a policy hides columns, and the query heads of one KV head and row fit in a tile. It has
    `sinces` with a window or a policy, and `anchored` with a policy.

    page_rows: columns of a page.
    heads_per_kv: query heads of each KV head.
    window: each row sees its own position and the `window` - 1 positions before it; None: all positions.
    spans: one span per segment of the frame, in row order; at least one.
    device: device of the tables.
    rates: `Rotary.frequencies`, fp32 [head_dim / 2], radians that a pair rotates by for each position; needed
        if spans have sights, else None.
    """
    num_rows = sum(span.rows for span in spans)
    blocks = num_head_blocks(heads_per_kv)
    tile = tile_of(num_rows, heads_per_kv // blocks)
    rows = tile // (heads_per_kv // blocks)
    sight_tables = tuple[Numbers, ...]()
    if any(span.sight for span in spans):
        sight_tables = policy_sights(spans, window)
    elif window is not None:
        sight_tables = (sinces_of(spans, window),)
    anchored = tuple(anchor_runs(spans, page_rows))
    tables = tabulate(spans, page_rows, rows, window, sight_tables[0] if sight_tables else None, anchored)
    on_device = send_tables((*tables, *sight_tables), device)
    prompts = None
    is_prompt = not sight_tables and all(span.visible is None for span in spans)
    if num_rows >= MIN_PROMPT_ROWS and is_prompt and blocks == 1:
        prompts = plan_prompts(spans, page_rows, heads_per_kv, device)
    sinces, policy_rows = _policy_tables(on_device[len(tables) :], rates)
    if policy_rows:
        policy_rows.turn()
    options = len(tables.slots), page_rows, tile, sinces, prompts, False, policy_rows
    return TreePlan(on_device[: len(tables)], *options)


def plan_over(
    tables: Sequence[Tensor],
    room: TableRoom,
    page_rows: int,
    heads_per_kv: int,
    sight_tables: Sequence[Tensor] = (),
    rates: Tensor | None = None,
) -> TreePlan:
    """Return a plan over tables that the caller fills before each use, as a captured graph needs.

    The plan has no `prompts`.

    tables: int32 of `room.shapes`.
    sight_tables: int32 [rows] each, filled by the caller too: nothing, (sinces,), or the three of
        `PolicySights`.
    room: sizes of the tables.
    page_rows: columns of a page.
    heads_per_kv: query heads of each KV head.
    rates: fp32 [head_dim / 2], radians that a pair rotates by for each position; needed with the three tables
        of `PolicySights`, else None. `AnchorRows.turn` of the plan is then to be called before each use.
    """
    pieces, *row_tables, pages = tables
    tile = max(power_of_two(room.tile_rows * heads_per_kv), MIN_TILE)
    (sinces, anchored) = _policy_tables(sight_tables, rates)
    options = room.slots, page_rows, tile, sinces, None, room.short, anchored
    return TreePlan((pieces, pages, *row_tables), *options)


def _policy_tables(
    sight_tables: Sequence[Tensor], rates: Tensor | None
) -> tuple[Tensor | None, AnchorRows | None]:
    """Return (sinces, rows with a policy); None for each that is absent.

    AssertionError is raised for three tables without `rates`.

    sight_tables: the tables of what policies leave visible, int32 [rows] each: nothing, (sinces,), or the
        three of `PolicySights`.
    rates: fp32 [head_dim / 2], radians that a pair rotates by for each position; needed for three tables.
    """
    if len(sight_tables) < len(PolicySights._fields):
        return sight_tables[0] if sight_tables else None, None
    sinces, anchors, turns = sight_tables
    assert rates is not None, "queries turn to anchors"
    return sinces, AnchorRows.of(anchors, turns, rates)


def plan_over_prompts(tiles: Tensor, pages: Tensor, page_rows: int) -> TreePlan:
    """Return a plan over the tables of `tabulate_prompts`, for pages that the prompt kernel `suits`.

    tiles: int32 [tiles, 4] on the device, the tiles of prompt rows.
    pages: int32 on the device, page numbers of all prompts.
    page_rows: columns of a page.
    """
    return TreePlan((), 0, page_rows, 0, prompts=PromptPlan(tiles, pages))


def send_tables(tables: Sequence[Numbers], device: torch.device | str) -> tuple[Tensor, ...]:
    """Copy all tables to the device in one transfer, and return them as int32 tensors of the same shapes.

    Each begins at a multiple of ALIGNED integers. On a GPU the host does not wait for the copy.

    tables: int32 arrays of any shape.
    device: the torch device in question.
    """
    sizes = [-(-each.size // ALIGNED) * ALIGNED for each in tables]
    flat = np.concatenate([np.resize(table, size) for table, size in zip(tables, sizes)])
    whole = torch.from_numpy(flat)
    # From memory that is not pinned, the copy would wait for everything that runs on the device.
    if torch.device(device).type == "cuda":
        whole = whole.pin_memory()
    parts = whole.to(device, non_blocking=True).split(sizes)
    return tuple(part[: each.size].view(each.shape) for part, each in zip(parts, tables))


def are_copied(plan: TreePlan, kind: torch.dtype, kv_layer: Tensor) -> bool:
    """Return whether tiles of columns are loaded by tensor descriptors.

    The smallest and short tiles are excluded because they were not measured with descriptors, rows that are
    keys and values at once because their kernel has no such loads, and blocks of heads because a descriptor
    cannot describe heads that lie at the same address.

    plan: the plan of the frame.
    kind: type of the queries.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], the KV of one layer.
    """
    if len(kv_layer) == 1 or kv_layer.stride(2) == 0:
        return False
    many = plan.tile > MIN_TILE and not plan.short and plan.page_rows % COLUMNS == 0
    return many and suits(kind, kv_layer)


def attend(
    q: Tensor,
    kv_layer: Tensor,
    plan: TreePlan,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    launch: Launch | None = None,
    values_from: int = 0,
) -> Tensor:
    """Return the attention output of every row, [rows, kv_heads * g * (head_dim - values_from)].

    The prompt kernel runs if the plan has `prompts`, the pages suit it, and there are neither sinks nor a
    softcap. A row that is in no piece gets zeros. More query heads than fit in a tile, which only a model
    with one KV head may have, are cut into blocks. Each block is computed as if it had a KV head of its own,
    with the same KV:

        q [rows, 1, 128, dim], kv [1, pages, 1, page_rows, dim]
        -> q [rows, 2, 64, dim], kv [1, pages, 2, page_rows, dim], whose heads lie at the same address

    q: [rows, kv_heads, g, head_dim], already scaled; rows and heads may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], keys and values; all dimensions but the last may be
        strided. [1, ...] for rows that are both, with `values_from` above 0. Or int8 with each row's fp16
        scale after its numbers, in 16 bytes, because 16 bytes are read at a time.
    sinks: fp32 [kv_heads, g], contiguous: learned sink scores without values. None: there are none.
    softcap: bounds the other scores by softcap * tanh(score / softcap). None: they are not bounded.
    plan: the plan of the frame, made by `plan_attention` or `plan_over`.
    launch: overrides `launch_of`; None: the fastest parameters that were measured.
    values_from: number of first elements of a row that are no part of its value, in rows that are keys and
        values at once: a power of two of at least 16. 0: keys and values are rows of their own.
    """
    if plan.prompts and sinks is None and softcap is None and not values_from and suits(q.dtype, kv_layer):
        return attend_prompts(q, kv_layer, plan.prompts)
    if (head_blocks := num_head_blocks(q.shape[2])) > 1:
        assert q.shape[1] == 1, "only a single KV head has more query heads than a tile"
        q = q.squeeze(1).unflatten(1, (head_blocks, -1))
        kv_layer = kv_layer.expand(-1, -1, head_blocks, -1, -1)
    rows, kv_heads, g, whole_dim = q.shape
    dim = whole_dim - values_from
    assert not (values_from and plan.anchored), "no queries are rotated towards anchors here"
    pieces, pages, leads, bases, bits, starts, slots = plan.tables
    parts = q.new_empty((plan.slots, kv_heads * g, dim), dtype=torch.float32)
    weights = q.new_empty((plan.slots, kv_heads * g), dtype=torch.float32)
    out = q.new_empty((rows, kv_heads * g * dim))
    room = max(power_of_two(dim), 16)
    windowed = plan.sinces is not None
    cap = softcap or 0.0
    is_int8 = kv_layer.dtype == torch.int8
    by_descriptor = are_copied(plan, q.dtype, kv_layer)
    wide, warps, stages = launch or launch_of(plan.tile, room, q.itemsize, is_int8, plan.short, by_descriptor)
    sinces = leads if plan.sinces is None else plan.sinces
    anchored = (leads, weights, weights)
    if plan.anchored:
        anchored = plan.anchored.anchors, plan.anchored.cosines, plan.anchored.sines
    scales = kv_layer[..., whole_dim:].view(torch.float16) if is_int8 else kv_layer
    looped = len(pieces) * kv_heads > MAX_UNLOOPED_PIECES
    programs = max(LOOPING_PROGRAMS // kv_heads, 1) if looped else len(pieces)
    each = power_of_two(-(-rows * kv_heads * g // MAX_MERGE_PROGRAMS))
    on_one_page = plan.page_rows % wide == 0
    blocks = kv_layer
    if by_descriptor:
        blocks = TensorDescriptor.from_tensor(kv_layer.view(-1, dim), [wide, dim])
    with on_device_of(q):
        _read[(kv_heads, programs)](
            q, kv_layer, blocks, scales, pieces, pages, leads, bases, bits, sinces, *anchored, starts, parts,
            weights, out, *q.stride()[:3], *kv_layer.stride()[:4], len(pieces), g, plan.page_rows,
            bits.shape[1], dim, room, plan.tile, wide, on_one_page, windowed, plan.anchored is not None,
            plan.short, looped, sinks is not None, cap, is_int8, by_descriptor, values_from, num_warps=warps,
            num_stages=stages, **pdl_options(q),
        )  # fmt: skip
        _merge[(rows, -(-kv_heads * g // each))](
            parts, weights, starts, slots, weights if sinks is None else sinks, out, dim, kv_heads * g, room,
            SLOTS_MERGED_AT_ONCE, each, plan.short, sinks is not None, num_warps=1, **pdl_options(q),
        )  # fmt: skip
    return out


@kernel
def _read(
    q, kv, blocks, scales, pieces, pages, leads, bases, bits, sinces, anchors, cosines, sines, starts, parts,
    weights, out, q_row, q_group, q_head, kv_half, kv_page, kv_head, kv_row, many, g, page_rows, words,
    dim: tl.constexpr, room: tl.constexpr, tile: tl.constexpr, wide: tl.constexpr, on_one_page: tl.constexpr,
    windowed: tl.constexpr, anchored: tl.constexpr, short: tl.constexpr, looped: tl.constexpr,
    has_sinks: tl.constexpr, cap: tl.constexpr, is_int8: tl.constexpr, by_descriptor: tl.constexpr,
    values_from: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Read one piece under one KV head; if `looped`, read piece after piece.

    A captured graph has room for more pieces than most frames have. The unused ones have no rows and come
    last.

    q: [rows, kv_heads, g, dim], the scaled queries.
    kv: [2, pages, kv_heads, page_rows, dim], keys and values.
    blocks: a tensor descriptor of kv, if `by_descriptor`.
    scales: fp16, the scales of int8 rows, if `is_int8`.
    pieces: int32 [pieces, 7], the pieces of the frame; see `AttentionTables`.
    pages: int32, page numbers of all pieces.
    leads: int32 [rows]; each row sees every column before this one.
    bases: int32 [rows], the column that bit 0 of each row's bits stands for.
    bits: int32 [rows, words], which later columns each row sees.
    starts: int32 [rows + 1], where each row's slots begin.
    sinces: [rows], the first column that each row sees, if `windowed`.
    anchors: int32 [rows], number of anchor columns that each row sees, if `anchored`; see `AnchorRows`.
    cosines: fp32 [rows, dim / 2], cosines of the queries' rotation towards the anchors, if `anchored`.
    sines: fp32 [rows, dim / 2], the sines.
    parts: fp32 [slots, heads, dim], receives each slot's output.
    weights: fp32 [slots, heads], receives each slot's log-sum-exp.
    out: [rows, heads, dim], receives the output of rows that are complete, if `short`.
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
    words: mask words of a row.
    dim: numbers of a head's value.
    room: `dim`, rounded up to a power of two.
    tile: queries of a tile.
    wide: columns that are read at a time.
    on_one_page: whether the columns of a tile lie on one page.
    windowed: whether rows have a first visible column.
    anchored: whether rows see anchors.
    short: whether most rows are in one piece alone.
    looped: whether programs loop over pieces.
    has_sinks: whether heads have sinks.
    cap: bound of the scores; 0: none.
    is_int8: whether KV is int8.
    by_descriptor: whether columns are loaded by tensor descriptors.
    values_from: number of first elements of a row that are a part of its key alone, if rows are keys and
        values at once; else 0.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    head = tl.program_id(0)
    number = tl.program_id(1)
    high = tl.load(pieces + number * 7 + 1)
    given = (
        q, kv, blocks, scales, pages, leads, bases, bits, sinces, anchors, cosines, sines, starts, parts,
        weights, out, q_row, q_group, q_head, kv_half, kv_page, kv_head, kv_row, head, g, page_rows, words,
    )  # fmt: skip
    if looped:
        while high > 0:
            _read_piece(
                given, pieces + number * 7, high, dim, room, tile, wide, on_one_page, windowed, anchored,
                short, has_sinks, cap, is_int8, by_descriptor, values_from, early,
            )  # fmt: skip
            number += tl.num_programs(1)
            high = tl.load(pieces + number * 7 + 1, mask=number < many, other=0)
        await_preceding_kernel(early)
    else:
        if high == 0:
            await_preceding_kernel(early)
            return
        _read_piece(
            given, pieces + number * 7, high, dim, room, tile, wide, on_one_page, windowed, anchored, short,
            has_sinks, cap, is_int8, by_descriptor, values_from, early,
        )  # fmt: skip


@kernel
def _read_piece(
    arguments, piece, high, dim: tl.constexpr, room: tl.constexpr, tile: tl.constexpr, wide: tl.constexpr,
    on_one_page: tl.constexpr, windowed: tl.constexpr, anchored: tl.constexpr,
    short: tl.constexpr, has_sinks: tl.constexpr, cap: tl.constexpr, is_int8: tl.constexpr,
    by_descriptor: tl.constexpr, values_from: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of a piece's rows over its columns, and its log-sum-exp.

    If pieces are short, a row that is in no other piece gets its final output here. The columns are read in
    three ranges: with masks up to `whole` (where the window of some row begins), without masks up to `free`
    (every row sees every column), and with masks to the end (tree nodes see different columns). Nothing is
    returned. A row's log-sum-exp is LOWEST if it sees no column of the piece.

    arguments: the arguments of `_read` from `q` to `kv_row`, without pieces, then head, g, page_rows and
        words.
    piece: address of the piece's seven numbers; see `AttentionTables.pieces`.
    high: number of the piece's rows.
    dim: numbers of a head's value.
    room: `dim`, rounded up to a power of two.
    tile: queries of a tile.
    wide: columns that are read at a time.
    on_one_page: whether the columns of a tile lie on one page.
    windowed: whether rows have a first visible column.
    anchored: whether rows see anchors.
    short: whether most rows are in one piece alone.
    has_sinks: whether heads have sinks.
    cap: bound of the scores; 0: none.
    is_int8: whether KV is int8.
    by_descriptor: whether columns are loaded by tensor descriptors.
    values_from: number of first elements of a row that are a part of its key alone, if rows are keys and
        values at once; else 0.
    early: whether the device starts kernels early (see `launching`).
    """
    (
        q, kv, blocks, scales, pages, leads, bases, bits, sinces, anchors, cosines, sines, starts, parts,
        weights, out, q_row, q_group, q_head, kv_half, kv_page, kv_head, kv_row, head, g, page_rows, words,
    ) = arguments  # fmt: skip
    top_row = tl.load(piece)
    where = tl.load(piece + 2)
    columns = tl.load(piece + 3)
    at = tl.load(piece + 4)
    common = tl.load(piece + 5)
    slot = tl.load(piece + 6)
    line = tl.arange(0, tile)
    d = tl.arange(0, room)
    # A tile holds g query heads of each row: with g = 4, lines 0..3 are row 0, lines 4..7 row 1.
    row = top_row + line // g
    live = line < high * g
    lead = tl.load(leads + row, mask=live, other=0)
    base = tl.load(bases + row, mask=live, other=0)
    merged = live
    if short and not has_sinks:
        merged = tl.load(starts + row + 1, mask=live, other=0) - tl.load(starts + row, mask=live, other=0) > 1
    since = tl.zeros_like(lead)
    if windowed:
        since = tl.load(sinces + row, mask=live, other=0)
    # The tables were written before this frame's kernels, so they may be read before this wait.
    await_preceding_kernel(early)
    there = live[:, None] & (d < dim)[None, :]
    from_q = row.to(tl.int64) * q_row + head * q_group + (line % g) * q_head
    queries = tl.load(q + values_from + from_q[:, None] + d[None, :], mask=there, other=0.0)
    # The first elements of queries and keys, which values do not have; not used if values_from is 0.
    starts_of_queries = queries
    if values_from > 0:
        start_at = q + from_q[:, None] + tl.arange(0, values_from)[None, :]
        starts_of_queries = tl.load(start_at, mask=live[:, None], other=0.0)
    if anchored:  # noqa: SIM102  # the first is known when this is compiled
        if common < 0:
            # The piece consists of anchors: rotate the query towards them. The partner of number d in a
            # rotated pair is d ^ 1.
            lead = tl.load(anchors + row, mask=live, other=0)
            since = tl.zeros_like(lead)
            other = tl.load(q + from_q[:, None] + (d ^ 1)[None, :], mask=there, other=0.0).to(tl.float32)
            pair = (row * (dim // 2))[:, None] + (d // 2)[None, :]
            sine = tl.where((d & 1)[None, :] == 0, 1.0, -1.0) * tl.load(sines + pair, mask=there, other=0.0)
            cosine = tl.load(cosines + pair, mask=there, other=0.0)
            queries = (queries.to(tl.float32) * cosine + other * sine).to(queries.dtype)
    highest = tl.full((tile,), LOWEST, tl.float32)
    total = tl.zeros((tile,), tl.float32)
    state = (highest, total, tl.zeros((tile, room), tl.float32))
    pages = pages + where
    kv = kv + head * kv_head
    bits = bits + row * words
    if is_int8:
        scales += head * (kv_head // 2)
    # Every row sees every column from `whole` to `free`.
    free = tl.minimum(tl.maximum(common - at, 0), columns) // wide * wide
    whole = 0
    if windowed:
        nearest = tl.min(tl.where(live, since, at + columns), 0)
        start = tl.minimum(tl.maximum(nearest - at, 0), columns) // wide * wide
        whole = tl.minimum(tl.maximum(tl.max(since, 0) - at, start), columns)
        whole = (whole + wide - 1) // wide * wide
        free = tl.maximum(free, whole)
        for left in range(start, tl.minimum(whole, columns), wide):
            keys, values, key_starts, key_scale, value_scale = _fetch(
                kv, blocks, scales, pages, left, columns, head, kv_half, kv_page, kv_row, page_rows,
                q.dtype.element_ty, dim, room, wide, on_one_page, is_int8, by_descriptor, values_from,
            )  # fmt: skip
            scores = _score(
                queries, keys, starts_of_queries, key_starts, key_scale, cap, is_int8, values_from
            )
            seen = _seen(bits, lead, base, since, live, left, at, columns, words, wide, windowed)
            state = update_softmax(state, tl.where(seen, scores, LOWEST), values, value_scale, is_int8)
    for left in range(whole, free, wide):
        keys, values, key_starts, key_scale, value_scale = _fetch(
            kv, blocks, scales, pages, left, columns, head, kv_half, kv_page, kv_row, page_rows,
            q.dtype.element_ty, dim, room, wide, on_one_page, is_int8, by_descriptor, values_from,
        )  # fmt: skip
        scores = _score(queries, keys, starts_of_queries, key_starts, key_scale, cap, is_int8, values_from)
        state = update_softmax(state, scores, values, value_scale, is_int8)
    for left in range(free, columns, wide):
        keys, values, key_starts, key_scale, value_scale = _fetch(
            kv, blocks, scales, pages, left, columns, head, kv_half, kv_page, kv_row, page_rows,
            q.dtype.element_ty, dim, room, wide, on_one_page, is_int8, by_descriptor, values_from,
        )  # fmt: skip
        scores = _score(queries, keys, starts_of_queries, key_starts, key_scale, cap, is_int8, values_from)
        seen = _seen(bits, lead, base, since, live, left, at, columns, words, wide, windowed)
        state = update_softmax(state, tl.where(seen, scores, LOWEST), values, value_scale, is_int8)
    highest, total, sums = state
    sums /= tl.maximum(total, 1.0)[:, None]
    heads = tl.num_programs(0) * g
    mine = head * g + line % g
    if short and not has_sinks:
        alone = row.to(tl.int64) * heads + mine
        tl.store(out + alone[:, None] * dim + d[None, :], sums, mask=there & ~merged[:, None])
    weight = tl.where(highest == LOWEST, LOWEST, (highest + tl.log2(tl.maximum(total, 1.0))) / LOG2E)
    arguments = (slot + line // g).to(tl.int64) * heads + mine
    tl.store(weights + arguments, weight, mask=live & merged)
    tl.store(parts + arguments[:, None] * dim + d[None, :], sums, mask=there & merged[:, None])


@kernel
def _score(
    queries, keys, query_starts, key_starts, scale, cap: tl.constexpr, is_int8: tl.constexpr,
    values_from: tl.constexpr,
):  # fmt: skip
    """Return scores, fp32 [tile, wide].

    queries: [tile, room], the queries.
    keys: [wide, room], in the queries' type.
    query_starts: [tile, values_from], the first elements of the queries, if `values_from` is not 0.
    key_starts: [wide, values_from], those of the keys.
    scale: fp32 [wide], the scales of int8 keys, if `is_int8`.
    cap: scores become cap * tanh(score / cap); 0: they stay as they are.
    is_int8: whether the keys are int8.
    values_from: number of elements of a key that its value does not have; see `_read`.
    """
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if values_from > 0:
        scores = tl.dot(query_starts, tl.trans(key_starts), scores, input_precision="ieee")
    if is_int8:
        scores *= scale[None, :]
    if cap > 0:
        scores = cap - 2 * cap / (tl.exp(scores * (2 / cap)) + 1)
    return scores


@kernel
def _seen(
    bits, lead, base, since, live, left, at, columns, words, wide: tl.constexpr, windowed: tl.constexpr
):  # fmt: skip
    """Return which columns of a tile each row sees, [tile, wide]: those from `since` to `lead`, and those
    whose bit is set.

    Columns beyond the piece are never seen.

    bits: [tile], addresses of the rows' mask words.
    lead: [tile], the row sees every column before this one.
    base: [tile], the column that bit 0 of the row's bits stands for.
    since: [tile], the first column that the row sees, if `windowed`.
    live: [tile], whether the line of the tile is a row.
    left: number of the tile's first column within the piece.
    at: the piece's first column.
    columns: number of the piece's columns.
    words: mask words of a row.
    wide: columns that are read at a time.
    windowed: whether rows have a first visible column.
    """
    column = left + tl.arange(0, wide)
    bit = at + column[None, :] - base[:, None]
    word = _words(bits, at + left - base, bit, live, words, wide)
    before = (at + column)[None, :] < lead[:, None]
    if windowed:
        before &= (at + column)[None, :] >= since[:, None]
    return (before | (((word >> (bit & 31)) & 1) == 1)) & (column < columns)[None, :]


@kernel
def _words(bits, first, bit, live, words, wide: tl.constexpr):
    """Return the mask word of each bit, [tile, wide]; each word is loaded once.

    bits: [tile], addresses of the rows' mask words.
    first: [tile], number of the first bit of each row.
    bit: [tile, wide], numbers of the bits.
    live: [tile], whether the line of the tile is a row.
    words: mask words of a row; bits outside of them are 0.
    wide: columns that are read at a time.
    """
    at = first >> 5
    word = tl.zeros_like(bit)
    # 16 columns that begin at bit 24 of a word lie in two words, 64 columns in three at most.
    for step in tl.static_range((wide + 30) // 32 + 1):
        there = live & (at + step >= 0) & (at + step < words)
        one = tl.load(bits + at + step, mask=there, other=0)
        word = tl.where((bit >> 5) == (at + step)[:, None], one[:, None], word)
    return word


@kernel
def _fetch(
    kv, blocks, scales, pages, left, columns, head, kv_half, kv_page, kv_row, page_rows, kind: tl.constexpr,
    dim: tl.constexpr, room: tl.constexpr, wide: tl.constexpr, on_one_page: tl.constexpr,
    is_int8: tl.constexpr, by_descriptor: tl.constexpr, values_from: tl.constexpr,
):  # fmt: skip
    """Return a tile of columns as loaded: (keys, values, starts of keys, key scales, value scales).

    If `values_from` is not 0, values are the keys without their first elements, which are the starts of keys.
    Otherwise the starts of keys are not used. Scales are 1.0 unless the numbers are int8. Numbers of columns
    beyond the piece are 0, except by descriptor.

    kv: address of the KV head's keys in page 0.
    blocks: a tensor descriptor of the KV, if `by_descriptor`.
    scales: address of the KV head's scales, if `is_int8`.
    pages: address of the piece's page numbers.
    left: number of the tile's first column within the piece.
    columns: number of the piece's columns.
    head: number of the KV head.
    kv_half: numbers from the keys to the values.
    kv_page: numbers from one page to the next.
    kv_row: numbers from one row of a page to the next.
    page_rows: columns of a page.
    kind: type of the queries, to which int8 numbers are converted exactly.
    dim: numbers of a head.
    room: dim, rounded up to a power of two.
    wide: columns that are read at a time.
    on_one_page: whether the columns lie on one page.
    is_int8: whether the numbers are int8.
    by_descriptor: whether to load by descriptors, together with what follows the columns in memory.
    values_from: number of elements of a key that its value does not have; see `_read`.
    """
    if by_descriptor:
        at = tl.load(pages + left // page_rows) * (kv_page // dim) + head * page_rows + left % page_rows
        keys = blocks.load([at, 0])
        return keys, blocks.load([at + (kv_half // dim).to(tl.int32), 0]), keys, 1.0, 1.0
    column = left + tl.arange(0, wide)
    d = tl.arange(0, room)
    if on_one_page:
        page = tl.load(pages + left // page_rows).to(tl.int64)
    else:
        page = tl.load(pages + column // page_rows, mask=column < columns, other=0).to(tl.int64)
    place = page * kv_page + (column % page_rows) * kv_row
    held = (column < columns)[:, None] & (d < dim)[None, :]
    where = (kv + values_from + place)[:, None] + d[None, :]
    keys = tl.load(where, mask=held, other=0)
    key_starts = keys
    if values_from > 0:
        values = keys
        start_at = (kv + place)[:, None] + tl.arange(0, values_from)[None, :]
        key_starts = tl.load(start_at, mask=(column < columns)[:, None], other=0)
        kv_half = 0
    else:
        values = tl.load(where + kv_half, mask=held, other=0)
    one = 1.0
    two = 1.0
    if is_int8:
        one = tl.load(scales + place // 2, mask=column < columns, other=0.0).to(tl.float32)
        two = tl.load(scales + place // 2 + kv_half // 2, mask=column < columns, other=0.0).to(tl.float32)
        keys, values, key_starts = keys.to(kind), values.to(kind), key_starts.to(kind)
    return keys, values, key_starts, one, two


@kernel
def update_softmax(state, scores, values, scale, is_int8: tl.constexpr):
    """Update a running softmax, in powers of two, with one tile of columns; return the new state.

    A row that has seen no column yet keeps the highest score LOWEST, a sum of 0 and values of 0.

    state: highest score [tile], sum of weights [tile] and weighted values [tile, room].
    scores: fp32 [tile, wide]; LOWEST where a row does not see a column.
    values: [wide, room], the values.
    scale: fp32 [wide], the scales of int8 values, if `is_int8`.
    is_int8: whether the values are int8.
    """
    highest, total, sums = state
    scores *= LOG2E
    higher = tl.maximum(highest, tl.max(scores, 1))
    chances = tl.exp2(scores - higher[:, None])
    kept = tl.exp2(highest - higher)
    total = total * kept + tl.sum(chances, 1)
    if is_int8:
        chances *= scale[None, :]
    sums = tl.dot(chances.to(values.dtype), values, sums * kept[:, None], input_precision="ieee")
    return higher, total, sums


@kernel
def _merge(
    parts, weights, starts, slots, sinks, out, dim, heads, room: tl.constexpr, many: tl.constexpr,
    each: tl.constexpr, short: tl.constexpr, has_sinks: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of `each` heads of one row by their log-sum-exp, together with the row's sink.

    A row without pieces gets zeros. If pieces are short, a row with a single piece and no sink already has
    its output.

    parts: fp32 [slots, heads, dim], each slot's output.
    weights: fp32 [slots, heads], each slot's log-sum-exp.
    starts: int32 [rows + 1]; row r has the slots `slots[starts[r] : starts[r + 1]]`.
    slots: int32, slot numbers, grouped by row.
    sinks: fp32 [heads], if `has_sinks`.
    out: [rows, heads, dim], receives the outputs.
    dim: numbers of a head.
    room: `dim`, rounded up to a power of two.
    heads: number of query heads.
    many: how many slots are loaded at a time.
    each: heads of one program.
    short: whether rows with a single piece have their output already.
    has_sinks: whether heads have sinks.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0)
    head = tl.program_id(1) * each + tl.arange(0, each)
    d = tl.arange(0, room)
    mine = head < heads
    whole = mine[:, None] & (d < dim)[None, :]
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    await_preceding_kernel(early)
    if short and not has_sinks:  # noqa: SIM102  # the first is known when this is compiled
        if last - first == 1:
            return
    highest = tl.full((each,), LOWEST, tl.float32)
    total = tl.zeros((each,), tl.float32)
    sums = tl.zeros((each, room), tl.float32)
    if has_sinks:
        highest = tl.load(sinks + head, mask=mine, other=LOWEST)
        total = total + 1.0
    for left in range(first, last, many):
        higher = highest
        for step in tl.static_range(many):
            slot = tl.load(slots + left + step, mask=left + step < last, other=0).to(tl.int64)
            live = mine & (left + step < last)
            higher = tl.maximum(higher, tl.load(weights + slot * heads + head, mask=live, other=LOWEST))
        kept = tl.exp(highest - higher)
        total = total * kept
        sums = sums * kept[:, None]
        highest = higher
        for step in tl.static_range(many):
            slot = tl.load(slots + left + step, mask=left + step < last, other=0).to(tl.int64)
            live = mine & (left + step < last)
            at = slot * heads + head
            weight = tl.load(weights + at, mask=live, other=LOWEST)
            share = tl.where(live, tl.exp(weight - higher), 0.0)
            place = parts + at[:, None] * dim + d[None, :]
            sums += share[:, None] * tl.load(place, mask=whole & live[:, None], other=0.0)
            total += share
    sums = tl.where((total > 0)[:, None], sums / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    tl.store(out + (row.to(tl.int64) * heads + head)[:, None] * dim + d[None, :], sums, mask=whole)
