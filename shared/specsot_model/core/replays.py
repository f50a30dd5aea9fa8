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
    """Return how many states to allocate for KV pages.

    One of them is the zero state, from which every new sequence begins.

    rows: Number of rows (tokens) of all pages together.
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
        """Start with all states free.

        count: Number of states, without the zero state.
        page_rows: Rows of a KV page.
        step: States are stored only at multiples of this position; 1 or CHUNK.
        shared: Returns whether several sequences hold a page, given its number.
        """
        self.count = count
        self.page_rows = page_rows
        self._step = step
        self._shared = shared
        self._free = list(range(count))
        # By page: the number of its state, and how many rows of the page the state follows. Least recently
        # used pages come first.
        self._state_of_page: dict[int, tuple[int, int]] = {}
        # The same for states that the current step writes; they become valid with `commit`.
        self._reserved: dict[int, tuple[int, int]] = {}
        # By page: how many sequences of the current step start from its state.
        self._starts: Counter[int] = Counter()
        # By page: after how many of its rows a chunk ended that ran as a chunk.
        self._ended: dict[int, set[int]] = {}

    def plan(self, spans: Sequence[RowSpan], history: int) -> list[PathReplay]:
        """Return the paths to run for the segments of a frame, and reserve their states: find, then reserve.

        history: Number of preceding tokens that a convolution reads.
        spans: One span per segment of the frame, in row order. No spans give no paths.
        """
        replays = list[PathReplay]()
        first = 0
        for replay in self.reserve(self.find(spans)):
            replays += _paths_of(replay, first, history, self.page_rows)
            first += replay.span.rows
        return replays

    def find(self, spans: Sequence[RowSpan]) -> list[SpanReplay]:
        """Return for each segment from which state and position on its sequence runs.

        The frame overwrites the rows of its segments, so states that follow from the old contents of those
        rows are dropped. No state is reserved yet. States reserved for a previous frame that failed, and was
        never committed, become free again. A segment's replay has `state` None and `start` 0 if its sequence
        has no usable state, and no `saves` yet.

        spans: One span per segment of the frame, in row order.
        """
        self._free += [state for state, _ in self._reserved.values()]
        self._reserved = {}
        for span in spans:
            self._discard_after(span)
            self._note_chunks(span)
        start_of_span = [self._find(span) for span in spans]
        self._starts = Counter(page for page, _ in start_of_span if page is not None)
        return [
            SpanReplay(
                span, None if page is None else self._state_of_page[page][0], start, self._chunks(span, start)
            )
            for span, (page, start) in zip(spans, start_of_span)
        ]

    def reserve(self, replays: Sequence[SpanReplay]) -> list[SpanReplay]:
        """Return the replays with `saves` filled in. The states are valid only after `commit`.

        `saves` is empty if no position of a replay is to be stored, or every state is read or reserved in
        this step. States of other pages may be evicted at once, least recently used first.

        replays: The replays of a frame, as `find` returns them.
        """
        return [replace(replay, saves=self._reserve(replay)) for replay in replays]

    def commit(self) -> None:
        """Make the reserved states valid: call it after all layers have run the plan.

        A page that had a state before loses that older state, which becomes free. Without reserved states
        nothing happens.
        """
        for page, entry in self._reserved.items():
            self._free_state(page)
            self._state_of_page[page] = entry
        self._reserved = {}

    def copy(self, source: int, target: int, rows: int) -> tuple[int, int] | None:
        """Record that page `target` is now a copy of the first `rows` rows of page `source`, and return which
        state to copy.

        The result is (source state, target state) if the caller must copy a state, and None if the source has
        no state within those rows or no state can be freed. The state and the noted chunks that `target` had
        are dropped first. Chunks noted for the copied rows are noted for `target` too. The target's state may
        evict the least recently used one, but never that of `source`.

        source: Number of the page that was copied.
        target: Number of the page that received the copy.
        rows: Number of rows that were copied, from the first row on.
        """
        self.discard_from(target)
        if ended := {end for end in self._ended.get(source, ()) if end <= rows}:
            self._ended[target] = ended
        entry = self._state_of_page.get(source)
        if entry is None or entry[1] > rows:
            return None
        self._starts = Counter((source,))
        state = self._allocate_state(target)
        if state is None:
            return None
        self._state_of_page[target] = state, entry[1]
        return entry[0], state

    def discard_from(self, page: int, row: int = 0) -> None:
        """Drop the state and the noted chunks that follow from replaced rows of a page.

        A state that follows at most `row` rows stays, and so do chunks that end there. A page without state
        or chunks is accepted.

        page: Number of the page.
        row: Offset of the first replaced row within the page; 0: all rows.
        """
        if page in self._state_of_page and self._state_of_page[page][1] > row:
            self._free_state(page)
        if page in self._ended:
            self._ended[page] = {end for end in self._ended[page] if end <= row}

    def _free_state(self, page: int) -> None:
        """Free the state of a page; do nothing if it has none.

        page: Number of the page.
        """
        if page in self._state_of_page:
            self._free.append(self._state_of_page.pop(page)[0])

    def _discard_after(self, span: RowSpan) -> None:
        """Drop the states of a sequence after the first position of a segment.

        On the page of position `span.base`, only what follows from later rows is dropped; on later pages
        everything is. A segment that begins after its last page drops nothing.

        span: The rows of one segment of the frame, with its sequence's pages.
        """
        place, row = divmod(span.base, self.page_rows)
        for page in span.pages[place : place + 1]:
            self.discard_from(page, row)
        for page in span.pages[place + 1 :]:
            self.discard_from(page)

    def _runs_by_chunks(self, span: RowSpan) -> bool:
        """Tell whether the tokens of a segment run by chunks: only long prompt segments do.

        span: The rows of one segment of the frame, with its sequence's pages.
        """
        return self._step == 1 and span.visible is None and span.rows >= CHUNKED_ROWS

    def _latest_start(self, span: RowSpan) -> int:
        """Return the latest position that the run of a segment may start from.

        span: The rows of one segment of the frame, with its sequence's pages.

        # span.base 150: run by chunks -> 128 (a multiple of CHUNK), one by one -> 150
        """
        return span.base // CHUNK * CHUNK if self._runs_by_chunks(span) else span.base

    def _note_chunks(self, span: RowSpan) -> None:
        """Note, with their pages, the chunks that a segment completes; nothing if it does not run by chunks.

        These are the whole chunks that end at or before the segment's end.

        span: The rows of one segment of the frame, with its sequence's pages.
        """
        if self._runs_by_chunks(span):
            for end in range(self._latest_start(span) + CHUNK, span.total + 1, CHUNK):
                place, row = divmod(end - 1, self.page_rows)
                self._ended.setdefault(span.pages[place], set()).add(row + 1)

    def _ran_as_chunk(self, span: RowSpan, end: int) -> bool:
        """Tell whether the chunk that ends before a position ran as a chunk.

        False if no chunk was noted for that page.

        span: A segment of the sequence, for its pages.
        end: Position after the chunk's last token.
        """
        place, row = divmod(end - 1, self.page_rows)
        return row + 1 in self._ended.get(span.pages[place], ())

    def _chunks(self, span: RowSpan, start: int) -> tuple[int, ...]:
        """Return `SpanReplay.chunks`: noted chunks that are replayed, then those of the segment itself.

        The result is empty if no token runs by chunks. A noted chunk counts only if it begins at `start` or
        later and ends at or before the segment's own first token that runs.

        span: The rows of one segment of the frame, with its sequence's pages.
        start: Position of the first token that runs.
        """
        own_start = self._latest_start(span)
        replayed = range(-(-start // CHUNK) * CHUNK, own_start - CHUNK + 1, CHUNK) if self._ended else ()
        own_chunks = range(own_start, span.total, CHUNK) if self._runs_by_chunks(span) else ()
        return (*(chunk for chunk in replayed if self._ran_as_chunk(span, chunk + CHUNK)), *own_chunks)

    def _find(self, span: RowSpan) -> tuple[int | None, int]:
        """Return the page of the last usable state before a segment, and the position that follows the state.

        A state in the middle of a chunk that ran as a chunk is not usable, because the chunk has to run as a
        whole. Return (None, 0) if the sequence has to run from its beginning. The state found becomes the
        most recently used one.

        span: The rows of one segment of the frame, with its sequence's pages.
        """
        latest = self._latest_start(span)
        for place in range(min(latest // self.page_rows, len(span.pages) - 1), -1, -1):
            page = span.pages[place]
            if (entry := self._state_of_page.get(page)) is None:
                continue
            row = place * self.page_rows + entry[1]
            end = -(-row // CHUNK) * CHUNK
            if row <= latest and not (row < end <= latest and self._ran_as_chunk(span, end)):
                # Reinserting the key makes the state the most recently used one.
                self._state_of_page[page] = self._state_of_page.pop(page)
                return page, row
        return None, 0

    def _reserve(self, replay: SpanReplay) -> tuple[tuple[int, int], ...]:
        """Reserve states for one replay and return its `saves`.

        Only committed tokens have states: all tokens of a prompt segment, and of a tree segment those before
        its root. The last possible position is stored, and multiples of KEPT_ROWS before it, but at most one
        state per page.

            # prompt segment of positions 0..599, pages of 256 rows, run by chunks -> saves at 576, 512, 256

        Pairs are returned from the last position to the first. A position at or before the first token that
        runs is left out, and so is one for which no state can be had. A page whose state an earlier segment
        of the frame has reserved gets no second one.

        replay: The replay of a segment.
        """
        span = replay.span
        start = replay.start
        step = CHUNK if self._runs_by_chunks(span) else self._step
        last = (span.total if span.visible is None else span.base) // step * step
        saves = list[tuple[int, int]]()
        left = self._page_left(replay)
        for end in (last, *range((last - 1) // KEPT_ROWS * KEPT_ROWS, start, -KEPT_ROWS)):
            place, row = divmod(end - 1, self.page_rows)
            if end <= start or (page := span.pages[place]) in self._reserved:
                continue
            if (state := self._allocate_state(page, left)) is not None:
                saves.append((end, state))
                self._reserved[page] = state, row + 1
        return tuple(saves)

    def _page_left(self, replay: SpanReplay) -> int | None:
        """Return the page whose state this sequence leaves, or None if the state has to stay.

        It stays at multiples of KEPT_ROWS, and on pages that another sequence shares. None is also returned
        if the sequence starts from the zero state.

        replay: The replay of a segment.
        """
        if replay.state is None or replay.start % KEPT_ROWS == 0:
            return None
        page = replay.span.pages[(replay.start - 1) // self.page_rows]
        return None if self._shared(page) else page

    def _allocate_state(self, page: int, left_page: int | None = None) -> int | None:
        """Return a state number for a page, or None if every state is read or reserved in this step.

        The page that loses the state has none afterwards. A page's own state is taken only if at most one
        sequence of this step starts from it; so is that of `left_page`.

        page: Number of the page that gets the state. It does not get the state here: the caller records it.
        left_page: A page that may lose its own state; None: no such page. The order of preference is: the
            page's own state, the one of `left_page`, a free one, the least recently used one that this step
            does not read.
        """
        for candidate in (page, left_page):
            if candidate in self._state_of_page and self._starts[candidate] < 2:
                return self._state_of_page.pop(candidate)[0]
        if self._free:
            return self._free.pop()
        oldest = next((used for used in self._state_of_page if used not in self._starts), None)
        return None if oldest is None else self._state_of_page.pop(oldest)[0]


def _paths_of(replay: SpanReplay, first_row: int, history: int, page_rows: int) -> Iterator[PathReplay]:
    """Yield the paths of one replay.

    A column before the sequence has slot -1. Only the first path has the replay's `saves`.

    replay: The segment, and the tokens of its sequence that run.
    first_row: Row of the frame that holds the segment's first token.
    history: Number of preceding tokens that a convolution reads.
    page_rows: Rows (tokens) of a KV page.

    # base 5, tree parents [0 0 0 2], state 7 after 3 tokens, history 2, first row 10, page 3 of 512 rows
    # path [0 2 3]: slots of columns 1..4 | 5 7 8, outputs ((10, 2), (12, 3), (13, 4))
    # path [0 1]:   slots of columns 1..4 | 5 6,   outputs ((11, 3),); node 0 has its output already
    """
    span = replay.span
    start = replay.start
    tree_row = first_row + span.rows - span.tail
    saves = tuple(((end - start) // CHUNK - 1, state) for end, state in replay.saves)
    for path, needed in _paths(span):
        columns = [*range(start - history, span.base), *(span.base + node for node in path)]
        slots = tuple(-1 if column < 0 else _slot_of(span, column, page_rows) for column in columns)
        outputs = tuple(
            (tree_row + node, span.base - start + place)
            for place, node in enumerate(path)
            if needed >> node & 1
        )
        yield PathReplay(replay.state, slots, outputs, saves)
        saves = ()


def _paths(span: RowSpan) -> Iterator[tuple[list[int], int]]:
    """Yield paths that together reach all rows of a span.

    Each path is a list of tail indices, with a bit mask of the rows that no earlier path has reached.

        # tree parents [0 0 0 2] -> ([0, 2, 3], 0b1101), then ([0, 1], 0b0010)

    A prompt segment gives a single path over its whole tail. A node that an earlier path has reached may be
    part of a later path, but its bit is not set again.

    span: The rows of one segment of the frame, with its sequence's pages.
    """
    first_own = span.tail - span.rows
    missing = ((1 << span.rows) - 1) << first_own
    while missing:
        seen = missing if span.visible is None else span.visible[missing.bit_length() - 1 - first_own]
        yield [node for node in range(span.tail) if seen >> node & 1], seen & missing
        missing &= ~seen


def _slot_of(span: RowSpan, column: int, page_rows: int) -> int:
    """Return the KV slot of a column of the span's sequence.

    span: The rows of a segment, with the sequence's pages.
    column: The column, from 0.
    page_rows: Rows (tokens) of a KV page.
    """
    place, row = divmod(column, page_rows)
    return span.pages[place] * page_rows + row
