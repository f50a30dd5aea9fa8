"""Batch-invariant attention of a frame as tables of numbers: rows read their lines, cut at the same places.

Pure. A row's line are the columns that it sees, in the order of its text: a tree's node reads its ancestors
where plain decoding has committed tokens. A line is cut into pieces of PIECE_COLUMNS; rows read whole blocks
of it together (as far as all of them see the same), and each by itself what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specsot_kernels.attention_tables import (
    QUERIES,
    WORD,
    Ints,
    Numbers,
    RowSights,
    TableRoom,
    TableSpan,
    grown,
    numbers,
    sights_of,
)

PIECE_COLUMNS = 512  # whatever the frame; no measurement recorded
BLOCK = 64  # columns: what rows of a tree read together is a multiple of it


class LineCut(NamedTuple):
    """Who reads what; slots are numbered through, for each row one for each PIECE_COLUMNS of its line.

    pieces: [pieces, 5] first row, rows, where their text's pages begin in `pages`, first column, last + 1.
    starts: [rows] first slot of each row.
    wheres: [rows] where its text's pages begin in `pages`.
    pages:  page numbers of all texts.
    slots:  how many.
    """

    pieces: Numbers
    starts: Numbers
    wheres: Numbers
    pages: Numbers
    slots: int

    def beside(self, sights: RowSights) -> tuple[Numbers, ...]:
        """Tables in the order of `LineRoom.shapes`."""
        return self.pieces, *sights, self.starts, self.wheres, self.pages


@dataclass(frozen=True, slots=True)
class LineRoom(TableRoom):
    """The same of batch-invariant tables, in another order behind the bits: starts, wheres, pages."""

    @property
    def pieces(self) -> int:
        """Enough for one text of 128k columns, or for any number of 8k each."""
        return 256 + 16 * self.rows

    @property
    def slots(self) -> int:
        return max(4096, 16 * self.rows)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        rows = (self.rows,)
        return (self.pieces, 5), rows, rows, (self.rows, self.rows // WORD + 1), rows, rows, (self.pages,)

    def fill_lines(self, cut: LineCut) -> list[Numbers] | None:
        """Pieces, starts, wheres and pages in these shapes, pages cut to those in use; None where they do not
        fit. A piece of no rows does nothing; a row without columns gets zeros.
        """
        if cut.slots > self.slots or len(cut.pages) > self.pages or len(cut.pieces) > self.pieces:
            return None
        pieces, rows, *_ = self.shapes
        return [grown(cut.pieces, pieces), grown(cut.starts, rows), grown(cut.wheres, rows), cut.pages]


def line_room(rows: int, pages: int, heads_per_kv: int) -> LineRoom:
    return LineRoom(rows, tile_rows_of(heads_per_kv), pages)


def tile_rows_of(heads_per_kv: int) -> int:
    """Rows of a tile, which never changes its size."""
    return max(QUERIES // heads_per_kv, 1)


def line_sights(spans: Sequence[TableSpan]) -> RowSights:
    """Of all rows: which columns they read in pieces, and the bits of those that are next on their lines."""
    leads, bases, bits = sights_of(spans)
    return RowSights(np.where(leads == bases, leads // BLOCK * BLOCK, leads), bases, bits)  # of trees


def cut_lines(spans: Sequence[TableSpan], leads: Numbers, page_rows: int, tile_rows: int) -> LineCut:
    """The work of one frame whose spans come in row order; a piece has at most tile_rows rows."""
    rows = np.array([span.rows for span in spans])
    own = numbers([BLOCK + span.tail if span.visible else 0 for span in spans]).repeat(rows)  # at most
    counts = -((leads + own) // -PIECE_COLUMNS)
    held = [span.pages[: -(-(span.base + span.tail) // page_rows)] for span in spans]
    sizes = np.array([*map(len, held)])
    wheres = (sizes.cumsum() - sizes).astype(np.int32).repeat(rows)
    shared = [0, *_shared(held, leads[rows.cumsum() - 1].tolist(), page_rows), 0]
    starts = (counts.cumsum() - counts).astype(np.int32)
    pages = numbers([page for run in held for page in run])
    return LineCut(_cut(rows, leads, wheres, shared, tile_rows), starts, wheres, pages, int(counts.sum()))


def _shared(held: Sequence[tuple[int, ...]], ends: Sequence[int], page_rows: int) -> Iterator[int]:
    """Of each text and the one before: columns of whole pieces that lie on the same pages for both."""
    for at in range(1, len(held)):
        pages = 0
        most = min(len(held[at - 1]), len(held[at]))
        while pages < most and held[at - 1][pages] == held[at][pages]:
            pages += 1
        yield min(pages * page_rows, ends[at - 1], ends[at]) // PIECE_COLUMNS * PIECE_COLUMNS


def _cut(rows: Ints, leads: Numbers, wheres: Numbers, shared: Sequence[int], tile_rows: int) -> Numbers:
    """rows: of each text. shared: of each with the one before, and of nobody with the last."""
    firsts = rows.cumsum() - rows
    ats = np.maximum(shared[:-1], shared[1:])
    runs = [*_runs(firsts.tolist(), rows.tolist(), shared)]
    stretches = np.concatenate(
        (np.array(runs, np.int64).reshape(-1, 4), np.stack((firsts, rows, ats, leads[firsts + rows - 1]), 1))
    )
    first, high, at, stop = stretches.T
    down = -(high // -tile_rows)
    across = np.maximum(-((at - stop) // PIECE_COLUMNS), 0)
    many: Ints = down * across
    of = np.arange(len(stretches)).repeat(many)
    place = np.arange(len(of)) - (many.cumsum() - many)[of]
    top = first[of] + place % down[of] * tile_rows
    high = np.minimum(first[of] + high[of] - top, tile_rows)
    left = at[of] + place // down[of] * PIECE_COLUMNS
    right = np.minimum(np.minimum(left + PIECE_COLUMNS, stop[of]), leads[top + high - 1])
    pieces = np.stack((top, high, wheres[top], left, right), 1).astype(np.int32)
    return pieces[right > left]


def _runs(firsts: Sequence[int], rows: Sequence[int], shared: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """First row, rows, first column and last one + 1 of pieces that several texts read together."""
    for stop in range(PIECE_COLUMNS, max(shared) + 1, PIECE_COLUMNS):
        begin = 0
        for at in range(1, len(rows) + 1):
            if shared[at] < stop or at == len(rows):
                if at - begin > 1:
                    yield firsts[begin], sum(rows[begin:at]), stop - PIECE_COLUMNS, stop
                begin = at
