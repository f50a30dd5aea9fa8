"""Computes which tokens may follow, so that the output is a valid skeleton within its token budget.

A token may follow if its bytes stay within the grammar, and if the output can then be ended within the
budget. The shortest known ending follows the first edges of the grammar (`language.onward`) and is spelled in
as few tokens as possible. The first token of this ending always passes the test, so some token is allowed
everywhere except at the end.

How a mask is computed. All tokens are sorted into tries by their bytes. From one place of the byte automaton,
the tries are walked level by level with NumPy, so that every token's place is known at once. What a token
costs and needs depends only on the place after it, and is stored once per place (`TokenReach`). A mask then
compares these numbers with the budgets (`TokenReach.fitting`), and masks are cached.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsot.core.skeleton import MAX_TITLE_BYTES, PlanRules
from specsot.core.vocabulary import Spelling, Vocabulary, spelling_of
from specsot.errors import ModelError
from specsot.grammar import language
from specsot.grammar.language import Done, ListTitle, Place, Title
from specsot.grammar.paths import PathCheck, step_by_step

# Bytes. Bounds the cache of distinct masks; when it is full, all masks are dropped. Untuned.
_MASK_BYTES = 32 << 20
# Entries. Bounds the states that share the cached masks; when there are more, all are dropped. Untuned.
_MASK_KEYS = 1 << 16

# What a mask depends on: place, bytes left for the title, budget of free text, budget of a plan.
Key = tuple[int, int, int, int]


class State(NamedTuple):
    """The state of one output. Only the automaton that created it can use it.

    place: number of the place in the automaton's `ByteTable`.
    left: number of bytes that the title may still have; 0 outside titles.
    written: number of tokens so far.
    """

    place: int
    left: int
    written: int


class TokenAutomaton:
    """The skeleton language over the tokens of one vocabulary. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...] = ()) -> None:
        """ends: tokens that may end a numbered list, in addition to its own end.

        Raises ModelError if the vocabulary cannot spell the language.
        """
        self.rules = rules
        self._ends = np.array([end for end in ends if end < len(vocabulary)], dtype=np.int64)
        self.vocabulary = vocabulary
        self._table = ByteTable(rules)
        self._spelling = spelling_of(vocabulary)
        self._survey = Survey(vocabulary, self._table, self._spelling)
        self._reaches: dict[int, TokenReach] = {}
        self._masks: dict[Key, Mask] = {}
        self._distinct: dict[bytes, Mask] = {}
        self._stretches: dict[tuple[int, int], tuple[int, ...]] = {}
        # Held while `_table`, `_reaches` or the masks grow.
        self._lock = threading.Lock()
        self._done = frozenset({self._table.number(Done(plan=True)), self._table.number(Done(plan=False))})
        begin, self._room = uncount(language.begin(rules))
        self._first = self._table.number(begin)
        self._nothing = _freeze(np.zeros(len(vocabulary), dtype=np.bool_))
        self._minimum = self._survey.ending(self._first)
        if self._minimum >= UNREACHABLE_TOKENS:
            raise ModelError("the tokenizer has no tokens for the skeleton language")

    def start(self) -> State:
        """Return the state before the first token."""
        return State(self._first, self._room, 0)

    def minimum(self) -> int:
        """Return the number of tokens of the shortest output, which is the smallest possible budget."""
        return self._minimum

    def finished(self, state: State) -> bool:
        """Return whether the output is complete, so that no token may follow."""
        return state.place in self._done

    def advance(self, state: State, token: int) -> State | None:
        """Return the state after `token`, or None if the grammar forbids the token. Ignores budgets."""
        text = self.vocabulary.bytes[token] if 0 <= token < len(self.vocabulary) else None
        if not text:
            return None
        table = self._table
        place = state.place
        left = state.left
        for byte in text:
            if not table.filled[place]:
                with self._lock:
                    table.fill(place)
            place = int(table.next[place, byte])
            if table.open[place]:
                left -= 1
                if left < table.owed[place]:
                    return None
            elif place == DEAD:
                return None
        return self._settle(place, left, state.written + 1)

    def path_check(self, state: State) -> PathCheck:
        """See `Grammar.path_check`."""
        return step_by_step(self.advance, state)

    def mask(self, state: State, remaining: int) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only and shared. All False at the end.

        remaining: number of tokens that the sequence may still generate, this one included. If the shortest
            ending needs more, only tokens of shortest endings are allowed.
        """
        if state.place in self._done:
            return self._nothing
        reach = self._reaches.get(state.place) or self._explore(state.place)
        key = self._key(reach, state, remaining)
        found = self._masks.get(key)
        return self._draw(reach, key) if found is None else found

    def allows(self, state: State, token: int, remaining: int) -> bool:
        """Return the entry of `mask` for one token."""
        return bool(self.mask(state, remaining)[token])

    def forced(self, state: State) -> tuple[int, ...]:
        """Return tokens for the bytes that the grammar determines from this state on; () if it leaves a
        choice.

        The bytes are tokenized by greedy longest match. `advance` accepts each token, but a mask may forbid
        it because of the budget.
        """
        key = (state.place, state.left)
        found = self._stretches.get(key)
        if found is None:
            place = recount(self._table.place(state.place), state.left)
            found = self._stretches[key] = self._spelling.split(language.forced(self.rules, place))
        return found

    def _settle(self, number: int, left: int, written: int) -> State:
        """Return the state at a place. If a token entered a title, the title's count moves to the state.

        The byte table has titles without a count, so that titles of different lengths share their places.
        """
        if self._table.open[number]:
            return State(number, left, written)
        place = self._table.place(number)
        alike, left = uncount(place)
        if alike is not place:
            with self._lock:
                number = self._table.number(alike)
        return State(number, left, written)

    def _explore(self, place: int) -> TokenReach:
        """Return the tokens that can follow a place, computed at the first call."""
        with self._lock:
            if place not in self._reaches:
                self._reaches[place] = self._survey.explore(place)
            return self._reaches[place]

    def _key(self, reach: TokenReach, state: State, remaining: int) -> Key:
        """Return the key of a mask, with each part reduced as far as the mask does not change.

        Larger budgets than `roomy` forbid no token, and numbers of bytes left are rounded down to the next
        need of any token, so that many states share one mask.
        """
        least = reach.least
        roomy = reach.roomy
        planned = min(remaining, self.rules.plan_tokens - state.written)
        planned = max(planned, least if reach.planned else 0)
        room = 0 if reach.planned else min(max(remaining, least), roomy)
        return state.place, reach.steps[state.left], room, min(planned, roomy)

    def _draw(self, reach: TokenReach, key: Key) -> Mask:
        """Compute the mask of a key. If an equal mask exists already, that one is returned and shared."""
        mask = np.zeros(len(self.vocabulary), dtype=np.bool_)
        for tokens in reach.fitting(*key[1:]):
            mask[tokens] = True
        if language.may_stop(self._table.place(key[0])):
            mask[self._ends] = True
        with self._lock:
            full = (len(self._distinct) + 1) * mask.size > _MASK_BYTES or len(self._masks) >= _MASK_KEYS
            if full:
                self._masks.clear()
                self._distinct.clear()
            shared = self._distinct.setdefault(np.packbits(mask).tobytes(), _freeze(mask))
            return self._masks.setdefault(key, shared)


@functools.lru_cache(maxsize=8)
def automaton(vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...] = ()) -> TokenAutomaton:
    """Return the automaton of these arguments, which the whole process shares. Raises ModelError."""
    return TokenAutomaton(vocabulary, rules, ends)


def _freeze(mask: Mask) -> Mask:
    mask.flags.writeable = False
    return mask


# The number of the dead place, which no valid output reaches. Every byte leads from it to itself.
DEAD = 0


class ByteTable:
    """The byte automaton of a grammar as a table that grows. Not thread-safe: its owner holds a lock.

    next: [places or more, 256], the number of the place after each byte. A row is valid once `filled` is
        True.
    places: the place of each number; None for DEAD.
    owed: by number, how many bytes a title still needs before it may end, see `language.owed`.
    open: by number, True for titles without a count of their bytes.
    filled: by number, whether the row of `next` is valid.
    """

    def __init__(self, rules: PlanRules) -> None:
        self.rules = rules
        self.next: NDArray[np.int32] = np.zeros((64, 256), dtype=np.int32)
        self.places: list[Place | None] = [None]
        self.owed: list[int] = [0]
        self.open: list[bool] = [False]
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
        self.places.append(place)
        self.owed.append(language.owed(place))
        self.open.append(isinstance(place, Title | ListTitle) and place.left is None)
        self.filled.append(False)
        self._numbers[place] = number
        return number


def uncount(place: Place) -> tuple[Place, int]:
    """Return a title without its count of bytes, and the count. Other places are returned with 0."""
    if isinstance(place, Title | ListTitle) and place.left is not None:
        return replace(place, left=None), place.left
    return place, 0


def recount(place: Place, left: int) -> Place:
    """The inverse of `uncount`."""
    if isinstance(place, Title | ListTitle) and place.left is None:
        return replace(place, left=left)
    return place


Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrieLevel:
    """The nodes of a trie at one depth, in byte order. A node is one distinct beginning of tokens.

    byte: [nodes], the last byte of each node's beginning.
    children: [nodes + 1]. The children of node i are the nodes children[i] .. children[i + 1] - 1 of the next
        level.
    tokens: [ends], ids of the tokens that end at this depth.
    ends: [ends], the node at which each of these tokens ends.
    lines: [ends], how many bytes each of these tokens has before its first line feed; all of its bytes if it
        has none.

    Worked example: the tokens 0 = "a", 1 = "ab", 2 = "ac" and 3 = "b".

        depth 0   byte [a b]   children [0 2 2]   tokens [0 3]   ends [0 1]
        depth 1   byte [b c]   children [0 0 0]   tokens [1 2]   ends [0 1]
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
        children = np.searchsorted(parents, np.arange(int(fresh.sum()) + 1)).astype(np.int32)
        whole = rows[~longer]
        byte = matrix[rows[fresh], depth]
        levels.append(TrieLevel(byte, children, tokens[whole], node[~longer], lines[whole]))
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


Mask = NDArray[np.bool_]

# Tokens. The cost of an ending that the vocabulary cannot spell, which exceeds every budget.
UNREACHABLE_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True)
class ReachPart:
    """Tokens that can follow a place, and what each of them requires.

    tokens: [k], token ids.
    costs: [k], number of tokens of the shortest ending after each token.
    needs: [k], how many bytes the title at this place must have left for each token.
    planned: [k], whether the output is certainly a plan after each token.
    """

    tokens: Ints
    costs: NDArray[np.int16]
    needs: NDArray[np.int16]
    planned: Mask


@dataclass(frozen=True, slots=True)
class TokenReach:
    """All tokens that can follow one place.

    parts: the tokens without a line feed, and the tokens with one.
    planned: True if the output is certainly a plan before the next token already.
    least: number of tokens of the shortest ending from this place.
    roomy: the smallest budget that forbids no token.
    steps: for each number of bytes left for a title, the smallest number that allows the same tokens. If
        tokens need 0, 2 or 5 bytes, steps is (0, 0, 2, 2, 2, 5, 5, ...).
    """

    parts: tuple[ReachPart, ReachPart]
    planned: bool
    least: int
    roomy: int
    steps: tuple[int, ...]

    def fitting(self, left: int, room: int, room_planned: int) -> list[Ints]:
        """Return the allowed tokens, as arrays of ids.

        left: number of bytes that the title may still have.
        room: token budget after which a direct answer must be complete.
        room_planned: token budget after which a plan must be complete.
        """
        found: list[Ints] = []
        for part in self.parts:
            rooms = np.where(part.planned, np.int16(room_planned), np.int16(room))
            found.append(part.tokens[(part.costs < rooms) & (part.needs <= left)])
        return found


class Survey:
    """Computes which tokens can follow a place of a byte table. Not thread-safe: its owner holds a lock."""

    def __init__(self, vocabulary: Vocabulary, table: ByteTable, spelling: Spelling) -> None:
        self._within, self._across = build_tries(vocabulary)
        self._table = table
        self._spelling = spelling
        self._endings: dict[int, int] = {}
        self._ways: dict[Place, bytes] = {}
        self._titles: dict[Place, ReachPart] = {}

    def explore(self, number: int) -> TokenReach:
        """Return all tokens that can follow a place, found in one walk over both tries."""
        place = self._table.place(number)
        parts = self._inner(place), self._walk(self._across, number)
        return TokenReach(
            parts=parts,
            planned=language.planned(place),
            least=self.ending(number),
            roomy=max(int(part.costs.max(initial=0)) for part in parts) + 1,
            steps=_steps(np.concatenate([part.needs for part in parts])),
        )

    def ending(self, number: int) -> int:
        """Return the number of tokens of the shortest ending from a place.

        Returns UNREACHABLE_TOKENS if the vocabulary cannot spell the ending.
        """
        if number not in self._endings:
            self._endings[number] = self._spelling.count(
                self._way(self._table.place(number)), UNREACHABLE_TOKENS
            )
        return self._endings[number]

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

        In a title, the number of the line makes no difference to them, so one walk serves all lines.
        """
        if isinstance(place, Title):
            alike = replace(place, line=1)
        elif isinstance(place, ListTitle) and 1 < place.line < self._table.rules.max_points:
            # The ending is longer from the first line of a list and shorter from the last, so these two lines
            # are walked separately.
            alike = replace(place, line=2)
        elif isinstance(place, ListTitle):
            alike = place
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
        found: list[tuple[Ints, Ints, Ints]] = []
        nodes = np.arange(len(trie[0].byte) if trie else 0, dtype=np.int32)
        at = np.full(len(nodes), number, dtype=np.int32)
        for level in trie:
            table.fill_all(at)
            at = table.next[at, level.byte[nodes]]
            alive = at != DEAD
            nodes = nodes[alive]
            at = at[alive]
            if not len(nodes):
                break
            found.append(_whole(level, nodes, at))
            first = level.children[nodes]
            counts = level.children[nodes + 1] - level.children[nodes]
            nodes = _ranges(first, counts)
            at = np.repeat(at, counts)
        return self._weigh(number, *(np.concatenate([_NONE, *column]) for column in _columns(found)))

    def _weigh(self, number: int, tokens: Ints, ends: Ints, lines: Ints) -> ReachPart:
        """Return tokens with their costs and needs. Tokens after which no ending exists are left out.

        tokens: [k], token ids.
        ends: [k], number of the place after each token.
        lines: [k], bytes of each token before its first line feed.
        """
        size = len(self._table.places)
        costs = np.full(size, UNREACHABLE_TOKENS, dtype=np.int16)
        planned = np.zeros(size, dtype=np.bool_)
        owed = np.zeros(size, dtype=np.int32)
        for end in np.flatnonzero(np.bincount(ends, minlength=1)).tolist():
            costs[end] = self.ending(end)
            planned[end] = language.planned(self._table.place(end))
            owed[end] = self._table.owed[end] if self._table.open[end] else 0
        possible = costs[ends] < UNREACHABLE_TOKENS
        tokens = tokens[possible]
        ends = ends[possible]
        lines = lines[possible]
        needs = lines + owed[ends] if self._table.open[number] else np.zeros_like(lines)
        return ReachPart(tokens, costs[ends], needs.astype(np.int16), planned[ends])


_NONE = np.zeros(0, dtype=np.int32)


def _whole(level: TrieLevel, nodes: Ints, at: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the tokens that end at `nodes` of a level, their places, and their bytes before a line feed.

    at: the place after each of the nodes.
    """
    place_of = np.full(len(level.byte), DEAD, dtype=np.int32)
    place_of[nodes] = at
    ends = place_of[level.ends]
    alive = ends != DEAD
    return level.tokens[alive], ends[alive], level.lines[alive]


def _columns(rows: list[tuple[Ints, Ints, Ints]]) -> tuple[list[Ints], list[Ints], list[Ints]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _ranges(first: Ints, counts: Ints) -> Ints:
    """Return the concatenation of the ranges that begin at `first` and have `counts` entries.

    With first [3, 9] and counts [2, 3], the result is [3, 4, 9, 10, 11].
    """
    stops = np.cumsum(counts, dtype=np.int32)
    return np.arange(stops[-1], dtype=np.int32) + np.repeat(first - (stops - counts), counts)


def _steps(needs: NDArray[np.int16]) -> tuple[int, ...]:
    """Return for each number of bytes left, 0 .. MAX_TITLE_BYTES, the largest need that it covers, or 0."""
    distinct = np.unique(np.append(needs, 0))
    lefts = np.arange(MAX_TITLE_BYTES + 1)
    return tuple(distinct[np.searchsorted(distinct, lefts, side="right") - 1].tolist())
