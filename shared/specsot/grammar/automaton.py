"""Which tokens may follow, so that what is written is a valid skeleton within its budget.

A token may follow when its bytes stay within the grammar and what then remains to the end, written the
shortest way we know (along `grammar.onward`, in as few tokens as it takes), fits the budget behind it. The
ending's own first token always passes that test, so some token is allowed everywhere but at the end.
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

_MASK_BYTES = 32 << 20  # bytes of distinct masks; when there are more, all are dropped; not measured
_MASK_KEYS = 1 << 16  # states that share them; when there are more, all are dropped; not measured

Key = tuple[int, int, int, int]  # place, title bytes left, budget of free text, budget of plans


class State(NamedTuple):
    """The state of a text, as the automaton that made it understands it.

    place:   a place of the grammar, by number.
    left:    bytes left for the title, 0 elsewhere.
    written: tokens written so far.
    """

    place: int
    left: int
    written: int


class TokenAutomaton:
    """The skeleton language over the tokens of one vocabulary. Safe to share between threads.

    ends: tokens that end a list, beside its own end. Raises ModelError when the vocabulary cannot write the
    language at all.
    """

    def __init__(self, vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...] = ()) -> None:
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
        self._lock = threading.Lock()  # held by whoever makes table, reaches or masks grow
        self._done = frozenset({self._table.number(Done(plan=True)), self._table.number(Done(plan=False))})
        begin, self._room = uncount(language.begin(rules))
        self._first = self._table.number(begin)
        self._nothing = _freeze(np.zeros(len(vocabulary), dtype=np.bool_))
        self._minimum = self._survey.ending(self._first)
        if self._minimum >= UNREACHABLE_TOKENS:
            raise ModelError("the tokenizer has no tokens for the skeleton language")

    def start(self) -> State:
        return State(self._first, self._room, 0)

    def minimum(self) -> int:
        """Tokens of the shortest output: the least budget that can be kept."""
        return self._minimum

    def finished(self, state: State) -> bool:
        return state.place in self._done

    def advance(self, state: State, token: int) -> State | None:
        """The state behind `token`, or None when the grammar forbids it. Budgets are not looked at."""
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
        return step_by_step(self.advance, state)

    def mask(self, state: State, remaining: int) -> Mask:
        """[V] which tokens may follow; read-only and shared. All False when finished.

        remaining: tokens the sequence may still write, this one included. When it is less than the
        shortest way to the end, only shortest ways are left open.
        """
        if state.place in self._done:
            return self._nothing
        reach = self._reaches.get(state.place) or self._explore(state.place)
        key = self._key(reach, state, remaining)
        found = self._masks.get(key)
        return self._draw(reach, key) if found is None else found

    def allows(self, state: State, token: int, remaining: int) -> bool:
        return bool(self.mask(state, remaining)[token])

    def forced(self, state: State) -> tuple[int, ...]:
        """Tokens for the bytes about which the grammar leaves no choice from here; () when it does.

        Greedy longest match. Each is accepted by `advance`, though budgets may ask for other tokens.
        """
        key = (state.place, state.left)
        found = self._stretches.get(key)
        if found is None:
            place = recount(self._table.place(state.place), state.left)
            found = self._stretches[key] = self._spelling.split(language.forced(self.rules, place))
        return found

    def _settle(self, number: int, left: int, written: int) -> State:
        """A title that was entered within the token hands its count over to the state."""
        if self._table.open[number]:
            return State(number, left, written)
        place = self._table.place(number)
        alike, left = uncount(place)
        if alike is not place:
            with self._lock:
                number = self._table.number(alike)
        return State(number, left, written)

    def _explore(self, place: int) -> TokenReach:
        with self._lock:
            if place not in self._reaches:
                self._reaches[place] = self._survey.explore(place)
            return self._reaches[place]

    def _key(self, reach: TokenReach, state: State, remaining: int) -> Key:
        """What a mask depends on, each part as small as it can be without a change in the mask."""
        least = reach.least
        roomy = reach.roomy
        planned = min(remaining, self.rules.plan_tokens - state.written)
        planned = max(planned, least if reach.planned else 0)
        room = 0 if reach.planned else min(max(remaining, least), roomy)
        return state.place, reach.steps[state.left], room, min(planned, roomy)

    def _draw(self, reach: TokenReach, key: Key) -> Mask:
        """A new mask, or one that was drawn before and is the same."""
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
    """The automaton of these, shared by everybody in the process. Raises ModelError."""
    return TokenAutomaton(vocabulary, rules, ends)


def _freeze(mask: Mask) -> Mask:
    mask.flags.writeable = False
    return mask


DEAD = 0  # the number of no place; every byte leads from there to itself


class ByteTable:
    """A byte-level automaton that grows. Not thread-safe: the owner holds a lock while it grows.

    next: [places or more, 256] the place behind each byte; DEAD rows are right, others only when filled.
    """

    def __init__(self, rules: PlanRules) -> None:
        self.rules = rules
        self.next: NDArray[np.int32] = np.zeros((64, 256), dtype=np.int32)
        self.places: list[Place | None] = [None]
        self.owed: list[int] = [0]  # grammar.owed of each place
        self.open: list[bool] = [False]  # titles without a count of their own
        self.filled: list[bool] = [True]
        self._numbers: dict[Place, int] = {}

    def number(self, place: Place) -> int:
        found = self._numbers.get(place)
        return self._add(place) if found is None else found

    def place(self, number: int) -> Place:
        found = self.places[number]
        assert found is not None
        return found

    def fill(self, number: int) -> None:
        if self.filled[number]:
            return
        leads = [(low, high, self.number(to) if to else DEAD) for low, high, to in self._edges(number)]
        row = self.next[number]  # numbering may have moved the table, so only now
        for low, high, to in reversed(leads):  # the first edge has precedence
            row[low : high + 1] = to
        self.filled[number] = True

    def fill_all(self, numbers: NDArray[np.int32]) -> None:
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
    """A title without its count, and the count; any other place with 0."""
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
    """The nodes of one depth, a node being one distinct beginning of tokens, in byte order.

    byte:     the last byte of the beginning.                                         [nodes]
    children: node i's children are the nodes children[i] .. children[i + 1] - 1 of the next level.
    tokens:   ids of the tokens that are whole at this depth.                         [ends]
    ends:     the node of each of them.                                               [ends]
    lines:    bytes of each of them before its first line feed (all of them without one). [ends]
    """

    byte: NDArray[np.uint8]
    children: Ints
    tokens: Ints
    ends: Ints
    lines: Ints


Trie = tuple[TrieLevel, ...]


@functools.lru_cache(maxsize=4)
def build_tries(vocabulary: Vocabulary) -> tuple[Trie, Trie]:
    """Two tries: of the tokens without a line feed, and of those with one. They are walked apart
    because the former can be walked once for the titles of all lines."""
    texts = sorted((text, token) for token, text in enumerate(vocabulary.bytes) if text)
    within = [entry for entry in texts if b"\n" not in entry[0]]
    across = [entry for entry in texts if b"\n" in entry[0]]
    return _build(within), _build(across)


def _build(texts: list[tuple[bytes, int]]) -> Trie:
    """The trie of sorted (text, token) pairs."""
    sizes = np.array([len(text) for text, _ in texts], dtype=np.int32)
    tokens = np.array([token for _, token in texts], dtype=np.int32)
    lines = np.array([len(text.partition(b"\n")[0]) for text, _ in texts], dtype=np.int32)
    matrix = _pad([text for text, _ in texts], int(sizes.max(initial=0)))
    shared = _shared_beginnings(matrix, sizes)
    levels: list[TrieLevel] = []
    rows = np.flatnonzero(sizes > 0)
    for depth in range(matrix.shape[1]):
        fresh = shared[rows] <= depth
        node = np.cumsum(fresh, dtype=np.int32) - 1  # of each row
        longer = sizes[rows] > depth + 1
        below = rows[longer]
        parents = node[longer][shared[below] <= depth + 1]  # of the nodes of the next level
        children = np.searchsorted(parents, np.arange(int(fresh.sum()) + 1)).astype(np.int32)
        whole = rows[~longer]
        byte = matrix[rows[fresh], depth]
        levels.append(TrieLevel(byte, children, tokens[whole], node[~longer], lines[whole]))
        rows = below
    return tuple(levels)


def _pad(texts: list[bytes], width: int) -> NDArray[np.uint8]:
    """[texts, width], zeros behind each text."""
    padded = b"".join(text.ljust(width, b"\0") for text in texts)
    return np.frombuffer(padded, dtype=np.uint8).reshape(len(texts), width)


def _shared_beginnings(matrix: NDArray[np.uint8], sizes: Ints) -> Ints:
    """Of each row of the sorted matrix, how many first bytes it shares with the row before."""
    shared = np.zeros(len(sizes), dtype=np.int32)
    if len(sizes) > 1:
        differs = matrix[1:] != matrix[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), matrix.shape[1])
        shared[1:] = np.minimum(first, np.minimum(sizes[1:], sizes[:-1]))
    return shared


Mask = NDArray[np.bool_]

UNREACHABLE_TOKENS = 1 << 14  # tokens of an ending that this vocabulary cannot write; beyond any budget


@dataclass(frozen=True, slots=True)
class ReachPart:
    """Tokens that can follow a place.

    tokens:  their ids.                                                      [k]
    costs:   tokens from behind each to the end, the shortest way.           [k]
    needs:   bytes that the title at this place must have left for each.     [k]
    planned: whether the output is a plan for sure behind each.              [k]
    """

    tokens: Ints
    costs: NDArray[np.int16]
    needs: NDArray[np.int16]
    planned: Mask


@dataclass(frozen=True, slots=True)
class TokenReach:
    """All tokens that can follow one place.

    planned: whether the output is a plan for sure, already here.
    least:   tokens from here to the end, the shortest way.
    roomy:   the least budget that bars no token.
    steps:   for each number of bytes left, the least number that allows the same tokens.
    """

    parts: tuple[ReachPart, ReachPart]
    planned: bool
    least: int
    roomy: int
    steps: tuple[int, ...]

    def fitting(self, left: int, room: int, room_planned: int) -> list[Ints]:
        """Tokens for a title of `left` bytes and budgets of free texts and of plans, in tokens."""
        found: list[Ints] = []
        for part in self.parts:
            rooms = np.where(part.planned, np.int16(room_planned), np.int16(room))
            found.append(part.tokens[(part.costs < rooms) & (part.needs <= left)])
        return found


class Survey:
    """Explores places over a byte table. Not thread-safe: the owner holds a lock."""

    def __init__(self, vocabulary: Vocabulary, table: ByteTable, spelling: Spelling) -> None:
        self._within, self._across = build_tries(vocabulary)
        self._table = table
        self._spelling = spelling
        self._endings: dict[int, int] = {}
        self._ways: dict[Place, bytes] = {}
        self._titles: dict[Place, ReachPart] = {}

    def explore(self, number: int) -> TokenReach:
        """One walk over all tokens."""
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
        """Tokens of the shortest way to the end, ENDLESS when the vocabulary cannot write it."""
        if number not in self._endings:
            self._endings[number] = self._spelling.count(
                self._way(self._table.place(number)), UNREACHABLE_TOKENS
            )
        return self._endings[number]

    def _way(self, place: Place) -> bytes:
        """The bytes of the way along first edges to the end."""
        if isinstance(place, language.Done):
            return b""
        if place not in self._ways:
            byte, to = language.onward(self._table.rules, place)
            self._ways[place] = bytes([byte]) + self._way(to)
        return self._ways[place]

    def _inner(self, place: Place) -> ReachPart:
        """Tokens without a line feed; within a title they don't know which line it is."""
        if isinstance(place, Title):
            alike = replace(place, line=1)
        elif isinstance(place, ListTitle) and 1 < place.line < self._table.rules.max_points:
            alike = replace(
                place, line=2
            )  # from the first the way to the end is longer, from the last shorter
        elif isinstance(place, ListTitle):
            alike = place
        else:
            return self._walk(self._within, self._table.number(place))
        if alike not in self._titles:
            self._titles[alike] = self._walk(self._within, self._table.number(alike))
        return self._titles[alike]

    def _walk(self, trie: Trie, number: int) -> ReachPart:
        """All tokens of `trie` from one place at once, level by level, leaving what has died."""
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
        """What the tokens that end at the places `ends` cost; those that lead to no end are left out."""
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
    """Tokens that are whole at the live `nodes`, the places `at` where they end, bytes to a line feed."""
    place_of = np.full(len(level.byte), DEAD, dtype=np.int32)
    place_of[nodes] = at
    ends = place_of[level.ends]
    alive = ends != DEAD
    return level.tokens[alive], ends[alive], level.lines[alive]


def _columns(rows: list[tuple[Ints, Ints, Ints]]) -> tuple[list[Ints], list[Ints], list[Ints]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _ranges(first: Ints, counts: Ints) -> Ints:
    """first[0], first[0] + 1, ... (counts[0] of them), first[1], ... in one array."""
    stops = np.cumsum(counts, dtype=np.int32)
    return np.arange(stops[-1], dtype=np.int32) + np.repeat(first - (stops - counts), counts)


def _steps(needs: NDArray[np.int16]) -> tuple[int, ...]:
    """For each number of bytes left, the largest need it covers (0 when it covers none)."""
    distinct = np.unique(np.append(needs, 0))
    lefts = np.arange(MAX_TITLE_BYTES + 1)
    return tuple(distinct[np.searchsorted(distinct, lefts, side="right") - 1].tolist())
