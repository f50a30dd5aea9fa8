"""How many drafts are accepted, and what a tree's nodes are worth by that, as laps showed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from specsot_drafter.core.selection import Floats, Ints

PRIOR_ACCEPTANCE: Final = 0.75  # Probability. Of the next depth, before any tree came back. Untuned.
PRIOR_TRIALS: Final = 2.0  # Trees. How many the prior counts for. Untuned.
DECAY: Final = 0.97  # Fraction. What one outcome leaves of those before. Untuned.
# Factor. From a head's probability to a chance of acceptance, at most. Untuned.
MAX_TRUST: Final = 1.5
WORTH_WEIGHT: Final = 0.2  # Fraction. Of one step in the mean of what nodes are worth. Untuned.


class AcceptanceRates:
    """Discounted counts per depth 1 .. levels. Depths never tried are taken to be like the one above."""

    def __init__(self, levels: int) -> None:
        self._counts = np.zeros((4, levels))
        self._hits, self._trials, self._masses, self._reached = self._counts
        self._chances: list[float] | None = None  # None: they are asked for anew
        self._factors: Floats | None = None

    def record(self, trees: Sequence[tuple[int, Sequence[float], int]]) -> None:
        """Trees came back, one after the other: of each how many levels were grown for it, the head's
        probability of what was sent, per depth, and how deep it was accepted.
        """
        depths = np.arange(self._counts.shape[1])
        grown, told, deep = (
            np.array([[number] for number in told])
            for told in ([one[0] for one in trees], [len(one[1]) for one in trees], [one[2] for one in trees])
        )
        masses = np.zeros((len(trees), len(depths)))
        for row, (_, mass, _) in zip(masses, trees):
            row[: len(mass)] = mass
        weights = DECAY ** np.arange(len(trees))[::-1]
        reached = depths < deep
        self._decay(DECAY ** len(trees))
        tried = (depths <= deep) & (depths < grown)
        self._counts += [weights @ one for one in (reached & tried, tried, masses, reached & (depths < told))]

    def by_depth(self) -> list[float]:
        """[levels] chance that depth d is accepted when depth d - 1 was."""
        if self._chances is not None:
            return self._chances
        chances = self._chances = list[float]()
        before = PRIOR_ACCEPTANCE
        for hits, trials in zip(self._hits.tolist(), self._trials.tolist()):
            before = (hits + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS)
            chances.append(before)
        return chances

    def trust(self) -> Floats:
        """[levels] factors from the head's cumulative probability to a chance of acceptance.

        Never rising with depth, so that no node is worth more than its parent.
        """
        if self._factors is not None:
            return self._factors
        factors: list[float] = []
        least = MAX_TRUST
        for reached, mass in zip(self._reached.tolist(), self._masses.tolist()):
            least = min(least, (reached + PRIOR_TRIALS) / (mass + PRIOR_TRIALS))
            factors.append(least)
        self._factors = np.array(factors)
        return self._factors

    def _decay(self, kept: float) -> None:
        self._counts *= kept
        self._chances = self._factors = None


class TreeWorth:
    """What a tree's nodes are worth, depth by depth and best first, as those of all texts were lately; of
    depths that did not grow, as far as those above say.
    """

    def __init__(self, acceptance: AcceptanceRates) -> None:
        """acceptance: says how much less a depth is worth than the one above, until it grows."""
        self._acceptance = acceptance
        self._by_depth = list[Floats]()
        self._best = np.zeros((0, 0))

    def record(self, values: Floats, depths: Ints) -> None:
        """[live, n] worth of candidates, -inf where one is barred, and [n] their depths. Trees that are cut
        because their texts end say nothing of others.
        """
        open_to = np.isfinite(values)
        if not open_to.any():
            return
        deepest = depths[open_to.any(0)].max()
        whole = open_to[:, depths == deepest].any(1)
        grown = depths <= deepest
        values = np.where(open_to, values, 0.0)[whole][:, grown]
        depths = depths[grown]
        # as many of a depth for every text
        keys = 2.0 * depths - values
        places = np.sort(depths)
        worth = 2.0 * places - np.sort(keys, 1).mean(0)
        found = np.split(worth, np.flatnonzero(np.diff(places)) + 1)
        for before, now in zip(self._by_depth, found):
            many = min(len(before), len(now))  # of more texts, fewer nodes are fed
            now[:many] = before[:many] + WORTH_WEIGHT * (now[:many] - before[:many])
        if below := self._by_depth[len(found) :]:  # beside the deepest that grew
            before = self._by_depth[len(found) - 1][0]
            changed = found[-1][0] / before if before else 1.0
            found += [deeper * changed for deeper in below]
        self._by_depth = found
        self._best = np.zeros((0, 0))

    def best(self, levels: int, most: int) -> Floats:
        """[levels, most] what 1, 2, ... nodes of trees of 1, 2, ... levels are worth together."""
        if self._best.shape != (levels, most):
            found = self._by_depth[:levels]
            chances = self._acceptance.by_depth()
            for depth in range(len(found), levels):
                found.append((found[-1][:1] if found else 1.0) * np.array(chances[depth : depth + 1]))
            depths = np.repeat(np.arange(levels), [len(one) for one in found])
            worth = np.where(depths <= np.arange(levels)[:, None], np.concatenate(found), 0.0)
            self._best = np.zeros((levels, most))
            best = -np.sort(-worth, 1)[:, :most]
            self._best[:, : best.shape[1]] = best
            np.cumsum(self._best, 1, out=self._best)
        return self._best
