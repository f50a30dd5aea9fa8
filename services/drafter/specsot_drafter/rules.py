"""Who decides how much is drafted: the interface, and two who look at no clock.

Refuses to know tensors and tokens. The decider that pays attention to costs is `tuning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specsot.drafting import TunerName
from specsot.members import Curve, TreeShape
from specsot_drafter.selection import Deserves, Flags, Floats, Offer, best_each
from specsot_drafter.tuning import UNKNOWN, Returned, Spent, Tuner

FIRST_DEPTH, LEAST_DEPTH, MOST_DEPTH = 5, 2, 10
FIRST_MEAN, KEPT = 0.8, 0.9  # of the seed's running mean of acceptance
POOR, RICH = 0.5, 0.85


class Rule(Protocol):
    """Decides for one drafter.

    rest:     for how many trees nothing shall be drafted, where the last plan said so.
    drafting: trees were sent since the last rest.
    adapts:   it looks at what pays: it may rest, and candidates of others may join its trees.
    """

    rest: int
    adapts: bool

    @property
    def drafting(self) -> bool: ...

    @property
    def asks(self) -> Deserves | None:
        """Who is to be asked before each level."""
        ...

    def plan_levels(self, live: int, most: int, due: int = 0) -> int:
        """Levels that `live` trees may grow, at most `most`; `due` rows must be caught up with first."""
        ...

    def values(self, offer: Offer) -> Floats:
        """[live, n] what every candidate is worth."""
        ...

    def choose(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all."""
        ...

    def rested(self, trees: int, live: int) -> None: ...
    def settle(self, trees: Sequence[Returned], spent: Spent = UNKNOWN) -> None: ...
    def note_growth(self, live: int, levels: int, due: int, seconds: float) -> None: ...


class Always:
    """Every tree as large as its shape; for reference vectors and comparisons."""

    adapts = False
    drafting = True
    asks: Deserves | None = None
    rest = 0

    def __init__(self, shape: TreeShape) -> None:
        self._each = shape.nodes - 1

    def plan_levels(self, live: int, most: int, due: int = 0) -> int:
        return most

    def values(self, offer: Offer) -> Floats:
        return offer.scores

    def choose(self, values: Floats, levels: int, most: int) -> Flags:
        return best_each(values, self._each)

    def rested(self, trees: int, live: int) -> None:
        """Nobody rests."""

    def settle(self, trees: Sequence[Returned], spent: Spent = UNKNOWN) -> None:
        """Nothing is learned."""

    def note_growth(self, live: int, levels: int, due: int, seconds: float) -> None:
        """Costs do not matter."""


class SeedRule(Always):
    """A running mean of accepted over drafted tokens moves the depth: below 0.5 down, above 0.85 up."""

    def __init__(self, shape: TreeShape) -> None:
        super().__init__(shape)
        self.depth, self.mean = FIRST_DEPTH, FIRST_MEAN

    def plan_levels(self, live: int, most: int, due: int = 0) -> int:
        return min(self.depth, most)

    def settle(self, trees: Sequence[Returned], spent: Spent = UNKNOWN) -> None:
        for tree in trees:
            if tree.grown:
                self.mean = KEPT * self.mean + (1 - KEPT) * tree.accepted / tree.grown
                step = (self.mean > RICH) - (self.mean < POOR)
                self.depth = min(max(self.depth + step, LEAST_DEPTH), MOST_DEPTH)


def rule_of(name: TunerName, shape: TreeShape, lap: Curve, level: Curve, widths: Sequence[int]) -> Rule:
    """lap, level: see `Tuner`. A fixed shape is always drafted whole."""
    if shape.fixed or name == "fixed":
        return Always(shape)
    return SeedRule(shape) if name == "seed" else Tuner(shape, lap, level, widths)
