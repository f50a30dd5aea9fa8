"""Drafts what the text itself suggests: the tokens that followed the last time the same ones were written.

Refuses to know models and tensors. How far to trust it is learned in hindsight, from every suggestion,
whether it was sent or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specsot.frames import Features
from specsot_drafter.acceptance import Acceptance
from specsot_drafter.selection import Deserves, Offer
from specsot_drafter.texts import Text

LONGEST, SHORTEST = 4, 2  # tokens that must have been written before

Gram = tuple[int, ...]


@dataclass(slots=True)
class Index:
    """Where each stretch of SHORTEST .. LONGEST tokens of one text was written last, as far as it is known.

    source: of the text it forks, until something is looked up. ends: the place behind each stretch.
    suggested: what was suggested behind so many tokens, until it is known.
    """

    text: Text
    source: Index | None = None
    ends: dict[Gram, int] = field(default_factory=dict)
    known: int = 0
    suggested: tuple[int, tuple[int, ...]] = (0, ())

    def catch_up(self) -> None:
        """All but the stretches that end with the newest token: they would only find themselves."""
        if self.source:
            self._share(self.source)
        tokens = self.text.tokens
        for end in range(max(self.known, SHORTEST), len(tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(tokens[end - size : end])] = end
        self.known = max(len(tokens), self.known)

    def _share(self, source: Index) -> None:
        self.source = None
        source.catch_up()
        if self.text.tokens[: source.known] == source.text.tokens:
            self.ends, self.known = source.ends.copy(), source.known

    def look(self, most: int) -> tuple[int, ...]:
        """The tokens behind the longest stretch that was written before, at most `most`."""
        self.catch_up()
        tokens = self.text.tokens
        for size in range(LONGEST, SHORTEST - 1, -1):
            end = self.ends.get(tuple(tokens[-size:]))
            if end is not None:
                return tuple(tokens[end : end + most])
        return ()


class NgramDrafter:
    """See `Drafter`. Its trees are chains."""

    def __init__(self, tokens: int, pages: int = 0) -> None:
        """tokens: of a chain at most. pages: what it reports, since it needs none."""
        self.widths: tuple[int, ...] = (1,) * (tokens - 1)
        self.free_pages = pages
        self._acceptance = Acceptance(tokens)
        self._indices: dict[int, Index] = {}

    def due(self, texts: Sequence[Text]) -> int:
        return 0

    def open(self, text: Text) -> None:
        """A fork knows what its source knows of what they share."""
        fork = text.opening.fork
        source = self._indices.get(fork.sequence) if fork else None
        self._indices[text.sequence] = Index(text, source)

    def hear(self, batch: Features) -> None:
        """Compare what was suggested with what was written."""
        for lesson in batch.lessons:
            index = self._indices.get(lesson.sequence)
            if index and index.suggested[1]:
                behind, chain = index.suggested
                written = index.text.tokens[behind:]
                right = _agreeing(chain, written)
                told = min(len(chain), right + 1, len(written))
                self._acceptance.note(told, (), right)
                index.suggested = (0, ())

    def close(self, sequence: int) -> None:
        self._indices.pop(sequence, None)

    def catch_up(self) -> None:
        """Nothing is ever due."""

    def most_levels(self, text: Text) -> int:
        known = text.sequence in self._indices
        return max(min(len(self.widths) + 1, text.room - 1), 0) if known else 0

    def offer(self, texts: Sequence[Text], levels: int, deserves: Deserves | None = None) -> Offer | None:
        """A chain where something was found; nobody has to be asked whether it deserves to grow."""
        chains = [self._suggest(text, levels) for text in texts]
        levels = max(map(len, chains))
        if not levels:
            return None
        depths = np.arange(1, levels + 1)
        sure = np.log(np.cumprod(self._acceptance.chances()[:levels]))
        tokens = np.zeros((len(texts), levels), np.int64)
        scores = np.full((len(texts), levels), -np.inf)
        for row, chain in enumerate(chains):
            tokens[row, : len(chain)], scores[row, : len(chain)] = chain, sure[: len(chain)]
        return Offer(tokens, scores, np.tile(depths - 1, (len(texts), 1)), depths)

    def _suggest(self, text: Text, most: int) -> tuple[int, ...]:
        index = self._indices.get(text.sequence)
        if index is None:
            return ()
        chain = index.look(min(most, self.most_levels(text)))
        index.suggested = (len(text.tokens), chain)
        return chain


def _agreeing(chain: Sequence[int], written: Sequence[int]) -> int:
    """How many tokens of the chain were really written."""
    for place, (ours, theirs) in enumerate(zip(chain, written)):
        if ours != theirs:
            return place
    return min(len(chain), len(written))
