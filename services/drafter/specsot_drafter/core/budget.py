"""What decides how much is drafted, and what it is told of laps; policies that measure nothing.

Counts, probabilities and measured seconds in, counts out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specsot.members import TreeShape
from specsot_drafter.core.selection import Candidates, Flags, Floats, Ints, KeepGrowing, best_each


class TreeOutcome(NamedTuple):
    """One tree that came back.

    grown:    levels grown for it; 0 when its root was sent alone.
    rows:     its nodes, root included.
    masses:   the drafter's probability of its nodes, summed per depth.
    accepted: tokens it brought that would not have come without it.
    own:      how deep the drafter's own nodes were accepted; None: as deep as that.
    """

    grown: int
    rows: int
    masses: Sequence[float]
    accepted: int
    own: int | None = None


def lessons_of(trees: Sequence[TreeOutcome]) -> list[tuple[int, Sequence[float], int]]:
    """As acceptance is learned: levels that grew, the drafter's probability of them, how deep was right."""
    return [(one.grown, one.masses, one.accepted if one.own is None else one.own) for one in trees]


ROOT_ONLY = TreeOutcome(0, 1, (), 0)  # a root without anything below


@dataclass(frozen=True, slots=True)
class LapSeconds:
    """What one lap took, in seconds; 0 where it is not known.

    computed: by all stages, when nothing else was in the frame. wall: by the clock. growing: by the drafter.
    """

    computed: float = 0.0
    wall: float = 0.0
    growing: float = 0.0


UNKNOWN_SECONDS = LapSeconds()


class BudgetPolicy:
    """Decides for one drafter; this one learns nothing, and never rests.

    rest:     for how many trees nothing shall be drafted, where the last plan said so.
    drafting: trees were sent since the last rest.
    adaptive: it looks at what pays: it may rest, and candidates of others may join its trees.
    holding:  nothing is learned now of what nodes are worth: what grows was chosen laps ago, or by nobody.
    """

    rest = 0
    adaptive = False
    holding = True

    def __init__(self, shape: TreeShape) -> None:
        self._each = shape.nodes - 1
        self._levels = shape.depth + 1

    @property
    def drafting(self) -> bool:
        return True

    @property
    def keep_growing(self) -> KeepGrowing | None:
        """Who is to be asked before each level."""
        return None

    def limit_texts(self, live: int) -> int:
        """For how many of so many texts to draft now."""
        return live

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        """Levels that `live` trees may grow, at most `most`; 0: none, and `rest` says for how long.

        due: rows that must be caught up with first. beside: texts that have no tree in this lap.
        """
        return most

    def looks_next(self, texts: int) -> bool:
        """Whether the next lap of so many goes without drafts, only to see what that takes."""
        return False

    def score(self, offer: Candidates) -> Floats:
        """[live, n] what every candidate is worth."""
        return offer.scores

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all: the same for every tree."""
        return best_each(values, min(self._each, most // max(len(values), 1)))

    def foreseen_nodes(self, live: int, levels: int, most: int) -> int:
        """How many nodes of each of `live` trees to send, at most `most` in all, where that must be known
        before those are; 0: it must not be.
        """
        return min(self._each, most // live)

    def log_trust(self) -> Floats:
        """[levels] what `score` adds to a log-probability at each depth."""
        return np.zeros(self._levels)

    def record_worth(self, values: Floats, depths: Ints) -> None:
        """[live, n] what the drafter's own candidates are worth: `foreseen_nodes` is asked of those alone.
        depths: [n] of each.
        """

    def begin_texts(self) -> bool:
        """None of the texts that write was there before; whether a rest ends for them."""
        return False

    def record_rest(self, trees: int, live: int) -> None:
        """So many trees went without drafts; `live` of them a lap, as far as is known."""

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None:
        """A lap came back."""

    def record_growth(self, live: int, levels: int, due: int, seconds: float) -> None:
        """Growing `live` trees of so many levels took so long, `due` rows caught up with included."""


# Depths of --tuner seed: the seed's own values, kept for comparison.
SEED_FIRST_DEPTH = 5
SEED_MIN_DEPTH = 2
SEED_MAX_DEPTH = 10
# of the seed's running mean of acceptance
SEED_FIRST_MEAN = 0.8
SEED_DECAY = 0.9
# Mean acceptance below which the seed's depth shrinks, and above which it grows; the seed's values.
SEED_LOW, SEED_HIGH = 0.5, 0.85


class FixedBudget(BudgetPolicy):
    """Every tree as large as its shape, or as its share of a frame's rows where that is less; for reference
    vectors and comparisons."""


class SeedBudget(FixedBudget):
    """A running mean of accepted over drafted tokens moves the depth: below 0.5 down, above 0.85 up."""

    def __init__(self, shape: TreeShape) -> None:
        super().__init__(shape)
        self.depth = SEED_FIRST_DEPTH
        self.mean = SEED_FIRST_MEAN

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        return min(self.depth, most)

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None:
        for tree in trees:
            if tree.grown:
                self.mean = SEED_DECAY * self.mean + (1 - SEED_DECAY) * tree.accepted / tree.grown
                step = (self.mean > SEED_HIGH) - (self.mean < SEED_LOW)
                self.depth = min(max(self.depth + step, SEED_MIN_DEPTH), SEED_MAX_DEPTH)
