"""What a policy leaves rows of the columns before them, as tables of numbers beside `attention_tables`.

Pure. Anchors are first columns that rows see besides what is recent: a window's sinks, or what pruning left.
They are pieces of their own, which the query turns to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from specsot_kernels.attention_tables import Numbers, PageStretch, numbers, sinces_of
from specsot_kernels.segments import RowSpan, VisibleColumns


class PolicySights(NamedTuple):
    """Of every row, [rows].

    sinces:  the first column that it sees as it does without a policy.
    anchors: of the first columns it sees so many, too, as it would from a position nearer by `turns`.
    """

    sinces: Numbers
    anchors: Numbers
    turns: Numbers


def policy_sights(spans: Sequence[RowSpan], window: int | None) -> PolicySights:
    """Of all rows, in row order. window: of the layer, as `sinces_of` has it."""
    each = [(sight, (0,) * span.rows) for span in spans for sight in (visible_of(span),)]
    sinces = numbers([since for sight, none in each for since in (sight.since if sight else none)])
    anchors = numbers([count for sight, none in each for count in (sight.sinks if sight else none)])
    turns = numbers([turn for sight, none in each for turn in (sight.turns if sight else none)])
    return PolicySights(
        sinces if window is None else np.maximum(sinces, sinces_of(spans, window)), anchors, turns
    )


def anchored_of(spans: Sequence[RowSpan], page_rows: int) -> Iterator[PageStretch]:
    """The columns that are anchors to any row; neighbours on the same pages read them at once."""
    first = 0
    for (columns, pages), group in groupby(spans, lambda span: _anchoring(span, page_rows)):
        rows = sum(span.rows for span in group)
        if columns:
            yield PageStretch(first, rows, 0, columns, pages)
        first += rows


def _anchoring(span: RowSpan, page_rows: int) -> tuple[int, tuple[int, ...]]:
    """How many of its columns are anchors, and the pages that hold them."""
    columns = anchors_in(span)
    return columns, span.pages[: -(-columns // page_rows)]


def anchors_in(span: RowSpan) -> int:
    """To any of its rows."""
    sight = visible_of(span)
    return max(sight.sinks) if sight else 0


def first_of(span: RowSpan) -> int:
    """The first column that any of its rows sees as it does without a policy."""
    sight = visible_of(span)
    return min(sight.since) if sight else 0


def visible_of(span: RowSpan) -> VisibleColumns | None:
    """What a policy leaves, where kernels read that."""
    return span.sight if isinstance(span.sight, VisibleColumns) else None
