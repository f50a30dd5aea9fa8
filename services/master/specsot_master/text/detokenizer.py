"""Turns a growing list of token ids into text, piece by piece, never half a character.

Refuses to know which tokenizer decodes: any function from ids to text will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"  # how decoders write bytes that are no character (yet)
MAX_PENDING_TOKENS = 16  # tokens; a character has at most 4 bytes, so what is broken by then stays broken


class Detokenizer:
    """One sequence's text. Each feed decodes only a few tokens: those since the last whole character,
    behind the few before them (many decoders treat a token differently at the very beginning).
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = 0  # characters of decode(context + pending) that are out already

    def feed(self, tokens: Sequence[int]) -> str:
        """The text these tokens complete; a character whose bytes are not all here is held back."""
        self._pending.extend(tokens)
        text = self._decode(self._context + self._pending)
        whole = text.rstrip(BROKEN) if len(self._pending) <= MAX_PENDING_TOKENS else text
        delta = whole[self._shown :]
        if len(whole) == len(text):
            self._slide()
        else:
            self._shown = max(self._shown, len(whole))
        return delta

    def flush(self) -> str:
        """What is left when no more tokens come. Bytes of an unfinished character are dropped."""
        text = self._decode(self._context + self._pending).rstrip(BROKEN)
        delta, self._pending = text[self._shown :], []
        return delta

    def _slide(self) -> None:
        """What is pending becomes the context, unless it writes nothing (special tokens)."""
        shown = self._decode(self._pending)
        if shown:
            self._context, self._shown = self._pending, len(shown)
        self._pending = []
