"""What a policy leaves of a span's columns: the first ones, read by themselves, and what is recent.

Refuses to know tensors and pages' contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specsot.arrange import HeadSight, Sight
from specsot.model.segments import Reading, Span, tail_seen

Bools = NDArray[np.bool_]
Look = tuple[Reading, Bools]  # and which columns rows must not see, [rows, columns] or [rows, heads, columns]


def look_at_sinks(span: Span, sight: Sight, page_rows: int) -> Iterator[Look]:
    """Readings of the columns that are sinks to any row; none where there are none."""
    most = max(sight.sinks)
    for at in range(0, most, page_rows):
        columns = np.arange(at, min(at + page_rows, most))
        reading = Reading(0, span.rows, 1, span.pages[at // page_rows], len(columns), at)
        yield reading, columns >= np.array(sight.sinks)[:, None]


def look_at_recent(span: Span, sight: Sight, readings: Sequence[Reading]) -> Iterator[Look]:
    """Those of a span's readings in which any row sees anything else than sinks."""
    hidden = np.ones((span.rows, span.total), dtype=bool)
    hidden[:, : span.base] = np.arange(span.base) < np.array(sight.since)[:, None]
    hidden[:, span.base :] = ~tail_seen(span)
    for reading in readings:
        cut = hidden[:, reading.at : reading.at + reading.columns]
        if not cut.all():
            yield reading, cut


def look_by_head(span: Span, sight: HeadSight, readings: Sequence[Reading]) -> Iterator[Look]:
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
