"""Orders the rows that a kernel of gated delta layers runs of a frame: each text's one after the other.

A row goes on from the state that the row before it left. Of a tree, nodes are visited depth first: the state
of a node with several children is set aside, and taken up again for each child but the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsot.core.replays import KEPT_ROWS, SpanReplay
from specsot.core.segments import RowSpan

Numbers = NDArray[np.int32]

# Last columns of a row: where its state is taken from, where it is set aside and kept, its output's row.
TAKEN, ASIDE, KEPT, OUTPUT = -4, -3, -2, -1
FIELDS = 4
NOTHING = -1  # also of a source: there is no such row
ROOT = -1  # what the first nodes of a tree follow
LANES = 16  # texts that the kernel walks side by side: its `TEXTS`; every so many follow one another


@dataclass(frozen=True, slots=True)
class Walk:
    """A frame's rows in the order in which they run.

    starts: [texts + 1], rows starts[i] .. starts[i + 1] - 1 are those of text i.
    rows:   [rows, history + 1 + FIELDS]. Sources first, the rows that a row's convolution reads, itself last:
            slots, or -2 - i for row i of the frame. Then TAKEN: -1 goes on from the row before, i >= 0 is
            the i-th state set aside, -2 - i is kept state i. The other fields: -1 for nowhere.
    aside:  how many states are set aside at once; texts that follow one another share theirs.
    """

    starts: Numbers
    rows: Numbers
    aside: int


@dataclass(frozen=True, slots=True)
class WalkRoom:
    """Tables of one size for every frame of at most `rows` rows."""

    rows: int
    history: int

    @property
    def lines(self) -> int:
        """With rows that run again: as many as the last frame may have kept, or all behind a lost state."""
        return 2 * self.rows + KEPT_ROWS

    @property
    def aside(self) -> int:
        """Enough for most frames: three rows set aside one state at most, and few texts many at once."""
        return min(self.rows // 3, LANES + self.rows // 8)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of counts (texts, rows), starts, rows."""
        return (2,), (self.rows + 1,), (self.lines, self.history + 1 + FIELDS)

    def holds(self, walk: Walk) -> bool:
        return len(walk.rows) <= self.lines and walk.aside <= self.aside

    def fill(self, walk: Walk) -> list[Numbers]:
        """The same tables in these shapes, of a walk that it holds."""
        starts, rows = (np.zeros(shape, np.int32) for shape in self.shapes[1:])
        starts[: len(walk.starts)], rows[: len(walk.rows)] = walk.starts, walk.rows
        return [counts_of(walk), starts, rows]


def counts_of(walk: Walk) -> Numbers:
    """[2]: texts, rows."""
    return np.array((len(walk.starts) - 1, len(walk.rows)), np.int32)


def walk_of(replays: Sequence[SpanReplay], history: int, page_rows: int, begun: int) -> Walk:
    """begun: the state of a text that begins. No state is kept yet: see `keep`."""
    starts, parts, first = [0], list[Numbers](), 0
    held = [0] * len(replays)
    for number, one in enumerate(replays):
        sources, lead = _sources(one, first, history, page_rows), one.span.base - one.start
        taken = -2 - (begun if one.state is None else one.state)
        if one.span.visible is None:
            part = _in_a_row(sources, history)
            part[lead:, OUTPUT] = np.arange(first, first + one.span.rows)
        else:
            part, held[number] = _depth_first(one.span, sources, lead, first, taken, history)
        part[0, TAKEN] = taken
        parts.append(part)
        starts.append(starts[-1] + len(part))
        first += one.span.rows
    aside = _share_aside(parts, held)
    return Walk(np.array(starts, np.int32), np.concatenate(parts), aside)


def _share_aside(parts: Sequence[Numbers], held: Sequence[int]) -> int:
    """Number the states that each text sets aside, 0 .. held - 1 so far, among those of all; how many."""
    begin = 0
    for lane in range(min(LANES, len(parts))):
        for part in parts[lane::LANES]:
            for field in part[:, TAKEN], part[:, ASIDE]:
                field[field >= 0] += begin
        begin += max(held[lane::LANES])
    return begin


def keep(walk: Walk, replays: Sequence[SpanReplay]) -> None:
    """Have states kept as these say, of the same spans."""
    for start, one in zip(walk.starts.tolist(), replays):
        for end, state in one.saves:
            walk.rows[start + end - 1 - one.start, KEPT] = state


def _sources(one: SpanReplay, first: int, history: int, page_rows: int) -> Numbers:
    """Of columns start - history .. total - 1. first: row of the frame that is the span's first one."""
    span = one.span
    columns = np.arange(one.start - history, span.total)
    place, row = np.divmod(columns.clip(0), page_rows)
    sources = np.array(span.pages, np.int32)[place] * page_rows + row
    sources[columns < 0] = NOTHING
    sources[len(sources) - span.rows :] = -2 - np.arange(first, first + span.rows)
    return sources.astype(np.int32)


def _in_a_row(sources: Numbers, history: int) -> Numbers:
    many = len(sources) - history
    rows = np.full((many, history + 1 + FIELDS), NOTHING, np.int32)
    for back in range(history + 1):
        rows[:, back] = sources[back : back + many]
    return rows


def _depth_first(
    span: RowSpan, sources: Numbers, lead: int, first: int, taken: int, history: int
) -> tuple[Numbers, int]:
    """What leads to a tree, then the tree; and how many states it sets aside at once, numbered from 0 on.

    The largest child comes last: its parent's state is not held any longer, so few are held at once.
    """
    before = _in_a_row(sources[: history + lead], history)
    parents, codes = _parents(span), sources[lead:].tolist()
    children, read = _children(parents), {ROOT: codes[:history]}
    own, held, free, rows = span.tail - span.rows, 0, list[int](), list[list[int]]()
    line: Numbers | list[int] | None = before[-1] if lead else None
    todo = [(ROOT, NOTHING)]
    while todo:
        node, place = todo.pop()
        if node != ROOT:
            seen = [*read[parents[node]], codes[history + node]]
            read[node] = seen[1:]
            line = [*seen, place, NOTHING, NOTHING, first + node - own if node >= own else NOTHING]
            rows.append(line)
            if place >= 0 and node == children[parents[node]][-1]:
                free.append(place)
        few, place = children.get(node, ()), NOTHING
        if len(few) > 1:
            if line is None:
                place = taken
            else:
                if not free:
                    free.append(held)
                    held += 1
                line[ASIDE] = place = free.pop()
        todo += [(child, place if number else NOTHING) for number, child in enumerate(few)][::-1]
    return np.concatenate((before, np.array(rows, np.int32))), held


def _parents(span: RowSpan) -> dict[int, int]:
    """By node of the tail that some row sees."""
    parents: dict[int, int] = {}
    for bits in span.seen:
        before = ROOT
        while bits:
            node = (bits & -bits).bit_length() - 1
            parents[node], before, bits = before, node, bits & (bits - 1)
    return parents


def _children(parents: dict[int, int]) -> dict[int, list[int]]:
    """Of each node that has some, the one that leads to most last."""
    sizes, children = dict.fromkeys(parents, 1), dict[int, list[int]]()
    for node in sorted(parents, reverse=True):
        if parents[node] != ROOT:
            sizes[parents[node]] += sizes[node]
    for node in sorted(parents):
        children.setdefault(parents[node], []).append(node)
    for few in children.values():
        few.sort(key=sizes.__getitem__)
    return children
