"""Plans what gated delta layers run of each text: what follows the last state that is kept.

A state is a function of the rows before it. Those that are kept are a cache beside the rows of KV pages: a
state is forgotten as soon as a row that it follows from may be another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specsot.core.segments import RowSpan

# Rows that are solved together where no kernel runs them one by one. Chunks begin at multiples of it in the
# text, and are always whole: so a row's output is the same, bit for bit, from whichever state a lap began.
CHUNK = 64  # not measured
KEPT_ROWS = 256  # states are kept at its multiples, besides the last one of each text; not measured


def states_for(rows: int) -> int:
    """How many states there are beside pages of so many rows; one of them is that of a text that begins."""
    return rows // KEPT_ROWS + 3


@dataclass(frozen=True, slots=True)
class SpanReplay:
    """A span, and what runs again of its text: rows from `start` on, from a state (None: the text begins).

    saves: (row, state): what follows from all rows before that one is kept there.
    """

    span: RowSpan
    state: int | None
    start: int
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PathReplay:
    """One path through a text, from a state on.

    state:   where it begins; None: at the text's first row.
    slots:   of its rows, and of as many in front of them as a convolution reads; negative: there is none.
    outputs: (row of the frame, place in the path) of rows whose outputs are wanted.
    saves:   (chunk, state): what follows from that chunk and all before it is kept there.
    """

    state: int | None
    slots: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    saves: tuple[tuple[int, int], ...] = ()


class KeptStates:
    """Which of `count` states follow which page's first rows. The least recently used one is given up first.

    A page that several texts share follows the same rows in all of them. Each page has one state at most.
    """

    def __init__(self, count: int, page_rows: int, step: int = CHUNK) -> None:
        """step: states are kept at its multiples alone."""
        self.count, self.page_rows, self._step = count, page_rows, step
        self._free = list(range(count))
        self._held: dict[
            int, tuple[int, int]
        ] = {}  # by page: a state, and how many rows of the page it follows
        self._due: dict[int, tuple[int, int]] = {}  # the same, once all layers have run
        self._starts: Counter[int] = Counter()  # pages whose states are read next, by how many texts

    def plan(self, spans: Sequence[RowSpan], history: int) -> list[PathReplay]:
        """The same by paths, kept too. history: rows in front that a convolution reads."""
        replays, first = list[PathReplay](), 0
        for one in self.reserve(self.find(spans)):
            replays += _paths_of(one, first, history, self.page_rows)
            first += one.span.rows
        return replays

    def find(self, spans: Sequence[RowSpan]) -> list[SpanReplay]:
        """What runs again for rows of a frame, which are written now; nothing is kept of it yet."""
        self._free += [state for state, _ in self._due.values()]  # of a frame that failed
        self._due = {}
        for span in spans:
            self._forget_from(span)
        found = [self._find(span) for span in spans]
        self._starts = Counter(page for page, _ in found if page is not None)
        return [
            SpanReplay(span, None if page is None else self._held[page][0], start)
            for span, (page, start) in zip(spans, found)
        ]

    def reserve(self, found: Sequence[SpanReplay]) -> list[SpanReplay]:
        """The same, with what is kept of it once it has run: then `commit`."""
        return [replace(one, saves=self._reserve(one.span, one.start)) for one in found]

    def commit(self) -> None:
        """All layers have run what was planned."""
        for page, kept in self._due.items():
            self.forget(page)
            self._held[page] = kept
        self._due = {}

    def copy(self, source: int, target: int, rows: int) -> tuple[int, int] | None:
        """Page `target` has the first `rows` rows of `source` now. A state to be copied, and where to."""
        self.forget(target)
        held = self._held.get(source)
        if held is None or held[1] > rows:
            return None
        self._starts = Counter((source,))
        state = self._take(target)
        if state is None:
            return None
        self._held[target] = state, held[1]
        return held[0], state

    def forget(self, page: int, row: int = 0) -> None:
        """A page's rows from `row` on are others now."""
        if page in self._held and self._held[page][1] > row:
            self._free.append(self._held.pop(page)[0])

    def _forget_from(self, span: RowSpan) -> None:
        place, row = divmod(span.base, self.page_rows)
        for page in span.pages[place : place + 1]:
            self.forget(page, row)
        for page in span.pages[place + 1 :]:
            self.forget(page)

    def _find(self, span: RowSpan) -> tuple[int | None, int]:
        """The page of the last state in front of a span, and the row of the text that follows it."""
        for place in range(min(span.base // self.page_rows, len(span.pages) - 1), -1, -1):
            page = span.pages[place]
            if held := self._held.pop(page, None):
                self._held[page] = held  # the most recently used one
                return page, place * self.page_rows + held[1]
        return None, 0

    def _reserve(self, span: RowSpan, start: int) -> tuple[tuple[int, int], ...]:
        """Where states of rows that stay are kept; a prompt's rows all stay."""
        last = (span.total if span.visible is None else span.base) // self._step * self._step
        saves: list[tuple[int, int]] = []
        for end in (last, *range((last - 1) // KEPT_ROWS * KEPT_ROWS, start, -KEPT_ROWS)):
            place, row = divmod(end - 1, self.page_rows)
            if end <= start or (page := span.pages[place]) in self._due:
                continue
            if (state := self._take(page)) is not None:
                saves.append((end, state))
                self._due[page] = state, row + 1
        return tuple(saves)

    def _take(self, page: int) -> int | None:
        """A state for this page; None where all others are read now."""
        if page in self._held and self._starts[page] < 2:
            return self._held.pop(page)[0]
        if self._free:
            return self._free.pop()
        oldest = next((one for one in self._held if one not in self._starts), None)
        return None if oldest is None else self._held.pop(oldest)[0]


def _paths_of(one: SpanReplay, first: int, history: int, page_rows: int) -> Iterator[PathReplay]:
    """first: row of the frame that is the span's first one."""
    span, start = one.span, one.start
    here = first + span.rows - span.tail
    saves = tuple(((end - start) // CHUNK - 1, state) for end, state in one.saves)
    for path, wanted in _paths(span):
        columns = [*range(start - history, span.base), *(span.base + node for node in path)]
        slots = tuple(-1 if one < 0 else _slot(span, one, page_rows) for one in columns)
        outputs = tuple(
            (here + node, span.base - start + place) for place, node in enumerate(path) if wanted >> node & 1
        )
        yield PathReplay(one.state, slots, outputs, saves)
        saves = ()


def _paths(span: RowSpan) -> Iterator[tuple[list[int], int]]:
    """Paths that lead to all rows of a span, as numbers of its tail; and as bits which rows are new."""
    own = span.tail - span.rows
    missing = ((1 << span.rows) - 1) << own
    while missing:
        seen = missing if span.visible is None else span.visible[missing.bit_length() - 1 - own]
        yield [node for node in range(span.tail) if seen >> node & 1], seen & missing
        missing &= ~seen


def _slot(span: RowSpan, column: int, page_rows: int) -> int:
    place, row = divmod(column, page_rows)
    return span.pages[place] * page_rows + row
