"""Attention of a frame's rows over KV pages: one plan a frame, one entry point for every layer.

Each reading (rows over one stretch of a page, read where it lies) is a softmax of its own, and where a
row has several they are merged by log-sum-exp: with o_i and l_i a reading's output and log-sum-exp,
l = log(sum exp l_i) and o = sum exp(l_i - l) o_i. On a GPU with Triton, kernels do the same.
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
from specsot_model.masks import Bools, as_mask, blind_rows, hidden_behind, hidden_columns
from specsot_model.rotary import turn_back

if TYPE_CHECKING:
    from specsot_kernels.cpu.running import ColumnPlan
    from specsot_kernels.gpu.attention import TreePlan
    from specsot_kernels.gpu.lines import LinePlan

__all__ = ["AttentionPlan", "RowSpan", "attend", "plan_attention", "plan_with_kernel"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # the one that tells the log-sum-exp  # noqa: SLF001
LOWEST = -1e30  # of a score: a row without any column stays finite


@dataclass(frozen=True, slots=True)
class _Pass:
    """One reading, ready for every layer.

    rows:  first and last + 1 of the arranged rows.
    mask:  [cells, 1 or kv_heads, rows of a cell * g, columns], minus infinity where a row must not see a
           column; None where every row sees every column.
    blind: [rows, 1 or kv_heads, 1] rows that see nothing here; None where there are none.
    """

    reading: PageRead
    rows: slice
    mask: Tensor | None
    blind: Tensor | None
    turned: bool = False


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What `plan_attention` decided; opaque. Good for one frame.

    opening: passes that open every row, in row order. further: the other passes, which follow.
    take, give: arranged rows as frame rows, and back; None when they are the same.
    kernel: does all of it instead, given queries and a layer.
    turns:  complex64 [rows, head_dim / 2], what queries are turned by where a window's sinks are read.
    columns: which columns rows see, for layers that attend by themselves (`PackedLayers`).
    near: the plan of layers that see a window of it, where there are any.
    spans: what was planned, for layers that read rows in order (`DeltaBlock`).
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
    """Plan one frame's attention, for `attend`: `spans` in row order, pages of `page_rows` rows.

    rates: `Rotary.frequencies`; needed where a policy gives spans a sight. To kernels, both layouts are one.
    kernels: whether they can read the pages; what heads see each for itself they cannot.
    invariant: kernels give a row the same in any company, bit for bit; where they read no sights, too.
    window: each row sees its own position and so many less one before it; None: all.
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
    rows = [span.rows for span in spans]

    def read(q: Tensor, kv_layer: Tensor, **rest: Any) -> Tensor:
        return torch.cat([attend(part, kv_layer, plan, **rest) for part, plan in zip(q.split(rows), plans)])

    return AttentionPlan((), (), None, None, read)


def plan_with_kernel(plan: TreePlan | LinePlan) -> AttentionPlan:
    """What a GPU's kernel planned, for `attend`."""
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
    """The plan that needs torch alone, on any device.

    packed: spans are read one by one, except that shared pages are read once.
    batched: spans whose pages are consecutive are read as one product, padded to equal row counts.
    A batched product also meets rows behind the end of shorter spans, with weight zero: pages must
    never hold what is not finite (KVPages.clear_page).
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
    """`AttentionPlan.turns` of a frame's rows; None where no query is turned."""
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
    """Attention output of every row.

    q:        [rows, kv_heads, g, head_dim], already scaled; rows may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], one layer of KVPages.
    sinks:    fp32 [kv_heads, g], scores without values; softcap: bounds scores, by tanh.
    returns   [rows, kv_heads * g * head_dim].
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
    if sinks is not None:  # the softmax's sum exp(weight) grows by exp(sinks)
        out = out * torch.sigmoid(weight - sinks).unsqueeze(-1).to(out.dtype)
    out = out.reshape(q.shape[0], -1)
    return out if plan.give is None else out.index_select(0, plan.give)


def _turn(q: Tensor, turns: Tensor) -> Tensor:
    """Queries [rows, kv_heads, g, head_dim], turned by `AttentionPlan.turns`; in fp32 whatever the dtype."""
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
    """Take in further readings; `out` and `weight` (log-sum-exp) are of the opening ones, then of all."""
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
    """One reading's output [rows, kv_heads, g, head_dim] and log-sum-exp [rows, kv_heads, g]; where a row
    sees nothing, the latter is so low that what is merged with it outweighs it."""
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
    """Softmax attention of [cells, heads, rows, dim] and its log-sum-exp, fp32 [cells, heads, rows].

    What a row that sees nothing gets is finite, and no more is said of it.
    """
    if q.device.type == "cpu" and softcap is None:
        return _flash(q, keys, values, 0.0, False, attn_mask=mask, scale=1.0)
    scores = (q @ keys.transpose(-1, -2)).float()
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask.float().clamp_min(LOWEST)  # which fp16 would round to infinity
    return torch.softmax(scores, -1).to(q.dtype) @ values, torch.logsumexp(scores, -1)


def _index(rows: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor(rows, dtype=torch.long).to(device)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes passes of readings of one group, whose rows are the arranged ones from `first` on."""

    first: int
    g: int
    dtype: torch.dtype
    device: torch.device | str

    def __call__(self, reading: PageRead, cut: Bools | None, turned: bool = False) -> _Pass:
        """cut: what rows must not see, [rows, columns] or [rows, heads, columns]; None: they see all."""
        start = self.first + reading.first
        rows = slice(start, start + reading.cells * reading.rows)
        if cut is None or not cut.any():
            return _Pass(reading, rows, None, None, turned)
        mask = as_mask(cut, reading, self.g, self.dtype, self.device)
        return _Pass(reading, rows, mask, blind_rows(cut, self.device), turned)


def _see(group: ReadGroup, page_rows: int, make: _Maker) -> tuple[list[_Pass], list[_Pass]]:
    """A group's passes: those that open every row, in row order, and the others."""
    match group.spans[0].sight:
        case VisibleColumns() as sight:
            return _see_window(group, sight, page_rows, make)
        case HeadColumns() as sight:
            passes = [make(*look) for look in read_by_head(group.spans[0], sight, group.readings)]
            return passes[:1], passes[1:]
        case None:
            return _see_all(group, make)


def _see_all(group: ReadGroup, make: _Maker) -> tuple[list[_Pass], list[_Pass]]:
    """The same where no policy hides anything."""
    hidden = hidden_behind(group)
    passes = [make(reading, hidden_columns(hidden, group.lead, reading)) for reading in group.readings]
    return [each for each in passes if each.reading.at == 0], [each for each in passes if each.reading.at]


def _see_window(
    group: ReadGroup, sight: VisibleColumns, page_rows: int, make: _Maker
) -> tuple[list[_Pass], list[_Pass]]:
    """The same for the one span of a window."""
    (span,) = group.spans
    sinks = [make(*look, turned=True) for look in read_sinks(span, sight, page_rows)]
    passes = sinks + [make(*look) for look in read_recent(span, sight, group.readings)]
    return passes[:1], passes[1:]
