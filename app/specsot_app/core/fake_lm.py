"""A language model that is a checksum of the text, and a drafter for it with a given error rate. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.proposers import Proposer

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


class OracleDrafter(Proposer):
    """Knows the voice, as well as its skill allows. Its trees are chains."""

    def __init__(
        self, voice: FakeLM, skill: float, depth: int, spend: Callable[[int], None], pages: int = 0
    ) -> None:
        """depth: levels at most. spend: called with the rows of every level that is grown.
        pages: what it reports, since it needs none.
        """
        self.widths, self._pages = (1,) * (depth - 1), pages
        self._voice, self._skill, self._spend = voice, skill, spend
        self._known: dict[int, tuple[int, int]] = {}  # tokens read so far, and the state behind them

    @property
    def free_pages(self) -> int:
        return self._pages

    def follows(self, sequence: int) -> bool:
        return sequence in self._known

    def open(self, sequence: DraftSequence) -> None:
        self._known[sequence.id] = 0, 0

    def close(self, sequence: int) -> None:
        self._known.pop(sequence, None)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """A chain for each, all equally long, as far as another level deserves its time."""
        depths = np.arange(1, levels + 1)
        scores = np.tile(depths * np.log(self._skill or 1e-9), (len(sequences), 1))
        for depth in range(1, levels + 1):
            self._spend(len(sequences))
            if depth < levels and keep_growing and not keep_growing(scores[:, depth - 1 : depth], depth):
                levels = depth
                break
        tokens = np.array([self._chain(text, levels) for text in sequences], np.int64)
        parents = np.tile(depths[:levels] - 1, (len(sequences), 1))
        return Candidates(tokens, scores[:, :levels], parents, depths[:levels])

    def _chain(self, text: DraftSequence, levels: int) -> list[int]:
        state, chain = self._read(text), list[int]()
        for _ in range(levels):
            right = self._voice.next(state)
            chain.append(right if self._voice.knows(state, self._skill) else 0)
            state = next_state(state, right)
        return chain

    def _read(self, text: DraftSequence) -> int:
        read_before, state = self._known[text.id]
        state = state_of(text.tokens[read_before:], state)
        self._known[text.id] = len(text.tokens), state
        return state
