"""Tokenizes bytes that a grammar forces."""

from __future__ import annotations

import functools

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
