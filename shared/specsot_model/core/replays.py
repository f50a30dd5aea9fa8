"""Plans what gated delta layers run of each text: what follows the last state that is kept.

A state is a function of the rows before it. Those that are kept are a cache beside the rows of KV pages: a
state is forgotten as soon as a row that it follows from may be another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from specsot_kernels.segments import RowSpan

# Rows that are solved together where no kernel runs them one by one. Chunks begin at multiples of it in the
# text, and are always whole: so a row's output is the same, bit for bit, from whichever state a lap began.
CHUNK = 64  # not measured
KEPT_ROWS = 256  # states are kept at its multiples, besides the last one of each text; not measured
CHUNKED_ROWS = (
    2 * CHUNK
)  # of a prompt in one frame, from which on kernels run them by chunks: 75 us for 98 (H100)


def states_for(rows: int) -> int:
    """How many states there are beside pages of so many rows; one of them is that of a text that begins."""
    return rows // KEPT_ROWS + 3


@dataclass(frozen=True, slots=True)
class SpanReplay:
    """A span, and what runs again of its text: rows from `start` on, from a state (None: the text begins).

    chunks: first rows of chunks from `start` on whose rows run together; the last one may not be whole yet.
    saves: (row, state): what follows from all rows before that one is kept there.
    """

    span: RowSpan
    state: int | None
    start: int
    chunks: tuple[int, ...] = ()
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
    A text that moves on takes the state of the page that it leaves along, but for those at multiples of
    KEPT_ROWS: so texts that are written push out no more states of others than their rows are counted for.

    Where states are kept behind any row (step 1), rows run one by one, or whole chunks together; sums differ
    in their last bits. So that a row's are the same from whichever state a lap begins, it is fixed when rows
    come: those of a prompt of CHUNKED_ROWS in one frame, and more, are outputs of their chunks, from the
    chunk's first row on; a chunk that such rows end leads to its next one as a chunk, which is noted with its
    page. All other rows, and whatever runs again of them, run one by one.
    """

    def __init__(
        self,
        count: int,
        page_rows: int,
        step: int = CHUNK,
        shared: Callable[[int], bool] = lambda page: False,
    ) -> None:
        """step: states are kept at its multiples alone. shared: whether several texts hold a page."""
        self.count = count
        self.page_rows = page_rows
        self._step = step
        self._shared = shared
        self._free = list(range(count))
        self._held: dict[
            int, tuple[int, int]
        ] = {}  # by page: a state, and how many rows of the page it follows
        self._due: dict[int, tuple[int, int]] = {}  # the same, once all layers have run
        self._starts: Counter[int] = Counter()  # pages whose states are read next, by how many texts
        self._ended: dict[int, set[int]] = {}  # by page: rows of it after which a chunk ended that ran as one

    def plan(self, spans: Sequence[RowSpan], history: int) -> list[PathReplay]:
        """The same by paths, kept too. history: rows in front that a convolution reads."""
        replays = list[PathReplay]()
        first = 0
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
            self._note_chunks(span)
        found = [self._find(span) for span in spans]
        self._starts = Counter(page for page, _ in found if page is not None)
        return [
            SpanReplay(span, None if page is None else self._held[page][0], start, self._chunks(span, start))
            for span, (page, start) in zip(spans, found)
        ]

    def reserve(self, found: Sequence[SpanReplay]) -> list[SpanReplay]:
        """The same, with what is kept of it once it has run: then `commit`."""
        return [replace(one, saves=self._reserve(one)) for one in found]

    def commit(self) -> None:
        """All layers have run what was planned."""
        for page, kept in self._due.items():
            self._give(page)
            self._held[page] = kept
        self._due = {}

    def copy(self, source: int, target: int, rows: int) -> tuple[int, int] | None:
        """Page `target` has the first `rows` rows of `source` now. A state to be copied, and where to."""
        self.forget(target)
        if ended := {end for end in self._ended.get(source, ()) if end <= rows}:
            self._ended[target] = ended
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
            self._give(page)
        if page in self._ended:
            self._ended[page] = {end for end in self._ended[page] if end <= row}

    def _give(self, page: int) -> None:
        if page in self._held:
            self._free.append(self._held.pop(page)[0])

    def _forget_from(self, span: RowSpan) -> None:
        place, row = divmod(span.base, self.page_rows)
        for page in span.pages[place : place + 1]:
            self.forget(page, row)
        for page in span.pages[place + 1 :]:
            self.forget(page)

    def _whole(self, span: RowSpan) -> bool:
        """Whether its rows run by chunks."""
        return self._step == 1 and span.visible is None and span.rows >= CHUNKED_ROWS

    def _goal(self, span: RowSpan) -> int:
        """The row at whose state its first row's run begins, unless that is forgotten."""
        return span.base // CHUNK * CHUNK if self._whole(span) else span.base

    def _note_chunks(self, span: RowSpan) -> None:
        """Those that end with its rows."""
        if self._whole(span):
            for end in range(self._goal(span) + CHUNK, span.total + 1, CHUNK):
                place, row = divmod(end - 1, self.page_rows)
                self._ended.setdefault(span.pages[place], set()).add(row + 1)

    def _ran_whole(self, span: RowSpan, end: int) -> bool:
        place, row = divmod(end - 1, self.page_rows)
        return row + 1 in self._ended.get(span.pages[place], ())

    def _chunks(self, span: RowSpan, start: int) -> tuple[int, ...]:
        """See `SpanReplay`."""
        goal = self._goal(span)
        lead = range(-(-start // CHUNK) * CHUNK, goal - CHUNK + 1, CHUNK) if self._ended else ()
        own = range(goal, span.total, CHUNK) if self._whole(span) else ()
        return (*(at for at in lead if self._ran_whole(span, at + CHUNK)), *own)

    def _find(self, span: RowSpan) -> tuple[int | None, int]:
        """The page of the last state in front of a span, and the row of the text that follows it; not one
        within a chunk whose rows run together.
        """
        goal = self._goal(span)
        for place in range(min(goal // self.page_rows, len(span.pages) - 1), -1, -1):
            page = span.pages[place]
            if (held := self._held.get(page)) is None:
                continue
            row = place * self.page_rows + held[1]
            end = -(-row // CHUNK) * CHUNK
            if row <= goal and not (row < end <= goal and self._ran_whole(span, end)):
                self._held[page] = self._held.pop(page)  # the most recently used one
                return page, row
        return None, 0

    def _reserve(self, one: SpanReplay) -> tuple[tuple[int, int], ...]:
        """Where states of rows that stay are kept; a prompt's rows all stay."""
        span = one.span
        start = one.start
        step = CHUNK if self._whole(span) else self._step
        last = (span.total if span.visible is None else span.base) // step * step
        saves = list[tuple[int, int]]()
        left = self._left_by(one)
        for end in (last, *range((last - 1) // KEPT_ROWS * KEPT_ROWS, start, -KEPT_ROWS)):
            place, row = divmod(end - 1, self.page_rows)
            if end <= start or (page := span.pages[place]) in self._due:
                continue
            if (state := self._take(page, left)) is not None:
                saves.append((end, state))
                self._due[page] = state, row + 1
        return tuple(saves)

    def _left_by(self, one: SpanReplay) -> int | None:
        """The page of the state that a text moves on from, if nobody else goes on there."""
        if one.state is None or one.start % KEPT_ROWS == 0:
            return None
        page = one.span.pages[(one.start - 1) // self.page_rows]
        return None if self._shared(page) else page

    def _take(self, page: int, left: int | None = None) -> int | None:
        """A state for this page; None where all others are read now. left: a page that may lose its own."""
        for own in (page, left):
            if own in self._held and self._starts[own] < 2:
                return self._held.pop(own)[0]
        if self._free:
            return self._free.pop()
        oldest = next((one for one in self._held if one not in self._starts), None)
        return None if oldest is None else self._held.pop(oldest)[0]


def _paths_of(one: SpanReplay, first: int, history: int, page_rows: int) -> Iterator[PathReplay]:
    """first: row of the frame that is the span's first one."""
    span = one.span
    start = one.start
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
