"""Computes which tokens may follow, so that the output is a valid skeleton within its token budget.

A token may follow if its bytes stay within the grammar, and if the output can then be ended within the
budget. The shortest known ending follows the first edges of the grammar (`language.onward`) and is spelled in
as few tokens as possible. The first token of this ending always passes the test, so some token is allowed
everywhere except at the end.

How a mask is computed. All tokens are sorted into tries by their bytes. From one place of the byte automaton,
the tries are walked level by level with NumPy, so that every token's place is known at once. What a token
costs and needs depends only on the place after it, and is stored once per place (`TokenReach`). A mask then
compares these numbers with the budgets of the sequence (`TokenReach.fitting`).

All sequences of one tokenizer share the tables (`PlanTables`), because no budget is part of them: neither the
tokens that a plan may have, nor its points, nor the bytes and words of a title. `TokenAutomaton` adds the
budgets of one sequence, and is cheap to make.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS, PlanRules
from specsot.core.vocabulary import Spelling, Vocabulary, spelling_of
from specsot.errors import ModelError
from specsot.grammar import language
from specsot.grammar.language import Done, Line, ListTitle, Literal, Place, Title
from specsot.grammar.paths import PathCheck, step_by_step

# Bytes. Bounds the cache of masks of one tokenizer; when it is full, all masks are dropped. Untuned.
_MASK_BYTES: Final = 32 << 20
# Masks. Bounds the same cache for small vocabularies. Untuned.
_MAX_MASKS: Final = 1 << 14
# Tables. Bounds the tables that are kept; there is one set per tokenizer and per set of tool names. Untuned.
MAX_CACHED_TABLES: Final = 8

Mask = NDArray[np.bool_]

# What a mask depends on: number of the place, bytes and words left for the title, budget of free text, budget
# of a plan, and the end tokens.
MaskKey = tuple[int, int, int, int, int, tuple[int, ...]]


class State(NamedTuple):
    """The state of one output. Only automata over the same tables can use it.

    place: number of the place in the tables' `ByteTable`.
    left: number of bytes that the title may still have; 0 outside titles.
    words: number of words that the title of a list may still begin; MAX_TITLE_WORDS elsewhere.
    written: number of tokens so far.
    """

    place: int
    left: int
    words: int
    written: int


class TokenAutomaton:
    """The skeleton language over the tokens of one vocabulary, with the budgets of one sequence.

    Safe to share between threads.
    """

    def __init__(self, vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...] = ()) -> None:
        """ends: tokens that may end a numbered list, in addition to its own end.

        Raises ModelError if the vocabulary cannot spell the language.
        """
        self.rules = rules
        self.vocabulary = vocabulary
        self._tables = tables_of(vocabulary, rules.tools)
        self._ends = tuple(end for end in ends if end < len(vocabulary))
        self._start = self._tables.enter(language.begin(rules))
        self._minimum = self._tables.ending(self._start.place)
        if self._minimum >= UNREACHABLE_TOKENS:
            raise ModelError("the tokenizer has no tokens for the skeleton language")

    def start(self) -> State:
        """Return the state before the first token."""
        return self._start

    def minimum(self) -> int:
        """Return the number of tokens of the shortest output, which is the smallest possible budget."""
        return self._minimum

    def finished(self, state: State) -> bool:
        """Return whether the output is complete, so that no token may follow."""
        return self._tables.is_done(state.place)

    def advance(self, state: State, token: int) -> State | None:
        """Return the state after `token`, or None if the grammar forbids the token. Ignores budgets."""
        return self._tables.advance(state, token)

    def path_check(self, state: State) -> PathCheck:
        """See `Grammar.path_check`."""
        return step_by_step(self.advance, state)

    def mask(self, state: State, remaining: int) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only and shared. All False at the end.

        remaining: number of tokens that the sequence may still generate, this one included. If the shortest
            ending needs more, only tokens of shortest endings are allowed.
        """
        return self._tables.mask(state, *self._rooms(state, remaining), self._ends)

    def allows(self, state: State, token: int, remaining: int) -> bool:
        """Return the entry of `mask` for one token. The mask is not computed."""
        tables = self._tables
        if tables.is_done(state.place):
            return False
        if token in self._ends and tables.may_stop(state.place):
            return True
        after = tables.advance(state, token)
        if after is None:
            return False
        room, room_planned = self._rooms(state, remaining)
        return tables.ending(after.place) < (room_planned if tables.is_planned(after.place) else room)

    def forced(self, state: State) -> tuple[int, ...]:
        """Return tokens for the bytes that the grammar determines from this state on; () if it leaves a
        choice.

        The bytes are tokenized by greedy longest match. `advance` accepts each token, but a mask may forbid
        it because of the budget.
        """
        return self._tables.forced(state)

    def explore(self) -> Iterator[None]:
        """Compute what masks are made of, for every place that can be reached, and yield after each place.

        Places are explored in the order of their distance from the start. Places within a character are left
        out: few tokens end there, and few can follow.
        """
        return self._tables.explore_from(self._start.place)

    def _rooms(self, state: State, remaining: int) -> tuple[int, int]:
        """Return the budgets after the next token if the output is a direct answer, and if it is a plan.

        At least one token of a shortest ending fits. If the output is certainly a plan already, the first
        budget is 0.
        """
        least = self._tables.ending(state.place)
        planned = min(remaining, self.rules.plan_tokens - state.written)
        if self._tables.is_planned(state.place):
            return 0, max(planned, least)
        return max(remaining, least), max(planned, 0)


def automaton(vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...] = ()) -> TokenAutomaton:
    """Return the automaton of these arguments. Its tables are shared. Raises ModelError."""
    return TokenAutomaton(vocabulary, rules, ends)


@functools.lru_cache(maxsize=MAX_CACHED_TABLES)
def tables_of(vocabulary: Vocabulary, tools: tuple[str, ...] = ()) -> PlanTables:
    """Return the tables of a tokenizer, which the whole process shares.

    tools: the names that may stand in TOOL besides None. They are the only rule that tables depend on.
    """
    return PlanTables(vocabulary, PlanRules(tools=tools))


class PlanTables:
    """Places, token costs and masks of the skeleton language over one vocabulary, for all budgets.

    Safe to share between threads.
    """

    def __init__(self, vocabulary: Vocabulary, rules: PlanRules) -> None:
        self.vocabulary = vocabulary
        self._rules = rules
        self._table = ByteTable(rules)
        self._spelling = spelling_of(vocabulary)
        self._survey = Survey(vocabulary, self._table, self._spelling)
        self._reaches: dict[int, TokenReach] = {}
        self._masks: dict[MaskKey, Mask] = {}
        self._max_masks = min(_MASK_BYTES // max(len(vocabulary), 1) + 1, _MAX_MASKS)
        self._stretches: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._explored: set[int] = set()
        # Held while `_table`, `_survey`, `_reaches` or the masks grow.
        self._lock = threading.Lock()
        self._done = frozenset({self._table.number(Done(plan=True)), self._table.number(Done(plan=False))})
        self._nothing = _freeze(np.zeros(len(vocabulary), dtype=np.bool_))

    def enter(self, place: Place) -> State:
        """Return the state at a place before the first token."""
        alike, left, words = uncount(place)
        with self._lock:
            return State(self._table.number(alike), left, words, 0)

    def is_done(self, place: int) -> bool:
        """Return whether no token may follow a place."""
        return place in self._done

    def is_planned(self, place: int) -> bool:
        """Return whether the output is certainly a plan."""
        return self._table.planned[place]

    def may_stop(self, place: int) -> bool:
        """Return whether an end token may follow a place."""
        return language.may_stop(self._table.place(place))

    def ending(self, place: int) -> int:
        """Return the number of tokens of the shortest ending from a place."""
        found = self._survey.endings.get(place)
        if found is None:
            with self._lock:
                found = self._survey.ending(place)
        return found

    def advance(self, state: State, token: int) -> State | None:
        """See `TokenAutomaton.advance`."""
        text = self.vocabulary.bytes[token] if 0 <= token < len(self.vocabulary) else None
        if not text:
            return None
        table = self._table
        place = state.place
        left = state.left
        words = state.words
        for byte in text:
            if not table.filled[place]:
                with self._lock:
                    table.fill(place)
            before = place
            place = int(table.next[place, byte])
            if table.open[place]:
                left -= 1
                words -= int(table.rank[place] > table.rank[before])
                if left < table.owed[place] or words < 0:
                    return None
            elif place == DEAD:
                return None
        return self._settle(place, left, words, state.written + 1)

    def mask(self, state: State, room: int, room_planned: int, ends: tuple[int, ...]) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only and shared.

        room: token budget after which a direct answer must be complete.
        room_planned: token budget after which a plan must be complete.
        ends: the tokens that may follow wherever the output may stop.
        """
        if state.place in self._done:
            return self._nothing
        reach = self._reaches.get(state.place) or self._explore(state.place)
        # Each part of the key is reduced as far as the mask does not change, so that many states share one
        # mask: budgets above `roomy` forbid no token, and bytes and words are rounded down to the next need
        # of any token.
        key = (
            reach.number,
            reach.steps[state.left],
            reach.word_steps[state.words],
            min(room, reach.roomy),
            min(room_planned, reach.roomy),
            ends,
        )
        found = self._masks.get(key)
        return self._draw(reach, key) if found is None else found

    def forced(self, state: State) -> tuple[int, ...]:
        """See `TokenAutomaton.forced`."""
        key = (state.place, state.left, state.words)
        found = self._stretches.get(key)
        if found is None:
            place = recount(self._table.place(state.place), state.left, state.words)
            found = self._spelling.split(language.forced(self._rules, place))
            if len(self._stretches) >= _MAX_MASKS:
                self._stretches.clear()
            self._stretches[key] = found
        return found

    def explore_from(self, start: int) -> Iterator[None]:
        """See `TokenAutomaton.explore`. Places that were explored before are not visited again."""
        waiting = deque([start])
        while waiting:
            number = waiting.popleft()
            if number in self._explored or number in self._done:
                continue
            self._explored.add(number)
            if language.is_within_character(self._table.place(number)):
                continue
            self._explore(number)
            with self._lock:
                self._table.fill(number)
                following = np.unique(self._table.next[number]).tolist()
                waiting += [self._table.uncounted(each) for each in following if each != DEAD]
            yield

    def _settle(self, number: int, left: int, words: int, written: int) -> State:
        """Return the state at a place. If a token entered a title, the title's counts move to the state.

        The byte table has titles without counts, so that titles of different lengths share their places.
        """
        if self._table.open[number]:
            return State(number, left, words, written)
        place = self._table.place(number)
        alike, left, words = uncount(place)
        if alike is not place:
            with self._lock:
                number = self._table.number(alike)
        return State(number, left, words, written)

    def _explore(self, place: int) -> TokenReach:
        """Return the tokens that can follow a place, computed at the first call."""
        with self._lock:
            if place not in self._reaches:
                self._reaches[place] = self._survey.explore(place)
            return self._reaches[place]

    def _draw(self, reach: TokenReach, key: MaskKey) -> Mask:
        """Compute the mask of a key, and add it to the cache."""
        _, left, words, room, room_planned, ends = key
        mask = reach.fitting(left, words, room, room_planned)
        if ends and language.may_stop(self._table.place(reach.number)):
            mask[list(ends)] = True
        with self._lock:
            if len(self._masks) >= self._max_masks:
                self._masks.clear()
            return self._masks.setdefault(key, _freeze(mask))


def _freeze(mask: Mask) -> Mask:
    mask.flags.writeable = False
    return mask


# A line feed and the first digit of a number.
_LINE_BEGUN = re.compile(rb"\n[0-9]")

# The number of the dead place, which no valid output reaches. Every byte leads from it to itself.
DEAD = 0


class ByteTable:
    """The byte automaton of a grammar as a table that grows. Not thread-safe: its owner holds a lock.

    next: [places or more, 256], the number of the place after each byte. A row is valid once `filled` is
        True.
    places: the place of each number; None for DEAD.
    owed: by number, how many bytes a title still needs before it may end, see `language.owed`.
    open: by number, True for titles without a count of their bytes.
    rank: [places or more], 0 outside of lists' titles without a count. Within them a byte that leads to a
        higher rank uses up a word, see `language.word_rank`.
    planned: by number, whether the output is certainly a plan.
    filled: by number, whether the row of `next` is valid.
    """

    def __init__(self, rules: PlanRules) -> None:
        self.rules = rules
        self.next: NDArray[np.int32] = np.zeros((64, 256), dtype=np.int32)
        self.places: list[Place | None] = [None]
        self.owed: list[int] = [0]
        self.open: list[bool] = [False]
        self.rank: NDArray[np.uint8] = np.zeros(64, dtype=np.uint8)
        self.planned: list[bool] = [False]
        self.filled: list[bool] = [True]
        self._numbers: dict[Place, int] = {}

    def number(self, place: Place) -> int:
        """Return the number of a place, which is added if it is new."""
        found = self._numbers.get(place)
        return self._add(place) if found is None else found

    def place(self, number: int) -> Place:
        """Return the place of a number other than DEAD."""
        found = self.places[number]
        assert found is not None
        return found

    def uncounted(self, number: int) -> int:
        """Return the number of the same place without counts, which is added if it is new."""
        return self.number(uncount(self.place(number))[0])

    def fill(self, number: int) -> None:
        """Compute the row of `next` for a place, unless it is valid already."""
        if self.filled[number]:
            return
        leads = [(low, high, self.number(to) if to else DEAD) for low, high, to in self._edges(number)]
        # `number` may have replaced the array, so the row is taken only now. The first edge has precedence,
        # so it is written last.
        row = self.next[number]
        for low, high, to in reversed(leads):
            row[low : high + 1] = to
        self.filled[number] = True

    def fill_all(self, numbers: NDArray[np.int32]) -> None:
        """Compute the rows of `next` for several places, which may repeat."""
        present = np.zeros(len(self.places), dtype=np.bool_)
        present[numbers] = True
        for number in np.flatnonzero(present).tolist():
            self.fill(number)

    def _edges(self, number: int) -> tuple[language.Edge, ...]:
        return language.edges(self.rules, self.place(number))

    def _add(self, place: Place) -> int:
        number = len(self.places)
        if number == len(self.next):
            self.next = np.concatenate([self.next, np.zeros_like(self.next)])
            self.rank = np.concatenate([self.rank, np.zeros_like(self.rank)])
        self.places.append(place)
        self.owed.append(language.owed(place))
        self.open.append(isinstance(place, Title | ListTitle) and place.left is None)
        self.rank[number] = language.word_rank(place) if self.open[-1] else 0
        self.planned.append(language.planned(place))
        self.filled.append(False)
        self._numbers[place] = number
        return number


def uncount(place: Place) -> tuple[Place, int, int]:
    """Return a place without the counts of its title, the bytes that are left, and the words that are left.

    For places outside of titles, no byte and MAX_TITLE_WORDS words are left.
    """
    if isinstance(place, Title) and place.left is not None:
        return replace(place, left=None), place.left, MAX_TITLE_WORDS
    if isinstance(place, ListTitle) and place.left is not None:
        words = MAX_TITLE_WORDS - language.words_used(place)
        return replace(place, left=None, words=min(place.words, 1)), place.left, words
    return place, 0, MAX_TITLE_WORDS


def recount(place: Place, left: int, words: int) -> Place:
    """The inverse of `uncount`."""
    if isinstance(place, Title) and place.left is None:
        return replace(place, left=left)
    if isinstance(place, ListTitle) and place.left is None:
        gap = language.words_used(place) - place.words
        return replace(place, left=left, words=MAX_TITLE_WORDS - words - gap)
    return place


Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrieLevel:
    """The nodes of a trie at one depth, in byte order. A node is one distinct beginning of tokens.

    byte: [nodes], the last byte of each node's beginning.
    children: [nodes + 1]. The children of node i are the nodes children[i] .. children[i + 1] - 1 of the next
        level.
    tokens: [k], ids of the tokens that end at this depth.
    ends: [nodes + 1]. The tokens that end at node i are tokens[ends[i]] .. tokens[ends[i + 1] - 1].
    lines: [k], how many bytes each of these tokens has before its first line feed; all of its bytes if it has
        none.

    Worked example: the tokens 0 = "a", 1 = "ab", 2 = "ac" and 3 = "b".

        depth 0   byte [a b]   children [0 2 2]   tokens [0 3]   ends [0 1 2]
        depth 1   byte [b c]   children [0 0 0]   tokens [1 2]   ends [0 1 2]
    """

    byte: NDArray[np.uint8]
    children: Ints
    tokens: Ints
    ends: Ints
    lines: Ints


Trie = tuple[TrieLevel, ...]


@functools.lru_cache(maxsize=4)
def build_tries(vocabulary: Vocabulary) -> tuple[Trie, Trie]:
    """Return two tries: of the tokens without a line feed, and of the tokens with one.

    The two are walked separately, because a walk of the first trie is valid for the titles of all lines.
    """
    texts = sorted((text, token) for token, text in enumerate(vocabulary.bytes) if text)
    within = [entry for entry in texts if b"\n" not in entry[0]]
    across = [entry for entry in texts if b"\n" in entry[0]]
    return _build(within), _build(across)


def _build(texts: list[tuple[bytes, int]]) -> Trie:
    """Return the trie of sorted (bytes, token) pairs."""
    sizes = np.array([len(text) for text, _ in texts], dtype=np.int32)
    tokens = np.array([token for _, token in texts], dtype=np.int32)
    lines = np.array([len(text.partition(b"\n")[0]) for text, _ in texts], dtype=np.int32)
    matrix = _pad([text for text, _ in texts], int(sizes.max(initial=0)))
    shared = _shared_beginnings(matrix, sizes)
    levels: list[TrieLevel] = []
    rows = np.flatnonzero(sizes > 0)
    for depth in range(matrix.shape[1]):
        fresh = shared[rows] <= depth
        # The node of each row at this depth.
        node = np.cumsum(fresh, dtype=np.int32) - 1
        longer = sizes[rows] > depth + 1
        below = rows[longer]
        # The parent of each node of the next level.
        parents = node[longer][shared[below] <= depth + 1]
        numbers = np.arange(int(fresh.sum()) + 1)
        children = np.searchsorted(parents, numbers).astype(np.int32)
        whole = rows[~longer]
        ends = np.searchsorted(node[~longer], numbers).astype(np.int32)
        byte = matrix[rows[fresh], depth]
        levels.append(TrieLevel(byte, children, tokens[whole], ends, lines[whole]))
        rows = below
    return tuple(levels)


def _pad(texts: list[bytes], width: int) -> NDArray[np.uint8]:
    """Return the texts as an array [texts, width], with zeros after each text."""
    padded = b"".join(text.ljust(width, b"\0") for text in texts)
    return np.frombuffer(padded, dtype=np.uint8).reshape(len(texts), width)


def _shared_beginnings(matrix: NDArray[np.uint8], sizes: Ints) -> Ints:
    """Return how many first bytes each row of the sorted matrix shares with the row before it.

    The rows "ab", "ac" and "b" share [0, 1, 0] bytes.
    """
    shared = np.zeros(len(sizes), dtype=np.int32)
    if len(sizes) > 1:
        differs = matrix[1:] != matrix[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), matrix.shape[1])
        shared[1:] = np.minimum(first, np.minimum(sizes[1:], sizes[:-1]))
    return shared


# Tokens. The cost of an ending that the vocabulary cannot spell, which exceeds every budget.
UNREACHABLE_TOKENS: Final = 1 << 14
# Fraction of the vocabulary. If more tokens can follow a place, their costs and needs are stored for all
# tokens of the vocabulary, because comparing contiguous arrays is faster than gathering. Untuned.
_DENSE_FROM: Final = 1 / 16


@dataclass(frozen=True, slots=True)
class ReachPart:
    """Tokens that can follow a place, and what each of them requires.

    tokens: [k], token ids. None if the other arrays have an entry for every token of the vocabulary; then the
        cost of a token that cannot follow is UNREACHABLE_TOKENS.
    costs: [k], number of tokens of the shortest ending after each token.
    needs: [k], how many bytes the title at this place must have left for each token.
    words: [k], how many words the title of a list must have left for each token.
    planned: [k], whether the output is certainly a plan after each token; or one value for all tokens.
    max_need: the largest of `needs`.
    max_words: the largest of `words`.
    """

    tokens: Ints | None
    costs: NDArray[np.int16]
    needs: NDArray[np.uint8]
    words: NDArray[np.uint8]
    planned: Mask | bool

    max_need: int = field(init=False)
    max_words: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_need", int(self.needs.max(initial=0)))
        object.__setattr__(self, "max_words", int(self.words.max(initial=0)))

    def fits(self, left: int, words: int, room: int, room_planned: int) -> Mask:
        """Return which of the tokens are allowed, see `TokenReach.fitting`: [k]."""
        if isinstance(self.planned, bool):
            fits = self.costs < np.int16(room_planned if self.planned else room)
        else:
            fits = self.costs < np.where(self.planned, np.int16(room_planned), np.int16(room))
        if left < self.max_need:
            fits &= self.needs <= np.uint8(left)
        if words < self.max_words:
            fits &= self.words <= np.uint8(words)
        return fits


@dataclass(frozen=True, slots=True)
class TokenReach:
    """All tokens that can follow one place.

    number: number of a place that stands for all places with the same tokens.
    size: number of tokens of the vocabulary.
    parts: the tokens without a line feed, and the tokens with one.
    roomy: the smallest budget that forbids no token.
    steps: for each number of bytes left for a title, the smallest number that allows the same tokens. If
        tokens need 0, 2 or 5 bytes, steps is (0, 0, 2, 2, 2, 5, 5, ...).
    word_steps: the same for each number of words.
    """

    number: int
    size: int
    parts: tuple[ReachPart, ReachPart]
    roomy: int
    steps: tuple[int, ...]
    word_steps: tuple[int, ...]

    def fitting(self, left: int, words: int, room: int, room_planned: int) -> Mask:
        """Return which tokens are allowed, as a new array: [vocabulary size].

        left: number of bytes that the title may still have.
        words: number of words that the title may still begin.
        room: token budget after which a direct answer must be complete.
        room_planned: token budget after which a plan must be complete.
        """
        mask: Mask | None = None
        for part in self.parts:
            if part.tokens is None:
                fits = part.fits(left, words, room, room_planned)
                mask = fits if mask is None else mask | fits
        if mask is None:
            mask = np.zeros(self.size, dtype=np.bool_)
        for part in self.parts:
            if part.tokens is not None:
                mask[part.tokens[part.fits(left, words, room, room_planned)]] = True
        return mask


class Survey:
    """Computes which tokens can follow a place of a byte table. Not thread-safe: its owner holds a lock."""

    def __init__(self, vocabulary: Vocabulary, table: ByteTable, spelling: Spelling) -> None:
        """endings: number of tokens of the shortest ending from each place, as far as it was computed."""
        self._within, self._across = build_tries(vocabulary)
        self._lines_begun = most_lines_begun(vocabulary)
        self._size = len(vocabulary)
        self._table = table
        self._spelling = spelling
        self.endings: dict[int, int] = {}
        self._ways: dict[Place, bytes] = {}
        self._titles: dict[Place, ReachPart] = {}
        self._reaches: dict[int, TokenReach] = {}

    def explore(self, number: int) -> TokenReach:
        """Return all tokens that can follow a place, found in one walk over both tries.

        Places that differ in how many lines may follow share the result if no token is long enough to see
        the difference.
        """
        place = bound_lines(self._table.place(number), self._lines_begun + 2)
        number = self._table.number(place)
        if number not in self._reaches:
            parts = self._inner(place), self._walk(self._across, number)
            self._reaches[number] = TokenReach(
                number=number,
                size=self._size,
                parts=parts,
                roomy=max(_largest(part.costs) for part in parts) + 1,
                steps=_steps([part.needs for part in parts], MAX_TITLE_BYTES),
                word_steps=_steps([part.words for part in parts], MAX_TITLE_WORDS),
            )
        return self._reaches[number]

    def ending(self, number: int) -> int:
        """Return the number of tokens of the shortest ending from a place.

        Returns UNREACHABLE_TOKENS if the vocabulary cannot spell the ending.
        """
        if number not in self.endings:
            self.endings[number] = self._spelling.count(
                self._way(self._table.place(number)), UNREACHABLE_TOKENS
            )
        return self.endings[number]

    def _way(self, place: Place) -> bytes:
        """Return the bytes of the ending that follows the first edge of every place."""
        if isinstance(place, language.Done):
            return b""
        if place not in self._ways:
            byte, to = language.onward(self._table.rules, place)
            self._ways[place] = bytes([byte]) + self._way(to)
        return self._ways[place]

    def _inner(self, place: Place) -> ReachPart:
        """Return the tokens without a line feed that can follow a place.

        In a title they depend on the line only through the length of the ending, so one walk serves many
        lines.
        """
        if isinstance(place, Title):
            alike: Place = replace(place, line=Line(1, 1))
        elif isinstance(place, ListTitle):
            alike = replace(place, line=_line_alike(place.line))
        else:
            return self._walk(self._within, self._table.number(place))
        if alike not in self._titles:
            self._titles[alike] = self._walk(self._within, self._table.number(alike))
        return self._titles[alike]

    def _walk(self, trie: Trie, number: int) -> ReachPart:
        """Walk a trie level by level from one place, for all its tokens at once.

        Nodes that the grammar forbids are dropped at each level.
        """
        table = self._table
        found: list[TokenEnds] = []
        nodes = np.arange(len(trie[0].byte) if trie else 0, dtype=np.int32)
        at = np.full(len(nodes), number, dtype=np.int32)
        words = np.zeros(len(nodes), dtype=np.int32)
        for level in trie:
            table.fill_all(at)
            before = at
            at = table.next[at, level.byte[nodes]]
            words = words + (table.rank[at] > table.rank[before])
            alive = at != DEAD
            nodes = nodes[alive]
            at = at[alive]
            words = words[alive]
            if not len(nodes):
                break
            found.append(_tokens_at(level, nodes, at, words))
            first = level.children[nodes]
            counts = level.children[nodes + 1] - level.children[nodes]
            nodes = _ranges(first, counts)
            at = np.repeat(at, counts)
            words = np.repeat(words, counts)
        return self._weigh(number, TokenEnds(*(np.concatenate([_NONE, *each]) for each in _columns(found))))

    def _weigh(self, number: int, found: TokenEnds) -> ReachPart:
        """Return tokens with their costs and needs. Tokens are left out if no ending exists after them,
        or if they are too long for any title."""
        table = self._table
        size = len(table.places)
        costs = np.full(size, UNREACHABLE_TOKENS, dtype=np.int16)
        planned = np.zeros(size, dtype=np.bool_)
        owed = np.zeros(size, dtype=np.int32)
        for end in np.flatnonzero(np.bincount(found.places, minlength=1)).tolist():
            costs[end] = self.ending(end)
            planned[end] = table.planned[end]
            owed[end] = table.owed[end] if table.open[end] else 0
        needs = found.lines + owed[found.places] if table.open[number] else np.zeros_like(found.lines)
        possible = costs[found.places] < UNREACHABLE_TOKENS
        possible &= (needs <= MAX_TITLE_BYTES) & (found.words <= MAX_TITLE_WORDS)
        places = found.places[possible]
        tokens = found.tokens[possible]
        part = ReachPart(
            tokens=tokens,
            costs=costs[places],
            needs=needs[possible].astype(np.uint8),
            words=found.words[possible].astype(np.uint8),
            planned=planned[places],
        )
        return self._spread(part) if len(tokens) > _DENSE_FROM * self._size else part

    def _spread(self, part: ReachPart) -> ReachPart:
        """Return a part with an entry for every token of the vocabulary, if that is possible."""
        assert part.tokens is not None
        assert not isinstance(part.planned, bool)
        if part.planned.any() != part.planned.all():
            return part
        costs = np.full(self._size, UNREACHABLE_TOKENS, dtype=np.int16)
        needs = np.zeros(self._size, dtype=np.uint8)
        words = np.zeros(self._size, dtype=np.uint8)
        costs[part.tokens] = part.costs
        needs[part.tokens] = part.needs
        words[part.tokens] = part.words
        return ReachPart(None, costs, needs, words, bool(part.planned.all()))


def most_lines_begun(vocabulary: Vocabulary) -> int:
    """Return how many numbered lines the longest such token begins: 1 for "a\\n2.", usually 0."""
    counts = (len(_LINE_BEGUN.findall(text)) for text in vocabulary.bytes if text and b"\n" in text)
    return max(counts, default=0)


def bound_lines(place: Place, following: int) -> Place:
    """Return the place with at most so many lines that may follow its own.

    With following=2, a place of line 3 of 16 becomes the same place of line 3 of 5.
    """
    if isinstance(place, Literal):
        return replace(place, then=bound_lines(place.then, following))
    if isinstance(place, Done | language.Direct):
        return place
    line = place.line
    return replace(place, line=Line(line.number, min(line.last, line.number + following)))


def _line_alike(line: Line) -> Line:
    """Return a line whose titles have endings of the same lengths.

    The ending of a list's title writes a second line if there is none, and a line feed more if a further line
    may follow.
    """
    if line.number >= line.last:
        return Line(1, 1)
    number = min(line.number, 2)
    return Line(number, number + min(line.last - line.number, 3 - number))


_NONE = np.zeros(0, dtype=np.int32)


class TokenEnds(NamedTuple):
    """Tokens that a walk has found.

    tokens: [k], token ids.
    places: [k], number of the place after each token.
    lines: [k], bytes of each token before its first line feed.
    words: [k], words of a list's title that each token uses up before its first line feed.
    """

    tokens: Ints
    places: Ints
    lines: Ints
    words: Ints


def _tokens_at(level: TrieLevel, nodes: Ints, at: Ints, words: Ints) -> TokenEnds:
    """Return the tokens that end at `nodes` of a level.

    at: the place after each of the nodes.
    words: the words that the beginning of each node uses up.
    """
    first = level.ends[nodes]
    counts = level.ends[nodes + 1] - first
    found = _ranges(first, counts)
    return TokenEnds(level.tokens[found], np.repeat(at, counts), level.lines[found], np.repeat(words, counts))


def _columns(rows: list[TokenEnds]) -> list[list[Ints]]:
    """Return the arrays of each field: [4][rows]."""
    return [[row[column] for row in rows] for column in range(4)]


def _ranges(first: Ints, counts: Ints) -> Ints:
    """Return the concatenation of the ranges that begin at `first` and have `counts` entries.

    With first [3, 9] and counts [2, 3], the result is [3, 4, 9, 10, 11].
    """
    stops = np.cumsum(counts, dtype=np.int32)
    return np.arange(stops[-1], dtype=np.int32) + np.repeat(first - (stops - counts), counts)


def _largest(costs: NDArray[np.int16]) -> int:
    """Return the largest cost of a token that can follow."""
    return int(costs[costs < UNREACHABLE_TOKENS].max(initial=0))


def _steps(needs: list[NDArray[np.uint8]], most: int) -> tuple[int, ...]:
    """Return for each number that may be left, 0 .. `most`, the largest need that it covers, or 0."""
    distinct = np.unique(np.concatenate([*needs, np.zeros(1, dtype=np.uint8)]))
    lefts = np.arange(most + 1)
    return tuple(distinct[np.searchsorted(distinct, lefts, side="right") - 1].tolist())
