"""Attention of a batch's rows over KV pages: one plan per frame, one entry point for every layer.

A *read* covers some rows of the batch and a run of columns of one page, which is read in place. Each read
is a softmax of its own. If a row has several reads, they are merged by log-sum-exp: with o_i and l_i the
output and log-sum-exp of read i, l = log(sum exp l_i) and o = sum exp(l_i - l) o_i. On a GPU with Triton,
kernels do the same.

    # pages of 8 rows; sequence a has columns 0..10 in pages [3 5], b has columns 0..9 in pages [3 7]
    # page 3 is their shared prefix: read once, by the rows of a and b together
    # then the rows of a read 3 columns of page 5, and the rows of b read 2 columns of page 7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specsot.members import Layout
from specsot_kernels.line_tables import MAX_SMALL_ROWS
from specsot_kernels.segments import (
    HeadColumns,
    PageRead,
    ReadGroup,
    RowSpan,
    VisibleColumns,
    look_back,
    plan_reads,
    read_by_head,
    read_recent,
    read_sinks,
)
from specsot_model.fp8 import runs_kernels
from specsot_model.kv import as_numbers
from specsot_model.masks import Bools, as_mask, blind_rows, hidden_columns, hidden_columns_of
from specsot_model.rotary import turn_back

if TYPE_CHECKING:
    from specsot_kernels.cpu.running import ColumnPlan
    from specsot_kernels.gpu.attention import TreePlan
    from specsot_kernels.gpu.lines import LinePlan
    from specsot_kernels.gpu.small_attention import SmallStepPlan

__all__ = ["AttentionPlan", "RowSpan", "attend", "plan_attention", "plan_with_kernel"]

# The CPU's flash attention is the operator that returns the log-sum-exp as well.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
# Score. Stands for minus infinity, so that a row that sees no column stays finite. Any value far below all
# scores of a model serves. Untuned.
LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class _Pass:
    """One read, ready for every layer.

    reading: Which pages and columns are read.
    rows: Slice of the arranged rows that read.
    mask: [cells, 1 or kv_heads, rows of a cell * heads_per_kv, columns], minus infinity where a row must not
        see a column; None if every row sees every column.
    sees_nothing: [rows, 1 or kv_heads, 1], true for rows that see no column of this read; None if there are
        none.
    turned: True if the queries are turned by `AttentionPlan.turns`, because the sinks of a window are read.
    """

    reading: PageRead
    rows: slice
    mask: Tensor | None
    sees_nothing: Tensor | None
    turned: bool = False


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The result of `plan_attention`, valid for one frame. Callers treat it as opaque.

    Rows are *arranged* if the plan sorts spans by their pages or pads them: 2 spans of 2 and 1 rows, padded
    to 2 rows each, have source_rows [0 1 2 2] and arranged_rows [0 1 3] (or 2: both copies of row 2 agree).

    first_passes: Reads that cover every row exactly once, in row order; their outputs are concatenated.
    merged_passes: All other reads; each is merged into the rows that it covers.
    source_rows: LongTensor [arranged rows], the frame row that each arranged row is a copy of; None if rows
        are not rearranged.
    arranged_rows: LongTensor [rows], the arranged row that holds the result of each frame row; None if rows
        are not rearranged.
    kernel: A kernel that does all of the attention instead, given queries and one layer's KV; None: the reads
        are done in torch.
    turns: complex64 [arranged rows, head_dim / 2], the rotation of queries that read the sinks of a window;
        None if no query is turned.
    columns: The visible columns, for layers that run attention inside their own kernel (`PackedLayers`); None
        for other layers.
    sliding: The plan of sliding-window layers, if it differs from this one, else None.
    spans: The spans that were planned, for layers that read tokens in order (`DeltaBlock`); empty for other
        models.
    """

    first_passes: tuple[_Pass, ...]
    merged_passes: tuple[_Pass, ...]
    source_rows: Tensor | None
    arranged_rows: Tensor | None
    kernel: Callable[..., Tensor] | None = None
    turns: Tensor | None = None
    columns: ColumnPlan | None = None
    sliding: AttentionPlan | None = None
    spans: tuple[RowSpan, ...] = ()


def plan_attention(
    spans: Sequence[RowSpan],
    page_rows: int,
    heads_per_kv: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
    frequencies: Tensor | None = None,
    kernels: bool = True,
    invariant: bool = False,
    window: int | None = None,
    small_steps: bool = False,
) -> AttentionPlan:
    """Return the plan of one frame's attention, for `attend`.

    The result does the reads in torch on a CPU, without Triton, with `kernels` false, if heads see different
    columns, and if a policy limits a span of an invariant plan. A kernel does the attention otherwise.

    spans: One span per segment, in row order; at least one.
    page_rows: Rows of a KV page.
    heads_per_kv: Number of query heads per KV head.
    layout: Whether spans are read one by one ("packed") or padded into one product ("batched"), see
        `plan_readings`; GPU kernels treat both layouts alike.
    dtype: Type of queries and masks.
    device: Device of queries and KV pages; with CUDA and Triton, kernels are planned.
    frequencies: `Rotary.frequencies`, radians per position of each rotary pair, fp32 [head_dim / 2]; needed
        if a policy hides columns from a span. None: no span has a policy.
    kernels: Whether the GPU kernels can read the pages. They cannot run spans whose KV heads see different
        columns (`HeadColumns`); such frames are planned in torch.
    invariant: The output of a row does not depend on the rest of the batch, bit for bit. Spans that a policy
        limits are then planned one by one in torch.
    window: A row sees its own position and the window - 1 positions before; None: all positions. In torch, a
        span is divided into parts by what its rows see.
    small_steps: Frames of at most MAX_SMALL_ROWS rows are planned as small steps, unless a policy hides
        columns.
    """
    needs_torch = any(span.sight and (invariant or isinstance(span.sight, HeadColumns)) for span in spans)
    if invariant and needs_torch and len(spans) > 1:
        options = page_rows, heads_per_kv, layout, dtype, device, frequencies, kernels, invariant, window
        return _one_by_one(spans, [plan_attention([span], *options) for span in spans])
    if needs_torch or not kernels or not runs_kernels(torch.device(device)):
        if window is not None:
            spans = [part for span in spans for part in look_back(span, window, drafts=False)]
        return plan_readings(spans, page_rows, heads_per_kv, layout, dtype, device, frequencies)
    from specsot_kernels.gpu import attention, lines, small_attention

    options = spans, page_rows, heads_per_kv, device, window
    is_small = small_steps and not any(span.sight for span in spans)
    if is_small and sum(span.rows for span in spans) <= MAX_SMALL_ROWS:
        return plan_with_kernel(small_attention.plan_small_step(*options))
    return plan_with_kernel(
        lines.plan_lines(*options) if invariant else attention.plan_attention(*options, frequencies)
    )


def _one_by_one(spans: Sequence[RowSpan], plans: Sequence[AttentionPlan]) -> AttentionPlan:
    """Return a plan that runs attention of each span by that span's own plan, so that no span affects
    another.

    The plan's kernel returns the outputs of all rows, in row order.

    spans: The spans of a frame, in row order.
    plans: The plan of each span alone.
    """
    rows = [span.rows for span in spans]

    def read(q: Tensor, kv_layer: Tensor, **extras: Any) -> Tensor:
        """Return the attention output of every row of the frame, each span's rows by the span's own plan.

        q: [rows, kv_heads, heads_per_kv, head_dim], already scaled.
        kv_layer: [2, pages, kv_heads, page_rows, head_dim], one layer of `KVPages`.
        extras: The sinks, the softcap and the `values_from` of `attend`, if there are any.
        """
        return torch.cat([attend(part, kv_layer, plan, **extras) for part, plan in zip(q.split(rows), plans)])

    return AttentionPlan((), (), None, None, read)


def plan_with_kernel(plan: TreePlan | LinePlan | SmallStepPlan) -> AttentionPlan:
    """Wrap the plan of a GPU kernel as a plan for `attend`.

    plan: The kernel's plan: `LinePlan` for the batch-invariant kernel, `SmallStepPlan` for small steps,
        `TreePlan` for all others.
    """
    from specsot_kernels.gpu import attention, lines, small_attention

    match plan:
        case lines.LinePlan():
            run = partial(lines.attend_lines, plan=plan)
        case small_attention.SmallStepPlan():
            run = partial(small_attention.attend_small, plan=plan)
        case _:
            run = partial(attention.attend, plan=plan)
    return AttentionPlan((), (), None, None, run)


def plan_readings(
    spans: Sequence[RowSpan],
    page_rows: int,
    heads_per_kv: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
    frequencies: Tensor | None = None,
) -> AttentionPlan:
    """Return a plan of attention in torch alone, for any device.

    In the layout "packed", spans are read one by one, except that shared pages are read once. In the layout
    "batched", spans whose pages are consecutive are read as one product, padded to equal row counts. A
    batched product also multiplies KV rows after the end of shorter spans, with weight zero; pages must
    therefore never hold values that are not finite (`KVPages.clear_pages`). AssertionError is raised if a
    query has to be turned and `frequencies` is None.

    spans: One span per segment, in row order.
    page_rows: Rows of a KV page.
    heads_per_kv: Number of query heads per KV head.
    layout: "packed" or "batched".
    dtype: Type of queries and masks.
    device: Device of queries and KV pages.
    frequencies: `Rotary.frequencies`, radians per position of each rotary pair, fp32 [head_dim / 2]; needed
        if a policy hides columns from a span. None: no query is turned.
    """
    arrangement = plan_reads(spans, page_rows, layout)
    first_passes = list[_Pass]()
    merged_passes = list[_Pass]()
    first = 0
    for group in arrangement.groups:
        make = _PassMaker(first, heads_per_kv, dtype, device)
        group_first, group_merged = _passes_of(group, page_rows, make)
        first_passes = first_passes + group_first
        merged_passes = merged_passes + group_merged
        first = first + group.rows
    turns = _query_turns(spans, frequencies)
    source_rows = arrangement.source_rows
    if source_rows is None:
        return AttentionPlan(tuple(first_passes), tuple(merged_passes), None, None, turns=turns)
    arranged_rows = [0] * sum(span.rows for span in spans)
    for row, source in enumerate(source_rows):
        arranged_rows[source] = row
    source_index = _index_tensor(source_rows, device)
    turns = None if turns is None else turns[source_index]
    return AttentionPlan(
        tuple(first_passes),
        tuple(merged_passes),
        source_index,
        _index_tensor(arranged_rows, device),
        turns=turns,
    )


def _query_turns(spans: Sequence[RowSpan], frequencies: Tensor | None) -> Tensor | None:
    """Return the rotations of queries that read sinks, complex64 [rows, head_dim / 2] in frame order.

    Return None if no query is turned, because no span sees sinks at another distance than its own.
    AssertionError is raised if a query is turned and `frequencies` is None.

    spans: The spans of a frame, in row order; their `VisibleColumns.turns` say how far each row's query is
        turned.
    frequencies: Radians per position of each rotary pair, fp32 [head_dim / 2]; None only if no query is
        turned.
    """
    positions_back = [
        turn
        for span in spans
        for turn in (span.sight.turns if isinstance(span.sight, VisibleColumns) else (0,) * span.rows)
    ]
    if not any(positions_back):
        return None
    assert frequencies is not None, (
        "spans with a window policy need the rotary frequencies, by which their queries are turned"
    )
    return turn_back(frequencies, positions_back)


def attend(
    q: Tensor,
    kv_layer: Tensor,
    plan: AttentionPlan,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    values_from: int = 0,
) -> Tensor:
    """Return the attention output of every row, [rows, kv_heads * heads_per_kv * (head_dim - values_from)].

    The result has the type of `q`.

    q: [rows, kv_heads, heads_per_kv, head_dim], already scaled; rows may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], one layer of `KVPages`, keys first. The KV of the
        batch is written already. With one tensor instead of two, rows are keys and values at once.
    plan: The plan of this frame, made by `plan_attention` for the same spans.
    sinks: fp32 [kv_heads, heads_per_kv], one extra score per query head that has no value (as in gpt-oss);
        None: no extra score.
    softcap: Scores become softcap * tanh(score / softcap); None: scores are not capped.
    values_from: Number of first elements that are no part of values; above 0 only where rows are keys and
        values at once.
    """
    if plan.kernel is not None:
        extras: dict[str, Any] = {"values_from": values_from} if values_from else {}
        extras |= {} if sinks is None and softcap is None else {"sinks": sinks, "softcap": softcap}
        return plan.kernel(q, kv_layer, **extras)
    q = q if plan.source_rows is None else q.index_select(0, plan.source_rows)
    turned_q = q if plan.turns is None else _turn_queries(q, plan.turns)
    parts_read = [
        _run_pass(turned_q if read_pass.turned else q, kv_layer, read_pass, softcap)
        for read_pass in plan.first_passes
    ]
    out, lse = parts_read[0] if len(parts_read) == 1 else (torch.cat(parts) for parts in zip(*parts_read))
    if plan.merged_passes:
        out, lse = _merge(q, turned_q, kv_layer, plan.merged_passes, out, lse, softcap)
    # A sink adds exp(sink) to the softmax's denominator exp(lse), so the output shrinks by
    # exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype)
    out = out[..., values_from:].reshape(q.shape[0], -1)
    return out if plan.arranged_rows is None else out.index_select(0, plan.arranged_rows)


def _turn_queries(q: Tensor, turns: Tensor) -> Tensor:
    """Rotate queries by the plan's turns, in fp32 for any dtype; return a new tensor in the dtype of `q`.

    q: [rows, kv_heads, heads_per_kv, head_dim], the arranged rows' queries.
    turns: complex64 [rows, head_dim / 2], `AttentionPlan.turns`.
    """
    pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None, None]).flatten(-2).to(q.dtype)


def _merge(
    q: Tensor,
    turned_q: Tensor,
    kv_layer: Tensor,
    merged_passes: Sequence[_Pass],
    out: Tensor,
    lse: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Merge further reads into `out` and its log-sum-exp `lse`, and return both.

    The merged values are a row's output and log-sum-exp over all of its reads; see the module's formula.
    `out` itself is not changed if it is in fp16 or bf16; an fp32 `out` is changed in place.

    q: [rows, kv_heads, heads_per_kv, head_dim], the arranged queries.
    turned_q: The same queries, turned for reads of sinks.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], keys and values of one layer.
    merged_passes: The reads to merge, each of a slice of the rows.
    out: [rows, kv_heads, heads_per_kv, head_dim], the output of the first reads.
    lse: fp32 [rows, kv_heads, heads_per_kv], the log-sum-exp of the first reads; changed in place if it is
        contiguous.
    softcap: Cap of the scores; None: no cap.
    """
    merged = out.float()
    lse = lse.contiguous()
    for read_pass in merged_passes:
        read_out, read_lse = _run_pass(turned_q if read_pass.turned else q, kv_layer, read_pass, softcap)
        before = lse[read_pass.rows]
        rows = merged[read_pass.rows]
        after = torch.logaddexp(before, read_lse)
        rows.mul_((before - after).exp_().unsqueeze(-1)).add_(
            read_out * (read_lse - after).exp_().unsqueeze(-1)
        )
        before.copy_(after)
    return merged.to(out.dtype), lse


def _run_pass(q: Tensor, kv_layer: Tensor, read_pass: _Pass, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return one read's output [rows, kv_heads, heads_per_kv, head_dim] and log-sum-exp [rows, kv_heads,
    heads_per_kv].

    If a row sees no column of this read, its log-sum-exp is LOWEST, so the read has no weight in a merge.
    int8 pages are dequantized.

    q: [arranged rows, kv_heads, heads_per_kv, head_dim], of which the read uses the rows `read_pass.rows`.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], keys and values of one layer.
    read_pass: The read, with its masks.
    softcap: Cap of the scores; None: no cap.
    """
    reading = read_pass.reading
    (_, kv_heads, heads_per_kv, head_dim) = q.shape
    cells = reading.cells
    rows = reading.rows
    queries = q[read_pass.rows].view(cells, rows, kv_heads, heads_per_kv, head_dim).transpose(1, 2)
    pages = as_numbers(kv_layer[:, reading.page : reading.page + cells, :, : reading.columns], q.dtype)
    out, lse = _softmax(
        queries.reshape(cells, kv_heads, rows * heads_per_kv, head_dim),
        pages[0],
        pages[-1],
        read_pass.mask,
        softcap,
    )
    out = out.view(cells, kv_heads, rows, heads_per_kv, head_dim).transpose(1, 2)
    lse = lse.view(cells, kv_heads, rows, heads_per_kv).transpose(1, 2).reshape(-1, kv_heads, heads_per_kv)
    if read_pass.sees_nothing is not None:
        lse = lse.masked_fill(read_pass.sees_nothing, LOWEST)
    return out.reshape(-1, kv_heads, heads_per_kv, head_dim), lse


def _softmax(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return softmax attention [cells, heads, rows, dim] and its log-sum-exp, fp32 [cells, heads, rows].

    The output of a row that sees no column is finite but otherwise unspecified. On a CPU without softcap,
    PyTorch's flash attention computes both.

    q: [cells, heads, rows, dim], already scaled.
    keys: [cells, heads, columns, dim], the keys of the columns.
    values: [cells, heads, columns, dim], their values.
    mask: Added to the scores, broadcast to [cells, heads, rows, columns]; None: nothing is hidden.
    softcap: Scores become softcap * tanh(score / softcap) before the mask is added; None: no cap.
    """
    if q.device.type == "cpu" and softcap is None:
        return _flash(q, keys, values, 0.0, False, attn_mask=mask, scale=1.0)
    scores = (q @ keys.transpose(-1, -2)).float()
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        # fp16 would round LOWEST to minus infinity, hence the addition in fp32.
        scores += mask.float().clamp_min(LOWEST)
    return torch.softmax(scores, -1).to(q.dtype) @ values, torch.logsumexp(scores, -1)


def _index_tensor(rows: Sequence[int], device: torch.device | str) -> Tensor:
    """Return row numbers as an int64 tensor [rows] on `device`.

    rows: The row numbers.
    device: Where the tensor lies.
    """
    return torch.tensor(rows, dtype=torch.long).to(device)


@dataclass(frozen=True, slots=True)
class _PassMaker:
    """Makes the passes of one group of spans.

    first: Arranged row of the group's first row.
    heads_per_kv: Number of query heads per KV head.
    dtype: Type of masks.
    device: Device of masks.
    """

    first: int
    heads_per_kv: int
    dtype: torch.dtype
    device: torch.device | str

    def __call__(self, reading: PageRead, hidden_mask: Bools | None, turned: bool = False) -> _Pass:
        """Return the pass of one read. Its masks are None if every row sees every column.

        reading: The rows and columns that are read; its rows count from the group's first row.
        hidden_mask: True where a row must not see a column, [rows, columns] or [rows, kv_heads, columns];
            None if rows see all columns.
        turned: True if the queries are turned by `AttentionPlan.turns`, because the sinks of a window are
            read.
        """
        start = self.first + reading.first
        rows = slice(start, start + reading.cells * reading.rows)
        if hidden_mask is None or not hidden_mask.any():
            return _Pass(reading, rows, None, None, turned)
        mask = as_mask(hidden_mask, reading, self.heads_per_kv, self.dtype, self.device)
        return _Pass(reading, rows, mask, blind_rows(hidden_mask, self.device), turned)


def _passes_of(group: ReadGroup, page_rows: int, pass_maker: _PassMaker) -> tuple[list[_Pass], list[_Pass]]:
    """Return (first passes, merged passes) of a group, in the meaning of `AttentionPlan`.

    A group with a policy has a single span. One of its passes is first, and the others are merged.

    group: Spans that are read together. All of them have a policy of the same kind, or none has.
    page_rows: Rows of a KV page.
    pass_maker: Makes a pass from a read and its mask.
    """
    match group.spans[0].sight:
        case VisibleColumns() as sight:
            return _passes_of_window(group, sight, page_rows, pass_maker)
        case HeadColumns() as sight:
            passes = [
                pass_maker(*masked_read)
                for masked_read in read_by_head(group.spans[0], sight, group.readings)
            ]
            return passes[:1], passes[1:]
        case None:
            return _passes_without_policy(group, pass_maker)


def _passes_without_policy(group: ReadGroup, pass_maker: _PassMaker) -> tuple[list[_Pass], list[_Pass]]:
    """Return (first passes, merged passes) of a group from which no policy hides columns.

    The first passes are the reads that begin at column 0. Reads that begin at a later column are merged.

    group: Spans that are read together.
    pass_maker: Makes a pass from a read and its mask.
    """
    group_mask = hidden_columns_of(group)
    passes = [
        pass_maker(reading, hidden_columns(group_mask, group.lead, reading)) for reading in group.readings
    ]
    return [read_pass for read_pass in passes if read_pass.reading.at == 0], [
        read_pass for read_pass in passes if read_pass.reading.at
    ]


def _passes_of_window(
    group: ReadGroup, visible_columns: VisibleColumns, page_rows: int, pass_maker: _PassMaker
) -> tuple[list[_Pass], list[_Pass]]:
    """Return (first passes, merged passes) of a span that sees sinks and recent columns.

    The first read is the first pass; all others are merged. Reads of sinks come first, with turned queries.

    group: A group of a single span.
    visible_columns: Which sinks and which recent columns each row of the span sees.
    page_rows: Rows of a KV page.
    pass_maker: Makes a pass from a read and its mask.
    """
    (span,) = group.spans
    sinks = [
        pass_maker(*masked_read, turned=True) for masked_read in read_sinks(span, visible_columns, page_rows)
    ]
    passes = sinks + [
        pass_maker(*masked_read) for masked_read in read_recent(span, visible_columns, group.readings)
    ]
    return passes[:1], passes[1:]
