"""One stretch of the answer as it is written: raw text in, what the reader may see out.

Pure. Refuses to know whether it is a branch or the whole answer.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from specsot.events import TokenLogprobs
from specsot_master.text.stops import StopStrings

ANSWER, END = "[ANSWER]", "[END]"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A token and the text it completed ("" in the middle of a character).

    token None: text that was held back and came out at the end.
    logprobs: of the token, where they are asked for.
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None


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
        start, self.length = self.length, self.length + len(piece.text)
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


class AnswerText:
    """Cuts at stop strings. `trim`: a branch's body, without a leading [ANSWER] and white space around it.

    marked:   it began with [ANSWER].
    skipped:  raw characters left out at the beginning.
    released: raw characters behind those that are let through, or held only as trailing white space.
    """

    def __init__(self, stops: Iterable[str] = (), trim: bool = False) -> None:
        self._watch = StopStrings(stops)
        self._trim, self._begun = trim, not trim
        self._head, self._tail = "", ""
        self.marked = False
        self._shown: list[str] = []
        self.skipped = self.released = self.length = 0

    @property
    def text(self) -> str:
        """Everything let through so far; `length` characters."""
        return "".join(self._shown)

    @property
    def stopped(self) -> bool:
        """A stop string was hit."""
        return self._watch.hit is not None

    def feed(self, text: str) -> str:
        """What may be shown now."""
        return self._show(self._watch.feed(text if self._begun else self._begin(text, last=False)))

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held = "" if self._begun else self._begin("", last=True)
        return self._show(self._watch.feed(held) + self._watch.flush())

    def _begin(self, text: str, last: bool) -> str:
        """Skip white space and one [ANSWER]; wait as long as the latter may still be coming."""
        self._head += text
        body = self._head.lstrip()
        if not last and ANSWER.startswith(body):
            return ""
        if body.startswith(ANSWER):
            self.marked, body = True, body.removeprefix(ANSWER).lstrip()
            if not body and not last:
                return ""
        self._begun = True
        self.skipped = len(self._head) - len(body)
        return body

    def _show(self, text: str) -> str:
        self.released += len(text)
        if self._trim:
            text = self._tail + text
            shown = text.rstrip()
            self._tail, text = text[len(shown) :], shown
        if text:
            self._shown.append(text)
            self.length += len(text)
        return text
