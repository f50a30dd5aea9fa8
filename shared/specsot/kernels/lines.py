"""Which slots each row of a frame reads, in the order of its text: what batch-invariant attention works off.

Refuses to know heads, tensors, and who owns the sequences. A row's line is all it sees, from its text's first
token to itself; a node of a draft has those above it where plain decoding has its committed tokens. Lines are
cut at multiples of `STEP`, so how a row's sums are grouped follows from its own line alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specsot.kernels.stretches import AttentionTables, Numbers, TableSpan, merges_of, numbers

PIECE_COLUMNS = 512  # columns of a piece, always


class RowLine(NamedTuple):
    """Rows first .. first + rows - 1 read these slots, which are columns at, at + 1, ... of their lines, each
    as far as its own goes.
    """

    first: int
    rows: int
    at: int
    slots: Numbers


def tabulate_lines(spans: Sequence[TableSpan], page_rows: int, tile_rows: int) -> AttentionTables:
    """The work of one frame, as `stretches.tabulate` has it; but `pages` are slots, one for every column, and
    a row sees the columns before its lead, nothing else.
    """
    leads = [length for span in spans for length in _lengths(span)]
    pieces: list[tuple[int, ...]] = []
    slots: list[Numbers] = []
    owners: list[range] = []
    used = held = 0
    for first, rows, at, line in _lines(spans, page_rows):
        for top in range(first, first + rows, tile_rows):
            high = min(tile_rows, first + rows - top)
            stop = min(max(leads[top : top + high]) - at, len(line))
            for left in range(0, stop, PIECE_COLUMNS):
                pieces.append((top, high, held + left, min(PIECE_COLUMNS, stop - left), at + left, 0, used))
                owners.append(range(top, top + high))
                used += high
        slots.append(line)
        held += len(line)
    nothing = np.zeros(len(leads), np.int32)
    sights = numbers(leads), nothing, nothing.reshape(-1, 1)
    return AttentionTables(numbers(pieces), np.concatenate(slots), *sights, *merges_of(owners, len(leads)))


def _lengths(span: TableSpan) -> list[int]:
    """Of each row's line."""
    if span.visible is None:
        return [span.base + row + 1 for row in range(span.rows)]
    return [span.base + seen.bit_count() for seen in span.visible]


def _lines(spans: Sequence[TableSpan], page_rows: int) -> Iterator[RowLine]:
    """Rows in a row read one line together; of a tree, what is before the last cut, and each its own rest."""
    first = 0
    for span in spans:
        slots = (numbers(span.pages)[:, None] * page_rows + np.arange(page_rows, dtype=np.int32)).reshape(-1)
        if span.visible is None:
            yield RowLine(first, span.rows, 0, slots[: span.base + span.tail])
        else:
            whole = span.base // PIECE_COLUMNS * PIECE_COLUMNS
            yield RowLine(first, span.rows, 0, slots[:whole])
            for row, seen in enumerate(span.visible, first):
                own = slots[span.base :][_places(seen)]
                yield RowLine(row, 1, whole, np.concatenate((slots[whole : span.base], own)))
        first += span.rows


def _places(bits: int) -> Numbers:
    """Of the bits that are set, ascending."""
    packed = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")).astype(np.int32)
