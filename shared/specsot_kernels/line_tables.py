"""Builds tables for batch-invariant attention, where a row's result is the same bits in every batch.

Pure NumPy. A row's *line* is the list of columns that it sees, in the order of its sequence: where plain
decoding has committed tokens, a tree node has its ancestors. Every line is cut at the same places, each
PIECE_COLUMNS columns. Rows read whole blocks of columns together as far as all of them see the same; the rest
of its line each row reads by itself.

A tree [root, a, b] with a and b below the root, after 200 committed tokens: the lines are 0..199 with root,
root a, root b. All three rows read columns 0..191 together (192 = 3 * BLOCK), then each reads 192..199 and
its own nodes.
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
    numbers,
    sights_of,
    zero_padded,
)

# Columns. Length of a piece, the same for every frame, since it decides the order of additions. Untuned.
PIECE_COLUMNS = 512
# Columns. What rows of a tree read together is a multiple of it. Untuned.
BLOCK = 64


class LineCut(NamedTuple):
    """Which rows read which pieces of their lines.

    Slots hold partial results and are numbered through: for each row one slot for each PIECE_COLUMNS of its
    line.

    pieces: [pieces, 5]: first row, number of rows, index in `pages` of their sequence's first page, first
        column, last column + 1.
    starts: [rows]: first slot of each row.
    wheres: [rows]: index in `pages` of the first page of the row's sequence.
    pages: page numbers of all sequences, concatenated.
    slots: number of slots.

    Rows with lines of 1100 and 300 columns have 3 slots and 1: starts [0, 3], slots = 4.
    """

    pieces: Numbers
    starts: Numbers
    wheres: Numbers
    pages: Numbers
    slots: int

    def in_order(self, sights: RowSights) -> tuple[Numbers, ...]:
        """Return all tables of the frame, in the order of `LineRoom.shapes`.

        sights: which columns each row sees.
        """
        return self.pieces, *sights, self.starts, self.wheres, self.pages


@dataclass(frozen=True, slots=True)
class LineRoom(TableRoom):
    """Sizes of batch-invariant tables for one captured graph; after the bits come starts, wheres
    and pages.
    """

    @property
    def pieces(self) -> int:
        """Return how many pieces there is room for: one sequence of 128k columns, or any number of
        8k each.
        """
        return 256 + 16 * self.rows

    @property
    def slots(self) -> int:
        """Return how many partial results there is room for."""
        return max(4096, 16 * self.rows)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of pieces, leads, bases, bits, starts, wheres and pages."""
        rows = (self.rows,)
        return (self.pieces, 5), rows, rows, (self.rows, self.rows // WORD + 1), rows, rows, (self.pages,)

    def fill_lines(self, line_cut: LineCut) -> list[Numbers] | None:
        """Return pieces, starts and wheres padded to `shapes`, and the pages in use; None if they do not fit.

        A piece of no rows does nothing, and a row without columns gets zeros. More slots, pages or pieces
        than there is room for do not fit.

        line_cut: the pieces of one frame.
        """
        if (
            line_cut.slots > self.slots
            or len(line_cut.pages) > self.pages
            or len(line_cut.pieces) > self.pieces
        ):
            return None
        pieces, rows, *_ = self.shapes
        return [
            zero_padded(line_cut.pieces, pieces),
            zero_padded(line_cut.starts, rows),
            zero_padded(line_cut.wheres, rows),
            line_cut.pages,
        ]


def line_room(rows: int, pages: int, heads_per_kv: int) -> LineRoom:
    """Return the sizes for tables of batch-invariant frames.

    rows: largest number of rows of a frame.
    pages: largest number of page numbers that a frame names.
    heads_per_kv: query heads of each KV head.
    """
    return LineRoom(rows, tile_rows_of(heads_per_kv), pages)


def tile_rows_of(heads_per_kv: int) -> int:
    """Return the rows of a tile. A tile never changes its size, since that would change the order of
    additions.

    heads_per_kv: query heads of each KV head.
    """
    return max(QUERIES // heads_per_kv, 1)


def line_sights(spans: Sequence[TableSpan]) -> RowSights:
    """Return which columns each row reads in pieces (`leads`), and the bits of the columns that follow on its
    line.

    A tree row's lead is rounded down to a multiple of BLOCK (base 200 -> lead 192); a causal row's lead is
    its column plus 1, so that it reads its whole line in pieces.

    spans: one span per segment of the frame, in row order.
    """
    leads, bases, bits = sights_of(spans)
    return RowSights(np.where(leads == bases, leads // BLOCK * BLOCK, leads), bases, bits)  # of trees


def cut_lines(spans: Sequence[TableSpan], leads: Numbers, page_rows: int, tile_rows: int) -> LineCut:
    """Return the work of one frame whose spans come in row order.

    Neighbouring sequences that share pages read whole pieces on these together. A row has slots for its lead
    and for the most that it may read by itself.

    spans: one span per segment of the frame, in row order; at least one.
    leads: [rows], how many first columns each row reads in pieces, from `line_sights`.
    page_rows: columns of a page.
    tile_rows: largest number of rows of a piece.
    """
    rows = np.array([span.rows for span in spans])
    # An upper bound of what a tree row reads by itself: less than a block before its base, and its tail.
    own_columns = numbers([BLOCK + span.tail if span.visible else 0 for span in spans]).repeat(rows)
    counts = -((leads + own_columns) // -PIECE_COLUMNS)
    held = [span.pages[: -(-(span.base + span.tail) // page_rows)] for span in spans]
    sizes = np.array([*map(len, held)])
    wheres = (sizes.cumsum() - sizes).astype(np.int32).repeat(rows)
    shared = [0, *_shared_columns(held, leads[rows.cumsum() - 1].tolist(), page_rows), 0]
    starts = (counts.cumsum() - counts).astype(np.int32)
    pages = numbers([page for run in held for page in run])
    return LineCut(
        _cut_pieces(rows, leads, wheres, shared, tile_rows), starts, wheres, pages, int(counts.sum())
    )


def _shared_columns(
    pages_by_sequence: Sequence[tuple[int, ...]], ends: Sequence[int], page_rows: int
) -> Iterator[int]:
    """Yield for each sequence but the first how many columns, in whole pieces, lie on the same pages as in
    the one before.

    Sequences without a common first page share 0 columns.

    pages_by_sequence: page numbers of each sequence.
    ends: number of columns that each sequence's rows read in pieces.
    page_rows: columns (rows) of a KV page.
    """
    for number in range(1, len(pages_by_sequence)):
        pages = 0
        num_pages = min(len(pages_by_sequence[number - 1]), len(pages_by_sequence[number]))
        while pages < num_pages and pages_by_sequence[number - 1][pages] == pages_by_sequence[number][pages]:
            pages += 1
        yield min(pages * page_rows, ends[number - 1], ends[number]) // PIECE_COLUMNS * PIECE_COLUMNS


def _cut_pieces(
    rows: Ints, leads: Numbers, wheres: Numbers, shared: Sequence[int], tile_rows: int
) -> Numbers:
    """Return the pieces of a frame.

    A row reads nothing in pieces that begin at or after its lead. Rows with no columns before their lead have
    no piece.

    rows: number of rows of each sequence.
    leads: int32 [rows of the frame], how many first columns each row reads in pieces.
    wheres: int32 [rows of the frame], index in the page table of the first page of each row's sequence.
    shared: [sequences + 1]: columns that each sequence shares with its predecessor; 0 at both ends.
    tile_rows: largest number of rows of a piece.
    """
    firsts = rows.cumsum() - rows
    # Columns that a sequence shares with a neighbour are read by all of them in one run; the sequence's own
    # page run begins after these columns.
    own_starts = np.maximum(shared[:-1], shared[1:])
    runs = [*_joint_reads(firsts.tolist(), rows.tolist(), shared)]
    reads = np.concatenate(
        (
            np.array(runs, np.int64).reshape(-1, 4),
            np.stack((firsts, rows, own_starts, leads[firsts + rows - 1]), 1),
        )
    )
    first, num_rows, at, stop = reads.T
    num_tiles = -(num_rows // -tile_rows)
    num_ranges = np.maximum(-((at - stop) // PIECE_COLUMNS), 0)
    pieces_of_run: Ints = num_tiles * num_ranges
    run_of = np.arange(len(reads)).repeat(pieces_of_run)
    # Piece `place` of a page run is tile place % down of column range place // down.
    place = np.arange(len(run_of)) - (pieces_of_run.cumsum() - pieces_of_run)[run_of]
    first_row = first[run_of] + place % num_tiles[run_of] * tile_rows
    num_rows = np.minimum(first[run_of] + num_rows[run_of] - first_row, tile_rows)
    first_column = at[run_of] + place // num_tiles[run_of] * PIECE_COLUMNS
    end_column = np.minimum(
        np.minimum(first_column + PIECE_COLUMNS, stop[run_of]), leads[first_row + num_rows - 1]
    )
    pieces = np.stack((first_row, num_rows, wheres[first_row], first_column, end_column), 1).astype(np.int32)
    # A tile whose rows all see fewer columns has no piece in this range.
    return pieces[end_column > first_column]


def _joint_reads(
    firsts: Sequence[int], rows: Sequence[int], shared: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield what several sequences read together: first row, number of rows, first column and last column +
    1.

    Nothing is yielded if no neighbours share a piece. Each range is one piece long; a sequence that shares it
    with neither neighbour is in none.

    firsts: first row of each sequence.
    rows: number of rows of each sequence.
    shared: [sequences + 1]: columns that each sequence shares with its predecessor; 0 at both ends.
    """
    for stop in range(PIECE_COLUMNS, max(shared) + 1, PIECE_COLUMNS):
        first_sequence = 0
        for number in range(1, len(rows) + 1):
            if shared[number] < stop or number == len(rows):
                if number - first_sequence > 1:
                    yield firsts[first_sequence], sum(rows[first_sequence:number]), stop - PIECE_COLUMNS, stop
                first_sequence = number
