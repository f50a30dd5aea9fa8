"""Computes attention of prompts' rows over KV pages: a tile of rows reads all of its columns in one go.

This replaces the pieces of `attention` for frames of many rows, whose tiles alone fill a GPU. Blocks of keys
and values are copied by tensor descriptors (TMA, NVIDIA from Hopper on) as whole pages or equal parts of
pages.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specsot_kernels.attention_tables import PROMPT_QUERIES, tabulate_prompts
from specsot_kernels.gpu.launching import copies_blocks, kernel, on_device_of, power_of_two
from specsot_kernels.segments import RowSpan

# Columns. Largest tile of keys that a program reads at a time.
COLUMNS = 64
# Warps of a program, and loop iterations in flight. Chosen by measurement: the fastest of
# ten pairs on an H100.
WARPS = 4
STAGES = 3
# log2(e): scores are multiplied by it, so that weights are powers of two.
LOG2E = tl.constexpr(1.4426950408889634)
# The score of a hidden column, as in `attention`.
LOWEST = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The tables of `tabulate_prompts` on the device. A tile of no rows does nothing.

    tiles: int32 [tiles, 4], the tiles of rows.
    pages: int32 [pages], the page numbers.
    """

    tiles: Tensor
    pages: Tensor


def suits(kind: torch.dtype, kv_layer: Tensor) -> bool:
    """Return whether the kernel reads such pages for such queries.

    It needs contiguous pages of the queries' 16-bit type, with sizes that are powers of 2. head_dim must be
    from 16 to 128, and a page must consist of whole blocks of COLUMNS rows, or of one block of at least 16
    rows. False on GPUs before Hopper, and on AMD's.

    kind: type of the queries.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], the KV of one layer.
    """
    page_rows, dim = kv_layer.shape[-2:]
    plain = kind == kv_layer.dtype and kind.itemsize == 2 and kv_layer.is_contiguous()
    heads = 16 <= dim == power_of_two(dim) <= 128
    wide = min(COLUMNS, page_rows)
    pages = 16 <= wide == power_of_two(wide) and page_rows % wide == 0
    return plain and heads and pages and copies_blocks(kv_layer.device)


def plan_prompts(
    spans: Sequence[RowSpan], page_rows: int, heads_per_kv: int, device: torch.device | str
) -> PromptPlan:
    """Return the tables of one frame of prompts.

    One copy to the device carries both tables.

    spans: one span per prompt, in row order; all causal.
    page_rows: columns of a page.
    heads_per_kv: query heads of each KV head.
    device: device of the tables.
    """
    tiles, pages = tabulate_prompts(spans, page_rows, PROMPT_QUERIES // heads_per_kv)
    sent = torch.from_numpy(np.concatenate((tiles.reshape(-1), pages)))
    if torch.device(device).type == "cuda":
        sent = sent.pin_memory().to(device, non_blocking=True)
    return PromptPlan(sent[: tiles.size].view(-1, 4), sent[tiles.size :])


def attend_prompts(q: Tensor, kv_layer: Tensor, plan: PromptPlan) -> Tensor:
    """Return the attention output of every row, [rows, kv_heads * g * head_dim].

    Rows that no tile names get undefined outputs.

    q: [rows, kv_heads, g, head_dim], already scaled; rows and heads may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], pages that this kernel `suits`.
    plan: the tables of the frame.
    """
    rows, kv_heads, g, dim = q.shape
    _, many, _, page_rows, _ = kv_layer.shape
    out = q.new_empty((rows, kv_heads * g * dim))
    wide = min(COLUMNS, page_rows)
    blocks = TensorDescriptor.from_tensor(kv_layer.view(-1, dim), [wide, dim])
    with on_device_of(q):
        _prompt[(kv_heads, len(plan.tiles))](
            q, blocks, out, plan.tiles, plan.pages, *q.stride()[:3], g, many * kv_heads * page_rows,
            page_rows, dim, PROMPT_QUERIES, wide, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


@kernel
def _prompt(
    q, blocks, out, tiles, pages, q_row, q_group, q_head, g, half, page_rows, dim: tl.constexpr,
    tile: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Compute one tile of rows under one KV head. A tile without rows writes nothing.

    q: [rows, kv_heads, g, dim], the scaled queries.
    blocks: a tensor descriptor of the KV, in blocks of [wide, dim].
    out: [rows, heads, dim], receives the outputs.
    tiles: int32 [tiles, 4], the tiles of rows; see `tabulate_prompts`.
    pages: int32, page numbers of all prompts.
    q_row: numbers from one row of `q` to the next.
    q_group: numbers from the queries of one KV head to those of the next.
    q_head: numbers from one query head to the next.
    g: query heads of each KV head.
    half: descriptor rows from keys to values.
    page_rows: columns of a page.
    dim: numbers of a head.
    tile: queries of a tile.
    wide: columns that are read at a time.
    """
    head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    place = tiles + tl.program_id(1) * 4
    first = tl.load(place)
    high = tl.load(place + 1)
    base = tl.load(place + 2)
    if high == 0:
        return
    pages += tl.load(place + 3)
    line = tl.arange(0, tile)
    d = tl.arange(0, dim)
    column = tl.arange(0, wide)
    row = line // g
    live = line < high * g
    given = (first + row).to(tl.int64)
    source = q + given * q_row + head * q_group + (line % g) * q_head
    queries = tl.load(source[:, None] + d[None, :], mask=live[:, None], other=0.0)
    state = (
        tl.full((tile,), LOWEST, tl.float32),
        tl.zeros((tile,), tl.float32),
        tl.zeros((tile, dim), tl.float32),
    )
    # Every row sees the columns before `free`, so that they need no mask.
    free = (base + 1) // wide * wide
    for left in range(0, free, wide):
        at = (tl.load(pages + left // page_rows) * kv_heads + head) * page_rows + left % page_rows
        scores = tl.dot(queries, blocks.load([at, 0]).T)
        state = _take_in(state, scores, blocks.load([at + half, 0]))
    for left in range(free, base + high, wide):
        at = (tl.load(pages + left // page_rows) * kv_heads + head) * page_rows + left % page_rows
        scores = tl.dot(queries, blocks.load([at, 0]).T)
        scores = tl.where((left + column)[None, :] <= (base + row)[:, None], scores, LOWEST)
        state = _take_in(state, scores, blocks.load([at + half, 0]))
    _, total, sums = state
    goal = (given * kv_heads * g + head * g + line % g) * dim
    sums = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + goal[:, None] + d[None, :], sums, mask=live[:, None])


@kernel
def _take_in(state, scores, values):
    """Update a running softmax, in powers of two, with one tile of columns; return the new state.

    state: highest score [tile], sum of weights [tile] and weighted values [tile, dim].
    scores: fp32 [tile, wide]; LOWEST where a row does not see a column.
    values: [wide, dim], the values.
    """
    highest, total, sums = state
    higher = tl.maximum(highest, tl.max(scores, 1) * LOG2E)
    chances = tl.exp2(scores * LOG2E - higher[:, None])
    kept = tl.exp2(highest - higher)
    sums = tl.dot(chances.to(values.dtype), values, sums * kept[:, None])
    return higher, total * kept + tl.sum(chances, 1), sums
