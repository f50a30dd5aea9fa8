"""Keeps an answer that is one of several texts within its budget.

Refuses to know which tokens are allowed, and the library.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specsot.constraint.spelling import Spelling
from specsot.vocabulary import Vocabulary

Mask = NDArray[np.bool_]


@functools.lru_cache(maxsize=4)
def _spelling_of(vocabulary: Vocabulary) -> Spelling:
    return Spelling(vocabulary)


class Choices:
    """The texts, and in how few tokens what is left of each can be written."""

    def __init__(self, vocabulary: Vocabulary, texts: Iterable[str]) -> None:
        self._bytes = vocabulary.bytes
        self._texts = [text.encode() for text in texts]
        self._spelling = _spelling_of(vocabulary)
        self._counts: dict[bytes, list[int]] = {}

    def fit(self, allowed: Mask, written: bytes, remaining: int) -> Mask:
        """Those of the allowed tokens behind which a text can be ended with remaining - 1 more."""
        open = [text for text in self._texts if text.startswith(written)]
        if all(len(text) - len(written) <= remaining for text in open):
            return allowed
        fitting = np.zeros_like(allowed)
        for token in np.flatnonzero(allowed).tolist():
            longer = written + (self._bytes[token] or b"")
            fitting[token] = any(
                text.startswith(longer) and self._count(text)[len(longer)] < remaining for text in open
            )
        return fitting

    def _count(self, text: bytes) -> list[int]:
        """Tokens for what follows each byte; counted once, when a budget is tight."""
        if text not in self._counts:
            self._counts[text] = self._spelling.counts(text, ceiling=len(text) + 1)
        return self._counts[text]
