"""Attention reads of a frame: which rows read which columns of which page, less what KV policies hide."""

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

# Rows x columns of one group at most: bounds the scores that it holds per head; not measured.
MAX_GROUP_CELLS = 1 << 20
# A group may be padded to so many times its rows, and so many more; not measured.
MAX_PADDING_RATIO = 1.5
FREE_PADDING_ROWS = 32


@dataclass(frozen=True, slots=True)
class VisibleColumns:
    """What a policy leaves of the columns in front of a segment and of the first ones.

    sinks: by row how many of the first columns it sees as sinks, or as what pruning left.
    since: by row the first of the other columns in front of the segment that it sees.
    turns: by row how many positions nearer it is to the sinks than its own position says, or 0.
    """

    sinks: tuple[int, ...]
    since: tuple[int, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """What one layer's heads see where each has a window of its own, and columns are positions.

    windows: (sinks, recent) of every KV head.
    positions: of the rows.
    since: the first column that heads see besides their sinks, whatever their windows say.
    """

    windows: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]
    since: int = 0


# Not frozen: a step makes hundreds of them, and a frozen one takes four times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class RowSpan:
    """One sequence's rows in a frame, whose own KV is already written.

    rows:    how many; their KV sits at tail positions tail - rows .. tail - 1.
    base:    KV rows 0 .. base - 1 of the sequence are seen by every row.
    tail:    KV rows base .. base + tail - 1 are seen in part.
    pages:   the pages that hold rows 0 .. base + tail - 1, in order (more may follow; unused).
    visible: for each row the tail positions it sees, as bits; None means row i sees 0 .. i
             (then tail == rows).
    sight:   where a policy hides a part of that, too; such rows are read by themselves.
    """

    rows: int
    base: int
    tail: int
    pages: tuple[int, ...]
    visible: tuple[int, ...] | None = None
    sight: VisibleColumns | HeadColumns | None = None

    @property
    def total(self) -> int:
        """KV rows this span's rows may see at most."""
        return self.base + self.tail

    @property
    def lead(self) -> int:
        """Columns 0 .. lead - 1 are seen by every row."""
        if self.sight is not None:
            return 0
        if self.visible is None:
            return self.base + 1
        common = reduce(and_, self.visible)
        return self.base + (~common & (common + 1)).bit_length() - 1

    def at(self, layer: int) -> RowSpan:
        """As this layer of the model reads it."""
        return self

    def depth(self, page_rows: int) -> int:
        """Pages in use."""
        return -(-self.total // page_rows)

    @property
    def seen(self) -> tuple[int, ...]:
        return self.visible or tuple((2 << row) - 1 for row in range(self.rows))

    def padded(self, rows: int) -> RowSpan:
        """The same with its last row repeated until there are `rows`."""
        if rows == self.rows:
            return self
        return replace(self, rows=rows, visible=self.seen + self.seen[-1:] * (rows - self.rows))


@dataclass(frozen=True, slots=True)
class PageRead:
    """`cells` runs of `rows` rows each, from row `first` of the group on, read the first `columns` KV
    rows of pages `page`, `page` + 1, ... (one page a cell), which are columns `at` ... of the group.
    """

    first: int
    rows: int
    cells: int
    page: int
    columns: int
    at: int


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Spans whose rows are read together, in the order of the arranged rows."""

    spans: tuple[RowSpan, ...]
    readings: tuple[PageRead, ...]

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)

    @property
    def width(self) -> int:
        return max(span.total for span in self.spans)

    @property
    def lead(self) -> int:
        """Columns 0 .. lead - 1 are seen by every row."""
        return min(span.lead for span in self.spans)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A frame's groups over its arranged rows.

    take: for each arranged row the frame's row it is; None when they are the frame's rows as they come.
    """

    groups: tuple[ReadGroup, ...]
    take: tuple[int, ...] | None


def plan_reads(spans: Sequence[RowSpan], page_rows: int, layout: Layout) -> ReadPlan:
    """Groups of a frame whose spans come in row order."""
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


RowBlock = tuple[int, RowSpan]  # first row in the frame, and the rows


def _cut(first: int, span: RowSpan) -> Iterator[RowBlock]:
    """A long causal span in blocks of rows: to a block, the rows before it are history."""
    step = max(MAX_GROUP_CELLS // span.total, 1)
    if span.visible is not None or span.rows <= step:
        yield first, span
        return
    for start in range(0, span.rows, step):
        rows = min(step, span.rows - start)
        yield first + start, RowSpan(rows, span.base + start, rows, span.pages)


def look_back(span: RowSpan, window: int, drafts: bool = True) -> Iterator[RowSpan]:
    """The rows: each sees its own position and `window` - 1 before it, less what a policy hides (whose sinks
    all layers see). drafts: they see all drafts that they follow.
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
    """Without its `fewer` lowest."""
    for _ in range(fewer):
        bits &= bits - 1
    return bits


def _gather(blocks: Sequence[RowBlock], page_rows: int, layout: Layout) -> Iterator[list[RowBlock]]:
    """Neighbours that can be read together."""
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
    """Whether the first pages can be read together."""
    if left.sight or right.sight:
        return False
    return _share(left, right, 0, page_rows) or (near and left.pages[0] + 1 == right.pages[0])


def _pad(spans: Sequence[RowSpan], layout: Layout) -> tuple[RowSpan, ...]:
    """Batched and near each other: all as long as the longest."""
    longest = max(span.rows for span in spans)
    if layout == "packed" or not _near(longest * len(spans), sum(span.rows for span in spans)):
        return tuple(spans)
    return tuple(span.padded(longest) for span in spans)


def _near(padded: int, rows: int) -> bool:
    """Whether so much padding is cheap."""
    return padded <= MAX_PADDING_RATIO * rows + FREE_PADDING_ROWS


def _share(left: RowSpan, right: RowSpan, level: int, page_rows: int) -> bool:
    """The same page, full, and seen whole by all rows of both."""
    end = (level + 1) * page_rows
    return min(left.lead, right.lead) >= end and left.pages[level] == right.pages[level]


def _adjoin(left: RowSpan, right: RowSpan, level: int, layout: Layout) -> bool:
    """Consecutive pages and equal row counts: cells of one product."""
    return layout == "batched" and left.rows == right.rows and left.pages[level] + 1 == right.pages[level]


def _read(spans: tuple[RowSpan, ...], page_rows: int, layout: Layout) -> tuple[PageRead, ...]:
    levels = range(max(span.depth(page_rows) for span in spans))
    return tuple(reading for level in levels for reading in _read_level(spans, level, page_rows, layout))


def _read_level(spans: tuple[RowSpan, ...], level: int, page_rows: int, layout: Layout) -> Iterator[PageRead]:
    """Readings of the level-th page of each span, as few as possible."""
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
    at = level * page_rows
    page = run[0].pages[level]
    if shared:
        return PageRead(first, sum(span.rows for span in run), 1, page, page_rows, at)
    columns = min(max(span.total for span in run) - at, page_rows)
    return PageRead(first, run[0].rows, len(run), page, columns, at)


def tail_seen(span: RowSpan) -> NDArray[np.bool_]:
    """Which tail positions each row sees: bool [rows, tail]."""
    if span.visible is None:
        return np.tri(span.rows, span.tail, dtype=bool)
    size = -(-span.tail // 8)
    packed = b"".join(bits.to_bytes(size, "little") for bits in span.visible)
    shaped = np.frombuffer(packed, dtype=np.uint8).reshape(span.rows, size)
    return np.unpackbits(shaped, axis=1, count=span.tail, bitorder="little").view(bool)


Bools = NDArray[np.bool_]
# And which columns rows must not see, [rows, columns] or [rows, heads, columns].
MaskedRead = tuple[PageRead, Bools]


def read_sinks(span: RowSpan, sight: VisibleColumns, page_rows: int) -> Iterator[MaskedRead]:
    """Readings of the columns that are sinks to any row; none where there are none."""
    most = max(sight.sinks)
    for at in range(0, most, page_rows):
        columns = np.arange(at, min(at + page_rows, most))
        reading = PageRead(0, span.rows, 1, span.pages[at // page_rows], len(columns), at)
        yield reading, columns >= np.array(sight.sinks)[:, None]


def read_recent(span: RowSpan, sight: VisibleColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Those of a span's readings in which any row sees anything else than sinks."""
    hidden = np.ones((span.rows, span.total), dtype=bool)
    hidden[:, : span.base] = np.arange(span.base) < np.array(sight.since)[:, None]
    hidden[:, span.base :] = ~tail_seen(span)
    for reading in readings:
        cut = hidden[:, reading.at : reading.at + reading.columns]
        if not cut.all():
            yield reading, cut


def read_by_head(span: RowSpan, sight: HeadColumns, readings: Sequence[PageRead]) -> Iterator[MaskedRead]:
    """Those of a span's readings in which any head of any row sees anything."""
    hidden = hidden_by_head(span, sight)
    for reading in readings:
        cut = hidden[:, :, reading.at : reading.at + reading.columns]
        if not cut.all():
            yield reading, cut


def hidden_by_head(span: RowSpan, sight: HeadColumns) -> Bools:
    """What rows must not see, [rows, heads, columns]."""
    rows = np.array(sight.positions)[:, None, None]
    columns = np.concatenate((np.arange(span.base), sight.positions))
    sinks, recent = np.array(sight.windows).T[:, None, :, None]
    hidden = (columns >= sinks) & (columns < np.maximum(rows - recent, sight.since))
    hidden[:, :, span.base :] |= ~tail_seen(span)[:, None]
    return hidden
