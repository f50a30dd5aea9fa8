"""Estimates how likely drafts are accepted by depth, and the expected tokens that nodes of a tree add."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np

from specsot_drafter.core.selection import Floats, Ints

# Probability. The assumed acceptance of depth 1 before any tree was verified. Untuned.
PRIOR_ACCEPTANCE: Final = 0.75
# Trees. The number of verified trees that the prior counts as. Untuned.
PRIOR_TRIALS: Final = 2.0
# Fraction. The weight that older trees keep with every newer tree. Untuned.
DECAY: Final = 0.97
# Factor. Upper bound of the ratio between the chance of acceptance and the head's probability. Untuned.
MAX_TRUST: Final = 1.5
# Fraction. The weight of the newest trees in the running means of what nodes are worth. These trees are those
# of one step, or sampled trees of several steps (`DraftPolicy.keep_sample`). The first sampled trees weigh
# more, see `DraftPolicy._learn_worth`. Untuned.
WORTH_WEIGHT: Final = 0.2


class AcceptanceRates:
    """Estimator of how often drafts are accepted, by discounted counts of verified trees per depth 1 ..
    levels.

    A depth that was never tried is assumed to be accepted as often as the depth above it.
    """

    def __init__(self, levels: int) -> None:
        """Start without verified trees.

        levels: Number of depths for which rates are estimated, 1 .. levels.
        """
        # One row per count, one column per depth; all rows are views, so that one operation updates them.
        # hits: trees accepted to this depth. trials: trees accepted to the depth above that grew this depth.
        # masses: probability of the sent nodes. reached: trees accepted to this depth that sent nodes of it.
        self._counts = np.zeros((4, levels))
        self._hits, self._trials, self._masses, self._reached = self._counts
        # Results of `by_depth` and `trust`; None after the counts have changed.
        self._chances: list[float] | None = None
        self._factors: Floats | None = None

    def record(self, trees: Sequence[tuple[int, Sequence[float], int]]) -> None:
        """Record verified trees, oldest first. Without trees nothing changes.

        trees: (levels, masses, accepted) of each tree. levels: number of levels that were grown. masses: the
            head's probability of the sent nodes, summed per depth; shorter than `levels` if nothing of the
            deeper levels was sent. accepted: the depth to which the tree was accepted, 0 for the root.

        A tree of 4 levels that is accepted to depth 2 counts as a trial of depths 1, 2 and 3, and as a hit of
        depths 1 and 2. Depth 4 was not tried, because its parent was not accepted.

        The counts of older trees lose weight by DECAY for every tree. The cached results of `by_depth` and
        `trust` are dropped.
        """
        if not trees:
            return
        # Hundreds of trees may be recorded together, so the arrays are filled without a loop over trees. The
        # arrays below are [num_trees, depths]; column 0 is depth 1.
        depths = np.arange(self._counts.shape[1])
        all_levels, all_masses, all_accepted = zip(*trees)
        lengths = [*map(len, all_masses)]
        grown, deep, num_masses = (
            np.array(numbers)[:, None] for numbers in (all_levels, all_accepted, lengths)
        )
        sent = depths < num_masses
        masses = np.zeros(sent.shape)
        masses[sent] = np.fromiter(chain.from_iterable(all_masses), float, sum(lengths))
        weights = DECAY ** np.arange(len(trees))[::-1]
        reached = depths < deep
        tried = (depths <= deep) & (depths < grown)
        self._counts *= DECAY ** len(trees)
        self._counts += [weights @ one for one in (reached & tried, tried, masses, reached & sent)]
        self._chances = self._factors = None

    def by_depth(self) -> list[float]:
        """Return the chance that each depth is accepted, given that the depth above was: a list of `levels`
        numbers. Entry 0 is depth 1.

        The prior of each depth is the estimate of the depth above, with the weight of PRIOR_TRIALS trees.

        The result is cached until trees are recorded; callers must not change it.
        """
        if self._chances is not None:
            return self._chances
        chances = self._chances = list[float]()
        before = PRIOR_ACCEPTANCE
        for hits, trials in zip(self._hits.tolist(), self._trials.tolist()):
            before = (hits + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS)
            chances.append(before)
        return chances

    def sure_tokens(self) -> Floats:
        """Return the number of tokens per tree that are accepted for sure by trees of 1, 2, ... levels,
        [levels]. The chance of each depth is estimated as in `by_depth`, with a prior of 0: without verified
        trees all numbers are 0.
        """
        return np.cumsum(np.cumprod(self._hits / (self._trials + PRIOR_TRIALS)))

    def trust(self) -> Floats:
        """Return the factors from the head's cumulative probability to the chance of acceptance, [levels].
        Entry 0 is depth 1.

        A factor is at most MAX_TRUST. The factors never rise with depth, so that no node is worth more than
        its parent.

        Without verified trees all factors are 1. The result is cached until trees are recorded.
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


class TreeWorth:
    """Running mean of the worth of a tree's nodes, over the recent trees of all sequences.

    The worth of a node is its chance of acceptance, which is the number of tokens that sending the node is
    expected to add. The means are kept per depth, best node first. The worth of depths that did not grow is
    derived from the depths above.
    """

    def __init__(self, acceptance: AcceptanceRates) -> None:
        """Start without trees.

        acceptance: Gives the ratio between the worth of a depth and of the depth above, for depths that have
            not grown yet.
        """
        self._acceptance = acceptance
        # Entry d: the mean worth of the nodes at depth d + 1, best first.
        self._by_depth = list[Floats]()
        # Result of `best`; empty after the means have changed.
        self._best = np.zeros((0, 0))

    def record(self, values: Floats, depths: Ints, weight: float = WORTH_WEIGHT) -> None:
        """Record the candidates of one step, or of sampled trees of several steps, in the running means.
        Nothing happens if all of them are barred.

        values: Worth of each candidate, [num_trees, n], at most 1; -inf where a candidate is barred.
        depths: Depth of each candidate, [n], at least 1.
        weight: Weight of the mean of these trees in the running means, more than 0 and at most 1. The weight
            does not depend on the number of trees. At 1, the mean of these trees replaces the running means.

        Trees that do not reach the deepest level of these trees are left out: those are cut because their
        sequences end soon, and say nothing about other sequences.

        A depth that grew for the first time begins with the mean of these trees. If fewer nodes of a depth
        grew than before, only that many are kept.
        """
        open_to = np.isfinite(values)
        if not open_to.any():
            return
        deepest = depths[open_to.any(0)].max()
        whole = open_to[:, depths == deepest].any(1)
        grown = depths <= deepest
        values = np.where(open_to, values, 0.0)[whole][:, grown]
        depths = depths[grown]
        # Sort each tree by depth, and by falling worth within a depth. Worth is in [0, 1], so the keys of a
        # depth d lie in [2 * d - 1, 2 * d] and never mix with those of another depth. Every tree has the same
        # number of candidates at a depth, so columns of different trees can be averaged.
        # depths [1 1 2 2], values [.2 .6 .1 .3] -> keys [1.8 1.4 3.9 3.7] -> sorted [1.4 1.8 3.7 3.9],
        # worth = [2 2 4 4] - sorted = [.6 .2 .3 .1]
        keys = 2.0 * depths - values
        places = np.sort(depths)
        worth = 2.0 * places - np.sort(keys, 1).mean(0)
        ends = [*(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
        found = [worth[start:end] for start, end in zip((0, *ends), ends)]
        for before, now in zip(self._by_depth, found):
            # The number of nodes per depth varies: with more sequences, fewer nodes of each tree are
            # expanded.
            many = min(len(before), len(now))
            now[:many] = before[:many] + weight * (now[:many] - before[:many])
        # Depths that did not grow this time change by the same factor as the deepest depth that did.
        if below := self._by_depth[len(found) :]:
            before = self._by_depth[len(found) - 1][0]
            changed = found[-1][0] / before if before else 1.0
            found += [deeper * changed for deeper in below]
        self._by_depth = found
        self._best = np.zeros((0, 0))

    def best(self, levels: int, max_nodes: int) -> Floats:
        """Return the summed worth of the best 0, 1, 2, ... nodes of a tree with 1, 2, ... levels: [levels,
        max_nodes + 1].

        levels: Number of rows: row 0 is a tree of one level.
        max_nodes: Number of nodes of the last column, without the root. Column 0 stands for a tree of its
            root alone, whose worth is 0.

        The values of a row are cumulative: levels worth [.6 .2] and [.3 .1] -> row 0 [0 .6 .8 .8], row 1 [0
        .6 .9 1.1] for max_nodes = 3.

        Depths that never grew count as a single node, whose worth is that of the best node above times the
        chance of the depth. With fewer nodes than columns, the last sum is repeated. The result is cached
        and must not be changed.
        """
        if self._best.shape != (levels, max_nodes + 1):
            found = self._by_depth[:levels]
            chances = self._acceptance.by_depth()
            for depth in range(len(found), levels):
                found.append((found[-1][:1] if found else 1.0) * np.array(chances[depth : depth + 1]))
            depths = np.repeat(np.arange(levels), [len(one) for one in found])
            worth = np.where(depths <= np.arange(levels)[:, None], np.concatenate(found), 0.0)
            self._best = np.zeros((levels, max_nodes + 1))
            best = -np.sort(-worth, 1)[:, :max_nodes]
            self._best[:, 1 : 1 + best.shape[1]] = best
            np.cumsum(self._best, 1, out=self._best)
        return self._best
