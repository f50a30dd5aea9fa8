"""Builds tables for attention in which a row's result is the same bits in every batch, or every small step.

Pure NumPy. A row's *line* is the list of columns that it sees, in the order of its sequence: where plain
decoding has committed tokens, a tree node has its ancestors. Every line is cut into pieces at the same
places, which `PieceSizes` says. Rows read the first columns together as far as all of them see the same; the
rest of its line each row reads by itself.

A tree [root, a, b] with a and b below the root, after 200 committed tokens: the lines are 0..199 with root,
root a, root b. Batch-invariant rows read columns 0..191 together (192 = 3 * BLOCK), then each row reads
192..199 and its own nodes. In a small step the rows read 0..127 together, the first piece, and then each row
reads 128..199 and its own nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from specsot_kernels.attention_tables import (
    QUERIES,
    SHORTEST,
    WORD,
    Ints,
    Numbers,
    RowSights,
    TableRoom,
    numbers,
    sights_of,
    zero_padded,
)
from specsot_kernels.segments import RowSpan

# Columns. Length of a batch-invariant piece, the same for every frame, since it decides the order of
# additions. Untuned.
PIECE_COLUMNS = 512
# Columns. What batch-invariant rows of a tree read together is a multiple of it. Untuned.
BLOCK = 64
# Rows. A step of at most so many rows is a small step. With --draft-invariant, products and attention compute
# each of its rows in the same order, whatever the other rows are, so that drafts do not change what a single
# sequence gets. The largest of `small_products.ROW_TILES`. Chosen by the size of the default draft tree (25
# rows); for 64 rows, these kernels take 1.4 times as long as the usual ones (1.5B, H200).
MAX_SMALL_ROWS: Final = 32
# Pieces and partial results. Room in the tables of a small step; a step that needs more runs in a larger
# graph. 32 rows after 40,000 columns fit, with tiles of two rows. Untuned.
MAX_SMALL_PIECES: Final = 1536
MAX_SMALL_SLOTS: Final = 3072


class PieceSizes(NamedTuple):
    """Where lines are cut into pieces, and how far rows read together. Both depend on columns alone, never on
    the frame.

    near: columns of a piece that begins before column `near_end`.
    near_end: where the middle pieces begin; a multiple of `near`.
    middle: columns of a piece that begins before column `middle_end`.
    middle_end: where the far pieces begin, a multiple of `middle` after `near_end`.
    far: columns of each of the other pieces.
    block: rows of a tree read a multiple of so many columns together; None: whole pieces.

    Sizes (2, 6, 3, 12, 4) cut a line of 20 columns at 0, 2, 4, 6, 9, 12 and 16.
    """

    near: int
    near_end: int
    middle: int
    middle_end: int
    far: int
    block: int | None = None

    def number_of(self, column: Ints) -> Ints:
        """Return the number of the piece that each column lies in.

        column: column numbers of a line, any shape.
        """
        near, middle = np.minimum(column, self.near_end), np.minimum(column, self.middle_end)
        beyond = np.maximum(column - self.middle_end, 0) // self.far
        return near // self.near + np.maximum(middle - self.near_end, 0) // self.middle + beyond

    def start_of(self, number: Ints) -> Ints:
        """Return the first column of each piece.

        number: numbers of pieces, any shape.
        """
        num_near = self.near_end // self.near
        num_middle = (self.middle_end - self.near_end) // self.middle
        near, middle = np.minimum(number, num_near), np.clip(number - num_near, 0, num_middle)
        return (
            near * self.near + middle * self.middle + np.maximum(number - num_near - num_middle, 0) * self.far
        )

    def lead_of(self, base: int) -> int:
        """Return how many first columns the rows of a tree read together, at most `base`.

        base: columns that all rows of the tree see.
        """
        if self.block:
            return base // self.block * self.block
        if base < self.near_end:
            return base // self.near * self.near
        if base < self.middle_end:
            return self.near_end + (base - self.near_end) // self.middle * self.middle
        return self.middle_end + (base - self.middle_end) // self.far * self.far

    def limit_of(self, lead: Ints) -> Ints:
        """Return the smallest base after `lead` that has another lead.

        lead: results of `lead_of`, any shape.
        """
        return lead + self.block if self.block else self.start_of(self.number_of(lead) + 1)


# Pieces of batch-invariant lines, all of one size.
EQUAL_PIECES: Final = PieceSizes(PIECE_COLUMNS, 0, PIECE_COLUMNS, 0, PIECE_COLUMNS, BLOCK)
# Pieces of lines in small steps: short ones, so that many programs share a short sequence, and longer ones
# where short ones would be too many to merge. Untuned.
SMALL_STEP_PIECES: Final = PieceSizes(128, 4096, 512, 32768, 2048)


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
    """Sizes of tables of lines for one captured graph; after the bits come starts, wheres and pages.

    max_pieces: pieces that there is room for; None: as many as batch-invariant frames need.
    max_slots: partial results that there is room for; None: as many as batch-invariant frames need.
    """

    max_pieces: int | None = None
    max_slots: int | None = None

    @property
    def pieces(self) -> int:
        """Return how many pieces there is room for. A batch-invariant frame has room for one sequence of 128k
        columns, or any number of 8k each.
        """
        return 256 + 16 * self.rows if self.max_pieces is None else self.max_pieces

    @property
    def slots(self) -> int:
        """Return how many partial results there is room for."""
        return max(4096, 16 * self.rows) if self.max_slots is None else self.max_slots

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


def small_step_room(rows: int, pages: int, heads_per_kv: int, columns: int) -> LineRoom:
    """Return the sizes for tables of small steps.

    There is room for MAX_SMALL_PIECES pieces and MAX_SMALL_SLOTS partial results, or fewer where no step
    needs so many.

    rows: largest number of rows of a step, at most MAX_SMALL_ROWS.
    pages: largest number of page numbers that a step names.
    heads_per_kv: query heads of each KV head.
    columns: largest number of columns that a row may see.
    """
    # One more piece than a line has, because `cut_lines` counts up to the next lead and the whole tail.
    num_pieces = rows * (int(SMALL_STEP_PIECES.number_of(np.array(columns))) + 2)
    tile_rows = small_tile_of(heads_per_kv) // heads_per_kv
    return LineRoom(
        rows,
        tile_rows,
        pages,
        max_pieces=min(num_pieces, MAX_SMALL_PIECES),
        max_slots=min(num_pieces, MAX_SMALL_SLOTS),
    )


def small_tile_of(heads_per_kv: int) -> int:
    """Return the queries of a tile of a small step: 16, or the power of two that holds all heads of a row.

    heads_per_kv: query heads of each KV head.
    """
    return max(1 << (heads_per_kv - 1).bit_length(), SHORTEST)


def line_sights(spans: Sequence[RowSpan], sizes: PieceSizes = EQUAL_PIECES) -> RowSights:
    """Return which columns each row reads in pieces (`leads`), and the bits of the columns that follow on its
    line.

    A tree row's lead is rounded down (to a multiple of BLOCK: base 200 -> lead 192); a causal row's lead is
    its column plus 1, so that it reads its whole line in pieces.

    spans: one span per segment of the frame, in row order.
    sizes: where lines are cut.
    """
    leads, bases, bits = sights_of(spans)
    tree_leads = numbers([sizes.lead_of(span.base) for span in spans]).repeat([span.rows for span in spans])
    if all(span.visible is not None for span in spans):
        return RowSights(tree_leads, bases, bits)
    return RowSights(np.where(leads == bases, tree_leads, leads), bases, bits)


def cut_lines(
    spans: Sequence[RowSpan],
    leads: Numbers,
    page_rows: int,
    tile_rows: int,
    sizes: PieceSizes = EQUAL_PIECES,
) -> LineCut:
    """Return the work of one frame whose spans come in row order.

    Neighbouring sequences that share pages read whole pieces on these together. A row has slots for its lead
    and for the most that it may read by itself.

    spans: one span per segment of the frame, in row order; at least one.
    leads: [rows], how many first columns each row reads in pieces, from `line_sights`.
    page_rows: columns of a page.
    tile_rows: largest number of rows of a piece.
    sizes: where lines are cut.
    """
    rows = np.array([span.rows for span in spans])
    tails = numbers([span.tail if span.visible else 0 for span in spans]).repeat(rows)
    # An upper bound of a tree row's line that holds for every base with the same lead, since tables are
    # cached by the lead: less than the next lead, and the tail.
    ends = np.where(tails > 0, sizes.limit_of(leads.astype(np.int64)) + tails, leads)
    counts = sizes.number_of(ends - 1) + 1
    held = [span.pages[: -(-(span.base + span.tail) // page_rows)] for span in spans]
    num_held = np.array([*map(len, held)])
    wheres = (num_held.cumsum() - num_held).astype(np.int32).repeat(rows)
    shared = [0, *_shared_columns(held, leads[rows.cumsum() - 1].tolist(), page_rows, sizes), 0]
    starts = (counts.cumsum() - counts).astype(np.int32)
    pages = numbers([page for run in held for page in run])
    return LineCut(
        _cut_pieces(rows, leads, wheres, shared, tile_rows, sizes), starts, wheres, pages, int(counts.sum())
    )


def _shared_columns(
    pages_by_sequence: Sequence[tuple[int, ...]], ends: Sequence[int], page_rows: int, sizes: PieceSizes
) -> Iterator[int]:
    """Yield for each sequence but the first how many columns, in whole pieces, lie on the same pages as in
    the one before.

    Sequences without a common first page share 0 columns.

    pages_by_sequence: page numbers of each sequence.
    ends: number of columns that each sequence's rows read in pieces.
    page_rows: columns (rows) of a KV page.
    sizes: where lines are cut.
    """
    for number in range(1, len(pages_by_sequence)):
        pages = 0
        num_pages = min(len(pages_by_sequence[number - 1]), len(pages_by_sequence[number]))
        while pages < num_pages and pages_by_sequence[number - 1][pages] == pages_by_sequence[number][pages]:
            pages += 1
        num_columns = np.array(min(pages * page_rows, ends[number - 1], ends[number]))
        yield int(sizes.start_of(sizes.number_of(num_columns)))


def _cut_pieces(
    rows: Ints, leads: Numbers, wheres: Numbers, shared: Sequence[int], tile_rows: int, sizes: PieceSizes
) -> Numbers:
    """Return the pieces of a frame.

    A row reads nothing in pieces that begin at or after its lead. Rows with no columns before their lead have
    no piece.

    rows: number of rows of each sequence.
    leads: int32 [rows of the frame], how many first columns each row reads in pieces.
    wheres: int32 [rows of the frame], index in the page table of the first page of each row's sequence.
    shared: [sequences + 1]: columns that each sequence shares with its predecessor; 0 at both ends.
    tile_rows: largest number of rows of a piece.
    sizes: where lines are cut.
    """
    firsts = rows.cumsum() - rows
    # Columns that a sequence shares with a neighbour are read by all of them in one run; the sequence's own
    # page run begins after these columns.
    own_starts = np.maximum(shared[:-1], shared[1:])
    runs = [*_joint_reads(firsts.tolist(), rows.tolist(), shared, sizes)]
    reads = np.concatenate(
        (
            np.array(runs, np.int64).reshape(-1, 4),
            np.stack((firsts, rows, own_starts, leads[firsts + rows - 1]), 1),
        )
    )
    first, num_rows, at, stop = reads.T
    num_tiles = -(num_rows // -tile_rows)
    first_number = sizes.number_of(at)
    num_ranges = np.where(stop > at, sizes.number_of(np.maximum(stop - 1, 0)) - first_number + 1, 0)
    pieces_of_run: Ints = num_tiles * num_ranges
    run_of = np.arange(len(reads)).repeat(pieces_of_run)
    # Piece `place` of a page run is tile place % down of column range place // down.
    place = np.arange(len(run_of)) - (pieces_of_run.cumsum() - pieces_of_run)[run_of]
    first_row = first[run_of] + place % num_tiles[run_of] * tile_rows
    num_rows = np.minimum(first[run_of] + num_rows[run_of] - first_row, tile_rows)
    number = first_number[run_of] + place // num_tiles[run_of]
    first_column = sizes.start_of(number)
    end_column = np.minimum(
        np.minimum(sizes.start_of(number + 1), stop[run_of]), leads[first_row + num_rows - 1]
    )
    pieces = np.stack((first_row, num_rows, wheres[first_row], first_column, end_column), 1).astype(np.int32)
    # A tile whose rows all see fewer columns has no piece in this range.
    return pieces[end_column > first_column]


def _joint_reads(
    firsts: Sequence[int], rows: Sequence[int], shared: Sequence[int], sizes: PieceSizes
) -> Iterator[tuple[int, ...]]:
    """Yield what several sequences read together: first row, number of rows, first column and last column +
    1.

    Nothing is yielded if no neighbours share a piece. Each range is one piece long; a sequence that shares it
    with neither neighbour is in none.

    firsts: first row of each sequence.
    rows: number of rows of each sequence.
    shared: [sequences + 1]: columns that each sequence shares with its predecessor; 0 at both ends.
    sizes: where lines are cut.
    """
    edges = sizes.start_of(np.arange(int(sizes.number_of(np.array(max(shared)))) + 1)).tolist()
    for start, stop in pairwise(edges):
        first_sequence = 0
        for number in range(1, len(rows) + 1):
            if shared[number] < stop or number == len(rows):
                if number - first_sequence > 1:
                    yield firsts[first_sequence], sum(rows[first_sequence:number]), start, stop
                first_sequence = number
