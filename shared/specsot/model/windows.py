"""What a policy leaves of a span's columns: the first ones, read by themselves, and what is recent.

Refuses to know tensors and pages' contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specsot.arrange import HeadColumns, VisibleColumns
from specsot.model.segments import PageRead, Span, tail_seen

Bools = NDArray[np.bool_]
MaskedRead = tuple[
    PageRead, Bools
]  # and which columns rows must not see, [rows, columns] or [rows, heads, columns]


def read_sinks(span: Span, sight: VisibleColumns, page_rows: int) -> Iterator[MaskedRead]:
    """Readings of the columns that are sinks to any row; none where there are none."""
    most = max(sight.sinks)
    for at in range(0, most, page_rows):
        columns = np.arange(at, min(at + page_rows, most))
        reading = PageRead(0, span.rows, 1, span.pages[at // page_rows], len(columns), at)
        yield reading, columns >= np.array(sight.sinks)[:, None]


def read_recent(span: Span, sight: VisibleColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Those of a span's readings in which any row sees anything else than sinks."""
    hidden = np.ones((span.rows, span.total), dtype=bool)
    hidden[:, : span.base] = np.arange(span.base) < np.array(sight.since)[:, None]
    hidden[:, span.base :] = ~tail_seen(span)
    for reading in readings:
        cut = hidden[:, reading.at : reading.at + reading.columns]
        if not cut.all():
            yield reading, cut


def read_by_head(span: Span, sight: HeadColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Those of a span's readings in which any head of any row sees anything."""
    rows = np.array(sight.positions)[:, None, None]
    columns = np.concatenate((np.arange(span.base), sight.positions))
    sinks, recent = np.array(sight.windows).T[:, None, :, None]
    hidden = (columns >= sinks) & (columns < rows - recent)  # [rows, heads, columns]
    hidden[:, :, span.base :] |= ~tail_seen(span)[:, None]
    for reading in readings:
        cut = hidden[:, :, reading.at : reading.at + reading.columns]
        if not cut.all():
            yield reading, cut
