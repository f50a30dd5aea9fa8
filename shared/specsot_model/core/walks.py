"""Orders the rows that kernels of gated delta layers run of a frame: each text's one after the other.

A row goes on from the state that the row before it left. Of a tree, nodes are visited depth first: the state
of a node with several children is set aside, and taken up again for each child but the first. Rows of chunks
run together (`specsot_model.core.replays.CHUNKED_ROWS` says which).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specsot_kernels.segments import RowSpan
from specsot_model.core.replays import CHUNK, CHUNKED_ROWS, KEPT_ROWS, SpanReplay

Numbers = NDArray[np.int32]

# Last columns of a row: where its state is taken from, where it is set aside and kept, its output's row.
TAKEN = -4
ASIDE = -3
KEPT = -2
OUTPUT = -1
FIELDS = 4
NOTHING = -1  # also of a source: there is no such row
ROOT = -1  # what the first nodes of a tree follow
LANES = 16  # texts that the kernel walks side by side: its `TEXTS`; every so many follow one another
BLOCK_ROWS = 2048  # that run at once where no graph has room; as many as a frame of prompts has
CARRIED = LANES  # texts at most whose states are handed on from one pass to another at once
HANDED = -(1 << 30)  # and more: in a row's TAKEN and ASIDE, states of those until they have their places


@dataclass(frozen=True, slots=True)
class Walk:
    """Rows of a frame in the order in which they run: those of chunks, then the others.

    starts: [texts + 1], rows starts[i] .. starts[i + 1] - 1 are those of text i.
    rows:   [rows, history + 1 + FIELDS]. Sources first, the rows that a row's convolution reads, itself last:
            slots, or -2 - i for row i of the frame. Then TAKEN: -1 goes on from the row before, i >= 0 is
            the i-th state set aside, -2 - i is kept state i. The other fields: -1 for nowhere. Of a chunk's
            rows, TAKEN is in the first one, ASIDE and KEPT in the last one.
    aside:  how many states are set aside at once; texts that follow one another share theirs.
    chunks: [texts + 1], chunks chunks[i] .. chunks[i + 1] - 1 are those of a text; chunk i has the i-th CHUNK
            rows.
    """

    starts: Numbers
    rows: Numbers
    aside: int
    chunks: Numbers

    @property
    def counts(self) -> Numbers:
        """[4]: texts, rows, texts with chunks, chunks."""
        texts = len(self.starts) - 1
        chunks = len(self.chunks) - 1
        return np.array((texts, len(self.rows), chunks, self.chunks[-1]), np.int32)


@dataclass(frozen=True, slots=True)
class TextRows:
    """What runs of one text.

    rows: as a `Walk`'s, states that are set aside numbered from 0 on, `held` of them.
    pieces: where rows end that run in the same way, and whether they are chunks. whole: so many rows at the
    end stay together.
    """

    rows: Numbers
    pieces: tuple[tuple[int, bool], ...]
    held: int = 0
    whole: int = 0


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
    def chunks(self) -> int:
        """Of prompts that begin and end anywhere; none where so few rows have no chunks."""
        return 2 * self.rows // CHUNK + 2 if self.rows >= CHUNKED_ROWS else 0

    @property
    def aside(self) -> int:
        """Enough for most frames: three rows set aside one state at most, and few texts many at once."""
        return min(self.rows // 3, LANES + self.rows // 8)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of counts, starts, chunks, rows."""
        texts = self.rows // CHUNKED_ROWS + 1
        return (4,), (self.rows + 1,), (texts,), (self.lines, self.history + 1 + FIELDS)

    def holds(self, texts: Sequence[TextRows]) -> bool:
        """In one pass: none of them both as chunks and row by row."""
        if any(len(text.pieces) > 1 for text in texts):
            return False
        chunks = sum(len(text.rows) for text in texts if text.pieces[0][1])
        lines = sum(len(text.rows) for text in texts)
        aside = aside_of([text.held for text in texts if not text.pieces[0][1]])
        return chunks <= self.chunks * CHUNK and lines <= self.lines and aside <= self.aside

    def fill(self, walk: Walk) -> list[Numbers]:
        """The same tables in these shapes, of a walk that it holds."""
        starts, chunks, rows = (np.zeros(shape, np.int32) for shape in self.shapes[1:])
        starts[: len(walk.starts)], rows[: len(walk.rows)] = walk.starts, walk.rows
        chunks[: len(walk.chunks)] = walk.chunks
        return [walk.counts, starts, chunks, rows]


def texts_of(replays: Sequence[SpanReplay], history: int, page_rows: int, begun: int) -> list[TextRows]:
    """begun: the state of a text that begins. No state is kept yet: see `keep`."""
    found = list[TextRows]()
    first = 0
    for one in replays:
        found.append(_text(one, first, history, page_rows, begun))
        first += one.span.rows
    return found


def _text(one: SpanReplay, first: int, history: int, page_rows: int, begun: int) -> TextRows:
    """first: row of the frame that is the span's first one."""
    sources = _sources(one, first, history, page_rows)
    lead = one.span.base - one.start
    taken = -2 - (begun if one.state is None else one.state)
    held = 0
    whole = 0
    if one.span.visible is None:
        rows = _in_a_row(sources, history)
        rows[lead:, OUTPUT] = np.arange(first, first + one.span.rows)
    else:
        behind = bool(one.chunks) and one.chunks[-1] + CHUNK == one.span.base
        root = HANDED if behind else taken
        rows, held = _depth_first(one.span, sources, lead, first, root, behind, history)
        whole = len(rows) - lead + (bool(lead) and not behind)
    rows[0, TAKEN] = taken
    pieces = tuple(_pieces(one, len(rows)))
    if missing := pieces[-1][0] - len(rows):  # of the last chunk
        rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=NOTHING)
    return TextRows(rows, pieces, held, whole)


def _pieces(one: SpanReplay, many: int) -> Iterator[tuple[int, bool]]:
    """As `TextRows` has them, of so many rows."""
    end = 0
    for at in (chunk - one.start for chunk in one.chunks):
        if at > end:
            if end:
                yield end, True
            yield at, False
        end = at + CHUNK
    if end:
        yield end, True
    if many > end:
        yield many, False


def aside_of(held: Sequence[int]) -> int:
    """How many states texts set aside that each need so many; see `LANES`."""
    return sum(max(held[lane::LANES]) for lane in range(min(LANES, len(held))))


def walk_of(texts: Sequence[TextRows]) -> Walk:
    """All in one pass. Their rows are theirs no longer."""
    (walk,) = in_blocks(texts, sum(len(text.rows) for text in texts))
    return walk


def keep(texts: Sequence[TextRows], replays: Sequence[SpanReplay]) -> None:
    """Have states kept as these say, of the same spans."""
    for text, one in zip(texts, replays):
        for end, state in one.saves:
            text.rows[end - 1 - one.start, KEPT] = state


@dataclass(slots=True)
class _Block:
    """A walk while it is made. held: of each part of rows, how many states it sets aside."""

    chunks: list[Numbers] = field(default_factory=list[Numbers])
    rows: list[Numbers] = field(default_factory=list[Numbers])
    held: list[int] = field(default_factory=list[int])
    lines: int = 0

    def put(self, part: Numbers, chunked: bool, held: int = 0) -> None:
        (self.chunks if chunked else self.rows).append(part)
        self.held += [] if chunked else [held]
        self.lines += len(part)

    def walk(self, aside: int, handed: int) -> Walk:
        """aside: how many states are set aside at once. handed: how many behind those are handed on."""
        if any(self.held):
            _share_aside(self.rows, self.held)
        parts = [*self.chunks, *self.rows]
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if handed:
            for places in rows[:, TAKEN], rows[:, ASIDE]:
                handing = places <= HANDED
                places[handing] = aside + HANDED - places[handing]
        chunks = [*accumulate(map(len, self.chunks), initial=0)]
        starts = [*accumulate(map(len, self.rows), initial=chunks[-1])]
        ends = np.array([chunk // CHUNK for chunk in chunks], np.int32)
        return Walk(np.array(starts, np.int32), rows, aside + handed, ends)


def in_blocks(texts: Sequence[TextRows], most: int = BLOCK_ROWS) -> list[Walk]:
    """Walks of at most so many rows, one behind the other: so what they take is bounded, however far back a
    text begins. A text that goes on in the next one, or behind its chunks, hands its state on. The rows of
    the texts are theirs no longer.
    """
    # from which block on there is a place for a state to hand on
    blocks = [_Block()]
    free = [0] * CARRIED
    for number, text in enumerate(texts):
        slot = number % CARRIED
        last = blocks[-1]
        if len(text.pieces) == 1 and last.lines + len(text.rows) <= most:
            last.put(text.rows, text.pieces[0][1], text.held)
        else:
            free[slot] = _put_parts(text, blocks, free[slot], most, HANDED - slot)
    aside = max(aside_of(block.held) for block in blocks)
    handed = CARRIED if any(free) else 0
    return [block.walk(aside, handed) for block in blocks]


def _put_parts(text: TextRows, blocks: list[_Block], at: int, most: int, handed: int) -> int:
    """From block `at` on; the block behind its last part. handed: its state, in between."""
    begin = 0
    rows = text.rows
    before = False
    assert text.whole <= most, "a tree runs in one block"
    rows[rows[:, TAKEN] == HANDED, TAKEN] = handed
    for end, chunked in text.pieces:
        while begin < end:
            if at == len(blocks):
                blocks.append(_Block())
            size = min(most - blocks[at].lines, end - begin)
            if chunked:
                size = 0 if before else size // CHUNK * CHUNK
            elif begin + size < end:
                size = 0 if before else min(size, len(rows) - text.whole - begin)
            if size <= 0:
                at = at + 1
                before = False
                continue
            if begin:
                rows[begin - 1, ASIDE] = rows[begin, TAKEN] = handed
            begin, part = begin + size, rows[begin : begin + size]
            blocks[at].put(part, chunked, text.held if begin == len(rows) else 0)
            before = not chunked  # chunks of a block run before its rows
    return at + 1


def _share_aside(parts: Sequence[Numbers], held: Sequence[int]) -> None:
    """Number the states that each text sets aside, 0 .. held - 1 so far, among those of all."""
    begin = 0
    for lane in range(min(LANES, len(parts))):
        for part in parts[lane::LANES]:
            for places in part[:, TAKEN], part[:, ASIDE]:
                places[places >= 0] += begin
        begin += max(held[lane::LANES])


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
    span: RowSpan, sources: Numbers, lead: int, first: int, taken: int, cut: bool, history: int
) -> tuple[Numbers, int]:
    """What leads to a tree, then the tree; and how many states it sets aside at once, numbered from 0 on.
    taken: the state in front of all; with `cut`, in front of the tree.

    The largest child comes last: its parent's state is not held any longer, so few are held at once.
    """
    before = _in_a_row(sources[: history + lead], history)
    parents = _parents(span)
    codes = sources[lead:].tolist()
    children = _children(parents)
    read = {ROOT: codes[:history]}
    own = span.tail - span.rows
    held = 0
    free = list[int]()
    rows = list[list[int]]()
    line: Numbers | list[int] | None = before[-1] if lead and not cut else None
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
        few = children.get(node, ())
        place = NOTHING
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
    sizes = dict.fromkeys(parents, 1)
    children = dict[int, list[int]]()
    for node in sorted(parents, reverse=True):
        if parents[node] != ROOT:
            sizes[parents[node]] += sizes[node]
    for node in sorted(parents):
        children.setdefault(parents[node], []).append(node)
    for few in children.values():
        few.sort(key=sizes.__getitem__)
    return children
