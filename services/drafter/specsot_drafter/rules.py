"""Who decides how much is drafted: the interface, and two who look at no clock.

Refuses to know tensors and tokens. The decider that pays attention to costs is `tuning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specsot.drafting import TunerName
from specsot.members import Curve, TreeShape
from specsot_drafter.selection import Candidates, Flags, Floats, KeepGrowing, best_each
from specsot_drafter.tuning import UNKNOWN_SECONDS, LapSeconds, MeasuredBudget, TreeOutcome

SEED_FIRST_DEPTH, SEED_MIN_DEPTH, SEED_MAX_DEPTH = 5, 2, 10
SEED_FIRST_MEAN, SEED_DECAY = 0.8, 0.9  # of the seed's running mean of acceptance
SEED_LOW, SEED_HIGH = 0.5, 0.85


class BudgetPolicy(Protocol):
    """Decides for one drafter.

    rest:     for how many trees nothing shall be drafted, where the last plan said so.
    drafting: trees were sent since the last rest.
    adapts:   it looks at what pays: it may rest, and candidates of others may join its trees.
    """

    rest: int
    adaptive: bool

    @property
    def drafting(self) -> bool: ...

    @property
    def keep_growing(self) -> KeepGrowing | None:
        """Who is to be asked before each level."""
        ...

    def plan_levels(self, live: int, most: int, due: int = 0) -> int:
        """Levels that `live` trees may grow, at most `most`; `due` rows must be caught up with first."""
        ...

    def score(self, offer: Candidates) -> Floats:
        """[live, n] what every candidate is worth."""
        ...

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all."""
        ...

    def record_rest(self, trees: int, live: int) -> None: ...
    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None: ...
    def record_growth(self, live: int, levels: int, due: int, seconds: float) -> None: ...


class FixedBudget:
    """Every tree as large as its shape; for reference vectors and comparisons."""

    adaptive = False
    drafting = True
    keep_growing: KeepGrowing | None = None
    rest = 0

    def __init__(self, shape: TreeShape) -> None:
        self._each = shape.nodes - 1

    def plan_levels(self, live: int, most: int, due: int = 0) -> int:
        return most

    def score(self, offer: Candidates) -> Floats:
        return offer.scores

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        return best_each(values, self._each)

    def record_rest(self, trees: int, live: int) -> None:
        """Nobody rests."""

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None:
        """Nothing is learned."""

    def record_growth(self, live: int, levels: int, due: int, seconds: float) -> None:
        """Costs do not matter."""


class SeedBudget(FixedBudget):
    """A running mean of accepted over drafted tokens moves the depth: below 0.5 down, above 0.85 up."""

    def __init__(self, shape: TreeShape) -> None:
        super().__init__(shape)
        self.depth, self.mean = SEED_FIRST_DEPTH, SEED_FIRST_MEAN

    def plan_levels(self, live: int, most: int, due: int = 0) -> int:
        return min(self.depth, most)

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None:
        for tree in trees:
            if tree.grown:
                self.mean = SEED_DECAY * self.mean + (1 - SEED_DECAY) * tree.accepted / tree.grown
                step = (self.mean > SEED_HIGH) - (self.mean < SEED_LOW)
                self.depth = min(max(self.depth + step, SEED_MIN_DEPTH), SEED_MAX_DEPTH)


def make_budget(
    name: TunerName, shape: TreeShape, lap: Curve, level: Curve, widths: Sequence[int]
) -> BudgetPolicy:
    """lap, level: see `MeasuredBudget`. A fixed shape is always drafted whole."""
    if shape.fixed or name == "fixed":
        return FixedBudget(shape)
    return SeedBudget(shape) if name == "seed" else MeasuredBudget(shape, lap, level, widths)
