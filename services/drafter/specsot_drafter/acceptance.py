"""What a head's guesses have been worth lately: acceptance per depth, and how far to trust its scores.

Refuses to know seconds, trees and tokens: depths and probabilities in, probabilities out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

HOPE = 0.75  # chance that the next depth is accepted, before anything is known
WEIGHT = 2.0  # how many trials the hope counts for
MEMORY = 0.97  # what one outcome leaves of those before
FADING = 0.99  # what one lap without drafts leaves of what is known


class Acceptance:
    """Discounted counts per depth 1 .. levels. Depths never tried are taken to be like the one above."""

    def __init__(self, levels: int) -> None:
        self._hits = np.zeros(levels)
        self._trials = np.zeros(levels)
        self._masses = np.zeros(levels)
        self._reached = np.zeros(levels)

    def note(self, grown: int, masses: Sequence[float], accepted: int) -> None:
        """One tree came back.

        grown: levels that were grown for it. masses: the head's probability of what was sent, per
        depth. accepted: how deep the tree was accepted.
        """
        tried = min(grown, accepted + 1)
        self._forget(MEMORY)
        self._trials[:tried] += 1
        self._hits[: min(accepted, grown)] += 1
        self._masses[: len(masses)] += masses
        self._reached[: min(accepted, len(masses))] += 1

    def fade(self) -> None:
        """A lap passed without drafts: what is known grows old, and hope returns."""
        self._forget(FADING)

    def expected(self) -> Floats:
        """[levels] expected accepted tokens when 1, 2, ... levels are drafted."""
        return np.cumsum(np.cumprod(self.chances()))

    def chances(self) -> Floats:
        """[levels] chance that depth d is accepted when depth d - 1 was."""
        chances = np.empty_like(self._hits)
        before = HOPE
        for depth in range(len(chances)):
            before = (self._hits[depth] + WEIGHT * before) / (self._trials[depth] + WEIGHT)
            chances[depth] = before
        return chances

    def trust(self) -> Floats:
        """[levels] factors from the head's cumulative probability to a chance of acceptance.

        Never rising with depth, so that no node is worth more than its parent.
        """
        ratios = (self._reached + WEIGHT) / (self._masses + WEIGHT)
        return np.minimum.accumulate(np.minimum(ratios, 1.5))

    def _forget(self, kept: float) -> None:
        for counts in (self._hits, self._trials, self._masses, self._reached):
            counts *= kept
