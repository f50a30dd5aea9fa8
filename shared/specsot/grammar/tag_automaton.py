"""Constrains an answer to a structural tag, and leads it to its end within its budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from specsot.core.vocabulary import Spelling, Vocabulary, spelling_of
from specsot.grammar.answers import FARTHEST, AnswerAutomaton, Closing, Mask, MatcherCursor, MatcherNode
from specsot.grammar.structural_tag import Exits, StructuralTag, extended, read_tag
from specsot.params import Form

# Tokens. The longest ending that is searched for when a tag is compiled. Untuned.
MAX_ENDING: Final = 2048
# Bytes that may follow in free text, and of which at most two may follow anywhere else.
_TEXT_PROBES: Final = (b"\n", b'"', b":", b"a")
# A byte that an ending writes in free text while the end of the text may not follow yet.
_FILLER: Final = b"a"


class TagAutomaton(AnswerAutomaton):
    """A `Grammar` of one structural tag over the tokens of one vocabulary, in which the tag's tokens have
    their texts.
    """

    def __init__(
        self, vocabulary: Vocabulary, form: Form, ends: tuple[int, ...] = (), guided: bool = True
    ) -> None:
        """Compile the tag. The vocabulary is extended by the tag's tokens, except by those that end an
        answer, which are no part of its text.

        vocabulary: the bytes of every token id.
        form: a form of the kind "structural_tag".
        ends: tokens that end an answer.
        guided: True if masks must lead the answer to its end when its budget gets small.

        Raises InvalidRequest if the tag is malformed or the library cannot compile it.

        Without `guided`, budgets make no difference.
        """
        self._tag = read_tag(form.texts[0])
        tokens = {token: text for token, text in self._tag.tokens.items() if token not in ends}
        super().__init__(extended(vocabulary, tokens), form, ends, guided)
        if isinstance(self._closing, TagClosing):
            self._closing.widen(self.start())

    def _closing_of(self, form: Form) -> Closing | None:
        """Return what finds the endings of the tag; never None.

        form: ignored, because the tag was read from it already.
        """
        return TagClosing(self.vocabulary, self._tag)


class _Exit:
    """A fixed text that leads to the end of an answer, and the tokens of all its rests.

    text: the fixed text.
    rests: entry i holds the tokens of the bytes from i on.
    sizes_by_last: by the last byte of a beginning of the text, the sizes of such beginnings, from the longest
        to the shortest.
    """

    def __init__(self, text: bytes, spelling: Spelling) -> None:
        """Tokenize every rest of the text.

        text: the fixed text.
        spelling: tokenizes the rests, by greedy longest match.
        """
        self.text = text
        self.rests = [spelling.split(text[size:]) for size in range(len(text))]
        self.sizes_by_last: dict[int, list[int]] = {}
        for size in range(len(text) - 1, 0, -1):
            self.sizes_by_last.setdefault(text[size - 1], []).append(size)


class TagClosing(Closing):
    """Finds short endings of one structural tag.

    JSON values end as `Closing` ends them. Everywhere else, the ending follows the tag's exits.
    """

    def __init__(self, vocabulary: Vocabulary, tag: StructuralTag) -> None:
        """Tokenize the tag's exits, and find the tokens that may begin the end of a free text.

        vocabulary: the bytes of every token id, the tag's tokens included.
        tag: the structural tag whose exits lead to the end.
        """
        super().__init__(vocabulary)
        self._texts = vocabulary.bytes
        exits = Exits(tag)
        spelling = spelling_of(vocabulary)
        self._outside = [_Exit(text.encode(), spelling) for text in exits.outside]
        self._text_ends = [_Exit(text.encode(), spelling) for text in exits.of_free_text]
        self._longest_exit = max(
            (len(exit_text.text) for exit_text in (*self._outside, *self._text_ends)), default=0
        )
        self._probes = [spelling.ids[byte] for byte in _TEXT_PROBES if byte in spelling.ids]
        self._filler = spelling.ids.get(_FILLER)
        first = bytes(exit_text.text[0] for exit_text in self._text_ends)
        self._mark = np.array([any(byte in first for byte in text or b"") for text in vocabulary.bytes])

    def widen(self, start: MatcherNode) -> None:
        """Set the horizon so that it covers the ending of an answer that has hardly started. If no such
        ending of at most MAX_ENDING tokens is found, the horizon stays FARTHEST.

        start: the place before the first token of an answer.
        """
        ending = self.search_ending(start, MAX_ENDING)
        self.horizon = FARTHEST + len(ending or ())

    def _beginnings(self, place: MatcherNode) -> Mask:
        """Return the tokens that may begin something that lengthens the ending: [vocabulary size]. In free
        text, these are the tokens with the beginning of a mark; in a JSON string, those with a quote; and
        elsewhere all tokens.

        place: the place in the answer, before the next token.

        A mark is the first byte of the end of any free text.
        """
        bits = place.walker.bits(place)
        if self._in_free_text(bits):
            return self._mark
        return self._quote if self._in_string(bits) else np.ones_like(self._quote)

    def _next(self, walker: MatcherCursor, place: MatcherNode) -> int | None:
        """Return the next token of an ending, or None if no token may follow.

        walker: the cursor that visits the places of the answer.
        place: the place before the token.

        In free text and outside of JSON strings, this is the first token of the first exit whose whole rest
        the form allows. Otherwise, free text continues with a filler (None if the vocabulary has no token for
        it), and JSON as `Closing` continues it.
        """
        bits = walker.bits(place)
        in_free_text = self._in_free_text(bits)
        if in_free_text or not self._in_string(bits):
            exits = self._text_ends if in_free_text else self._outside
            for tokens in self._exit_tokens(place, exits):
                if walker.accepts_path(place, tokens):
                    return tokens[0]
        return self._filler if in_free_text else super()._next(walker, place)

    def _exit_tokens(self, place: MatcherNode, exits: Sequence[_Exit]) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of the rest of every exit, of which a beginning may have been written already.

        Of one exit, the longest beginning that was written comes first. A rest is left out if the vocabulary
        cannot even spell its first bytes.

        place: the place before the rest.
        exits: the exits to try, in this order.

            written "... </para", exit "</parameter>" -> the tokens of "meter>", and those of "</parameter>"

        After the longest beginning, shorter ones follow, down to the whole exit.
        """
        written = self._last_bytes(place)
        for exit_text in exits:
            for size in (*(exit_text.sizes_by_last.get(written[-1], ()) if written else ()), 0):
                if exit_text.rests[size] and written.endswith(exit_text.text[:size]):
                    yield exit_text.rests[size]

    def _last_bytes(self, place: MatcherNode) -> bytes:
        """Return the last bytes before a place, at least as many as the longest exit has, or all if fewer
        were written.

        place: the place after these bytes.

        Tokens without text count as no bytes. More bytes than needed may be returned, because whole tokens
        are.
        """
        parts: list[bytes] = []
        size = 0
        node = place
        while node.parent is not None and size < self._longest_exit:
            text = self._texts[node.token] or b""
            parts.append(text)
            size += len(text)
            node = node.parent
        return b"".join(reversed(parts))

    def _in_free_text(self, bits: bytes) -> bool:
        """Return whether the position is within free text, which alone may contain all of the probes.

        False if the vocabulary lacks a token for one of the probes.

        bits: one bit per token that may follow, see `MatcherCursor.bits`.
        """
        found = len(self._probes) == len(_TEXT_PROBES)
        return found and all(bits[token >> 3] >> (token & 7) & 1 for token in self._probes)
