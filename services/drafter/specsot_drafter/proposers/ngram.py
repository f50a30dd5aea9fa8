"""Proposes by n-gram lookup: the tokens that followed the last time the same ones were written.

How far to trust it is learned in hindsight, from every suggestion, whether it was sent or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specsot.core.frames import Features
from specsot_drafter.core.cost_model import AcceptanceRates
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence, common_prefix
from specsot_drafter.proposers import Proposer

MAX_MATCH, MIN_MATCH = 4, 2  # tokens that must have been written before, most and least; not measured


@dataclass(slots=True)
class SuffixIndex:
    """One text as an array, in which what was written before is looked for. It costs nothing until then.

    suggested: what was suggested behind so many tokens, until it is known.
    """

    sequence: DraftSequence
    known: int = 0
    suggested: tuple[int, tuple[int, ...]] = (0, ())
    buffer: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def find_continuation(self, most: int) -> tuple[int, ...]:
        """The tokens behind the longest stretch that was written before, at most `most`; of several, behind
        the last.
        """
        written = self._tokens()
        if len(written) <= MIN_MATCH:
            return ()
        ends = np.flatnonzero((written[1:-1] == written[-1]) & (written[:-2] == written[-2])) + MIN_MATCH
        for size in range(MIN_MATCH + 1, MAX_MATCH + 1):
            longer = ends[ends >= size]
            longer = longer[written[longer - size] == written[-size]]
            if not len(longer):
                break
            ends = longer
        return tuple(written[ends[-1] : ends[-1] + most].tolist()) if len(ends) else ()

    def _tokens(self) -> NDArray[np.int32]:
        tokens = self.sequence.tokens
        if len(tokens) > len(self.buffer):
            room = np.empty(2 * len(tokens), np.int32)
            room[: self.known] = self.buffer[: self.known]
            self.buffer = room
        self.buffer[self.known : len(tokens)] = tokens[self.known :]
        self.known = len(tokens)
        return self.buffer[: self.known]


class NgramProposer(Proposer):
    """See `Proposer`. Its trees are chains."""

    def __init__(self, tokens: int, pages: int = 0) -> None:
        """tokens: of a chain at most. pages: what it reports, since it needs none."""
        self.widths, self._pages = (1,) * (tokens - 1), pages
        self._acceptance = AcceptanceRates(tokens)
        self._indices: dict[int, SuffixIndex] = {}

    @property
    def free_pages(self) -> int:
        return self._pages

    def follows(self, sequence: int) -> bool:
        return sequence in self._indices

    def open(self, sequence: DraftSequence) -> None:
        self._indices[sequence.id] = SuffixIndex(sequence)

    def observe(self, batch: Features) -> None:
        """Compare what was suggested with what was written."""
        for lesson in batch.lessons:
            index = self._indices.get(lesson.sequence)
            if index and index.suggested[1]:
                behind, chain = index.suggested
                written = index.sequence.tokens[behind:]
                right = common_prefix(chain, written)
                told = min(len(chain), right + 1, len(written))
                self._acceptance.record(told, (), right)
                index.suggested = (0, ())

    def close(self, sequence: int) -> None:
        self._indices.pop(sequence, None)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """A chain where something was found; nobody has to be asked whether it deserves to grow."""
        chains = [self._suggest(text, levels) for text in sequences]
        levels = max(map(len, chains))
        if not levels:
            return None
        depths = np.arange(1, levels + 1)
        sure = np.log(np.cumprod(self._acceptance.by_depth()[:levels]))
        tokens = np.zeros((len(sequences), levels), np.int64)
        scores = np.full((len(sequences), levels), -np.inf)
        for row, chain in enumerate(chains):
            tokens[row, : len(chain)], scores[row, : len(chain)] = chain, sure[: len(chain)]
        return Candidates(tokens, scores, np.tile(depths - 1, (len(sequences), 1)), depths)

    def _suggest(self, sequence: DraftSequence, most: int) -> tuple[int, ...]:
        index = self._indices.get(sequence.id)
        if index is None:
            return ()
        chain = index.find_continuation(min(most, self.max_levels(sequence)))
        index.suggested = (len(sequence.tokens), chain)
        return chain
