"""Tokens for bytes that are known already: in general, and for what a grammar forces in one base's habit."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from specsot.core.vocabulary import Vocabulary


@functools.lru_cache(maxsize=4)
def spelling_of(vocabulary: Vocabulary) -> Spelling:
    """The one of this vocabulary, shared by all grammars."""
    return Spelling(vocabulary)


class Spelling:
    """The tokens of a vocabulary by what they write; of several that write the same, the lowest id."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(vocabulary.bytes):
            if text:
                self._ids.setdefault(text, token)
        self._longest = max(map(len, self._ids), default=0)

    def count(self, text: bytes, ceiling: int) -> int:
        """The least number of tokens that write `text`; `ceiling` when it is more, or none do."""
        return self.counts(text, ceiling)[0]

    def counts(self, text: bytes, ceiling: int) -> list[int]:
        """The same for what is left of `text` behind 0, 1, ... of its bytes."""
        counts = [0] * (len(text) + 1)
        for begin in range(len(text) - 1, -1, -1):
            tails = (counts[stop] for stop in self._stops(text, begin) if text[begin:stop] in self._ids)
            counts[begin] = min(1 + min(tails, default=ceiling), ceiling)
        return counts

    def split(self, text: bytes) -> tuple[int, ...]:
        """Greedy longest match, as far as the vocabulary goes."""
        tokens: list[int] = []
        begin = 0
        while begin < len(text):
            stops = reversed(self._stops(text, begin))
            stop = next((stop for stop in stops if text[begin:stop] in self._ids), None)
            if stop is None:
                break
            tokens.append(self._ids[text[begin:stop]])
            begin = stop
        return tuple(tokens)

    def _stops(self, text: bytes, begin: int) -> range:
        return range(begin + 1, min(begin + self._longest, len(text)) + 1)


LONGEST_STRETCH = 16  # tokens
MAX_STRETCHES = 4096  # stretches; strangers' forms bring ever new ones


class Forcing(Protocol):
    """What is asked of an automaton over tokens; states are opaque."""

    def advance(self, state: Any, token: int, /) -> Any: ...
    def finished(self, state: Any, /) -> bool: ...
    def forced(self, state: Any, /) -> Sequence[int]: ...


class SpellingHabits:
    """With which token one base begins each forced stretch. Shared by all its texts; those that were noted
    longest ago are forgotten.
    """

    def __init__(self) -> None:
        self._firsts: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        """Stretches that are known."""
        return len(self._firsts)

    def note(self, rules: Forcing, state: Any, token: int) -> None:
        """The base wrote `token` in this state."""
        if stretch := _stretch(rules, state):
            self._firsts[stretch] = token
            self._firsts.move_to_end(stretch)
            if len(self._firsts) > MAX_STRETCHES:
                self._firsts.popitem(last=False)

    def forced(self, rules: Forcing, state: Any, most: int = LONGEST_STRETCH) -> tuple[int, ...]:
        """What must follow this state, as far as there is no choice; at most `most` tokens."""
        chain: list[int] = []
        while len(chain) < most and (stretch := _stretch(rules, state)):
            chain.append(self._firsts.get(stretch, stretch[0]))
            state = rules.advance(state, chain[-1])
        return tuple(chain)


def _stretch(rules: Forcing, state: Any) -> tuple[int, ...]:
    return () if state is None or rules.finished(state) else tuple(rules.forced(state))
