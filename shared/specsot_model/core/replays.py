"""Plans which tokens gated delta layers run for each sequence: those after its last stored state.

A gated delta layer is recurrent: its state after a token is a function of all tokens before. Some states are
stored in a cache that belongs to the KV pages. A step looks for the last stored state before a segment,
*replays* the tokens between that state and the segment from their stored inputs, and then runs the segment's
own tokens. A stored state is dropped as soon as one of the tokens that it was computed from may be replaced.

In this file, a *row* is one token: the rows of a page hold consecutive tokens of a sequence, and the rows of
a frame are the tokens of its batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from specsot_kernels.segments import RowSpan

# Tokens. Size of a chunk: tokens that are solved together if no kernel runs them one by one. Chunks begin at
# multiples of CHUNK in the sequence and are always whole, so that a token's output is the same, bit for bit,
# whichever state a step started from. Untuned.
CHUNK = 64
# Tokens. States are stored at multiples of this, in addition to the last one of each sequence. Untuned.
KEPT_ROWS = 256
# Tokens of one prompt segment. From this length on, kernels run the segment by chunks. Chosen by
# measurement on an H100: 75 us instead of 98.
CHUNKED_ROWS = 2 * CHUNK


def states_for(rows: int) -> int:
    """Return how many states to allocate for KV pages of `rows` rows in all.

    One of them is the zero state, from which every new sequence begins.
    """
    return rows // KEPT_ROWS + 3


@dataclass(frozen=True, slots=True)
class SpanReplay:
    """One segment of a frame, and the tokens of its sequence that run: from `start` to the segment's end.

    span: The rows of the segment.
    state: Number of the stored state to start from; None if the sequence starts from the zero state.
    start: Position of the first token that runs. Tokens start .. span.base - 1 are replayed.
    chunks: Position of the first token of each chunk, from `start` on, whose tokens run together. The last
        chunk may reach beyond the segment.
    saves: Pairs (position, state number): the state after all tokens before that position is stored there.
    """

    span: RowSpan
    state: int | None
    start: int
    chunks: tuple[int, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PathReplay:
    """One root-to-leaf path through a sequence and its tree, run as a plain chain of tokens.

    Layers without a tree kernel run every path on its own.

    state: Number of the stored state that the path starts from; None for the zero state.
    slots: KV slots of the path's tokens, preceded by those of as many tokens as a convolution reads. A
        negative number means that there is no such token.
    outputs: Pairs (row of the frame, index in the path) of the tokens whose outputs are needed.
    saves: Pairs (chunk index, state number): the state after that chunk of the path is stored there.
    """

    state: int | None
    slots: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    saves: tuple[tuple[int, int], ...] = ()


class CachedStates:
    """An LRU cache of `count` states, keyed by KV page: which state follows which first rows of a page.

    A KV page that several sequences share follows the same tokens in all of them, so the state belongs to
    the page. Each page has at most one state. A decoding sequence takes its state along from the page that
    it leaves, except for states at multiples of KEPT_ROWS. Decoding sequences therefore evict no more states
    of other sequences than `states_for` counts for their rows.

    If states may be stored after any token (step 1), tokens run either one by one or in whole chunks, and
    the two sums differ in their last bits. To make a token's output independent of the state that a step
    starts from, the choice is fixed when the token first arrives. A prompt segment of at least CHUNKED_ROWS
    tokens runs by chunks, from the first token of the chunk that it begins in. Each chunk that such a
    segment completes is noted with its page and is replayed as a chunk. All other tokens run, and are
    replayed, one by one.

    A step calls `find`, then `reserve`, and `commit` after all layers have run.
    """

    def __init__(
        self,
        count: int,
        page_rows: int,
        step: int = CHUNK,
        shared: Callable[[int], bool] = lambda page: False,
    ) -> None:
        """
        page_rows: Rows of a KV page.
        step: States are stored only at multiples of this position; 1 or CHUNK.
        shared: Tells whether several sequences hold a page.
        """
        self.count = count
        self.page_rows = page_rows
        self._step = step
        self._shared = shared
        self._free = list(range(count))
        # By page: the number of its state, and how many rows of the page the state follows. Least recently
        # used pages come first.
        self._held: dict[int, tuple[int, int]] = {}
        # The same for states that the current step writes; they become valid with `commit`.
        self._due: dict[int, tuple[int, int]] = {}
        # By page: how many sequences of the current step start from its state.
        self._starts: Counter[int] = Counter()
        # By page: after how many of its rows a chunk ended that ran as a chunk.
        self._ended: dict[int, set[int]] = {}

    def plan(self, spans: Sequence[RowSpan], history: int) -> list[PathReplay]:
        """Return the paths to run for the segments of a frame, and reserve their states: find, then reserve.

        history: Number of preceding tokens that a convolution reads.
        """
        replays = list[PathReplay]()
        first = 0
        for one in self.reserve(self.find(spans)):
            replays += _paths_of(one, first, history, self.page_rows)
            first += one.span.rows
        return replays

    def find(self, spans: Sequence[RowSpan]) -> list[SpanReplay]:
        """Return for each segment from which state and position on its sequence runs.

        The frame overwrites the rows of its segments, so states that follow from the old contents of those
        rows are dropped. No state is reserved yet. States reserved for a previous frame that failed, and was
        never committed, become free again.
        """
        self._free += [state for state, _ in self._due.values()]
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
        """Return the replays with `saves` filled in. The states are valid only after `commit`."""
        return [replace(one, saves=self._reserve(one)) for one in found]

    def commit(self) -> None:
        """Make the reserved states valid: call it after all layers have run the plan."""
        for page, kept in self._due.items():
            self._give(page)
            self._held[page] = kept
        self._due = {}

    def copy(self, source: int, target: int, rows: int) -> tuple[int, int] | None:
        """Record that page `target` is now a copy of the first `rows` rows of page `source`.

        Return (source state, target state) if the caller must copy a state, or None if the source has no
        state within those rows or no state can be freed.
        """
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
        """Drop what was derived from the rows of `page` from offset `row` on, because they are replaced."""
        if page in self._held and self._held[page][1] > row:
            self._give(page)
        if page in self._ended:
            self._ended[page] = {end for end in self._ended[page] if end <= row}

    def _give(self, page: int) -> None:
        """Free the state of a page, if it has one."""
        if page in self._held:
            self._free.append(self._held.pop(page)[0])

    def _forget_from(self, span: RowSpan) -> None:
        """Drop the states of a sequence after position `span.base`."""
        place, row = divmod(span.base, self.page_rows)
        for page in span.pages[place : place + 1]:
            self.forget(page, row)
        for page in span.pages[place + 1 :]:
            self.forget(page)

    def _whole(self, span: RowSpan) -> bool:
        """Tell whether the tokens of a segment run by chunks: only long prompt segments do."""
        return self._step == 1 and span.visible is None and span.rows >= CHUNKED_ROWS

    def _goal(self, span: RowSpan) -> int:
        """Return the latest position that the run of a segment may start from.

        # span.base 150: run by chunks -> 128 (a multiple of CHUNK), one by one -> 150
        """
        return span.base // CHUNK * CHUNK if self._whole(span) else span.base

    def _note_chunks(self, span: RowSpan) -> None:
        """Note with their pages the chunks that this segment completes."""
        if self._whole(span):
            for end in range(self._goal(span) + CHUNK, span.total + 1, CHUNK):
                place, row = divmod(end - 1, self.page_rows)
                self._ended.setdefault(span.pages[place], set()).add(row + 1)

    def _ran_whole(self, span: RowSpan, end: int) -> bool:
        """Tell whether the chunk that ends before position `end` ran as a chunk."""
        place, row = divmod(end - 1, self.page_rows)
        return row + 1 in self._ended.get(span.pages[place], ())

    def _chunks(self, span: RowSpan, start: int) -> tuple[int, ...]:
        """Return `SpanReplay.chunks`: noted chunks that are replayed, then those of the segment itself."""
        goal = self._goal(span)
        lead = range(-(-start // CHUNK) * CHUNK, goal - CHUNK + 1, CHUNK) if self._ended else ()
        own = range(goal, span.total, CHUNK) if self._whole(span) else ()
        return (*(at for at in lead if self._ran_whole(span, at + CHUNK)), *own)

    def _find(self, span: RowSpan) -> tuple[int | None, int]:
        """Return the page of the last usable state before a segment, and the position that follows the state.

        A state in the middle of a chunk that ran as a chunk is not usable, because the chunk has to run as a
        whole. Return (None, 0) if the sequence has to run from its beginning.
        """
        goal = self._goal(span)
        for place in range(min(goal // self.page_rows, len(span.pages) - 1), -1, -1):
            page = span.pages[place]
            if (held := self._held.get(page)) is None:
                continue
            row = place * self.page_rows + held[1]
            end = -(-row // CHUNK) * CHUNK
            if row <= goal and not (row < end <= goal and self._ran_whole(span, end)):
                # Reinserting the key makes the state the most recently used one.
                self._held[page] = self._held.pop(page)
                return page, row
        return None, 0

    def _reserve(self, one: SpanReplay) -> tuple[tuple[int, int], ...]:
        """Reserve states for one replay and return its `saves`.

        Only committed tokens have states: all tokens of a prompt segment, and of a tree segment those before
        its root. The last possible position is stored, and multiples of KEPT_ROWS before it, but at most one
        state per page.

            # prompt segment of positions 0..599, pages of 256 rows, run by chunks -> saves at 576, 512, 256
        """
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
        """Return the page whose state this sequence leaves, or None if the state has to stay.

        It stays at multiples of KEPT_ROWS, and on pages that another sequence shares.
        """
        if one.state is None or one.start % KEPT_ROWS == 0:
            return None
        page = one.span.pages[(one.start - 1) // self.page_rows]
        return None if self._shared(page) else page

    def _take(self, page: int, left: int | None = None) -> int | None:
        """Return a state number for `page`, or None if every state is read in this step.

        left: A page that may lose its own state. The order of preference is: the page's own state, the one of
        `left`, a free one, the least recently used one that this step does not read.
        """
        for own in (page, left):
            if own in self._held and self._starts[own] < 2:
                return self._held.pop(own)[0]
        if self._free:
            return self._free.pop()
        oldest = next((one for one in self._held if one not in self._starts), None)
        return None if oldest is None else self._held.pop(oldest)[0]


def _paths_of(one: SpanReplay, first: int, history: int, page_rows: int) -> Iterator[PathReplay]:
    """Yield the paths of one replay. first: the row of the frame that holds the segment's first token.

    # base 5, tree parents [0 0 0 2], state 7 after 3 tokens, history 2, first row 10, page 3 of 512 rows
    # path [0 2 3]: slots of columns 1..4 | 5 7 8, outputs ((10, 2), (12, 3), (13, 4))
    # path [0 1]:   slots of columns 1..4 | 5 6,   outputs ((11, 3),); node 0 has its output already
    """
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
    """Yield paths that together reach all rows of a span.

    Each path is a list of tail indices, with a bit mask of the rows that no earlier path has reached.

        # tree parents [0 0 0 2] -> ([0, 2, 3], 0b1101), then ([0, 1], 0b0010)
    """
    own = span.tail - span.rows
    missing = ((1 << span.rows) - 1) << own
    while missing:
        seen = missing if span.visible is None else span.visible[missing.bit_length() - 1 - own]
        yield [node for node in range(span.tail) if seen >> node & 1], seen & missing
        missing &= ~seen


def _slot(span: RowSpan, column: int, page_rows: int) -> int:
    """Return the KV slot of a column of the span's sequence."""
    place, row = divmod(column, page_rows)
    return span.pages[place] * page_rows + row
