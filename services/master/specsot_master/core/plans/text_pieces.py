"""Pieces of text with the tokens that wrote them, and the mapping between characters and tokens."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from specsot.events import TokenLogprobs


@dataclass(slots=True)
class TextPiece:
    """A token and the text that the token completed. Not frozen, because a frozen object takes three times as
    long to make.

    token: the token's id; None for a piece that only carries held-back text, prompt logprobs or a stop token.
    text: the text; "" if the token ends in the middle of a character.
    logprobs: the logprobs of the token, or None if the client did not ask for them.
    prompt: the logprobs of the prompt's tokens, with the first piece of a sequence only; else ().
    stop: the id of the stop token that ended the sequence, with the last piece only; else None. The token may
        also have a piece of its own.
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    prompt: tuple[TokenLogprobs, ...] = ()
    stop: int | None = None


class TokenSpans:
    """Maps the characters of a sequence's raw text to the tokens that wrote them.

    pieces 7:"He", 8:"" (half a character), 9:"llo"   starts [0 2 2], ends [2 2 5]
    within(0, 2) -> (7,)    within(2, 5) -> (8, 9): a token without text belongs to what follows it
    """

    def __init__(self) -> None:
        """Start with an empty text."""
        self._tokens: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # One entry per token, or always empty.
        self._taken = 0  # Tokens whose logprobs were taken.
        self.length = 0  # Characters of the raw text.

    def add(self, piece: TextPiece) -> None:
        """Append a piece's text, and its token if it has one. Logprobs are kept with the token.

        piece: the next piece of the sequence, in order.
        """
        start = self.length
        self.length = self.length + len(piece.text)
        if piece.token is not None:
            self._tokens.append(piece.token)
            self._starts.append(start)
            self._ends.append(self.length)
        if piece.logprobs is not None:
            self._logprobs.append(piece.logprobs)

    def __len__(self) -> int:
        """Return the number of tokens that were added."""
        return len(self._tokens)

    def count(self, first: int) -> int:
        """Return how many tokens wrote text at or after character `first`; 0 if none did.

        first: a position in the raw text, in characters.
        """
        return len(self._tokens) - self._index(first)

    def within(self, first: int, last: int | None = None) -> tuple[int, ...]:
        """Return the tokens that wrote any of the characters first .. last - 1, in order; () if none did.

        first: a position in the raw text, in characters.
        last: the position after the last character; None for the end of the text.
        """
        return tuple(self._tokens[self._index(first) : self._stop(last)])

    def take_logprobs(self, first: int, last: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the tokens that `within(first, last)` returns, without those taken by an
        earlier call. Return () if the client asked for no logprobs. They count as taken up to the last of
        them.

        first: a position in the raw text, in characters.
        last: the position after the last character; None for the end of the text.
        """
        if not self._logprobs:
            return ()
        start, stop = max(self._index(first), self._taken), self._stop(last)
        self._taken = max(self._taken, stop)
        return tuple(self._logprobs[start:stop])

    def _stop(self, last: int | None) -> int:
        """Return the index after the last token that wrote text before character `last`.

        last: a position in the raw text, in characters; None for the end of the text.
        """
        return len(self._tokens) if last is None else bisect.bisect_left(self._starts, last)

    def _index(self, first: int) -> int:
        """Return the index of the first token with text after character `first`. Tokens without text directly
        before it are included, as they belong to the text that follows them. It is the number of tokens if no
        token wrote text after it.

        first: a position in the raw text, in characters.
        """
        index = bisect.bisect_right(self._ends, first)
        while index and self._starts[index - 1] >= first:
            index -= 1
        return index
