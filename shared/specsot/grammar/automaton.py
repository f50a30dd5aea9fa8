"""Which tokens may follow, so that what is written is a valid skeleton within its budget.

A token may follow when its bytes stay within the grammar and what then remains to the end, written the
shortest way we know (along `grammar.onward`, in as few tokens as it takes), fits the budget behind it. The
ending's own first token always passes that test, so some token is allowed everywhere but at the end.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import numpy as np

from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Vocabulary
from specsot.errors import ModelError
from specsot.grammar import language
from specsot.grammar.language import Done
from specsot.grammar.spelling import spelling_of
from specsot.grammar.token_masks import (
    DEAD,
    UNREACHABLE_TOKENS,
    ByteTable,
    Mask,
    Survey,
    TokenReach,
    recount,
    uncount,
)

_MASK_BYTES = 32 << 20  # of distinct masks; when there are more, all are dropped
_MASK_KEYS = 1 << 16  # of situations that share them; likewise

Key = tuple[int, int, int, int]  # place, title bytes left, budget of free text, budget of plans


class State(NamedTuple):
    """Where a text stands, as the automaton that made it understands it.

    place:   a place of the grammar, by number.
    left:    bytes left for the title, 0 elsewhere.
    written: tokens written so far.
    """

    place: int
    left: int
    written: int


class TokenAutomaton:
    """The skeleton language over the tokens of one vocabulary. Safe to share between threads.

    Raises ModelError when the vocabulary cannot write the language at all.
    """

    def __init__(self, vocabulary: Vocabulary, rules: PlanRules) -> None:
        self.rules = rules
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
        self._first = self._table.number(language.begin(rules))
        self._nothing = _freeze(np.zeros(len(vocabulary), dtype=np.bool_))
        self._minimum = self._survey.ending(self._first)
        if self._minimum >= UNREACHABLE_TOKENS:
            raise ModelError("the tokenizer has no tokens for the skeleton language")

    def start(self) -> State:
        """Before the first token."""
        return State(self._first, 0, 0)

    def minimum(self) -> int:
        """Tokens of the shortest output: the least budget that can be kept."""
        return self._minimum

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
        least, roomy = reach.least, reach.roomy
        planned = min(remaining, self.rules.plan_tokens - state.written)
        planned = max(planned, least if reach.planned else 0)
        room = 0 if reach.planned else min(max(remaining, least), roomy)
        return state.place, reach.steps[state.left], room, min(planned, roomy)

    def _draw(self, reach: TokenReach, key: Key) -> Mask:
        """A new mask, or one that was drawn before and is the same."""
        mask = np.zeros(len(self.vocabulary), dtype=np.bool_)
        for tokens in reach.fitting(*key[1:]):
            mask[tokens] = True
        with self._lock:
            full = (len(self._distinct) + 1) * mask.size > _MASK_BYTES or len(self._masks) >= _MASK_KEYS
            if full:
                self._masks.clear()
                self._distinct.clear()
            shared = self._distinct.setdefault(np.packbits(mask).tobytes(), _freeze(mask))
            return self._masks.setdefault(key, shared)


@functools.lru_cache(maxsize=8)
def automaton(vocabulary: Vocabulary, rules: PlanRules) -> TokenAutomaton:
    """The automaton of these two, shared by everybody in the process. Raises ModelError."""
    return TokenAutomaton(vocabulary, rules)


def _freeze(mask: Mask) -> Mask:
    mask.flags.writeable = False
    return mask
