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
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specsot.members import Layout
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
from specsot_model.kv import as_numbers
from specsot_model.masks import Bools, as_mask, blind_rows, hidden_columns, hidden_columns_of
from specsot_model.rotary import turn_back

if TYPE_CHECKING:
    from specsot_kernels.cpu.running import ColumnPlan
    from specsot_kernels.gpu.attention import TreePlan
    from specsot_kernels.gpu.lines import LinePlan

__all__ = ["AttentionPlan", "RowSpan", "attend", "plan_attention", "plan_with_kernel"]

# The CPU's flash attention is the operator that returns the log-sum-exp as well.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
# Score. Stands for minus infinity, so that a row that sees no column stays finite.
LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class _Pass:
    """One read, ready for every layer. g is the number of query heads per KV head.

    reading: Which pages and columns are read.
    rows: Slice of the arranged rows that read.
    mask: [cells, 1 or kv_heads, rows of a cell * g, columns], minus infinity where a row must not see a
        column; None if every row sees every column.
    blind: [rows, 1 or kv_heads, 1], true for rows that see no column of this read; None if there are none.
    turned: The queries are turned by `AttentionPlan.turns`, because the sinks of a window are read.
    """

    reading: PageRead
    rows: slice
    mask: Tensor | None
    blind: Tensor | None
    turned: bool = False


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The result of `plan_attention`, valid for one frame. Callers treat it as opaque.

    opening: Reads that cover every row exactly once, in row order; their outputs are concatenated.
    further: All other reads; each is merged into the rows that it covers.
    take: Frame row of each arranged row; None if rows are not rearranged.
    give: Arranged row of each frame row, the inverse of `take`; None if rows are not rearranged.
    kernel: A kernel that does all of the attention instead, given queries and one layer's KV.
    turns: complex64 [rows, head_dim / 2], the rotation of queries that read the sinks of a window; None if
        no query is turned.
    columns: The visible columns, for layers that run attention inside their own kernel (`PackedLayers`).
    near: The plan of sliding-window layers, if it differs from this one.
    spans: The spans that were planned, for layers that read tokens in order (`DeltaBlock`).
    """

    opening: tuple[_Pass, ...]
    further: tuple[_Pass, ...]
    take: Tensor | None
    give: Tensor | None
    kernel: Callable[..., Tensor] | None = None
    turns: Tensor | None = None
    columns: ColumnPlan | None = None
    near: AttentionPlan | None = None
    spans: tuple[RowSpan, ...] = ()


def plan_attention(
    spans: Sequence[RowSpan],
    page_rows: int,
    heads_per_kv: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
    rates: Tensor | None = None,
    kernels: bool = True,
    invariant: bool = False,
    window: int | None = None,
) -> AttentionPlan:
    """Plan one frame's attention, for `attend`.

    spans: One span per segment, in row order.
    page_rows: Rows of a KV page.
    heads_per_kv: Number of query heads per KV head.
    layout: See `plan_readings`; GPU kernels treat both layouts alike.
    dtype: Type of queries and masks.
    rates: `Rotary.frequencies`; needed if a policy hides columns from a span.
    kernels: Whether the GPU kernels can read the pages. They cannot run spans whose KV heads see different
        columns (`HeadColumns`); such frames are planned in torch.
    invariant: The output of a row does not depend on the rest of the batch, bit for bit. Spans that a policy
        limits are then planned one by one in torch.
    window: A row sees its own position and the window - 1 positions before; None: all positions.
    """
    unread = any(span.sight and (invariant or isinstance(span.sight, HeadColumns)) for span in spans)
    if invariant and unread and len(spans) > 1:
        given = page_rows, heads_per_kv, layout, dtype, device, rates, kernels, invariant, window
        return _one_by_one(spans, [plan_attention([span], *given) for span in spans])
    if unread or not kernels or torch.device(device).type != "cuda" or find_spec("triton") is None:
        if window is not None:
            spans = [part for span in spans for part in look_back(span, window, drafts=False)]
        return plan_readings(spans, page_rows, heads_per_kv, layout, dtype, device, rates)
    from specsot_kernels.gpu import attention, lines

    given = spans, page_rows, heads_per_kv, device, window
    return plan_with_kernel(
        lines.plan_lines(*given) if invariant else attention.plan_attention(*given, rates)
    )


def _one_by_one(spans: Sequence[RowSpan], plans: Sequence[AttentionPlan]) -> AttentionPlan:
    """Return the plan that attends to each span by its own plan, so that no span affects another."""
    rows = [span.rows for span in spans]

    def read(q: Tensor, kv_layer: Tensor, **rest: Any) -> Tensor:
        return torch.cat([attend(part, kv_layer, plan, **rest) for part, plan in zip(q.split(rows), plans)])

    return AttentionPlan((), (), None, None, read)


def plan_with_kernel(plan: TreePlan | LinePlan) -> AttentionPlan:
    """Wrap the plan of a GPU kernel, for `attend`."""
    from specsot_kernels.gpu import attention, lines

    kernel = lines.attend_lines if isinstance(plan, lines.LinePlan) else attention.attend
    return AttentionPlan((), (), None, None, partial(kernel, plan=plan))


def plan_readings(
    spans: Sequence[RowSpan],
    page_rows: int,
    heads_per_kv: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
    rates: Tensor | None = None,
) -> AttentionPlan:
    """Plan attention in torch alone, for any device.

    In the layout "packed", spans are read one by one, except that shared pages are read once. In the layout
    "batched", spans whose pages are consecutive are read as one product, padded to equal row counts. A
    batched product also multiplies KV rows after the end of shorter spans, with weight zero; pages must
    therefore never hold values that are not finite (`KVPages.clear_page`).
    """
    arrangement = plan_reads(spans, page_rows, layout)
    opening = list[_Pass]()
    further = list[_Pass]()
    first = 0
    for group in arrangement.groups:
        make = _Maker(first, heads_per_kv, dtype, device)
        opens, follows = _see(group, page_rows, make)
        opening = opening + opens
        further = further + follows
        first = first + group.rows
    turns = _turns(spans, rates)
    take = arrangement.take
    if take is None:
        return AttentionPlan(tuple(opening), tuple(further), None, None, turns=turns)
    give = [0] * sum(span.rows for span in spans)
    for row, source in enumerate(take):
        give[source] = row
    taken = _index(take, device)
    turns = None if turns is None else turns[taken]
    return AttentionPlan(tuple(opening), tuple(further), taken, _index(give, device), turns=turns)


def _turns(spans: Sequence[RowSpan], rates: Tensor | None) -> Tensor | None:
    """Return `AttentionPlan.turns` in frame order, or None if no query is turned."""
    steps = [
        n
        for span in spans
        for n in (span.sight.turns if isinstance(span.sight, VisibleColumns) else (0,) * span.rows)
    ]
    if not any(steps):
        return None
    assert rates is not None, "spans that look through a window need what turns their queries"
    return turn_back(rates, steps)


def attend(
    q: Tensor,
    kv_layer: Tensor,
    plan: AttentionPlan,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention output of every row, [rows, kv_heads * g * head_dim].

    q: [rows, kv_heads, g, head_dim], already scaled; rows may be strided. g is the number of query heads per
        KV head.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], one layer of `KVPages`. The KV of the batch is
        written already.
    sinks: fp32 [kv_heads, g], one extra score per query head that has no value (as in gpt-oss); None: none.
    softcap: Scores become softcap * tanh(score / softcap); None: scores are not capped.
    """
    if plan.kernel is not None:
        given = {} if sinks is None and softcap is None else {"sinks": sinks, "softcap": softcap}
        return plan.kernel(q, kv_layer, **given)
    q = q if plan.take is None else q.index_select(0, plan.take)
    near = q if plan.turns is None else _turn(q, plan.turns)
    read = [_read(near if each.turned else q, kv_layer, each, softcap) for each in plan.opening]
    out, weight = read[0] if len(read) == 1 else (torch.cat(parts) for parts in zip(*read))
    if plan.further:
        out, weight = _merge(q, near, kv_layer, plan.further, out, weight, softcap)
    # A sink adds exp(sink) to the softmax's denominator exp(weight), so the output shrinks by
    # exp(weight) / (exp(weight) + exp(sink)) = sigmoid(weight - sink).
    if sinks is not None:
        out = out * torch.sigmoid(weight - sinks).unsqueeze(-1).to(out.dtype)
    out = out.reshape(q.shape[0], -1)
    return out if plan.give is None else out.index_select(0, plan.give)


def _turn(q: Tensor, turns: Tensor) -> Tensor:
    """Rotate queries [rows, kv_heads, g, head_dim] by `AttentionPlan.turns`, in fp32 for any dtype."""
    pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None, None]).flatten(-2).to(q.dtype)


def _merge(
    q: Tensor,
    near: Tensor,
    kv_layer: Tensor,
    passes: Sequence[_Pass],
    out: Tensor,
    weight: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Merge further reads into `out` and its log-sum-exp `weight`, and return both.

    q, near: Queries as they are, and turned for reads of sinks.

    The merged values are a row's output and log-sum-exp over all of its reads; see the module's formula.
    """
    whole = out.float()
    weight = weight.contiguous()
    for each in passes:
        part, seen = _read(near if each.turned else q, kv_layer, each, softcap)
        before = weight[each.rows]
        rows = whole[each.rows]
        after = torch.logaddexp(before, seen)
        rows.mul_((before - after).exp_().unsqueeze(-1)).add_(part * (seen - after).exp_().unsqueeze(-1))
        before.copy_(after)
    return whole.to(out.dtype), weight


def _read(q: Tensor, kv_layer: Tensor, each: _Pass, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return one read's output [rows, kv_heads, g, head_dim] and log-sum-exp [rows, kv_heads, g].

    If a row sees no column of this read, its log-sum-exp is LOWEST, so the read has no weight in a merge.
    """
    reading = each.reading
    (_, kv_heads, g, head_dim) = q.shape
    cells = reading.cells
    rows = reading.rows
    queries = q[each.rows].view(cells, rows, kv_heads, g, head_dim).transpose(1, 2)
    pages = as_numbers(kv_layer[:, reading.page : reading.page + cells, :, : reading.columns], q.dtype)
    out, weight = _softmax(
        queries.reshape(cells, kv_heads, rows * g, head_dim), pages[0], pages[1], each.mask, softcap
    )
    out = out.view(cells, kv_heads, rows, g, head_dim).transpose(1, 2)
    weight = weight.view(cells, kv_heads, rows, g).transpose(1, 2).reshape(-1, kv_heads, g)
    if each.blind is not None:
        weight = weight.masked_fill(each.blind, LOWEST)
    return out.reshape(-1, kv_heads, g, head_dim), weight


def _softmax(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return softmax attention [cells, heads, rows, dim] and its log-sum-exp, fp32 [cells, heads, rows].

    The output of a row that sees no column is finite but otherwise unspecified.
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


def _index(rows: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor(rows, dtype=torch.long).to(device)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the passes of one group of spans.

    first: Arranged row of the group's first row.
    g: Number of query heads per KV head.
    dtype: Type of masks.
    device: Device of masks.
    """

    first: int
    g: int
    dtype: torch.dtype
    device: torch.device | str

    def __call__(self, reading: PageRead, cut: Bools | None, turned: bool = False) -> _Pass:
        """Make the pass of one read.

        cut: True where a row must not see a column, [rows, columns] or [rows, kv_heads, columns]; None if
            rows see all columns.
        """
        start = self.first + reading.first
        rows = slice(start, start + reading.cells * reading.rows)
        if cut is None or not cut.any():
            return _Pass(reading, rows, None, None, turned)
        mask = as_mask(cut, reading, self.g, self.dtype, self.device)
        return _Pass(reading, rows, mask, blind_rows(cut, self.device), turned)


def _see(group: ReadGroup, page_rows: int, make: _Maker) -> tuple[list[_Pass], list[_Pass]]:
    """Return the `opening` and the `further` passes of a group; see `AttentionPlan`."""
    match group.spans[0].sight:
        case VisibleColumns() as sight:
            return _see_window(group, sight, page_rows, make)
        case HeadColumns() as sight:
            passes = [make(*look) for look in read_by_head(group.spans[0], sight, group.readings)]
            return passes[:1], passes[1:]
        case None:
            return _see_all(group, make)


def _see_all(group: ReadGroup, make: _Maker) -> tuple[list[_Pass], list[_Pass]]:
    """Return the passes of a group from which no policy hides columns."""
    hidden = hidden_columns_of(group)
    passes = [make(reading, hidden_columns(hidden, group.lead, reading)) for reading in group.readings]
    return [each for each in passes if each.reading.at == 0], [each for each in passes if each.reading.at]


def _see_window(
    group: ReadGroup, sight: VisibleColumns, page_rows: int, make: _Maker
) -> tuple[list[_Pass], list[_Pass]]:
    """Return the passes of a span that sees sinks and recent columns; such a group has a single span."""
    (span,) = group.spans
    sinks = [make(*look, turned=True) for look in read_sinks(span, sight, page_rows)]
    passes = sinks + [make(*look) for look in read_recent(span, sight, group.readings)]
    return passes[:1], passes[1:]
