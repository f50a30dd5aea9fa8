"""The interface of a policy that decides how much to draft, its inputs, and policies without measurements.

A policy takes counts, probabilities and measured seconds, and returns counts. A *step* is one forward pass of
the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specsot.members import TreeShape
from specsot.values import value
from specsot_drafter.core.selection import Candidates, Flags, Floats, Ints, KeepGrowing, best_each


@value
class TreeOutcome:
    """The verification result of one tree.

    grown:    Number of levels that were grown for the tree; 0 if only its root was sent.
    rows:     Number of its nodes, root included.
    masses:   The drafter's probability of its own nodes that were sent, summed per depth.
    accepted: Number of tokens that the tree added to the step, compared with a step without it.
    own:      The depth to which the drafter's own nodes were accepted; None: equal to `accepted`.
    """

    grown: int
    rows: int
    masses: Sequence[float]
    accepted: int
    own: int | None = None


def observations_of(trees: Sequence[TreeOutcome]) -> list[tuple[int, Sequence[float], int]]:
    """Return the observations that `AcceptanceRates.record` reads, one per tree: (levels, masses, accepted).

    trees: Outcomes of the trees.

    The accepted depth is that of the drafter's own nodes, since other nodes say nothing about the drafter.
    """
    return [(one.grown, one.masses, one.accepted if one.own is None else one.own) for one in trees]


ROOT_ONLY = TreeOutcome(0, 1, (), 0)  # The outcome of a tree that consists of its root.


@value
class StepSeconds:
    """The duration of one step, in seconds; 0 where a duration is unknown.

    computed: Compute time of all stages together.
    wall: Wall-clock time of the step.
    growing: Time that the drafter took to grow the trees.
    waited: Time that the thread on which both the stage and the drafter run has waited for the device during
        the step. 0 means that the thread did not wait. None: unknown, or the trees did not grow
        asynchronously, so that the device and the host did not work at the same time.
    """

    computed: float = 0.0
    wall: float = 0.0
    growing: float = 0.0
    waited: float | None = None


UNKNOWN_SECONDS = StepSeconds()


class BudgetPolicy:
    """Policy that decides how much one drafter drafts. The base class learns nothing and never pauses.

    paused_trees: Number of trees for which drafting is paused, after `plan_levels` returned 0.
    drafting: True if a step with drafts has finished since the last pause began; always True in the base
        class.
    keep_growing: The function that is called before each further level is grown, and returns how many nodes
        of each tree to feed for it. None, as in the base class: all levels are grown.
    adaptive: True if the policy may pause drafting; then candidates of a second proposer may join its trees.
    holding: True if the levels and nodes of the current trees were chosen for an earlier step, or if the
        policy makes no choices. If a device selects the nodes, the second proposer is asked only while
        `holding` is False whether its candidates are worth joining the next trees.
    likeliest_first: True if the tree of a single sequence may travel in parts, so that its likeliest nodes
        come first.
    """

    paused_trees = 0
    drafting = True
    keep_growing: KeepGrowing | None = None
    likeliest_first = False
    adaptive = False
    holding = True

    def __init__(self, shape: TreeShape) -> None:
        """Start without observations.

        shape: The largest tree: its number of nodes and its depth.
        """
        self._each = shape.nodes - 1
        self._levels = shape.depth + 1

    def plan_levels(self, num_trees: int, max_levels: int, num_due: int = 0, num_others: int = 0) -> int:
        """Return the number of levels that trees may grow, at most `max_levels`. Return 0 if nothing is to be
        drafted; then `paused_trees` is the number of trees for which drafting is paused.

        num_trees: Number of trees.
        max_levels: Maximum number of levels of the deepest tree.
        num_due: Number of rows of committed tokens that the drafter must compute before the trees can grow.
        num_others: Number of sequences that have no tree in this step.
        """
        return max_levels

    def looks_next(self, num_sequences: int) -> bool:
        """Return whether the next step runs without drafts, to measure its duration. The base class never
        measures, and returns False.

        num_sequences: Number of sequences in the step.
        """
        return False

    def score(self, offer: Candidates) -> Floats:
        """Return the worth of every candidate, [num_trees, n]: here its score, a cumulative log-probability.

        offer: Candidates of all trees, n each.
        """
        return offer.scores

    def select(self, values: Floats, levels: int, max_nodes: int) -> Flags:
        """Return flags of the candidates to send, bool [num_trees, n].

        values: Worth of each candidate, [num_trees, n]; -inf where a candidate is barred.
        levels: Number of levels of the trees.
        max_nodes: Maximum number of candidates of all trees together, roots not counted.

        The base class sends at most the same number of every tree: max_nodes / num_trees, rounded down, or as
        many as the tree's shape has if that is fewer. Without trees, the result has no rows.
        """
        return best_each(values, min(self._each, max_nodes // max(len(values), 1)))

    def predict_nodes(self, num_trees: int, levels: int, max_nodes: int) -> int:
        """Return the number of nodes to send of each tree, without its root, if that must be fixed before the
        tree is known. Return 0 if the host selects when the candidates are known.

        num_trees: Number of trees, at least 1.
        levels: Number of levels of the trees.
        max_nodes: Maximum number of nodes of all trees together, roots not counted.

        A device can select nodes only if their number is fixed beforehand. The base class returns the number
        that the shape has, or each tree's equal share of `max_nodes`, rounded down, if that is less.
        """
        return min(self._each, max_nodes // num_trees)

    def log_trust(self) -> Floats:
        """Return the number that is added to a candidate's log-probability at each depth, [levels].

        A device ranks candidates by that sum, as the host ranks them by `score`.
        """
        return np.zeros(self._levels)

    def record_worth(self, values: Floats, depths: Ints) -> None:
        """Learn the worth of the drafter's own candidates, without those of a second proposer. The base class
        does nothing.

        values: Worth of each candidate, [num_trees, n]; -inf where a candidate is barred.
        depths: Depth of each candidate, [n], at least 1.
        """

    def keep_sample(self, candidates: Candidates) -> None:
        """Keep what is needed of these candidates to learn the worth of nodes later. The base class does
        nothing.

        candidates: Candidates of the trees of a step, at least one tree. Those that cannot be accepted need
            not be barred.
        """

    def start_sequences(self, num_sequences: int) -> bool:
        """Prepare for sequences of new requests, of which none was running before. Return whether a pause
        ends for them. The base class never pauses, and returns False.

        num_sequences: Number of sequences that run now, at least 1.
        """
        return False

    def record_pause(self, num_trees: int, num_sequences: int) -> None:
        """Record that trees were not drafted during a pause. The base class does nothing.

        num_trees: Number of these trees.
        num_sequences: Number of sequences per step, about.
        """

    def record_step(self, trees: Sequence[TreeOutcome], spent: StepSeconds = UNKNOWN_SECONDS) -> None:
        """Record a finished step. The base class does nothing.

        trees: Outcomes of the step's trees, one per sequence.
        spent: Duration of the step.
        """


# Levels. First, smallest and largest depth of `--tuner seed`. Precedent: the seed's own values, kept for
# comparison.
SEED_FIRST_DEPTH = 5
SEED_MIN_DEPTH = 2
SEED_MAX_DEPTH = 10
# Fractions. First value and decay of the running mean of acceptance. Precedent: the seed's own values.
SEED_FIRST_MEAN = 0.8
SEED_DECAY = 0.9
# Fractions. The depth shrinks below the first and grows above the second mean acceptance. Precedent: the
# seed's own values.
SEED_LOW, SEED_HIGH = 0.5, 0.85


class FixedBudget(BudgetPolicy):
    """Policy that grows every tree to its full shape, or to an equal share of the frame's rows where that is
    smaller.

    Used for reference vectors and for comparisons.
    """


class SeedBudget(FixedBudget):
    """Policy that changes the depth by one level, by the running mean of accepted tokens divided by grown
    levels.

    The depth shrinks if the mean is below SEED_LOW, and grows if the mean is above SEED_HIGH.

    depth: Present number of levels of a tree.
    mean: Running mean of accepted tokens divided by grown levels, a fraction.
    """

    def __init__(self, shape: TreeShape) -> None:
        """Start with the seed's first depth.

        shape: The largest tree.

        That is SEED_FIRST_DEPTH levels, even if the shape is less deep, with SEED_FIRST_MEAN as the mean.
        """
        super().__init__(shape)
        self.depth = SEED_FIRST_DEPTH
        self.mean = SEED_FIRST_MEAN

    def plan_levels(self, num_trees: int, max_levels: int, num_due: int = 0, num_others: int = 0) -> int:
        """Return the present depth, or `max_levels` if that is less; see `BudgetPolicy.plan_levels`.

        num_trees: Number of trees.
        max_levels: Maximum number of levels.
        num_due: Ignored.
        num_others: Ignored.
        """
        return min(self.depth, max_levels)

    def record_step(self, trees: Sequence[TreeOutcome], spent: StepSeconds = UNKNOWN_SECONDS) -> None:
        """Update the running mean with the outcomes of a step, and change the depth by at most one level per
        tree.

        trees: Outcomes of the step's trees. Trees of their root only are skipped.
        spent: Ignored.

        The depth stays in SEED_MIN_DEPTH .. SEED_MAX_DEPTH.
        """
        for tree in trees:
            if tree.grown:
                self.mean = SEED_DECAY * self.mean + (1 - SEED_DECAY) * tree.accepted / tree.grown
                step = (self.mean > SEED_HIGH) - (self.mean < SEED_LOW)
                self.depth = min(max(self.depth + step, SEED_MIN_DEPTH), SEED_MAX_DEPTH)
