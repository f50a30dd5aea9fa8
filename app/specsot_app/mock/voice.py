"""What a ring without weights writes: the next token as a pure function of the tokens before it.

Refuses to know stages, pages and time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EMPTY_STATE = 0  # the state of an empty text


def next_state(state: int, token: int) -> int:
    """The state (32 bits) behind one more token. It depends on every token before."""
    return zlib.crc32(token.to_bytes(4, "little"), state)


def state_of(tokens: Iterable[int], state: int = EMPTY_STATE) -> int:
    for token in tokens:
        state = next_state(state, token)
    return state


@dataclass(frozen=True, slots=True)
class FakeLM:
    """alphabet: the tokens it writes with. A vocabulary's first ones are seldom text."""

    alphabet: Sequence[int] = range(300, 1324)

    def next(self, state: int) -> int:
        return self.alphabet[state % len(self.alphabet)]

    def write(self, tokens: Iterable[int], count: int) -> list[int]:
        """What plain decoding writes behind `tokens`."""
        state, written = state_of(tokens), list[int]()
        for _ in range(count):
            written.append(self.next(state))
            state = next_state(state, written[-1])
        return written

    def knows(self, state: int, skill: float) -> bool:
        """Whether somebody of such `skill` (0..1) guesses right behind this text; always the same answer."""
        return next_state(state, 0) < skill * (1 << 32)
