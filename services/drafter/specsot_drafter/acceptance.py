"""What a head's guesses have been worth lately: acceptance per depth, and how far to trust its scores.

Refuses to know seconds, trees and tokens: depths and probabilities in, probabilities out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

PRIOR_ACCEPTANCE = 0.75  # chance that the next depth is accepted, before anything is known
PRIOR_TRIALS = 2.0  # how many trials the hope counts for
DECAY = 0.97  # what one outcome leaves of those before
MAX_TRUST = 1.5
TRIALS_AFTER_REST = 4.0  # trials that what was known counts for, behind a rest


class AcceptanceRates:
    """Discounted counts per depth 1 .. levels. Depths never tried are taken to be like the one above."""

    def __init__(self, levels: int) -> None:
        self._hits = [0.0] * levels
        self._trials = [0.0] * levels
        self._masses = [0.0] * levels
        self._reached = [0.0] * levels

    def record(self, grown: int, masses: Sequence[float], accepted: int) -> None:
        """One tree came back.

        grown: levels that were grown for it. masses: the head's probability of what was sent, per
        depth. accepted: how deep the tree was accepted.
        """
        self._decay(DECAY)
        for depth in range(min(grown, accepted + 1)):
            self._trials[depth] += 1
            self._hits[depth] += depth < accepted
        for depth, mass in enumerate(masses):
            self._masses[depth] += mass
            self._reached[depth] += depth < accepted

    def discount(self) -> None:
        """What is known is old by now: a short trial shall be able to change it."""
        self._decay(min(1.0, TRIALS_AFTER_REST / max(self._trials[0], TRIALS_AFTER_REST)))

    def expected_tokens(self) -> Floats:
        """[levels] expected accepted tokens when 1, 2, ... levels are drafted."""
        return np.cumsum(np.cumprod(self.by_depth()))

    def by_depth(self) -> list[float]:
        """[levels] chance that depth d is accepted when depth d - 1 was."""
        chances: list[float] = []
        before = PRIOR_ACCEPTANCE
        for hits, trials in zip(self._hits, self._trials):
            before = (hits + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS)
            chances.append(before)
        return chances

    def pessimistic_first(self) -> float:
        """Chance that depth 1 is accepted, as one must fear: hope counts for nothing."""
        return self._hits[0] / (self._trials[0] + PRIOR_TRIALS)

    def trust(self) -> Floats:
        """[levels] factors from the head's cumulative probability to a chance of acceptance.

        Never rising with depth, so that no node is worth more than its parent.
        """
        factors: list[float] = []
        least = MAX_TRUST
        for reached, mass in zip(self._reached, self._masses):
            least = min(least, (reached + PRIOR_TRIALS) / (mass + PRIOR_TRIALS))
            factors.append(least)
        return np.array(factors)

    def _decay(self, kept: float) -> None:
        for counts in (self._hits, self._trials, self._masses, self._reached):
            counts[:] = [count * kept for count in counts]
