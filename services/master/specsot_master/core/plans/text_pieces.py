"""Tokens with the text they wrote: which wrote what of a sequence."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from specsot.events import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A token and the text it completed ("" in the middle of a character).

    token None: text that was held back and came out at the end, or none at all.
    logprobs: of the token, where they are asked for. prompt: of the prompt's tokens, with the first piece.
    stop: the token that ended the sequence, the last piece's, whether or not it is told as one.
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    prompt: tuple[TokenLogprobs, ...] = ()
    stop: int | None = None


class TokenSpans:
    """Which token wrote which characters of a sequence's raw text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # as many as tokens, or none at all
        self._taken = 0
        self.length = 0  # characters

    def add(self, piece: TextPiece) -> None:
        start = self.length
        self.length = self.length + len(piece.text)
        if piece.token is not None:
            self._tokens.append(piece.token)
            self._starts.append(start)
            self._ends.append(self.length)
        if piece.logprobs is not None:
            self._logprobs.append(piece.logprobs)

    def __len__(self) -> int:
        return len(self._tokens)

    def count(self, first: int) -> int:
        """How many tokens wrote at or behind character `first`."""
        return len(self._tokens) - self._index(first)

    def within(self, first: int, last: int | None = None) -> tuple[int, ...]:
        """Tokens that wrote any of the characters first .. last - 1, to the end if `last` is None."""
        return tuple(self._tokens[self._index(first) : self._stop(last)])

    def take_logprobs(self, first: int, last: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Those of the tokens `within` that were not taken before."""
        if not self._logprobs:
            return ()
        start, stop = max(self._index(first), self._taken), self._stop(last)
        self._taken = max(self._taken, stop)
        return tuple(self._logprobs[start:stop])

    def _stop(self, last: int | None) -> int:
        return len(self._tokens) if last is None else bisect.bisect_left(self._starts, last)

    def _index(self, first: int) -> int:
        """The first token with text behind `first`; silent ones belong to what follows them."""
        index = bisect.bisect_right(self._ends, first)
        while index and self._starts[index - 1] >= first:
            index -= 1
        return index
