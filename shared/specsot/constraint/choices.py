"""Keeps an answer that is one of several texts within its budget.

Refuses to know which tokens are allowed, and the library.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specsot.constraint.spelling import Spelling, spelling_of
from specsot.vocabulary import Vocabulary

Mask = NDArray[np.bool_]


class Choices:
    """The texts, and in how few tokens what is left of each can be written: counted now, not within a lap."""

    def __init__(
        self, vocabulary: Vocabulary, texts: Iterable[str], spelling: Spelling | None = None
    ) -> None:
        self._bytes = vocabulary.bytes
        self._texts = [text.encode() for text in texts]
        spelling = spelling or spelling_of(vocabulary)
        self._counts = {text: spelling.counts(text, ceiling=len(text) + 1) for text in self._texts}

    def fit(self, allowed: Mask, written: bytes, remaining: int) -> Mask:
        """Those of the allowed tokens behind which a text can be ended with remaining - 1 more."""
        open = [text for text in self._texts if text.startswith(written)]
        if all(len(text) - len(written) <= remaining for text in open):
            return allowed
        tokens = np.flatnonzero(allowed).tolist()
        begun, sizes = len(written), {len(self._bytes[token] or b"") for token in tokens}
        near = {
            text[begun : begun + size]
            for text in open
            for size in sizes
            if begun + size <= len(text) and self._counts[text][begun + size] < remaining
        }
        fitting = np.zeros_like(allowed)
        fitting[[token for token in tokens if (self._bytes[token] or b"") in near]] = True
        return fitting
