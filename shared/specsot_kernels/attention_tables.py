"""Builds a frame's attention work as tables of integers: which rows read which KV columns.

Pure NumPy, without torch. A *row* is one token of the batch, that is, one row of the query matrix. A *column*
is one KV position of a sequence, numbered from the sequence's first token. A *page run* is a run of KV pages
together with the rows that read it. If neighbouring sequences share full pages (a common prefix) and every
row of these sequences sees all of the columns on them, the shared pages form one page run for all of these
rows, so that they are read once. Page runs are then cut into *pieces*, one GPU program each, and the partial
results of a row are merged by their log-sum-exp.

Two sequences with 4 columns a page that share the pages 7 and 8:

    a: rows 0..1, columns 0..10 on pages (7, 8, 3)      b: row 2, columns 0..10 on pages (7, 8, 5)
    page_runs: rows 0..2 read columns 0..7 on (7, 8); rows 0..1 read 8..10 on (3); row 2 reads 8..10 on (5)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsot_kernels.segments import RowSpan, drop_low_bits

# A query is one head of one row; a tile of 64 queries holds 16 rows with 4 query heads for each KV head.
# Queries. Largest tile. Untuned.
QUERIES = 64
# Queries. Tile for frames in which many sequences have a few rows each. Chosen by measurement on an H100.
SHORT = 32
# Queries. The same for frames of at most SHORTEST_ROWS rows, mostly frames without trees. Chosen by
# measurement on an H100.
SHORTEST = 16
# Rows. Most rows that a sequence of a short frame has. Untuned.
MAX_SHORT_ROWS = 32
# Rows. Largest frame that uses tiles of SHORTEST queries. Chosen by measurement on an H100.
SHORTEST_ROWS = 64
# Queries. Tile for frames that consist of prompts alone. Chosen by measurement on an H100.
PROMPT_QUERIES = 128

# A table of int32 numbers, as kernels read it.
Numbers = NDArray[np.int32]
# Entries. Bounds each cache of this file, whose results follow from the shapes of trees or from numbers of
# rows and columns. Trees that the host has not read have one shape for each number of nodes. Untuned.
CACHED_SHAPES = 256
# Numbers of 64 bits, for sums that may exceed 32 bits.
Ints = NDArray[np.int64]

# Columns. Smallest piece that is worth a GPU program; twice as many for tiles of WIDE_TILE_ROWS rows or more.
# Untuned.
MIN_PIECE_COLUMNS = 64
# Rows. Tiles of at least so many rows use pieces of at least 2 * MIN_PIECE_COLUMNS columns. Untuned.
WIDE_TILE_ROWS = 8
# The next five describe an H100 to the cost model that cuts page runs into pieces. Chosen by
# measurement on an H100.
# Programs. How many run at once: two on each of the 132 SMs.
PROGRAMS = 264
# KV heads. The number that most models have; the default where a model's number is not given.
KV_HEADS = 8
# Columns. How many a program reads in the time that starting and ending a piece costs.
PIECE_OVERHEAD_COLUMNS = 384
# Pieces. Largest number that one page run is cut into, because the pieces of a row are merged one after
# another.
MAX_PIECES = 32
# Waves of programs. How many cutting may add to the smallest number of pieces; buffers are sized for all of
# them.
MAX_EXTRA_WAVES = 2
# Bits. Width of one word of a visibility mask.
WORD = 32
# Index. Where `bits` stands in `TableRoom.shapes`.
BITS = 3
# Replaces the count of commonly visible columns in a piece that consists of anchors; see `anchors`.
ANCHORED = -1


def whole_pages(rows: int, base: int, pages: tuple[int, ...], page_rows: int) -> RowSpan:
    """Return the span of some rows over whole pages: its tail goes to the end of the last page. The span, and
    the pieces cut from it, stay valid until the sequence needs another page; other tables say what
    single rows see.

    rows: number of rows.
    base: the first column of a page; every row sees all columns before it.
    pages: the page numbers, in order.
    page_rows: columns (rows) of a KV page.
    """
    return RowSpan(rows, base, len(pages) * page_rows - base, pages)


class SeenRows(NamedTuple):
    """Rows of one sequence that all see the columns 0 .. lead - 1.

    first: the frame row of the first of the rows.
    span: the rows' span.
    lead: number of first columns that all of the rows see.
    """

    first: int
    span: RowSpan
    lead: int


class PageRun(NamedTuple):
    """Rows of the frame that read the same run of columns.

    first: the frame row of the first of the rows.
    rows: number of rows, which follow one another.
    at: the first column that is read.
    columns: number of columns that are read.
    pages: the page numbers on which these columns lie, in order.
    """

    first: int
    rows: int
    at: int
    columns: int
    pages: tuple[int, ...]


class PageRuns(NamedTuple):
    """Many `PageRun` values as arrays, [runs] each.

    first: the frame row of each run's first row.
    rows: number of rows of each run.
    at: the first column that each run reads.
    columns: number of columns that each run reads.
    held: number of pages of each run.
    pages: page numbers of all runs, one run after the other.
    shared: True if several sequences may read a run together. False if there is one run per sequence, in row
        order, by which the sequence reads all of its pages.
    """

    first: Ints
    rows: Ints
    at: Ints
    columns: Ints
    held: Ints
    pages: Numbers
    shared: bool


class RowSights(NamedTuple):
    """Which columns each row sees, in row order.

    leads: int32 [rows]; row r sees every column before leads[r].
    bases: int32 [rows], the column that bit 0 of the row's bits stands for.
    bits: int32 [rows, words]; bit j of word i is set if the row sees column base + 32 * i + j.
    """

    leads: Numbers
    bases: Numbers
    bits: Numbers


class AttentionTables(NamedTuple):
    """The attention work of one frame.

    A slot is one row's partial result from one piece; slots are numbered through all pieces, piece by piece.

    pieces: [pieces, 7]: first row, number of rows, index of its first page in `pages`, number of columns,
        first column, number of columns (from column 0 on) that all of its rows see, or ANCHORED, and first
        slot.
    pages: page numbers of all pieces, concatenated.
    leads: [rows]: row r sees every column before leads[r].
    bases: [rows]: the column that bit 0 of the row's bits stands for.
    bits: [rows, words]: bit j of word i is set if the row sees column base + 32 * i + j.
    starts: [rows + 1]: row r merges the partial results slots[starts[r] : starts[r + 1]].
    slots: slot numbers, grouped by row; see `starts`.

    A tree with root 0 and its children 1 and 2 after 10 committed columns has leads [10, 10, 10], bases [10,
    10, 10] and bits [0b001, 0b011, 0b101]: node 2 sees columns 0..9, the root's (10) and its own (12), but
    not its sibling's (11).
    """

    pieces: Numbers
    pages: Numbers
    leads: Numbers
    bases: Numbers
    bits: Numbers
    starts: Numbers
    slots: Numbers


class PieceTables(NamedTuple):
    """The part of `AttentionTables` that does not depend on what single rows see.

    pieces: int32 [pieces, 7]; see `AttentionTables`.
    starts: int32 [rows + 1]; row r merges the partial results slots[starts[r] : starts[r + 1]].
    slots: int32, slot numbers grouped by row.
    pages: int32, page numbers of all pieces, one piece after the other.
    """

    pieces: Numbers
    starts: Numbers
    slots: Numbers
    pages: Numbers


@dataclass(frozen=True, slots=True)
class TableRoom:
    """Sizes of tables that hold every frame of at most `rows` rows, so that one captured CUDA graph can read
    them.

    The order is that of `AttentionTables`, except that the pages come last: only the pages in use need to be
    copied.

    rows: largest number of rows in a frame.
    tile_rows: rows of one tile.
    pages: largest number of page numbers that the pieces name.
    short: whether frames have many sequences with a few rows each, at most MAX_SHORT_ROWS, so that their
        masks have few bits.
    anchored: whether sequences may have a policy that leaves anchors; see `anchors`.
    places: pieces that run at once under each KV head; see `places_of`.
    """

    rows: int
    tile_rows: int
    pages: int
    short: bool = False
    anchored: bool = False
    places: int = PROGRAMS // KV_HEADS

    @property
    def pieces(self) -> int:
        """Return how many pieces any frame has that shares at most two levels of prefixes; see
        `_piece_columns`.
        """
        return MAX_EXTRA_WAVES * self.places + (2 + self.anchored) * self.rows

    @property
    def slots(self) -> int:
        """Return how many partial results there are at most.

        A row reads at most three page runs, and its anchors, with one piece each; the pieces that cutting
        adds are counted as full of rows.
        """
        cut = MAX_EXTRA_WAVES * self.places * min(self.rows, self.tile_rows)
        return cut + (3 + self.anchored) * self.rows

    @property
    def words(self) -> int:
        """Return how many int32 words hold the bits of one row, see `AttentionTables.bits`."""
        return (min(self.rows, MAX_SHORT_ROWS) if self.short else self.rows) // WORD + 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of pieces, leads, bases, bits, starts, slots and pages."""
        rows = self.rows
        bits = rows, self.words
        return (self.pieces, 7), (rows,), (rows,), bits, (rows + 1,), (self.slots,), (self.pages,)

    def fill_pieces(self, piece_tables: PieceTables) -> list[Numbers] | None:
        """Return pieces, starts and slots padded to `shapes`, and the pages as they are, or None if they do
        not fit.

        Entries of `starts` after the frame's rows repeat the last one, so that those rows have no piece.

        piece_tables: the pieces of one frame.
        """
        pieces, starts, slots, pages = piece_tables
        limits = self.pieces, self.rows + 1, self.slots, self.pages
        if any(len(part) > limit for part, limit in zip(piece_tables, limits)):
            return None
        padded_starts = np.full(self.rows + 1, starts[-1], np.int32)
        padded_starts[: len(starts)] = starts
        padded_pieces = zero_padded(pieces, (self.pieces, 7))
        return [padded_pieces, padded_starts, zero_padded(slots, (self.slots,)), pages]

    def fill_sights(self, sights: RowSights) -> list[Numbers]:
        """Return leads, bases and bits padded to `shapes`.

        sights: what the rows of one frame see. The caller has checked that the rows fit.
        """
        rows = len(sights.leads)
        both = np.zeros((2, self.rows), np.int32)
        both[0, :rows] = sights.leads
        both[1, :rows] = sights.bases
        return [*both, zero_padded(sights.bits, (self.rows, self.words))]


def room_for(
    rows: int,
    pages: int,
    heads_per_kv: int,
    short: bool = False,
    anchored: bool = False,
    kv_heads: int = KV_HEADS,
) -> TableRoom:
    """Return the sizes for tables of every frame of at most `rows` rows and `pages` pages.

    Tiles have `tile_of` queries, or with `short` SHORTEST queries for at most SHORTEST_ROWS rows, and SHORT
    queries for more; at least one row.

    heads_per_kv: query heads of each KV head; of one block if `num_head_blocks` cuts them.
    rows: largest number of rows of a frame.
    pages: largest number of page numbers that the pieces of a frame name.
    short: whether frames have many sequences with a few rows each.
    anchored: whether sequences may have a policy that leaves anchors.
    kv_heads: number of KV heads.
    """
    tile = tile_of(rows, heads_per_kv)
    if short:
        tile = SHORTEST if rows <= SHORTEST_ROWS else SHORT
    return TableRoom(rows, max(tile // heads_per_kv, 1), pages, short, anchored, places_of(kv_heads))


def places_of(kv_heads: int) -> int:
    """Return how many pieces a GPU reads at once under each KV head, at least 1.

    kv_heads: number of KV heads.
    """
    return max(PROGRAMS // kv_heads, 1)


def tile_of(rows: int, heads_per_kv: int) -> int:
    """Return the queries of a tile: the power of two that holds all heads of `rows` rows, within 16 ..
    QUERIES.

    rows: largest number of rows of a frame.
    heads_per_kv: query heads of each KV head; of one block if `num_head_blocks` cuts them.
    """
    return min(max(1 << (rows * heads_per_kv - 1).bit_length(), 16), QUERIES)


def num_head_blocks(heads_per_kv: int) -> int:
    """Return into how many equal blocks the query heads of a KV head are cut, so that the heads of one block
    and one row fit in a tile: the smallest possible number.

        64 heads -> 1 block; 128 heads -> 2 blocks of 64; 96 heads -> 2 blocks of 48

    heads_per_kv: query heads of each KV head, at least 1.
    """
    numbers = range(1, heads_per_kv + 1)
    return next(one for one in numbers if heads_per_kv % one == 0 and heads_per_kv // one <= QUERIES)


def zero_padded(part: Numbers, shape: tuple[int, ...]) -> Numbers:
    """Return the array padded with zeros at the end of each dimension.

    part: int32, an array of any shape.
    shape: shape of the result, in no dimension smaller than that of `part`.
    """
    padded = np.zeros(shape, np.int32)
    padded[tuple(map(slice, part.shape))] = part
    return padded


def tabulate(
    spans: Sequence[RowSpan],
    page_rows: int,
    tile_rows: int,
    window: int | None = None,
    sinces: Numbers | None = None,
    anchored: Sequence[PageRun] = (),
    places: int = PROGRAMS // KV_HEADS,
) -> AttentionTables:
    """Return the attention work of one frame, whose spans are in row order, as tables for the kernel.

    page_rows: columns of a page.
    tile_rows: largest number of rows of a piece.
    sinces: [rows], the first column that each row sees, see `sinces_of`; whole pages before them are not
        read. None: rows see all columns.
    anchored: page runs of anchor columns, see `anchors.anchor_runs`; empty: no row has anchors.
    spans: one span per segment of the frame, in row order; at least one.
    window: how many positions of its path a row sees at most, as in `sights_of`; None: all.
    places: pieces that run at once under each KV head; see `places_of`.
    """
    sights = sights_of(spans, window)
    page_runs = page_runs_of(spans, page_rows, sinces)
    pieces, starts, slots, pages = cut_pieces(
        page_runs, sights.leads, page_rows, tile_rows, anchored=anchored, places=places
    )
    return AttentionTables(pieces, pages, *sights, starts, slots)


def cut_pieces(
    page_runs: Sequence[PageRun] | PageRuns,
    leads: Numbers,
    page_rows: int,
    tile_rows: int,
    times: int = 1,
    anchored: Sequence[PageRun] = (),
    places: int = PROGRAMS // KV_HEADS,
) -> PieceTables:
    """Return page runs cut into pieces, tile by tile and column range by column range.

    All pieces of a frame have the same number of columns, except the last one of a run. A piece of an
    anchored run has ANCHORED in the place of its common columns. `starts` and `slots` of the result must not
    be changed, because they are cached.

    page_runs: in row order. If they are given as `PageRuns`, `anchored` must already be their last entries.
        At least one.
    leads: [rows] as in `AttentionTables`. For page runs that are not shared (`PageRuns.shared`), every row
        must belong to a run, and leads must not fall from one row of a run to the next.
    times: number of rows of the frame for which each row of a page run stands.
    places: pieces that run at once under each KV head; see `places_of`.
    page_rows: columns of a page.
    tile_rows: largest number of rows of a piece.
    anchored: the runs of anchor columns, in row order; see `anchors.anchor_runs`.

    A page run of 6 rows and 1024 columns, cut with tile_rows = 4 and 512 columns a piece, becomes four
    pieces: rows 0..3 with columns 0..511, rows 4..5 with 0..511, rows 0..3 with 512..1023, rows 4..5 with
    512..1023.
    """
    if not isinstance(page_runs, PageRuns):
        page_runs = as_arrays((*page_runs, *anchored))
    first, rows, at, columns, held, pages, shared = page_runs
    if times > 1:
        first = first * times
        rows = rows * times
    columns_per_piece = _piece_columns(columns, -(-rows // tile_rows), page_rows, tile_rows, places)
    num_ranges = -(-columns // columns_per_piece)
    grids = first.tobytes(), rows.tobytes(), num_ranges.tobytes()
    cut = _cut_grids(*grids, columns_per_piece, page_rows, tile_rows, len(leads))
    run_of = cut.run_of
    # The grids are cached, so a copy receives what differs between frames: pages, columns and leads.
    pieces = cut.pieces.copy()
    first_row, rows_of_piece, first_page, columns_of_piece, first_column, lead, _ = pieces.T
    first_page += (held.cumsum() - held)[run_of]
    columns_of_piece[:] = np.minimum(columns[run_of] - first_column, columns_per_piece)
    # Within one sequence, no row has a smaller lead than the row before, so the first row's is the smallest.
    lead[:] = _smallest_leads(leads, first_row, rows_of_piece) if shared else leads[first_row]
    first_column += at[run_of]
    if anchored:
        lead[run_of >= len(first) - len(anchored)] = ANCHORED
    return PieceTables(pieces, cut.starts, cut.slots, pages)


class CutGrids(NamedTuple):
    """The part of a frame's pieces that is the same in all frames whose page runs have the same rows and are
    cut into the same grids.

    pieces: int32 [pieces, 7], as in `AttentionTables`, except that the index of the first page and the first
        column are counted from the beginning of the page run, and that the numbers of columns and of commonly
        visible columns are 0.
    run_of: int64 [pieces], the number of the page run of each piece.
    starts: as in `PieceTables`.
    slots: as in `PieceTables`.
    """

    pieces: Numbers
    run_of: Ints
    starts: Numbers
    slots: Numbers


@lru_cache(CACHED_SHAPES)
def _cut_grids(
    first_rows: bytes,
    rows_of_run: bytes,
    ranges_of_run: bytes,
    columns_per_piece: int,
    page_rows: int,
    tile_rows: int,
    num_rows: int,
) -> CutGrids:
    """Cut each page run into a grid of tiles of rows by ranges of columns, and return the pieces. Most steps
    have the sequences of the step before, and their page runs are then cut in the same way, so the result is
    cached. Its arrays must not be changed. Arrays are given as bytes, because the cache needs hashable
    arguments.

    first_rows: int64 [runs], the first row of each page run.
    rows_of_run: int64 [runs], the number of rows of each page run.
    ranges_of_run: int64 [runs], the number of column ranges that each page run is cut into.

        # a run of 6 rows and 2 ranges, tiles of 4 rows, pieces of 512 columns -> first rows [0 4 0 4],
        # rows [4 2 4 2], first columns [0 0 512 512]

    columns_per_piece: columns of a range, a multiple of `page_rows`.
    page_rows: columns of a page.
    tile_rows: largest number of rows of a piece.
    num_rows: number of rows of the frame.
    """
    runs = np.frombuffer(first_rows + rows_of_run + ranges_of_run, np.int64).reshape(3, -1)
    num_tiles = -(-runs[1] // tile_rows)
    pieces_of_run = runs[2] * num_tiles
    run_of = np.arange(len(pieces_of_run)).repeat(pieces_of_run)
    first, rows, _ = runs[:, run_of]
    # Piece `place` of a page run is tile place % tiles of column range place // tiles.
    place = np.arange(len(run_of)) - (pieces_of_run.cumsum() - pieces_of_run)[run_of]
    range_number, tile = np.divmod(place, num_tiles[run_of])
    first_column = range_number * columns_per_piece
    first_row = first + tile * tile_rows
    rows_of_piece = np.minimum(first + rows - first_row, tile_rows)
    nothing = np.zeros_like(first)
    first_slot = rows_of_piece.cumsum() - rows_of_piece
    fields = first_row, rows_of_piece, first_column // page_rows, nothing, first_column, nothing, first_slot
    pieces = np.array(fields, np.int32).T.copy()
    return CutGrids(pieces, run_of, *_slots_by_row(first_row, rows_of_piece, num_rows))


def _smallest_leads(leads: Numbers, firsts: Numbers, counts: Numbers) -> Numbers:
    """Return the smallest lead of the rows of each piece, int32 [pieces].

    leads: int32 [rows], as in `AttentionTables`.
    firsts: int32 [pieces], first row of each piece.
    counts: int32 [pieces], number of rows of each piece, at least 1.

        # leads [5 7 6 9], pieces of rows 0..1 and 2..3 -> [5 6]
    """
    # `reduceat` reduces between neighbouring edges, and every second of these ranges is a piece. The last
    # edge may lie after the last row, where there must be an element for `reduceat`.
    return np.minimum.reduceat(
        np.concatenate((leads, leads[:1])), np.array((firsts, firsts + counts)).T.reshape(-1)
    )[::2]


def as_arrays(page_runs: Sequence[PageRun]) -> PageRuns:
    """Return the page runs as arrays, with `shared` True, because several sequences may read one of them.

    page_runs: the runs; at least one.
    """
    fields = [(first, rows, at, columns, len(run)) for first, rows, at, columns, run in page_runs]
    pages = numbers([page for page_run in page_runs for page in page_run.pages])
    first, rows, at, columns, held = np.array(fields).T
    return PageRuns(first, rows, at, columns, held, pages, shared=True)


def page_runs_unshared(
    rows: Sequence[int], pages: Sequence[tuple[int, ...]], page_rows: int
) -> PageRuns | None:
    """Return one page run for each sequence, by which its rows read all of its pages. Return None if
    sequences may share pages.

    rows: number of rows of each sequence; at least one sequence.
    pages: page numbers of each sequence. Sharing is detected by equal first pages.
    page_rows: columns of a page.
    """
    if len({pages_of[0] for pages_of in pages}) < len(pages):
        return None
    held = np.array([*map(len, pages)])
    counts = np.array(rows)
    # Faster than an array of a list, and most of the time is spent here.
    all_pages = np.fromiter(chain.from_iterable(pages), np.int32)
    return PageRuns(
        counts.cumsum() - counts,
        counts,
        np.zeros_like(counts),
        held * page_rows,
        held,
        all_pages,
        shared=False,
    )


def _slots_by_row(firsts: Ints, counts: Ints, rows: int) -> tuple[Numbers, Numbers]:
    """Group the slots by row: return `starts` and `slots` of `AttentionTables`.

    A row without pieces has an empty range in `starts`.

    firsts: int64 [pieces], first row of each piece.
    counts: int64 [pieces], number of rows of each piece.
    rows: number of rows of the frame.

    Pieces with rows 0..1 and 0..2 have the slots 0, 1 and 2, 3, 4: starts [0, 2, 4, 5], slots [0, 2, 1, 3,
    4].
    """
    ends = counts.cumsum()
    # The row of each slot. A stable sort by row then keeps a row's pieces in order.
    rows_of = np.arange(ends[-1]) + (firsts + counts - ends).repeat(counts)
    starts = np.zeros(rows + 1, np.int32)
    np.bincount(rows_of, minlength=rows).cumsum(out=starts[1:])
    return starts, rows_of.argsort(kind="stable").astype(np.int32)


def tabulate_prompts(
    spans: Sequence[RowSpan], page_rows: int, tile_rows: int, padded: int = 0
) -> tuple[Numbers, Numbers]:
    """Return the work of a frame of prompts alone, whose rows are causal: tiles [tiles, 4], and pages.

    A tile is: first row, number of rows, columns before the first row's own, index of its sequence's first
    page in `pages`. Tiles with most columns come first, so that the longest programs start first. Without
    spans and `padded` rows both tables are empty.

    spans: one span per segment of the frame, in row order; all causal.
    page_rows: columns of a page.
    tile_rows: largest number of rows of a tile.
    padded: rows from the spans' end up to this number get tiles that read the first columns of some page, so
        that their outputs are defined. 0: no such rows.
    """
    tiles: list[tuple[int, int, int, int]] = []
    pages: list[int] = []
    first = 0
    for span in spans:
        for top in range(0, span.rows, tile_rows):
            tiles.append((first + top, min(tile_rows, span.rows - top), span.base + top, len(pages)))
        pages += span.pages[: -(-(span.base + span.tail) // page_rows)]
        first += span.rows
    tiles.sort(key=lambda tile: -tile[2])
    tiles += [(top, min(tile_rows, padded - top), 0, 0) for top in range(first, padded, tile_rows)]
    return numbers(tiles), numbers(pages)


def _piece_columns(columns: Ints, tiles: Ints, page_rows: int, tile_rows: int, places: int) -> int:
    """Return the columns of a piece, a multiple of `page_rows`, that reads all page runs in the shortest
    estimated time.

    The model: pieces run in waves of `places`; a piece costs its columns plus PIECE_OVERHEAD_COLUMNS; the
    remainder of a page run takes a proportional part of a place. Sizes that add more than MAX_EXTRA_WAVES *
    places pieces are not considered. Sizes below MIN_PIECE_COLUMNS columns are not considered, nor below
    twice as many for tiles of WIDE_TILE_ROWS rows or more.

    columns: int64 [page runs], number of columns of each page run.
    tiles: int64 [page runs], number of tiles that each page run's rows make.
    places: pieces that run at once under each KV head; see `places_of`.
    page_rows: columns of a page; the result is a multiple of it.
    tile_rows: largest number of rows of a piece.
    """
    min_columns = MIN_PIECE_COLUMNS if tile_rows < WIDE_TILE_ROWS else 2 * MIN_PIECE_COLUMNS
    sizes = _piece_sizes(int(columns.max()), min_columns, page_rows)
    pieces_of_size = (-(-columns // np.array(sizes)[:, None]) @ tiles).tolist()
    # `TableRoom.pieces` keeps memory for so many pieces and no more.
    max_total = int(tiles.sum()) + MAX_EXTRA_WAVES * places
    work = int(columns @ tiles)
    seconds = dict[int, int]()
    for size, pieces in zip(sizes, pieces_of_size):
        if pieces <= max_total:
            cost_of_piece = size + PIECE_OVERHEAD_COLUMNS
            waves = -(-(work + pieces * PIECE_OVERHEAD_COLUMNS) // (places * cost_of_piece))
            seconds[size] = waves * cost_of_piece
    return min(seconds, key=seconds.__getitem__)


@lru_cache(CACHED_SHAPES)
def _piece_sizes(max_columns: int, min_columns: int, page_rows: int) -> tuple[int, ...]:
    """Return the columns of a piece that `_piece_columns` considers, each size once, largest first.

    max_columns: columns of the longest page run.
    min_columns: smallest piece that is considered, before it is rounded up to whole pages.
    page_rows: columns of a page.
    """
    # More pieces than this would all have `min_columns` columns, like the last candidate.
    max_pieces = min(max(-(-max_columns // min_columns), 1), MAX_PIECES)
    candidates = [max(-(-max_columns // number), min_columns) for number in range(1, max_pieces + 1)]
    return tuple(dict.fromkeys([-(-candidate // page_rows) * page_rows for candidate in candidates]))


def page_runs_of(
    spans: Sequence[RowSpan], page_rows: int, sinces: Numbers | None = None
) -> tuple[PageRun, ...]:
    """Return the page runs that the spans read, in row order.

    Shared prefixes are searched only if two spans have the same first page; see the module's example. A run
    whose pages are hidden from all of its rows is left out.

    spans: one span per segment of the frame, in row order; no spans give no runs.
    page_rows: columns of a page.
    sinces: [rows], the first column that each row sees; whole pages before them are left out. None: rows see
        all columns.
    """
    starts = (0, *accumulate(span.rows for span in spans))
    if len({span.pages[0] for span in spans}) < len(spans):  # some may share pages
        runs = tuple(
            _page_runs([SeenRows(at, span, span.lead) for at, span in zip(starts, spans)], 0, page_rows)
        )
    else:
        ends = [span.base + span.tail for span in spans]
        runs = tuple(
            PageRun(at, span.rows, 0, end, span.pages[: -(-end // page_rows)])
            for at, span, end in zip(starts, spans, ends)
        )
    return runs if sinces is None else tuple(_without_hidden_pages(runs, sinces, page_rows))


def _page_runs(blocks: Sequence[SeenRows], level: int, page_rows: int) -> Iterator[PageRun]:
    """Yield the page runs of neighbouring spans from one level on; shared pages come before each span's own.

    A span without columns from `level` on yields nothing.

    blocks: the neighbouring spans, with their first rows.
    level: index of the first page that is read.
    page_rows: columns (rows) of a KV page.
    """
    for run in _shared_runs(blocks, level, page_rows):
        (first, span, _) = run[0]
        at = level * page_rows
        end = -(-(span.base + span.tail) // page_rows)
        columns = span.base + span.tail - at
        if len(run) > 1:
            end = _shared_until(run, level + 1, page_rows)
            columns = end * page_rows - at
        if columns > 0:
            yield PageRun(first, sum(block.span.rows for block in run), at, columns, span.pages[level:end])
        if len(run) > 1:
            yield from _page_runs(run, end, page_rows)


def _shared_runs(blocks: Sequence[SeenRows], level: int, page_rows: int) -> list[list[SeenRows]]:
    """Return groups of neighbours that have the same full page at a level, and whose rows all see the whole
    page.

    A span that shares its page with no neighbour is a group of its own. The groups are in row order, and
    every span is in one of them.

    blocks: the neighbouring spans, with their first rows.
    level: index of the page among a span's pages.
    page_rows: columns (rows) of a KV page.
    """
    runs: list[list[SeenRows]] = []
    previous_page: int | None = None
    for block in blocks:
        page = block.span.pages[level] if block.lead >= (level + 1) * page_rows else None
        if runs and page is not None and page == previous_page:
            runs[-1].append(block)
        else:
            runs.append([block])
        previous_page = page
    return runs


def _shared_until(run: Sequence[SeenRows], level: int, page_rows: int) -> int:
    """Return the first level whose page the run does not share, or does not see as a whole.

    run: spans that share the pages before.
    level: the level from which to search; it is returned if its page is not shared.
    page_rows: columns (rows) of a KV page.
    """
    pages = [block.span.pages for block in run]
    num_seen = min(block.lead for block in run) // page_rows
    return next(
        (at for at in range(level, num_seen) if len({pages_of[at] for pages_of in pages}) > 1),
        max(level, num_seen),
    )


def _without_hidden_pages(page_runs: Sequence[PageRun], sinces: Numbers, page_rows: int) -> Iterator[PageRun]:
    """Yield each page run without the leading whole pages that none of its rows sees; nothing if all are
    hidden.

    page_runs: the page runs, in row order.
    sinces: int32 [rows], the first column that each row of the frame sees.
    page_rows: columns (rows) of a KV page.
    """
    for first, rows, at, columns, pages in page_runs:
        num_hidden = max(int(sinces[first : first + rows].min()) - at, 0) // page_rows
        if num_hidden * page_rows < columns:
            hidden_columns = num_hidden * page_rows
            yield PageRun(first, rows, at + hidden_columns, columns - hidden_columns, pages[num_hidden:])


def sinces_of(spans: Sequence[RowSpan], window: int) -> Numbers:
    """Return the first position of each row's own path that it sees if it sees the last `window` positions.

    A row's path has the columns that it sees without a window: the row itself is its last. Row 0 of a causal
    span with base 10 has a path of 11 positions; with window 4 it sees those from 7 on. A row whose path has
    at most `window` positions gets 0.

    spans: one span per segment of the frame, in row order.
    window: number of positions, the row's own included.
    """
    return numbers([max(length - window, 0) for span in spans for length in _path_lengths(span)])


def _path_lengths(span: RowSpan) -> list[int]:
    """Return the length of each row's path: a causal row's column + 1, a tree node's base plus its visible
    tail columns.

    span: the rows of one sequence in the frame.
    """
    if span.visible is None:
        return [span.base + row + 1 for row in range(span.rows)]
    return [span.base + seen.bit_count() for seen in span.visible]


def sights_of(spans: Sequence[RowSpan], window: int | None = None) -> RowSights:
    """Return what each row sees, in row order.

    A causal row's lead is its column + 1, with no bits; a tree row's lead is its span's base. Without spans
    all arrays are empty. The arrays must not be changed: the bits may be cached, and leads and bases may be
    one array.

    window: a tree row's bits keep only the last `window` positions of its path; None keeps all. (Columns
        before `base` are cut by `sinces_of` instead.)
    spans: one span per segment of the frame, in row order.
    """
    bases = numbers([span.base for span in spans])
    seen = spans[0].visible if spans else None
    if seen and window is None and [span.visible for span in spans].count(seen) == len(spans):
        # All spans are trees of one shape, whose rows all have the base as their lead.
        bases = bases.repeat(len(seen))
        return RowSights(bases, bases, _words_of_shape(seen, len(spans)))
    bases = bases.repeat([span.rows for span in spans])
    leads = bases.copy()
    rows = list[int]()
    for span in spans:
        if span.visible is None:
            leads[len(rows) : len(rows) + span.rows] += np.arange(1, span.rows + 1, dtype=np.int32)
        rows += span.visible or [0] * span.rows
    if window is not None:
        rows = [drop_low_bits(bits, bits.bit_count() - window) for bits in rows]
    return RowSights(leads, bases, _words_of(rows))


@lru_cache(CACHED_SHAPES)
def _words_of_shape(rows: tuple[int, ...], num_trees: int) -> Numbers:
    """Return what `_words_of` returns for the rows of some trees of one shape, one tree after the other. The
    array is cached and read-only.

    rows: the bits of each row of one tree.
    num_trees: number of trees.
    """
    words = np.tile(_words_of(rows), (num_trees, 1))
    words.flags.writeable = False
    return words


def _words_of(rows: Sequence[int]) -> Numbers:
    """Return each row's bits packed into int32 words, [rows, words], as many as the row with the highest bit
    needs.

    There is at least one word. No rows give an array of shape [0, 1].

    rows: the bits of each row, as an integer: bit 33 becomes word 1, bit 1.
    """
    words = max(map(int.bit_length, rows), default=0) // WORD + 1
    if words <= 2:
        return np.array(rows, f"<u{4 * words}").view("<i4").reshape(len(rows), words)
    packed = b"".join([row.to_bytes(4 * words, "little") for row in rows])
    return np.frombuffer(packed, "<i4").reshape(len(rows), words)


def numbers(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Numbers:
    """Return integers as an int32 array.

    values: integers, or tuples of equally many integers.
    """
    return np.array(values, np.int32)
