"""Which rows of a frame read which stretch of which page, decided once a frame, for all layers.

Refuses to know tensors, heads, and who owns the sequences.

A frame's rows fall into groups of neighbouring spans; each group has one softmax over its columns
(column c of a span is its KV row c). A group is a few readings; a reading is one batched product of
rows with one stretch of a page, or of consecutive pages. A full committed page that neighbouring spans
share is read once for all of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

from specsot.members import Layout

CELLS = 1 << 20  # rows x columns of one group at most: bounds the scores one group holds per head


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows in a frame, whose own KV is already written.

    rows:    how many; their KV sits at tail positions tail - rows .. tail - 1.
    base:    KV rows 0 .. base - 1 of the sequence are seen by every row.
    tail:    KV rows base .. base + tail - 1 are seen in part.
    pages:   the pages that hold rows 0 .. base + tail - 1, in order (more may follow; unused).
    visible: for each row the tail positions it sees, as bits; None means row i sees 0 .. i
             (then tail == rows).
    """

    rows: int
    base: int
    tail: int
    pages: tuple[int, ...]
    visible: tuple[int, ...] | None = None

    @property
    def total(self) -> int:
        """KV rows this span's rows may see at most."""
        return self.base + self.tail

    @property
    def lead(self) -> int:
        """Columns 0 .. lead - 1 are seen by every row."""
        if self.visible is None:
            return self.base + 1
        common = reduce(and_, self.visible)
        return self.base + (~common & (common + 1)).bit_length() - 1

    def depth(self, page_rows: int) -> int:
        """Pages in use."""
        return -(-self.total // page_rows)


@dataclass(frozen=True, slots=True)
class Reading:
    """`cells` runs of `rows` rows each, from row `first` of the frame on, read the first `columns` KV
    rows of pages `page`, `page` + 1, ... (one page a cell), which are columns `at` ... of their group.

    spans:  those of the cells, when some row must not see some column; else empty.
    opens:  no reading before it touched these rows.
    """

    first: int
    rows: int
    cells: int
    page: int
    columns: int
    at: int
    opens: bool
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Rows first .. first + rows - 1 of the frame, their columns 0 .. width - 1, and how to read them."""

    first: int
    rows: int
    width: int
    readings: tuple[Reading, ...]


def plan_groups(spans: Sequence[Span], page_rows: int, layout: Layout) -> tuple[Group, ...]:
    """The groups of a frame, in row order."""
    blocks = [block for span in spans for block in _cut(span)]
    groups: list[Group] = []
    first = 0
    for members in _gather(blocks, page_rows, layout):
        groups.append(_group(members, first, page_rows, layout))
        first += groups[-1].rows
    return tuple(groups)


def _cut(span: Span) -> Iterator[Span]:
    """A long causal span in blocks of rows: to a block, the rows before it are history."""
    step = max(CELLS // span.total, 1)
    if span.visible is not None or span.rows <= step:
        yield span
        return
    for start in range(0, span.rows, step):
        rows = min(step, span.rows - start)
        yield Span(rows, span.base + start, rows, span.pages)


def _gather(blocks: Sequence[Span], page_rows: int, layout: Layout) -> Iterator[list[Span]]:
    """Neighbours that can be read together."""
    members: list[Span] = []
    for block in blocks:
        if members and not _belongs(block, members, page_rows, layout):
            yield members
            members = []
        members.append(block)
    if members:
        yield members


def _belongs(block: Span, members: list[Span], page_rows: int, layout: Layout) -> bool:
    last = members[-1]
    rows = block.rows + sum(member.rows for member in members)
    width = (
        max(block.total, *(member.total for member in members))
        if len(members) > 1
        else max(block.total, last.total)
    )
    if rows * width > CELLS:
        return False
    if _share(last, block, 0, page_rows):
        return True
    return _adjoin(last, block, 0, layout) and last.depth(page_rows) == block.depth(page_rows)


def _share(left: Span, right: Span, level: int, page_rows: int) -> bool:
    """The same page, full, and seen whole by all rows of both."""
    end = (level + 1) * page_rows
    return min(left.lead, right.lead) >= end and left.pages[level] == right.pages[level]


def _adjoin(left: Span, right: Span, level: int, layout: Layout) -> bool:
    """Consecutive pages and equal row counts: cells of one product."""
    return layout == "batched" and left.rows == right.rows and left.pages[level] + 1 == right.pages[level]


def _group(members: list[Span], first: int, page_rows: int, layout: Layout) -> Group:
    rows = sum(member.rows for member in members)
    width = max(member.total for member in members)
    levels = range(-(-width // page_rows))
    readings = tuple(r for level in levels for r in _read_level(members, first, level, page_rows, layout))
    return Group(first, rows, width, readings)


def _read_level(
    members: list[Span], first: int, level: int, page_rows: int, layout: Layout
) -> Iterator[Reading]:
    """Readings of the level-th page of each span, as few as possible."""
    run: list[Span] = []
    shared = False
    start = row = first
    for member in members:
        reaches = member.total > level * page_rows
        if run and reaches and len(run) == 1:
            shared = _share(run[0], member, level, page_rows)
        joins = (
            bool(run)
            and reaches
            and (
                _share(run[-1], member, level, page_rows)
                if shared
                else _adjoin(run[-1], member, level, layout)
            )
        )
        if run and not joins:
            yield _reading(run, start, level, page_rows, shared)
            run, shared = [], False
        if reaches:
            start = start if run else row
            run.append(member)
        row += member.rows
    if run:
        yield _reading(run, start, level, page_rows, shared)


def _reading(run: list[Span], first: int, level: int, page_rows: int, shared: bool) -> Reading:
    at = level * page_rows
    page, opens = run[0].pages[level], level == 0
    if shared:
        return Reading(first, sum(span.rows for span in run), 1, page, page_rows, at, opens)
    columns = min(max(span.total for span in run) - at, page_rows)
    partial = min(span.lead for span in run) < at + columns
    return Reading(first, run[0].rows, len(run), page, columns, at, opens, tuple(run) if partial else ())
