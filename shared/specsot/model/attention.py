"""Attention of a frame's rows over KV pages: one plan a frame, one entry point for every layer.

Refuses to know layers, weights and sequences.

Scores of all of a row's page segments lie side by side in one softmax, which is the log-sum-exp merge
of the segments' own softmaxes, in fewer passes. Pages are read where they lie: every product takes a
strided view of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specsot.members import Layout
from specsot.model.segments import Group, Reading, Span, plan_groups

__all__ = ["AttentionPlan", "Span", "attend", "plan_attention"]


@dataclass(frozen=True, slots=True)
class _Mask:
    """Added to scores [cells, kv_heads, rows, g, columns] from column `start` on: [cells, 1, rows, 1, w]."""

    start: int
    values: Tensor


Masks = tuple[_Mask | None, ...]  # of one group's readings, in order


class AttentionPlan:
    """What `plan_attention` decided; opaque. Good for one frame, on one thread: it holds scratch space."""

    __slots__ = ("groups", "masks", "rows", "scratch")

    def __init__(self, groups: tuple[Group, ...], masks: tuple[Masks, ...]) -> None:
        self.groups, self.masks = groups, masks
        self.rows = sum(group.rows for group in groups)
        self.scratch: tuple[_Scratch, ...] = ()


def plan_attention(
    spans: Sequence[Span],
    page_rows: int,
    heads_per_kv: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
) -> AttentionPlan:
    """Plan one frame's attention: `spans` in row order, pages of `page_rows` rows.

    packed: spans are read one by one, except that shared pages are read once.
    batched: spans of equal row counts whose pages are consecutive are also read as one product.
    """
    del heads_per_kv  # the query's own shape says it
    groups = plan_groups(spans, page_rows, layout)
    masks = tuple(tuple(_mask(reading, dtype, device) for reading in group.readings) for group in groups)
    return AttentionPlan(groups, masks)


def attend(q: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention output of every row.

    q:        [rows, kv_heads, g, head_dim], already scaled; rows may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], one layer of KVPages.
    returns   [rows, kv_heads * g * head_dim]; valid until the next call with this plan.
    """
    if len(plan.groups) == 1 and len(plan.groups[0].readings) == 1:
        return _attend_alone(q, kv_layer, plan.groups[0].readings[0], plan.masks[0][0])
    if not plan.scratch:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        plan.scratch = tuple(_Scratch(group, masks, out) for group, masks in zip(plan.groups, plan.masks))
    for group in plan.scratch:
        group.attend(q, kv_layer)
    return plan.scratch[0].out.view(plan.rows, -1)


def _attend_alone(q: Tensor, kv_layer: Tensor, reading: Reading, mask: _Mask | None) -> Tensor:
    """The whole frame is one reading: plain softmax, nothing to put together."""
    rows, kv_heads, g, head_dim = q.shape
    scores = torch.bmm(_queries(q, reading), _keys(kv_layer, reading))
    if mask is not None:
        shaped = scores.view(reading.cells, kv_heads, reading.rows, g, reading.columns)
        shaped[..., mask.start :].add_(mask.values)
    out = torch.bmm(torch.softmax(scores, -1), _values(kv_layer, reading))
    if reading.rows == 1:
        return out.view(rows, -1)
    return out.view(reading.cells, kv_heads, reading.rows, g * head_dim).transpose(1, 2).reshape(rows, -1)


class _Scratch:
    """Scores, weights and sums of one group, laid out once and used again by every layer.

    Columns that a row has no reading for stay at minus infinity in `scores` from the start.
    """

    def __init__(self, group: Group, masks: Masks, out: Tensor) -> None:
        _, kv_heads, g, _ = out.shape
        shape = (group.rows, kv_heads, g, group.width)
        self.out = out
        self.scores = torch.full(shape, -torch.inf, dtype=out.dtype, device=out.device)
        self.weights = torch.empty_like(self.scores)
        self.readings = group.readings
        self.score_views = [_columns(self.scores, group, reading) for reading in group.readings]
        self.weight_views = [_columns(self.weights, group, reading) for reading in group.readings]
        self.out_views = [_cells(out, reading, reading.first) for reading in group.readings]
        self.masked = [
            (view[..., mask.start :], mask.values) if mask is not None else None
            for view, mask in zip(self.score_views, masks)
        ]

    def attend(self, q: Tensor, kv_layer: Tensor) -> None:
        for reading, view, masked in zip(self.readings, self.score_views, self.masked):
            view.copy_(torch.bmm(_queries(q, reading), _keys(kv_layer, reading)).view(view.shape))
            if masked is not None:
                masked[0].add_(masked[1])
        torch.softmax(self.scores, -1, out=self.weights)
        for reading, view, out in zip(self.readings, self.weight_views, self.out_views):
            weights = view.reshape(-1, view.shape[2] * view.shape[3], reading.columns)
            part = torch.bmm(weights, _values(kv_layer, reading)).view(out.shape)
            _ = out.copy_(part) if reading.opens else out.add_(part)


def _columns(whole: Tensor, group: Group, reading: Reading) -> Tensor:
    """A reading's part of [group rows, kv_heads, g, width], as [cells, kv_heads, rows, g, columns]."""
    part = _cells(whole, reading, reading.first - group.first)
    return part[..., reading.at : reading.at + reading.columns]


def _cells(whole: Tensor, reading: Reading, first: int) -> Tensor:
    """A reading's rows of [rows, kv_heads, g, x], as [cells, kv_heads, rows, g, x]."""
    part = whole[first : first + reading.cells * reading.rows]
    return part.unflatten(0, (reading.cells, reading.rows)).transpose(1, 2)


def _queries(q: Tensor, reading: Reading) -> Tensor:
    """A reading's queries, [cells * kv_heads, rows * g, head_dim]; a copy unless rows == 1."""
    rows, kv_heads, g, head_dim = q.shape
    if reading.cells * reading.rows != rows:
        q = q[reading.first : reading.first + reading.cells * reading.rows]
    if reading.rows > 1:
        q = q.view(reading.cells, reading.rows, kv_heads, g, head_dim).transpose(1, 2)
    return q.reshape(reading.cells * kv_heads, reading.rows * g, head_dim)


def _keys(kv_layer: Tensor, reading: Reading) -> Tensor:
    """A view of the pages' keys, transposed: [cells * kv_heads, head_dim, columns]."""
    _, _, kv_heads, page_rows, head_dim = kv_layer.shape
    size, stride = page_rows * head_dim, (page_rows * head_dim, 1, head_dim)
    shape = (reading.cells * kv_heads, head_dim, reading.columns)
    return kv_layer.as_strided(shape, stride, reading.page * kv_heads * size)


def _values(kv_layer: Tensor, reading: Reading) -> Tensor:
    """A view of the pages' values: [cells * kv_heads, columns, head_dim]."""
    _, pages, kv_heads, page_rows, head_dim = kv_layer.shape
    size, stride = page_rows * head_dim, (page_rows * head_dim, head_dim, 1)
    shape = (reading.cells * kv_heads, reading.columns, head_dim)
    return kv_layer.as_strided(shape, stride, (pages + reading.page) * kv_heads * size)


def _mask(reading: Reading, dtype: torch.dtype, device: torch.device | str) -> _Mask | None:
    """Minus infinity where a row must not see a column, from the first such column on."""
    if not reading.spans:
        return None
    start = max(min(span.lead for span in reading.spans) - reading.at, 0)
    hidden = np.ones((reading.cells, reading.rows, reading.columns - start), dtype=bool)
    for cell, span in zip(hidden, reading.spans):
        _reveal(cell, span, reading.at + start)
    values = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
    return _Mask(start, values[:, None, :, None, :].to(device))


def _reveal(hidden: np.ndarray, span: Span, column: int) -> None:
    """Clear hidden[row, c] where `span`'s row sees column `column` + c."""
    hidden[:, : max(span.base - column, 0)] = False
    seen = _tail(span)
    skip = max(column - span.base, 0)
    begin = max(span.base - column, 0)
    width = max(min(span.tail - skip, hidden.shape[1] - begin), 0)
    hidden[:, begin : begin + width] &= ~seen[:, skip : skip + width]


def _tail(span: Span) -> np.ndarray:
    """Which tail positions each row sees: bool [rows, tail]."""
    if span.visible is None:
        return np.tri(span.rows, span.tail, dtype=bool)
    size = -(-span.tail // 8)
    packed = b"".join(bits.to_bytes(size, "little") for bits in span.visible)
    shaped = np.frombuffer(packed, dtype=np.uint8).reshape(span.rows, size)
    return np.unpackbits(shaped, axis=1, count=span.tail, bitorder="little").astype(bool)
