"""Which tokens may follow, so that what is written is a valid skeleton within its budget.

Refuses to know text, logits, sequences, and how tokens are chosen.

A token may follow when its bytes stay within the grammar and what then remains to the end, written the
shortest way we know (`grammar.ending`, in as few tokens as it takes), fits the budget behind it. The
ending's own first token always passes that test, so some token is allowed at every place but the last.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specsot.constraint import grammar
from specsot.constraint.grammar import Done
from specsot.constraint.table import DEAD, ByteTable, recount, uncount
from specsot.constraint.trie import build_trie
from specsot.errors import ModelError
from specsot.skeleton import MAX_TITLE_BYTES, PlanRules
from specsot.vocabulary import Vocabulary

Mask = NDArray[np.bool_]

_MASK_BYTES = 16 << 20  # of cached masks; when they are more, all are dropped
_ENDLESS = 1 << 14  # tokens of an ending that this vocabulary cannot write; no budget reaches it


class State(NamedTuple):
    """Where a text stands, as the automaton that made it understands it.

    place:   a place of the grammar, by number.
    left:    bytes left for the title, 0 elsewhere.
    written: tokens written so far.
    """

    place: int
    left: int
    written: int


@dataclass(frozen=True, slots=True)
class Reach:
    """The tokens that can follow one place, budgets aside.

    tokens:  their ids.                                                             [k]
    costs:   tokens from behind each to the end, the shortest way.                  [k]
    needs:   bytes the title at this place must have left for each.                 [k]
    planned: whether the output is a plan for sure behind each; True or False for all alike. [k] | bool
    least:   tokens from here to the end.
    roomy:   the least budget that bars none of them.
    steps:   for each number of bytes left, the least number with the same mask.
    """

    tokens: NDArray[np.int32]
    costs: NDArray[np.int16]
    needs: NDArray[np.int16]
    planned: Mask | bool
    least: int
    roomy: int
    steps: tuple[int, ...]


class TokenAutomaton:
    """The skeleton language over the tokens of one vocabulary. Safe to share between threads.

    Raises ModelError when the vocabulary cannot write the language at all.
    """

    def __init__(self, vocabulary: Vocabulary, rules: PlanRules) -> None:
        self.rules = rules
        self.vocabulary = vocabulary
        self._ids = _first_ids(vocabulary)
        self._longest = max(map(len, self._ids), default=0)
        self._table = ByteTable(rules)
        self._done = frozenset({self._table.number(Done(plan=True)), self._table.number(Done(plan=False))})
        self._endings: dict[int, int] = dict.fromkeys(self._done, 0)
        self._reaches: dict[int, Reach] = {}
        self._masks: dict[tuple[int, int, int, int], Mask] = {}
        self._stretches: dict[tuple[int, int], tuple[int, ...]] = {}
        self._lock = threading.RLock()
        self._first = self._table.number(grammar.begin(rules))
        self._nothing = _freeze(np.zeros(len(vocabulary), dtype=np.bool_))
        if self.minimum() >= _ENDLESS:
            raise ModelError("the tokenizer has no tokens for the skeleton language")

    def start(self) -> State:
        """Before the first token."""
        return State(self._first, 0, 0)

    def minimum(self) -> int:
        """Tokens of the shortest output: the least budget that can be kept."""
        return self._ending(self._first)

    def finished(self, state: State) -> bool:
        """Whether the output is complete. Nothing may follow."""
        return state.place in self._done

    def advance(self, state: State, token: int) -> State | None:
        """The state behind `token`, or None when the grammar forbids it. Budgets are not looked at."""
        text = self.vocabulary.bytes[token] if 0 <= token < len(self.vocabulary) else None
        if not text:
            return None
        table, place, left = self._table, state.place, state.left
        for byte in text:
            if not table.filled(place):
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

    def forced(self, state: State) -> tuple[int, ...]:
        """Tokens for the bytes that the grammar leaves no choice about from here; () when it does.

        Greedy longest match. Each is accepted by `advance`, though budgets may ask for other tokens.
        """
        key = (state.place, state.left)
        found = self._stretches.get(key)
        if found is None:
            found = self._stretches[key] = self._tokenize(self._forced_bytes(*key))
        return found

    # ── building ────────────────────────────────────────────────────────────────────────────────

    def _settle(self, number: int, left: int, written: int) -> State:
        """A title that was entered within the token hands its count over to the state."""
        if self._table.open[number]:
            return State(number, left, written)
        place, left = uncount(self._table.place(number))
        if left:
            with self._lock:
                number = self._table.number(place)
        return State(number, left, written)

    def _key(self, reach: Reach, state: State, remaining: int) -> tuple[int, int, int, int]:
        """What a mask depends on: place, bytes left, budget of free text, budget of plans."""
        planned = min(remaining, self.rules.plan_tokens - state.written)
        if reach.planned is True:
            planned = max(planned, reach.least)
        room = min(max(remaining, reach.least), reach.roomy)
        return state.place, reach.steps[state.left], room, max(min(planned, reach.roomy), 0)

    def _draw(self, reach: Reach, key: tuple[int, int, int, int]) -> Mask:
        _, left, room, planned = key
        rooms = np.where(reach.planned, planned, room)
        fits = (reach.costs < rooms) & (reach.needs <= left)
        mask = np.zeros(len(self.vocabulary), dtype=np.bool_)
        mask[reach.tokens[fits]] = True
        with self._lock:
            if (len(self._masks) + 1) * mask.size > _MASK_BYTES:
                self._masks.clear()
            return self._masks.setdefault(key, _freeze(mask))

    def _explore(self, place: int) -> Reach:
        with self._lock:
            if place not in self._reaches:
                self._reaches[place] = self._gather(place)
            return self._reaches[place]

    def _gather(self, place: int) -> Reach:
        tokens, ends, spent = self._walk(place)
        found = np.flatnonzero(np.bincount(ends, minlength=1))
        cost_of = np.full(len(self._table.places), _ENDLESS, dtype=np.int16)
        plan_of = np.zeros(len(self._table.places), dtype=np.bool_)
        for number in found.tolist():
            cost_of[number] = self._ending(number)
            plan_of[number] = grammar.planned(self._table.place(number))
        possible = cost_of[ends] < _ENDLESS
        tokens, ends, spent = tokens[possible], ends[possible], spent[possible]
        needs = spent + np.where(_flags(self._table.open)[ends], np.array(self._table.owed)[ends], 0)
        return Reach(
            tokens=tokens,
            costs=cost_of[ends],
            needs=needs.astype(np.int16),
            planned=grammar.planned(self._table.place(place)) or _alike(plan_of[ends]),
            least=self._ending(place),
            roomy=int(cost_of[ends].max(initial=0)) + 1,
            steps=_steps(needs),
        )

    def _walk(self, place: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """All tokens from `place` at once: those that live, where they end, title bytes they take."""
        table = self._table
        at, spent = np.array([place], dtype=np.int32), np.zeros(1, dtype=np.int32)
        found: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = []
        for depth, level in enumerate(build_trie(self.vocabulary)):
            for number in np.flatnonzero(np.bincount(at)).tolist():
                table.fill(number)
            at = table.next[at[level.parent], level.byte]
            if not at.any():
                break
            spent = np.where(_flags(table.open)[at], np.int32(depth + 1), spent[level.parent])
            ends = at[level.ends]
            alive = ends != DEAD
            found.append((level.tokens[alive], ends[alive], spent[level.ends[alive]]))
        empty = np.zeros(0, dtype=np.int32)
        tokens, ends, taken = (
            np.concatenate([empty, *part]) for part in (zip(*found) if found else ((),) * 3)
        )
        return tokens, ends, taken

    def _ending(self, number: int) -> int:
        """Tokens of the shortest way to the end, `_ENDLESS` when the vocabulary cannot write it."""
        known = self._endings.get(number)
        if known is not None:
            return known
        with self._lock:
            way = grammar.ending(self.rules, self._table.place(number))
            text = bytes(byte for byte, _ in way)
            costs = [0] * (len(text) + 1)
            for begin in range(len(text) - 1, -1, -1):
                stops = range(begin + 1, min(begin + self._longest, len(text)) + 1)
                tails = (costs[stop] for stop in stops if text[begin:stop] in self._ids)
                costs[begin] = min(1 + min(tails, default=_ENDLESS), _ENDLESS)
            return self._endings.setdefault(number, costs[0])

    def _forced_bytes(self, number: int, left: int) -> bytes:
        place = recount(self._table.place(number), left)
        stretch = bytearray()
        while (following := grammar.only(self.rules, place)) is not None:
            byte, place = following
            stretch.append(byte)
        return bytes(stretch)

    def _tokenize(self, text: bytes) -> tuple[int, ...]:
        """Greedy longest match, as far as the vocabulary goes."""
        tokens: list[int] = []
        begin = 0
        while begin < len(text):
            stops = range(min(begin + self._longest, len(text)), begin, -1)
            stop = next((stop for stop in stops if text[begin:stop] in self._ids), None)
            if stop is None:
                break
            tokens.append(self._ids[text[begin:stop]])
            begin = stop
        return tuple(tokens)


@functools.lru_cache(maxsize=8)
def automaton(vocabulary: Vocabulary, rules: PlanRules) -> TokenAutomaton:
    """The automaton of these two, shared by everybody in the process. Raises ModelError."""
    return TokenAutomaton(vocabulary, rules)


def _first_ids(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Of each text the lowest token id that writes it."""
    ids: dict[bytes, int] = {}
    for token, text in enumerate(vocabulary.bytes):
        if text:
            ids.setdefault(text, token)
    return ids


def _freeze(mask: Mask) -> Mask:
    mask.flags.writeable = False
    return mask


def _flags(values: list[bool]) -> Mask:
    return np.array(values, dtype=np.bool_)


def _alike(values: Mask) -> Mask | bool:
    """One bool for all where all are the same."""
    return bool(values[0]) if values.size and (values == values[0]).all() else values


def _steps(needs: NDArray[np.int32]) -> tuple[int, ...]:
    """For each number of bytes left, the largest need it covers (0 when it covers none)."""
    lefts = np.arange(MAX_TITLE_BYTES + 1)
    distinct = np.unique(np.append(needs, 0))
    return tuple(distinct[np.searchsorted(distinct, lefts, side="right") - 1].tolist())
