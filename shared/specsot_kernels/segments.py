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

# The same names as `specsot.members.Layout`, which this package must not import.
Layout = Literal["packed", "batched"]

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

    Columns are KV entries of the sequence in order. Tail positions are the columns from `base` on, counted
    from 0.

    rows: number of rows; their KV sits at the tail positions tail - rows .. tail - 1.
    base: every row sees the sequence's KV columns 0 .. base - 1.
    tail: the KV columns base .. base + tail - 1 are seen in part; see `visible`.
    pages: the page numbers that hold columns 0 .. base + tail - 1, in order; more pages may follow and are
        not used.
    visible: for each row the tail positions that it sees, as bits; None means that row i sees 0 .. i (then
        tail == rows).
    sight: which columns a KV policy leaves visible, if it hides some; such spans are read by themselves.
        None: only `visible` hides columns.

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
        """Return the number of KV columns that the span's rows see at most, base + tail."""
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
        """Return the span as one layer of the model reads it. Here it is the span itself; subclasses change
        the sight.

        layer: index of the layer in the whole model.
        """
        return self

    def num_pages(self, page_rows: int) -> int:
        """Return the number of pages that hold the span's columns 0 .. base + tail - 1.

        page_rows: number of rows of a KV page.
        """
        return -(-self.total // page_rows)

    @property
    def seen(self) -> tuple[int, ...]:
        """Return the visible tail positions of each row as bits: `visible`, or 0b1, 0b11, 0b111, ... for
        causal rows.
        """
        return self.visible or tuple((2 << row) - 1 for row in range(self.rows))

    def padded(self, rows: int) -> RowSpan:
        """Return the span with its last row repeated until there are `rows` rows.

        rows: number of rows of the result, at least the span's own number; if equal, the span itself is
            returned.
        """
        if rows == self.rows:
            return self
        return replace(self, rows=rows, visible=self.seen + self.seen[-1:] * (rows - self.rows))


@dataclass(frozen=True, slots=True)
class PageRead:
    """A batched product of attention: `cells` cells of `rows` rows each, every cell with one page.

    first: row of the group at which the first cell's rows begin; the cells' rows follow one another.
    rows: number of rows of a cell.
    cells: number of cells. Cell i reads page `page` + i.
    page: number of the KV page that the first cell reads.
    columns: number of KV columns that are read of each page, from the page's beginning on.
    at: column of the group's score matrix of the first column that is read.
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

    spans: the spans, padded to equal numbers of rows if the group is padded.
    readings: the products that together cover all columns of the group.
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
    source_rows: for each arranged row the frame's row that it is a copy of; None if the arranged rows are the
        frame's rows. Two spans of 2 and 1 rows, padded to 2 each: source_rows = (0, 1, 2, 2).
    """

    groups: tuple[ReadGroup, ...]
    source_rows: tuple[int, ...] | None


def plan_reads(spans: Sequence[RowSpan], page_rows: int, layout: Layout) -> ReadPlan:
    """Return the reads of a frame: which rows read which columns of which page.

    Long causal spans are divided into blocks of rows. The plan's `source_rows` is None if the rows are read
    in their own order, without padding.

    spans: one span per segment of the frame, in row order; an empty frame yields no groups.
    page_rows: number of rows of a KV page.
    layout: "batched" sorts the spans by their pages, so that neighbouring pages become one batched product,
        and may pad spans to equal numbers of rows; "packed" keeps the rows as they are.
    """
    starts = (0, *accumulate(span.rows for span in spans))
    blocks = [block for first, span in zip(starts, spans) for block in _row_blocks(first, span)]
    if layout == "batched":
        blocks.sort(key=lambda block: block[1].pages[: block[1].num_pages(page_rows)])
    groups: list[ReadGroup] = []
    source_rows: list[int] = []
    for members in _group_blocks(blocks, page_rows, layout):
        padded = _padded_spans([span for _, span in members], layout)
        groups.append(ReadGroup(padded, _reads_of(padded, page_rows, layout)))
        for (first, span), each in zip(members, padded):
            source_rows += range(first, first + span.rows)
            source_rows += [first + span.rows - 1] * (each.rows - span.rows)
    return ReadPlan(tuple(groups), None if source_rows == list(range(starts[-1])) else tuple(source_rows))


# The number of the block's first row in the frame, and the block's rows.
RowBlock = tuple[int, RowSpan]


def _row_blocks(first: int, span: RowSpan) -> Iterator[RowBlock]:
    """Yield a segment's rows as blocks; a long causal span is split so that each block's scores fit
    MAX_GROUP_CELLS.

    Each block is yielded as a pair (number in the frame of the block's first row, block). A tree, and a span
    that is short enough, is one block. To a block, the rows before it are history: 6 rows with base 10 in
    blocks of 4 become rows 0..3 with base 10 and rows 4..5 with base 14.

    first: number in the frame of the span's first row.
    span: rows of one segment.
    """
    rows_per_block = max(MAX_GROUP_CELLS // span.total, 1)
    if span.visible is not None or span.rows <= rows_per_block:
        yield first, span
        return
    for start in range(0, span.rows, rows_per_block):
        rows = min(rows_per_block, span.rows - start)
        yield first + start, RowSpan(rows, span.base + start, rows, span.pages)


def look_back(span: RowSpan, window: int, drafts: bool = True) -> Iterator[RowSpan]:
    """Yield the span's rows as a layer with a sliding window reads them, less what a policy hides.

    A row sees its own position and the `window` - 1 positions before it. Sinks of the policy stay visible in
    all layers. The span is yielded unchanged if the window hides nothing; a long causal span is yielded in
    blocks. Where the KV heads have windows of their own, each window is limited to the last `window`
    positions.

    span: rows of one segment.
    window: number of positions that a row sees, its own included; at least 1.
    drafts: True if a tree row sees all draft nodes on its path, even beyond the window; False: it sees the
        last `window` positions of its path only.
    """
    if span.total <= window:
        yield span
        return
    if isinstance(span.sight, HeadColumns):
        heads = tuple((sinks, min(recent, window - 1)) for sinks, recent in span.sight.windows)
        yield replace(span, sight=replace(span.sight, windows=heads))
        return
    for _, block in ((0, span),) if span.sight else _row_blocks(0, span):
        places = [bits.bit_count() for bits in block.seen]
        seen = block.seen
        if block.visible is None:
            seen = tuple(bits >> far << far for bits, far in zip(seen, (max(n - window, 0) for n in places)))
        elif not drafts:
            seen = tuple(drop_low_bits(bits, n - window) for bits, n in zip(seen, places))
        since = tuple(min(max(block.base + place - window, 0), block.base) for place in places)
        if any(since) or seen != block.seen:
            nothing = (0,) * block.rows
            left = span.sight or VisibleColumns(nothing, nothing, nothing)
            since = tuple(map(max, since, left.since))
            block = replace(block, visible=seen, sight=replace(left, since=since))
        yield block


def drop_low_bits(bits: int, num_dropped: int) -> int:
    """Return `bits` without its `num_dropped` lowest set bits: (0b1101, 2) -> 0b1000; 0 if there are not
    more.

    bits: a set of positions, one bit each.
    num_dropped: number of set bits to drop; none if it is 0 or less.
    """
    for _ in range(num_dropped):
        bits &= bits - 1
    return bits


def _group_blocks(blocks: Sequence[RowBlock], page_rows: int, layout: Layout) -> Iterator[list[RowBlock]]:
    """Yield groups of neighbouring blocks that can be read together, within MAX_GROUP_CELLS.

    No blocks give no groups. A block that is larger than MAX_GROUP_CELLS is a group of its own.

    blocks: pairs (first row in the frame, span), in the order in which they are to be read.
    page_rows: number of rows of a KV page.
    layout: "batched" joins blocks of neighbouring pages as well; "packed" joins only blocks with a shared
        page.
    """
    members: list[RowBlock] = []
    longest = rows = width = 0
    for first, span in blocks:
        longest = max(longest, span.rows)
        rows = rows + span.rows
        width = max(width, span.total)
        padded = longest * (len(members) + 1)
        padding_is_cheap = layout == "batched" and _is_cheap_padding(padded, rows)
        if members and (
            padded * width > MAX_GROUP_CELLS
            or not _reads_together(members[-1][1], span, page_rows, padding_is_cheap)
        ):
            yield members
            members = []
            longest = span.rows
            rows = span.rows
            width = span.total
        members.append((first, span))
    if members:
        yield members


def _reads_together(left: RowSpan, right: RowSpan, page_rows: int, padding_is_cheap: bool) -> bool:
    """Return whether the first pages of two spans can be read together: one shared page, or neighbouring
    pages.

    False for two neighbouring pages if padding is not cheap.

    left: a span. Spans with a policy are never read together.
    right: the span that follows `left`.
    page_rows: number of rows of a KV page.
    padding_is_cheap: True if the spans may be padded to equal rows, which neighbouring pages need.
    """
    if left.sight or right.sight:
        return False
    return _shares_page(left, right, 0, page_rows) or (
        padding_is_cheap and left.pages[0] + 1 == right.pages[0]
    )


def _padded_spans(spans: Sequence[RowSpan], layout: Layout) -> tuple[RowSpan, ...]:
    """Return the spans padded to the longest one's rows if the layout is batched and the padding is cheap;
    else the spans.

    spans: the spans of one group.
    layout: "packed" never pads.
    """
    longest = max(span.rows for span in spans)
    if layout == "packed" or not _is_cheap_padding(longest * len(spans), sum(span.rows for span in spans)):
        return tuple(spans)
    return tuple(span.padded(longest) for span in spans)


def _is_cheap_padding(padded: int, rows: int) -> bool:
    """Return whether padding `rows` rows to `padded` rows costs little.

    padded: number of rows with padding.
    rows: number of rows without padding.
    """
    return padded <= MAX_PADDING_RATIO * rows + FREE_PADDING_ROWS


def _shares_page(left: RowSpan, right: RowSpan, level: int, page_rows: int) -> bool:
    """Return whether both spans have the same page at an index, full, and all rows of both see all of it.

    left: a span.
    right: another span.
    level: index of the page among a span's pages.
    page_rows: number of rows of a KV page.
    """
    end = (level + 1) * page_rows
    return min(left.lead, right.lead) >= end and left.pages[level] == right.pages[level]


def _joins_batch(left: RowSpan, right: RowSpan, level: int, layout: Layout) -> bool:
    """Return whether two spans can be cells of one batched product: consecutive pages and equal numbers of
    rows.

    left: a span.
    right: the span that follows `left`.
    level: index of the page among a span's pages.
    layout: only "batched" allows batched products.
    """
    return layout == "batched" and left.rows == right.rows and left.pages[level] + 1 == right.pages[level]


def _reads_of(spans: tuple[RowSpan, ...], page_rows: int, layout: Layout) -> tuple[PageRead, ...]:
    """Return the reads of all pages of the spans: first the reads of every span's page 0, then of page 1, and
    so on.

    spans: the spans of one group.
    page_rows: number of rows of a KV page.
    layout: "packed" or "batched".
    """
    levels = range(max(span.num_pages(page_rows) for span in spans))
    return tuple(reading for level in levels for reading in _read_level(spans, level, page_rows, layout))


def _read_level(spans: tuple[RowSpan, ...], level: int, page_rows: int, layout: Layout) -> Iterator[PageRead]:
    """Yield as few reads as possible of the level-th page of each span; spans without such a page are left
    out.

    Spans that share the page are one read, and so are spans with consecutive pages and equal numbers of rows
    in the layout "batched". Each read covers spans that follow one another in the group.

    spans: the spans of one group.
    level: index of the page among a span's pages.
    page_rows: number of rows of a KV page.
    layout: "packed" or "batched".
    """
    run: list[RowSpan] = []
    shared = False
    start = 0
    row = 0
    for span in spans:
        reaches = span.total > level * page_rows
        if len(run) == 1 and reaches:
            shared = _shares_page(run[0], span, level, page_rows)
        joins = (
            reaches
            and bool(run)
            and (
                _shares_page(run[-1], span, level, page_rows)
                if shared
                else _joins_batch(run[-1], span, level, layout)
            )
        )
        if run and not joins:
            yield _page_read(run, start, level, page_rows, shared)
            run = []
            shared = False
        if reaches:
            start = start if run else row
            run.append(span)
        row += span.rows
    if run:
        yield _page_read(run, start, level, page_rows, shared)


def _page_read(run: list[RowSpan], first: int, level: int, page_rows: int, shared: bool) -> PageRead:
    """Return one read for a run of spans: one cell over a shared page, or one cell a span over consecutive
    pages.

    A shared page is read as a whole; of other pages, as many columns are read as the longest span has.

    run: spans that follow one another in the group.
    first: row of the group at which the run begins.
    level: index of the page among a span's pages.
    page_rows: number of rows of a KV page.
    shared: True if all spans of the run have the same page there.
    """
    at = level * page_rows
    page = run[0].pages[level]
    if shared:
        return PageRead(first, sum(span.rows for span in run), 1, page, page_rows, at)
    columns = min(max(span.total for span in run) - at, page_rows)
    return PageRead(first, run[0].rows, len(run), page, columns, at)


def tail_seen(span: RowSpan) -> NDArray[np.bool_]:
    """Return which tail positions each row sees: bool [rows, tail].

    Row i of a causal span sees the positions 0 .. i.

    span: rows of one segment. Bits 0b101 of 3 positions become [True, False, True].
    """
    if span.visible is None:
        return np.tri(span.rows, span.tail, dtype=bool)
    size = -(-span.tail // 8)
    packed = b"".join(bits.to_bytes(size, "little") for bits in span.visible)
    shaped = np.frombuffer(packed, dtype=np.uint8).reshape(span.rows, size)
    return np.unpackbits(shaped, axis=1, count=span.tail, bitorder="little").view(bool)


# A mask; True where a row must not see a column.
Bools = NDArray[np.bool_]
# A reading, and which of its columns rows must not see: [rows, columns] or [rows, heads, columns].
MaskedRead = tuple[PageRead, Bools]


def read_sinks(span: RowSpan, sight: VisibleColumns, page_rows: int) -> Iterator[MaskedRead]:
    """Yield the reads of the columns that are sinks to any row, with masks [rows, columns]; nothing without
    sinks.

    span: rows of one segment.
    sight: how many first columns each row of the span sees as sinks.
    page_rows: number of rows of a KV page.
    """
    num_sinks = max(sight.sinks)
    for at in range(0, num_sinks, page_rows):
        columns = np.arange(at, min(at + page_rows, num_sinks))
        reading = PageRead(0, span.rows, 1, span.pages[at // page_rows], len(columns), at)
        yield reading, columns >= np.array(sight.sinks)[:, None]


def read_recent(span: RowSpan, sight: VisibleColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Yield those reads in which any row sees a column by other means than as a sink, with masks [rows,
    columns].

    A read of which every column is hidden from every row is left out.

    span: rows of one segment.
    sight: the first column, after the sinks, that each row of the span sees.
    readings: all reads of the span, from which the result is chosen.
    """
    hidden = np.ones((span.rows, span.total), dtype=bool)
    hidden[:, : span.base] = np.arange(span.base) < np.array(sight.since)[:, None]
    hidden[:, span.base :] = ~tail_seen(span)
    for reading in readings:
        hidden_mask = hidden[:, reading.at : reading.at + reading.columns]
        if not hidden_mask.all():
            yield reading, hidden_mask


def read_by_head(span: RowSpan, sight: HeadColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Yield those reads in which any head of any row sees a column, with masks [rows, heads, columns].

    A read of which every column is hidden from every head is left out.

    span: rows of one segment.
    sight: the windows of the KV heads, and the rows' positions.
    readings: all reads of the span, from which the result is chosen.
    """
    hidden = hidden_by_head(span, sight)
    for reading in readings:
        hidden_mask = hidden[:, :, reading.at : reading.at + reading.columns]
        if not hidden_mask.all():
            yield reading, hidden_mask


def hidden_by_head(span: RowSpan, sight: HeadColumns) -> Bools:
    """Return which columns rows must not see: bool [rows, heads, columns].

    A head sees its first columns (sinks) and the columns from `recent` before the row's position, but of the
    tail only what the row sees.

    span: rows of one segment, which gives the number of columns and what tree rows see.
    sight: the windows of the KV heads, and the rows' positions.
    """
    rows = np.array(sight.positions)[:, None, None]
    columns = np.concatenate((np.arange(span.base), sight.positions))
    sinks, recent = np.array(sight.windows).T[:, None, :, None]
    hidden = (columns >= sinks) & (columns < np.maximum(rows - recent, sight.since))
    hidden[:, :, span.base :] |= ~tail_seen(span)[:, None]
    return hidden
