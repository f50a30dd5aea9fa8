"""Attention work of a frame as tables of numbers: which rows read which columns.

Pure. A stretch is a run of pages and the rows that read it; full pages that neighbouring sequences share, and
every row of them sees, are one stretch for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specsot_kernels.segments import last_bits

QUERIES = 64  # rows of a tile at most; no measurement recorded
SHORT = 32  # queries of a tile where many texts have a few rows each: docs/results/h100-vllm.md
# The same in frames of at most so many rows, plain ones above all: docs/results/h100-product.md
SHORTEST = 16
SHORTEST_ROWS = 64
PROMPT_QUERIES = 128  # rows of a tile of prompts alone: docs/results/h100-product.md

Numbers = NDArray[np.int32]
Ints = NDArray[np.int64]

# Columns of a piece that are worth a program; twice as many for more than FEW rows; no measurement recorded.
LEAST = 64
FEW = 8
# How stretches are cut, as fits what an H100 takes (docs/results/h100-kernels.md#how-long-texts-are-cut):
# that read at once, two on each of 132 SMs; heads of most models
PROGRAMS = 264
KV_HEADS = 8
BEGUN = 384  # columns that are read in the time in which a piece begins and ends
PIECES = 32  # of a stretch at most: each row's are merged one after another
WAVES = 2  # of programs that cuts add at most: memory is kept for all of them
WORD = 32  # bits of a mask's word
BITS = 3  # place of the bits among a room's tables
ANCHORED = -1  # in place of the columns that all rows of a piece see: see `anchors`


class TableSpan(Protocol):
    """One sequence's rows in a frame: see `specsot_kernels.segments.RowSpan`."""

    @property
    def rows(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def pages(self) -> tuple[int, ...]: ...
    @property
    def visible(self) -> tuple[int, ...] | None: ...
    @property
    def lead(self) -> int: ...


class WholePages(NamedTuple):
    """A `TableSpan` over all of its pages, whose rows see what is before the base's own page: so it stays for
    many laps, and names every column that they see.
    """

    rows: int
    base: int
    tail: int
    pages: tuple[int, ...]
    visible: tuple[int, ...] | None = None

    @property
    def lead(self) -> int:
        return self.base


def whole_pages(rows: int, base: int, pages: tuple[int, ...], page_rows: int) -> WholePages:
    """Of so many rows, which see what is before column `base`, where a page begins."""
    return WholePages(rows, base, len(pages) * page_rows - base, pages)


class SeenRows(NamedTuple):
    """A sequence's rows, from row `first` of the frame on, which all see the columns before `lead`."""

    first: int
    span: TableSpan
    lead: int


class PageStretch(NamedTuple):
    """Rows first .. first + rows - 1 read columns at .. at + columns - 1, which lie on these pages."""

    first: int
    rows: int
    at: int
    columns: int
    pages: tuple[int, ...]


class Stretches(NamedTuple):
    """The same of many, each of as many numbers. held: pages of each; pages: of all, one behind the other."""

    first: Ints
    rows: Ints
    at: Ints
    columns: Ints
    held: Ints
    pages: Numbers


class RowSights(NamedTuple):
    """What each row sees, as `Tables` has it."""

    leads: Numbers
    bases: Numbers
    bits: Numbers


class AttentionTables(NamedTuple):
    """A frame's work; slots are numbered through, one for each row of each piece.

    pieces: [pieces, 7] first row, rows, where its pages start in `pages`, columns, the first column,
            columns that all of its rows see (or ANCHORED), first slot.
    pages:  page numbers of all pieces.
    leads:  [rows] columns before this one are seen; bases: [rows] column of bit 0 of the row's bits.
    bits:   [rows, words], bit j of word i: column base + 32 i + j is seen.
    starts: [rows + 1] and slots: row r merges slots[starts[r] : starts[r + 1]].
    """

    pieces: Numbers
    pages: Numbers
    leads: Numbers
    bases: Numbers
    bits: Numbers
    starts: Numbers
    slots: Numbers


class PieceTables(NamedTuple):
    """What of `AttentionTables` does not say what rows see of the pieces."""

    pieces: Numbers
    starts: Numbers
    slots: Numbers
    pages: Numbers


@dataclass(frozen=True, slots=True)
class TableRoom:
    """Tables of one size for every frame of at most `rows` rows, tiles of `tile_rows` of them, and `pages`
    pages named: what one captured graph reads. In the order of `Tables`, but pages come last: few of them
    are in use, and only what is in use needs to be copied.

    short: for frames of many texts with a few rows each. anchored: of texts with a policy, too.
    places: see `places_of`.
    """

    rows: int
    tile_rows: int
    pages: int
    short: bool = False
    anchored: bool = False
    places: int = PROGRAMS // KV_HEADS

    @property
    def pieces(self) -> int:
        """As many as any frame that shares at most two levels of prefixes has; see `_piece_columns`."""
        return WAVES * self.places + (2 + self.anchored) * self.rows

    @property
    def slots(self) -> int:
        """Of one piece a stretch, of which a row reads at most three, and its anchors; of those that cuts
        add, full of rows.
        """
        cut = WAVES * self.places * min(self.rows, self.tile_rows)
        return cut + (3 + self.anchored) * self.rows

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of pieces, leads, bases, bits, starts, slots, pages."""
        rows = self.rows
        words = self.rows // WORD + 1
        return (self.pieces, 7), (rows,), (rows,), (rows, words), (rows + 1,), (self.slots,), (self.pages,)

    def fill(self, tables: AttentionTables) -> list[Numbers] | None:
        """The same tables in these shapes, pages cut to those in use; None where they do not fit.

        A piece of no rows does nothing; a row of no pieces gets zeros.
        """
        cut = self.fill_pieces(PieceTables(tables.pieces, tables.starts, tables.slots, tables.pages))
        if cut is None or not _fits(tables.bits.shape, self.shapes[3]):
            return None
        return [cut[0], *self.fill_sights(RowSights(*tables[2:5])), *cut[1:]]

    def fill_pieces(self, cut: PieceTables) -> list[Numbers] | None:
        """Pieces, starts, slots and pages alone."""
        shapes = self.shapes[0], *self.shapes[4:]
        if any(not _fits(part.shape, shape) for part, shape in zip(cut, shapes)):
            return None
        pieces, starts, slots = (grown(part, shape) for part, shape in zip(cut, shapes[:-1]))
        starts[len(cut.starts) :] = cut.starts[-1]
        return [pieces, starts, slots, cut.pages]

    def fill_sights(self, sights: RowSights) -> list[Numbers]:
        """Leads, bases and bits alone, of rows for which there is room."""
        return [grown(part, shape) for part, shape in zip(sights, self.shapes[1:4])]


def room_for(
    rows: int,
    pages: int,
    heads_per_kv: int,
    short: bool = False,
    anchored: bool = False,
    kv_heads: int = KV_HEADS,
) -> TableRoom:
    """Of the tables of every frame of at most `rows` rows and `pages` pages. short, anchored: as in
    `TableRoom`.
    """
    tile = tile_of(rows, heads_per_kv)
    if short:
        tile = SHORTEST if rows <= SHORTEST_ROWS else SHORT
    return TableRoom(rows, max(tile // heads_per_kv, 1), pages, short, anchored, places_of(kv_heads))


def places_of(kv_heads: int) -> int:
    """Pieces that a GPU reads at once under each KV head."""
    return max(PROGRAMS // kv_heads, 1)


def tile_of(rows: int, heads_per_kv: int) -> int:
    """Queries of a tile, a power of two: of all heads of a few rows."""
    return min(max(1 << (rows * heads_per_kv - 1).bit_length(), 16), QUERIES)


def _fits(inner: tuple[int, ...], outer: tuple[int, ...]) -> bool:
    return all(one <= other for one, other in zip(inner, outer))


def grown(part: Numbers, shape: tuple[int, ...]) -> Numbers:
    grown = np.zeros(shape, np.int32)
    grown[tuple(map(slice, part.shape))] = part
    return grown


def tabulate(
    spans: Sequence[TableSpan],
    page_rows: int,
    tile_rows: int,
    window: int | None = None,
    sinces: Numbers | None = None,
    anchored: Sequence[PageStretch] = (),
    places: int = PROGRAMS // KV_HEADS,
) -> AttentionTables:
    """The work of one frame whose spans come in row order; a piece has at most tile_rows rows.

    window: as in `sights_of`. sinces: see `sinces_of`; whole pages before them are not read.
    anchored: see `anchored_of`. places: see `places_of`.
    """
    sights = sights_of(spans, window)
    stretches = stretches_of(spans, page_rows, sinces)
    pieces, starts, slots, pages = cut_pieces(
        stretches, sights.leads, page_rows, tile_rows, anchored=anchored, places=places
    )
    return AttentionTables(pieces, pages, *sights, starts, slots)


def cut_pieces(
    stretches: Sequence[PageStretch] | Stretches,
    leads: Numbers,
    page_rows: int,
    tile_rows: int,
    times: int = 1,
    anchored: Sequence[PageStretch] = (),
    places: int = PROGRAMS // KV_HEADS,
) -> PieceTables:
    """leads: as in `AttentionTables`. times: for each row of the stretches so many. anchored: see
    `anchored_of`. places: see `places_of`.
    """
    if not isinstance(stretches, Stretches):
        stretches = as_arrays((*stretches, *anchored))
    first, rows, at, columns, held, pages = stretches
    seen = len(first) - len(anchored)
    first = first * times
    rows = rows * times
    down = -(-rows // tile_rows)
    step = _piece_columns(columns, down, page_rows, tile_rows, places)
    across = -(-columns // step)  # by `down` pieces of each stretch
    many = across * down
    of = np.arange(len(first)).repeat(many)
    place = np.arange(len(of)) - (many.cumsum() - many)[of]
    left = place // down[of] * step
    below = place % down[of] * tile_rows
    top = first[of] + below
    high = np.minimum(rows[of] - below, tile_rows)
    where = (held.cumsum() - held)[of] + left // page_rows
    wide = np.minimum(columns[of] - left, step)
    edges = np.array((top, top + high)).T.reshape(-1)
    lead = np.where(of < seen, np.minimum.reduceat(np.append(leads, 0), edges)[::2], ANCHORED)
    used = high.cumsum() - high
    pieces = np.stack((top, high, where, wide, at[of] + left, lead, used), 1).astype(np.int32)
    return PieceTables(pieces, *_merges(top, high, len(leads)), pages)


def as_arrays(stretches: Sequence[PageStretch]) -> Stretches:
    told = [(first, rows, at, columns, len(run)) for first, rows, at, columns, run in stretches]
    pages = numbers([page for stretch in stretches for page in stretch.pages])
    first, rows, at, columns, held = np.array(told).T
    return Stretches(first, rows, at, columns, held, pages)


def stretches_alone(
    rows: Sequence[int], pages: Sequence[tuple[int, ...]], page_rows: int
) -> Stretches | None:
    """Of texts of so many rows each, which read all of these pages; None where texts may share some."""
    if len({own[0] for own in pages}) < len(pages):
        return None
    held = np.array([len(own) for own in pages])
    many = np.array(rows)
    every = np.fromiter(chain.from_iterable(pages), np.int32, int(held.sum()))
    return Stretches(many.cumsum() - many, many, np.zeros_like(many), held * page_rows, held, every)


def _merges(firsts: Ints, counts: Ints, rows: int) -> tuple[Numbers, Numbers]:
    ends = np.cumsum(counts)
    rows_of = np.arange(ends[-1]) + np.repeat(firsts + counts - ends, counts)
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(rows_of, minlength=rows), out=starts[1:])
    return starts, np.argsort(rows_of, kind="stable").astype(np.int32)


def tabulate_prompts(
    spans: Sequence[TableSpan], page_rows: int, tile_rows: int, padded: int = 0
) -> tuple[Numbers, Numbers]:
    """The work of a frame of prompts alone, whose rows see all before them: tiles [tiles, 4], which are first
    row, rows, columns before the first row's own, where its pages start; and pages. Those that read most come
    first.

    padded: rows behind those of the spans up to this one, too, read something.
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


def _piece_columns(columns: Ints, down: Ints, page_rows: int, tile_rows: int, places: int) -> int:
    """Whole pages, so many that all is read soonest: in waves of `places` pieces, where what is left of each
    stretch takes a part of a place.

    columns, down: of every stretch, and how many tiles its rows make. places: see `places_of`.
    """
    least = LEAST if tile_rows < FEW else 2 * LEAST
    wanted = np.maximum(-(-int(columns.max()) // np.arange(1, PIECES + 1)), least)
    steps = -(-wanted // page_rows) * page_rows
    pieces = -(-columns // steps[:, None]) @ down
    each = steps + BEGUN
    times = -(-(columns @ down + pieces * BEGUN) // (places * each)) * each
    fitting = pieces <= int(down.sum()) + WAVES * places
    return int(steps[fitting][times[fitting].argmin()])


def stretches_of(
    spans: Sequence[TableSpan], page_rows: int, sinces: Numbers | None = None
) -> tuple[PageStretch, ...]:
    """What spans read, which come in row order. sinces: see `tabulate`."""
    starts = (0, *accumulate(span.rows for span in spans))
    if len({span.pages[0] for span in spans}) < len(spans):  # some may share pages
        found = tuple(_cut([SeenRows(at, span, span.lead) for at, span in zip(starts, spans)], 0, page_rows))
    else:
        ends = [span.base + span.tail for span in spans]
        found = tuple(
            PageStretch(at, span.rows, 0, end, span.pages[: -(-end // page_rows)])
            for at, span, end in zip(starts, spans, ends)
        )
    return found if sinces is None else tuple(_from(found, sinces, page_rows))


def _cut(blocks: Sequence[SeenRows], level: int, page_rows: int) -> Iterator[PageStretch]:
    """Stretches of neighbours from the level-th page on."""
    for run in _runs(blocks, level, page_rows):
        (first, span, _) = run[0]
        at = level * page_rows
        end = -(-(span.base + span.tail) // page_rows)
        columns = span.base + span.tail - at
        if len(run) > 1:
            end = _shared_until(run, level + 1, page_rows)
            columns = end * page_rows - at
        if columns > 0:
            yield PageStretch(first, sum(each.span.rows for each in run), at, columns, span.pages[level:end])
        if len(run) > 1:
            yield from _cut(run, end, page_rows)


def _runs(blocks: Sequence[SeenRows], level: int, page_rows: int) -> list[list[SeenRows]]:
    """Neighbours whose level-th page is the same, full, and seen whole."""
    runs: list[list[SeenRows]] = []
    before: int | None = None
    for block in blocks:
        page = block.span.pages[level] if block.lead >= (level + 1) * page_rows else None
        if runs and page is not None and page == before:
            runs[-1].append(block)
        else:
            runs.append([block])
        before = page
    return runs


def _shared_until(run: Sequence[SeenRows], level: int, page_rows: int) -> int:
    """The first level from this one on whose page the run does not share."""
    pages = [block.span.pages for block in run]
    most = min(block.lead for block in run) // page_rows
    return next((at for at in range(level, most) if len({each[at] for each in pages}) > 1), max(level, most))


def _from(stretches: Sequence[PageStretch], sinces: Numbers, page_rows: int) -> Iterator[PageStretch]:
    """What is left of them from the first page on that any of their rows sees."""
    for first, rows, at, columns, pages in stretches:
        gone = max(int(sinces[first : first + rows].min()) - at, 0) // page_rows
        if gone * page_rows < columns:
            left = gone * page_rows
            yield PageStretch(first, rows, at + left, columns - left, pages[gone:])


def sinces_of(spans: Sequence[TableSpan], window: int) -> Numbers:
    """The first column of each row's line that it sees, where it sees the last `window` positions."""
    return numbers([max(length - window, 0) for span in spans for length in _lengths(span)])


def _lengths(span: TableSpan) -> list[int]:
    """Of each row's line."""
    if span.visible is None:
        return [span.base + row + 1 for row in range(span.rows)]
    return [span.base + seen.bit_count() for seen in span.visible]


def sights_of(spans: Sequence[TableSpan], window: int | None = None) -> RowSights:
    """Of all rows, in row order. window: bits have the last so many positions of a line alone."""
    counts = [span.rows for span in spans]
    bases = np.repeat(numbers([span.base for span in spans]), counts)
    leads = bases.copy()
    rows = list[int]()
    seen = spans[0].visible if spans else None
    if seen and window is None and all(span.visible is seen for span in spans):  # trees of one shape
        return RowSights(leads, bases, np.tile(_words_of(seen), (len(spans), 1)))
    for span in spans:
        if span.visible is None:
            leads[len(rows) : len(rows) + span.rows] += np.arange(1, span.rows + 1, dtype=np.int32)
        rows += span.visible or [0] * span.rows
    if window is not None:
        rows = [last_bits(bits, bits.bit_count() - window) for bits in rows]
    return RowSights(leads, bases, _words_of(rows))


def _words_of(rows: Sequence[int]) -> Numbers:
    """Each row's bits in as many words as the longest needs."""
    words = max(map(int.bit_length, rows), default=0) // WORD + 1
    if words <= 2:
        return np.array(rows, f"<u{4 * words}").view("<i4").reshape(len(rows), words)
    packed = b"".join([row.to_bytes(4 * words, "little") for row in rows])
    return np.frombuffer(packed, "<i4").reshape(len(rows), words)


def numbers(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Numbers:
    return np.array(values, np.int32)
