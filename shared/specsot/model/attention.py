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
from specsot.model.segments import Group, Reading, Span, arrange

__all__ = ["AttentionPlan", "Span", "attend", "plan_attention"]


@dataclass(slots=True)
class _Work:
    """One group and what its layers share.

    rows:  first and last + 1 of the arranged rows.
    mask:  [rows, width - lead], minus infinity where a row must not see a column from group.lead on;
           None where every row sees every column.
    """

    group: Group
    uniform: bool
    rows: tuple[int, int]
    mask: Tensor | None
    scratch: _Scratch | None = None


@dataclass(slots=True)
class AttentionPlan:
    """What `plan_attention` decided; opaque. Good for one frame, on one thread: it holds scratch space.

    take, give: arranged rows as frame rows, and back; None when they are the same.
    """

    works: list[_Work]
    take: Tensor | None
    give: Tensor | None


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
    batched: spans whose pages are consecutive are read as one product, padded to equal row counts.
    A batched product also meets rows behind the end of shorter spans, with weight zero: pages must
    never hold what is not finite (KVPages.clear_page).
    """
    del heads_per_kv  # the query's own shape says it
    arrangement = arrange(spans, page_rows, layout)
    works: list[_Work] = []
    first = 0
    for group, mask in zip(arrangement.groups, _masks(arrangement.groups, dtype, device)):
        works.append(_Work(group, group.uniform, (first, first + group.rows), mask))
        first += group.rows
    if arrangement.take is None:
        return AttentionPlan(works, None, None)
    give = [0] * sum(span.rows for span in spans)
    for row, source in enumerate(arrangement.take):
        give[source] = row
    return AttentionPlan(works, _index(arrangement.take, device), _index(give, device))


def attend(q: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention output of every row.

    q:        [rows, kv_heads, g, head_dim], already scaled; rows may be strided.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], one layer of KVPages.
    returns   [rows, kv_heads * g * head_dim]; valid until the next call with this plan.
    """
    if plan.take is not None:
        q = q.index_select(0, plan.take)
    if len(plan.works) == 1:
        out = _attend_group(q, kv_layer, plan.works[0])
    else:
        out = torch.cat([_attend_group(q[slice(*work.rows)], kv_layer, work) for work in plan.works])
    return out if plan.give is None else out.index_select(0, plan.give)


def _attend_group(q: Tensor, kv_layer: Tensor, work: _Work) -> Tensor:
    if work.uniform:
        return _attend_uniform(q, kv_layer, work)
    if work.scratch is None:
        work.scratch = _Scratch(work.group, work.mask, q)
    return work.scratch.attend(q, kv_layer)


def _attend_uniform(q: Tensor, kv_layer: Tensor, work: _Work) -> Tensor:
    """All readings are of the same rows: their scores are simply laid side by side."""
    readings, mask = work.group.readings, work.mask
    rows, kv_heads, g, head_dim = q.shape
    cells, each = readings[0].cells, readings[0].rows
    queries = _queries(q, cells, each)
    parts = [_score(queries, kv_layer, reading) for reading in readings]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    if mask is not None:
        shaped = scores.view(cells, kv_heads, each, g, -1)
        shaped[..., work.group.lead :].add_(mask.view(cells, 1, each, 1, -1))
    out = _weigh(torch.softmax(scores, -1), kv_layer, readings)
    if each == 1:
        return out.view(rows, -1)
    return out.view(cells, kv_heads, each, g * head_dim).transpose(1, 2).reshape(rows, -1)


def _weigh(weights: Tensor, kv_layer: Tensor, readings: tuple[Reading, ...]) -> Tensor:
    """Weights [cells * kv_heads, rows * g, width] times the values of every reading."""
    if len(readings) == 1:
        return torch.bmm(weights, _values(kv_layer, readings[0]))
    out: Tensor | None = None
    for reading in readings:
        part, values = weights.narrow(-1, reading.at, reading.columns), _values(kv_layer, reading)
        out = torch.bmm(part, values) if out is None else out.baddbmm_(part, values)
    assert out is not None
    return out


class _Scratch:
    """Scores, weights and sums of one group, laid out once and used again by every layer.

    Heads lie outside rows, so that readings of one cell (shared pages) need no copy. Columns behind a
    row's end have no reading; they start as zero and the mask hides them.
    """

    def __init__(self, group: Group, mask: Tensor | None, q: Tensor) -> None:
        rows, kv_heads, g, _ = q.shape
        self._readings = group.readings
        self._scores = q.new_zeros((kv_heads, rows, g, group.width))
        self._weights = torch.empty_like(self._scores)
        self._out = q.new_empty(q.shape)
        self._hidden = self._scores[..., group.lead :]
        self._mask = None if mask is None else mask[:, None, :]
        out = self._out.transpose(0, 1)
        self._score_views = [_columns(self._scores, reading) for reading in group.readings]
        self._weight_views = [_columns(self._weights, reading) for reading in group.readings]
        self._out_views = [_cells(out, reading) for reading in group.readings]

    def attend(self, q: Tensor, kv_layer: Tensor) -> Tensor:
        for reading, view in zip(self._readings, self._score_views):
            rows = q.narrow(0, reading.first, reading.cells * reading.rows)
            queries = _queries(rows, reading.cells, reading.rows)
            if reading.cells == 1:
                out = view.view(view.shape[1], -1, reading.columns)
                torch.bmm(queries, _keys(kv_layer, reading), out=out)
            else:
                view.copy_(_score(queries, kv_layer, reading).view(view.shape))
        if self._mask is not None:
            self._hidden.add_(self._mask)
        torch.softmax(self._scores, -1, out=self._weights)
        for reading, view, out in zip(self._readings, self._weight_views, self._out_views):
            weights = view.reshape(-1, view.shape[2] * view.shape[3], reading.columns)
            part = torch.bmm(weights, _values(kv_layer, reading)).view(out.shape)
            _ = out.add_(part) if reading.at else out.copy_(part)  # column 0 opens every row
        return self._out.view(q.shape[0], -1)


def _columns(whole: Tensor, reading: Reading) -> Tensor:
    """A reading's part of [kv_heads, rows, g, width], as [cells, kv_heads, rows, g, columns]."""
    return _cells(whole, reading).narrow(-1, reading.at, reading.columns)


def _cells(whole: Tensor, reading: Reading) -> Tensor:
    """A reading's rows of [kv_heads, rows, g, x], as [cells, kv_heads, rows, g, x]."""
    part = whole.narrow(1, reading.first, reading.cells * reading.rows)
    return part.unflatten(1, (reading.cells, reading.rows)).transpose(0, 1)


def _queries(q: Tensor, cells: int, each: int) -> Tensor:
    """Queries [cells * each, kv_heads, g, head_dim] as [cells * kv_heads, each * g, head_dim]."""
    _, kv_heads, g, head_dim = q.shape
    if each > 1:
        q = q.view(cells, each, kv_heads, g, head_dim).transpose(1, 2)
    return q.reshape(cells * kv_heads, each * g, head_dim)


def _score(queries: Tensor, kv_layer: Tensor, reading: Reading) -> Tensor:
    """Scores [cells * kv_heads, rows * g, columns] of a reading."""
    keys = _keys(kv_layer, reading)
    if queries.is_cuda or queries.dtype == torch.float32:
        return torch.bmm(queries, keys)
    # On the CPU 16-bit products are oneDNN's, which is up to three times faster with the long side left.
    return torch.bmm(keys.transpose(1, 2), queries.transpose(1, 2)).transpose(1, 2).contiguous()


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


def _index(rows: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor(rows, dtype=torch.long).to(device)


def _masks(groups: Sequence[Group], dtype: torch.dtype, device: torch.device | str) -> list[Tensor | None]:
    """Each group's mask; all of them travel to the device as one tensor."""
    masks = [_mask(group) for group in groups]
    given = [mask for mask in masks if mask is not None]
    if not given:
        return [None] * len(masks)
    flat = np.concatenate([mask.ravel() for mask in given]) if len(given) > 1 else given[0].ravel()
    pieces = iter(torch.from_numpy(flat).to(device=device, dtype=dtype).split([mask.size for mask in given]))
    return [None if mask is None else next(pieces).view(mask.shape) for mask in masks]


def _mask(group: Group) -> np.ndarray | None:
    """[rows, width - lead] fp32: minus infinity where a row must not see column lead + c, else 0."""
    lead, width = group.lead, group.width
    if lead == width:
        return None
    mask = np.full((group.rows, width - lead), -np.inf, dtype=np.float32)
    first = 0
    for span in group.spans:
        rows = mask[first : first + span.rows]
        first += span.rows
        rows[:, : span.lead - lead] = 0
        if span.lead < span.total:
            rows[:, span.lead - lead : span.total - lead][_tail(span)[:, span.lead - span.base :]] = 0
    return mask


def _tail(span: Span) -> np.ndarray:
    """Which tail positions each row sees: bool [rows, tail]."""
    if span.visible is None:
        return np.tri(span.rows, span.tail, dtype=bool)
    size = -(-span.tail // 8)
    packed = b"".join(bits.to_bytes(size, "little") for bits in span.visible)
    shaped = np.frombuffer(packed, dtype=np.uint8).reshape(span.rows, size)
    return np.unpackbits(shaped, axis=1, count=span.tail, bitorder="little").view(bool)
