"""Constrains an answer to a structural tag, and leads it to its end within its budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from specsot.core.vocabulary import Spelling, Vocabulary, spelling_of
from specsot.grammar.answers import FARTHEST, AnswerAutomaton, Closing, Mask, MatcherCursor, MatcherNode
from specsot.grammar.structural_tag import StructuralTag, exits_of, extended, read_tag
from specsot.params import Form

# Tokens. The longest ending that is searched for when a tag is compiled. Untuned.
MAX_ENDING: Final = 2048
# Bytes that may follow in free text, and of which at most two may follow anywhere else.
_TEXT_PROBES: Final = (b"\n", b'"', b":", b"a")
_FILLER: Final = b"a"


class TagAutomaton(AnswerAutomaton):
    """One structural tag over the tokens of one vocabulary, in which the tag's tokens have their texts."""

    def __init__(
        self, vocabulary: Vocabulary, form: Form, ends: tuple[int, ...] = (), led: bool = True
    ) -> None:
        """See `AnswerAutomaton`. Tokens that end an answer are no part of its text."""
        self._tag = read_tag(form.texts[0])
        tokens = {token: text for token, text in self._tag.tokens.items() if token not in ends}
        super().__init__(extended(vocabulary, tokens), form, ends, led)
        if isinstance(self._closing, TagClosing):
            self._closing.widen(self.start())

    def _closing_of(self, form: Form) -> Closing | None:
        return TagClosing(self.vocabulary, self._tag)


class _Exit:
    """A fixed text that leads to the end of an answer, and the tokens of all its rests.

    rests: entry i holds the tokens of the bytes from i on.
    """

    def __init__(self, text: bytes, spelling: Spelling) -> None:
        self.text = text
        self.rests = [spelling.split(text[size:]) for size in range(len(text))]


class TagClosing(Closing):
    """Finds short endings of one structural tag.

    JSON values end as `Closing` ends them. Everywhere else, the ending follows the tag's exits.
    """

    def __init__(self, vocabulary: Vocabulary, tag: StructuralTag) -> None:
        super().__init__(vocabulary)
        self._texts = vocabulary.bytes
        exits = exits_of(tag)
        spelling = spelling_of(vocabulary)
        self._outside = [_Exit(text.encode(), spelling) for text in exits.outside]
        self._text_ends = [_Exit(text.encode(), spelling) for text in exits.of_free_text]
        self._longest_exit = max((len(one.text) for one in (*self._outside, *self._text_ends)), default=0)
        singles = {text: token for token, text in reversed(list(enumerate(vocabulary.bytes))) if text}
        self._probes = [singles[byte] for byte in _TEXT_PROBES if byte in singles]
        self._filler = singles.get(_FILLER)
        first = bytes(one.text[0] for one in self._text_ends)
        self._mark = np.array([any(byte in first for byte in text or b"") for text in vocabulary.bytes])

    def widen(self, start: MatcherNode) -> None:
        """Set the horizon so that it covers the ending of an answer that has hardly begun."""
        ending = self.search(start, MAX_ENDING)
        self.horizon = FARTHEST + len(ending or ())

    def _beginnings(self, place: MatcherNode) -> Mask:
        """Return the tokens that may begin something that lengthens the ending: in free text those with the
        beginning of a mark, in a JSON string those with a quote, and elsewhere all tokens.
        """
        bits = place.walker.bits(place)
        if self._in_free_text(bits):
            return self._mark
        return self._quote if self._in_string(bits) else np.ones_like(self._quote)

    def _next(self, walker: MatcherCursor, place: MatcherNode) -> int | None:
        """Return the next token of an ending, or None if no token may follow."""
        bits = walker.bits(place)
        in_free_text = self._in_free_text(bits)
        if in_free_text or not self._in_string(bits):
            exits = self._text_ends if in_free_text else self._outside
            for tokens in self._ways_out(place, exits):
                if walker.accepts_path(place, tokens):
                    return tokens[0]
        return self._filler if in_free_text else super()._next(walker, place)

    def _ways_out(self, place: MatcherNode, exits: Sequence[_Exit]) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of the rest of every exit, of which a beginning may have been written already.

        written "... </para", exit "</parameter>" -> the tokens of "meter>", and those of "</parameter>"
        """
        written = self._last_bytes(place)
        for one in exits:
            for size in range(min(len(one.text) - 1, len(written)), -1, -1):
                if one.rests[size] and written.endswith(one.text[:size]):
                    yield one.rests[size]

    def _last_bytes(self, place: MatcherNode) -> bytes:
        """Return the last bytes before a place, at least as many as the longest exit has, if so many were
        written.
        """
        parts: list[bytes] = []
        size = 0
        here = place
        while here.behind is not None and size < self._longest_exit:
            text = self._texts[here.token] or b""
            parts.append(text)
            size += len(text)
            here = here.behind
        return b"".join(reversed(parts))

    def _in_free_text(self, bits: bytes) -> bool:
        """Return whether the position is within free text, which alone may contain all of the probes."""
        found = len(self._probes) == len(_TEXT_PROBES)
        return found and all(bits[token >> 3] >> (token & 7) & 1 for token in self._probes)
