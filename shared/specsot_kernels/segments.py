"""Plans a frame's attention reads on CPUs: which rows read which columns of which KV page, less what policies
hide.

A *row* is one token of the batch (a row of the query matrix). A *column* is one KV position of a sequence.
Rows that read the same page, or neighbouring pages, are read together as one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from operator import and_
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Layout = Literal["packed", "batched"]  # As `specsot.members.Layout`: the kernels import nothing of ours.

# Rows x columns. Largest group; bounds the scores that the group holds per head. Untuned.
MAX_GROUP_CELLS = 1 << 20
# Ratio and rows. A group of n rows may be padded to MAX_PADDING_RATIO * n + FREE_PADDING_ROWS rows. Untuned.
MAX_PADDING_RATIO = 1.5
FREE_PADDING_ROWS = 32


@dataclass(frozen=True, slots=True)
class VisibleColumns:
    """What a KV policy leaves visible of the columns before a segment; a tuple entry per row.

    sinks: how many of the first columns the row sees as attention sinks, or as what pruning left.
    since: the first column, after the sinks, that the row sees; it sees all columns from there to the
        segment's base.
    turns: how many positions closer to the sinks the row is rotated than its own position says, or 0.

    A row at position 100 with sinks = 4, since = 84, turns = 80 sees columns 0..3 and 84.. .
    """

    sinks: tuple[int, ...]
    since: tuple[int, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """What the heads of one layer see if each KV head has a window of its own. Columns are positions here.

    windows: (sinks, recent) of every KV head: its first columns, and the columns at most `recent` before the
        row.
    positions: positions of the rows.
    since: columns before this one are hidden from every head, except its sinks, even if its window reaches
        further.

    With windows ((1, 2),) and since = 0, the row at position 5 sees columns 0, 3, 4 and 5.
    """

    windows: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]
    since: int = 0


# Not frozen: a step makes hundreds of spans, and making a frozen one takes four times as long.
@dataclass(slots=True, unsafe_hash=True)
class RowSpan:
    """One sequence's rows in a frame. The rows' own KV has already been written.

    rows: number of rows; their KV sits at the tail positions tail - rows .. tail - 1.
    base: every row sees the sequence's KV columns 0 .. base - 1.
    tail: the KV columns base .. base + tail - 1 are seen in part; see `visible`.
    pages: the pages that hold columns 0 .. base + tail - 1, in order; more pages may follow and are not used.
    visible: for each row the tail positions that it sees, as bits; None means that row i sees 0 .. i (then
        tail == rows).
    sight: set if a policy hides more columns; such rows are read by themselves.

    A tree [root, a, b, c] with a and b below the root and c below a, after 10 committed tokens: rows = tail =
    4, base = 10, visible = (0b0001, 0b0011, 0b0101, 0b1011).
    """

    rows: int
    base: int
    tail: int
    pages: tuple[int, ...]
    visible: tuple[int, ...] | None = None
    sight: VisibleColumns | HeadColumns | None = None

    @property
    def total(self) -> int:
        """Return how many KV columns the span's rows see at most."""
        return self.base + self.tail

    @property
    def lead(self) -> int:
        """Return how many columns, from the first on, every row sees. It is 0 if a policy hides columns.

        visible (0b001, 0b011, 0b101) have bit 0 in common: lead = base + 1.
        """
        if self.sight is not None:
            return 0
        if self.visible is None:
            return self.base + 1
        common = reduce(and_, self.visible)
        return self.base + (~common & (common + 1)).bit_length() - 1

    def at(self, layer: int) -> RowSpan:
        """Return the span as layer `layer` of the model reads it; subclasses change the sight by layer."""
        return self

    def depth(self, page_rows: int) -> int:
        """Return the number of pages in use."""
        return -(-self.total // page_rows)

    @property
    def seen(self) -> tuple[int, ...]:
        """Return the visible tail positions of each row as bits; of causal rows 0b1, 0b11, 0b111
        and so on.
        """
        return self.visible or tuple((2 << row) - 1 for row in range(self.rows))

    def padded(self, rows: int) -> RowSpan:
        """Return the span with its last row repeated until there are `rows` rows."""
        if rows == self.rows:
            return self
        return replace(self, rows=rows, visible=self.seen + self.seen[-1:] * (rows - self.rows))


@dataclass(frozen=True, slots=True)
class PageRead:
    """A batched product of `cells` cells of `rows` rows each with one page each.

    The cells' rows lie in sequence from row `first` of the group on. Cell i reads the first `columns` KV
    columns of page `page` + i; they are the columns at .. at + columns - 1 of the group's score matrix.
    """

    first: int
    rows: int
    cells: int
    page: int
    columns: int
    at: int


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Spans whose rows are read together, in the order of the arranged rows.

    spans: the spans, padded if the group is padded.
    readings: the products that cover all columns of the group.
    """

    spans: tuple[RowSpan, ...]
    readings: tuple[PageRead, ...]

    @property
    def rows(self) -> int:
        """Return the number of rows of the group, padding included."""
        return sum(span.rows for span in self.spans)

    @property
    def width(self) -> int:
        """Return the number of columns of the group's score matrix."""
        return max(span.total for span in self.spans)

    @property
    def lead(self) -> int:
        """Return how many columns, from the first on, every row of the group sees."""
        return min(span.lead for span in self.spans)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A frame's groups over its arranged rows.

    groups: in the order of the arranged rows.
    take: for each arranged row the frame's row that it is a copy of; None if the arranged rows are the
        frame's rows. Two spans of 2 and 1 rows, padded to 2 each: take = (0, 1, 2, 2).
    """

    groups: tuple[ReadGroup, ...]
    take: tuple[int, ...] | None


def plan_reads(spans: Sequence[RowSpan], page_rows: int, layout: Layout) -> ReadPlan:
    """Plan the reads of a frame whose spans come in row order.

    layout: "batched" sorts the spans by their pages, so that neighbouring pages become one batched product,
        and may pad spans to equal numbers of rows; "packed" keeps the rows as they are.
    """
    starts = (0, *accumulate(span.rows for span in spans))
    blocks = [block for first, span in zip(starts, spans) for block in _cut(first, span)]
    if layout == "batched":
        blocks.sort(key=lambda block: block[1].pages[: block[1].depth(page_rows)])
    groups: list[ReadGroup] = []
    take: list[int] = []
    for members in _gather(blocks, page_rows, layout):
        padded = _pad([span for _, span in members], layout)
        groups.append(ReadGroup(padded, _read(padded, page_rows, layout)))
        for (first, span), each in zip(members, padded):
            take += range(first, first + span.rows)
            take += [first + span.rows - 1] * (each.rows - span.rows)
    return ReadPlan(tuple(groups), None if take == list(range(starts[-1])) else tuple(take))


# The number of the block's first row in the frame, and the block's rows.
RowBlock = tuple[int, RowSpan]


def _cut(first: int, span: RowSpan) -> Iterator[RowBlock]:
    """Split a long causal span into blocks of rows, so that each block's scores fit MAX_GROUP_CELLS.

    To a block, the rows before it are history: 6 rows with base 10 in blocks of 4 become rows 0..3 with base
    10 and rows 4..5 with base 14.
    """
    step = max(MAX_GROUP_CELLS // span.total, 1)
    if span.visible is not None or span.rows <= step:
        yield first, span
        return
    for start in range(0, span.rows, step):
        rows = min(step, span.rows - start)
        yield first + start, RowSpan(rows, span.base + start, rows, span.pages)


def look_back(span: RowSpan, window: int, drafts: bool = True) -> Iterator[RowSpan]:
    """Yield the span's rows for a layer with a sliding window, less what a policy hides.

    A row sees its own position and the `window` - 1 positions before it. Sinks of the policy stay visible in
    all layers.
    drafts: a tree row sees all draft nodes on its path, even beyond the window.
    """
    if span.total <= window:
        yield span
        return
    if isinstance(span.sight, HeadColumns):
        heads = tuple((sinks, min(recent, window - 1)) for sinks, recent in span.sight.windows)
        yield replace(span, sight=replace(span.sight, windows=heads))
        return
    for _, part in ((0, span),) if span.sight else _cut(0, span):
        places = [bits.bit_count() for bits in part.seen]
        seen = part.seen
        if part.visible is None:
            seen = tuple(bits >> far << far for bits, far in zip(seen, (max(n - window, 0) for n in places)))
        elif not drafts:
            seen = tuple(last_bits(bits, n - window) for bits, n in zip(seen, places))
        since = tuple(min(max(part.base + place - window, 0), part.base) for place in places)
        if any(since) or seen != part.seen:
            nothing = (0,) * part.rows
            left = span.sight or VisibleColumns(nothing, nothing, nothing)
            since = tuple(map(max, since, left.since))
            part = replace(part, visible=seen, sight=replace(left, since=since))
        yield part


def last_bits(bits: int, fewer: int) -> int:
    """Return `bits` without its `fewer` lowest set bits: (0b1101, 2) -> 0b1000."""
    for _ in range(fewer):
        bits &= bits - 1
    return bits


def _gather(blocks: Sequence[RowBlock], page_rows: int, layout: Layout) -> Iterator[list[RowBlock]]:
    """Yield groups of neighbours that can be read together, within MAX_GROUP_CELLS."""
    members: list[RowBlock] = []
    longest = rows = width = 0
    for first, span in blocks:
        longest = max(longest, span.rows)
        rows = rows + span.rows
        width = max(width, span.total)
        padded = longest * (len(members) + 1)
        near = layout == "batched" and _near(padded, rows)
        if members and (
            padded * width > MAX_GROUP_CELLS or not _beside(members[-1][1], span, page_rows, near)
        ):
            yield members
            members = []
            longest = span.rows
            rows = span.rows
            width = span.total
        members.append((first, span))
    if members:
        yield members


def _beside(left: RowSpan, right: RowSpan, page_rows: int, near: bool) -> bool:
    """Return whether the first pages of two spans can be read together: one shared page, or neighbouring
    pages.
    """
    if left.sight or right.sight:
        return False
    return _share(left, right, 0, page_rows) or (near and left.pages[0] + 1 == right.pages[0])


def _pad(spans: Sequence[RowSpan], layout: Layout) -> tuple[RowSpan, ...]:
    """Return the spans padded to the longest one's rows if the layout is batched and the padding is cheap."""
    longest = max(span.rows for span in spans)
    if layout == "packed" or not _near(longest * len(spans), sum(span.rows for span in spans)):
        return tuple(spans)
    return tuple(span.padded(longest) for span in spans)


def _near(padded: int, rows: int) -> bool:
    """Return whether padding `rows` rows to `padded` rows is cheap."""
    return padded <= MAX_PADDING_RATIO * rows + FREE_PADDING_ROWS


def _share(left: RowSpan, right: RowSpan, level: int, page_rows: int) -> bool:
    """Return whether both spans have the same level-th page, full, and all rows of both see all of it."""
    end = (level + 1) * page_rows
    return min(left.lead, right.lead) >= end and left.pages[level] == right.pages[level]


def _adjoin(left: RowSpan, right: RowSpan, level: int, layout: Layout) -> bool:
    """Return whether two spans can be cells of one batched product: consecutive pages and equal numbers of
    rows.
    """
    return layout == "batched" and left.rows == right.rows and left.pages[level] + 1 == right.pages[level]


def _read(spans: tuple[RowSpan, ...], page_rows: int, layout: Layout) -> tuple[PageRead, ...]:
    """Return the readings of all pages of the spans, level by level."""
    levels = range(max(span.depth(page_rows) for span in spans))
    return tuple(reading for level in levels for reading in _read_level(spans, level, page_rows, layout))


def _read_level(spans: tuple[RowSpan, ...], level: int, page_rows: int, layout: Layout) -> Iterator[PageRead]:
    """Yield readings of the level-th page of each span, as few as possible."""
    run: list[RowSpan] = []
    shared = False
    start = 0
    row = 0
    for span in spans:
        reaches = span.total > level * page_rows
        if len(run) == 1 and reaches:
            shared = _share(run[0], span, level, page_rows)
        joins = (
            reaches
            and bool(run)
            and (_share(run[-1], span, level, page_rows) if shared else _adjoin(run[-1], span, level, layout))
        )
        if run and not joins:
            yield _reading(run, start, level, page_rows, shared)
            run = []
            shared = False
        if reaches:
            start = start if run else row
            run.append(span)
        row += span.rows
    if run:
        yield _reading(run, start, level, page_rows, shared)


def _reading(run: list[RowSpan], first: int, level: int, page_rows: int, shared: bool) -> PageRead:
    """Return one reading for a run of spans: one cell over a shared page, or one cell a span over consecutive
    pages.
    """
    at = level * page_rows
    page = run[0].pages[level]
    if shared:
        return PageRead(first, sum(span.rows for span in run), 1, page, page_rows, at)
    columns = min(max(span.total for span in run) - at, page_rows)
    return PageRead(first, run[0].rows, len(run), page, columns, at)


def tail_seen(span: RowSpan) -> NDArray[np.bool_]:
    """Return which tail positions each row sees: bool [rows, tail]. Bits 0b101 of 3 positions -> [True,
    False, True].
    """
    if span.visible is None:
        return np.tri(span.rows, span.tail, dtype=bool)
    size = -(-span.tail // 8)
    packed = b"".join(bits.to_bytes(size, "little") for bits in span.visible)
    shaped = np.frombuffer(packed, dtype=np.uint8).reshape(span.rows, size)
    return np.unpackbits(shaped, axis=1, count=span.tail, bitorder="little").view(bool)


Bools = NDArray[np.bool_]
# A reading, and which of its columns rows must not see: [rows, columns] or [rows, heads, columns].
MaskedRead = tuple[PageRead, Bools]


def read_sinks(span: RowSpan, sight: VisibleColumns, page_rows: int) -> Iterator[MaskedRead]:
    """Yield readings of the columns that are sinks to any row, with masks; yield nothing if there are no
    sinks.
    """
    most = max(sight.sinks)
    for at in range(0, most, page_rows):
        columns = np.arange(at, min(at + page_rows, most))
        reading = PageRead(0, span.rows, 1, span.pages[at // page_rows], len(columns), at)
        yield reading, columns >= np.array(sight.sinks)[:, None]


def read_recent(span: RowSpan, sight: VisibleColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Yield those readings in which any row sees a column by other means than as a sink, with masks."""
    hidden = np.ones((span.rows, span.total), dtype=bool)
    hidden[:, : span.base] = np.arange(span.base) < np.array(sight.since)[:, None]
    hidden[:, span.base :] = ~tail_seen(span)
    for reading in readings:
        cut = hidden[:, reading.at : reading.at + reading.columns]
        if not cut.all():
            yield reading, cut


def read_by_head(span: RowSpan, sight: HeadColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Yield those readings in which any head of any row sees a column, with masks [rows, heads, columns]."""
    hidden = hidden_by_head(span, sight)
    for reading in readings:
        cut = hidden[:, :, reading.at : reading.at + reading.columns]
        if not cut.all():
            yield reading, cut


def hidden_by_head(span: RowSpan, sight: HeadColumns) -> Bools:
    """Return which columns rows must not see: bool [rows, heads, columns]."""
    rows = np.array(sight.positions)[:, None, None]
    columns = np.concatenate((np.arange(span.base), sight.positions))
    sinks, recent = np.array(sight.windows).T[:, None, :, None]
    hidden = (columns >= sinks) & (columns < np.maximum(rows - recent, sight.since))
    hidden[:, :, span.base :] |= ~tail_seen(span)[:, None]
    return hidden
