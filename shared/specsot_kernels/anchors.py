"""Tabulates which columns a KV policy leaves visible to rows, as additions to `attention_tables`.

Pure NumPy. *Anchors* are first columns of a sequence that rows see in addition to the recent ones: the sinks
of a window policy, or what pruning left. Anchors are read as pieces of their own, with the query rotated to a
position closer to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from specsot_kernels.attention_tables import Numbers, PageRun, numbers, sinces_of
from specsot_kernels.segments import RowSpan, VisibleColumns


class PolicySights(NamedTuple):
    """What a policy leaves visible to every row, [rows] each.

    sinces: the first of the columns that the row sees without the policy's rotation.
    anchors: the row sees so many of the first columns as anchors.
    turns: by how many positions the query is rotated towards the anchors.
    """

    sinces: Numbers
    anchors: Numbers
    turns: Numbers


def policy_sights(spans: Sequence[RowSpan], window: int | None) -> PolicySights:
    """Return what a policy leaves visible to every row, in row order. Rows without a policy have no anchors
    and no rotation.

    window: the layer's sliding window, as in `sinces_of`, or None; the narrower of window and policy applies.
    spans: one span per segment of the frame, in row order.
    """
    sights = [(sight, (0,) * span.rows) for span in spans for sight in (visible_of(span),)]
    sinces = numbers([since for sight, zeros in sights for since in (sight.since if sight else zeros)])
    anchors = numbers([count for sight, zeros in sights for count in (sight.sinks if sight else zeros)])
    turns = numbers([turn for sight, zeros in sights for turn in (sight.turns if sight else zeros)])
    return PolicySights(
        sinces if window is None else np.maximum(sinces, sinces_of(spans, window)), anchors, turns
    )


def anchor_runs(spans: Sequence[RowSpan], page_rows: int) -> Iterator[PageRun]:
    """Yield the page runs of anchor columns; nothing if no row has anchors. Neighbouring spans with the same
    anchor pages form one run.

    spans: one span per segment of the frame, in row order.
    page_rows: columns (rows) of a KV page.
    """
    first = 0
    for (columns, pages), group in groupby(spans, lambda span: _anchor_pages(span, page_rows)):
        rows = sum(span.rows for span in group)
        if columns:
            yield PageRun(first, rows, 0, columns, pages)
        first += rows


def _anchor_pages(span: RowSpan, page_rows: int) -> tuple[int, tuple[int, ...]]:
    """Return how many of the span's columns are anchors to any row, and the pages that hold these columns.

    span: the rows of one sequence in the frame.
    page_rows: columns (rows) of a KV page.
    """
    columns = num_anchors(span)
    return columns, span.pages[: -(-columns // page_rows)]


def num_anchors(span: RowSpan) -> int:
    """Return how many columns are anchors to at least one of the span's rows; 0 without a policy.

    span: the rows of one sequence in the frame.
    """
    sight = visible_of(span)
    return max(sight.sinks) if sight else 0


def first_unrotated_column(span: RowSpan) -> int:
    """Return the first column that any of the span's rows sees without rotation; 0 without a policy.

    span: the rows of one sequence in the frame.
    """
    sight = visible_of(span)
    return min(sight.since) if sight else 0


def visible_of(span: RowSpan) -> VisibleColumns | None:
    """Return the columns that a policy leaves visible to the span, or None if there is no policy that the GPU
    kernels read.

    span: the rows of one sequence in the frame.
    """
    return span.sight if isinstance(span.sight, VisibleColumns) else None
