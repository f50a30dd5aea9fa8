"""Decides how much to draft now: how deep, how many nodes, or for how long not at all.

There is one policy for CPUs and GPUs. The policy chooses the depth and the number of nodes with the most
expected tokens per second, from a model of acceptance (`acceptance`) and a model of costs, which are the
wall-clock seconds of whole steps. The model of costs is `DeviceCosts` where all levels of a tree are launched
at once, as on a GPU, and `StepCosts` elsewhere.

A regret budget bounds the time that drafting may lose compared with the baseline, which drafts nothing. Every
step adds a little to the budget, a step with drafts adds what it gained or subtracts what it lost. When the
budget cannot cover the next step with drafts, drafting pauses until enough has been added. There is one
budget for each group of numbers of sequences (`size_group`), because drafts that lose with 64 sequences may
gain with one; what future sequences are granted comes from one pool.

The policy takes counts, probabilities and measured seconds, and returns counts.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from specsot.core.cost_curve import CostCurve
from specsot.drafting import TunerName
from specsot.members import Curve, TreeShape
from specsot_drafter.core.acceptance import WORTH_WEIGHT, AcceptanceRates, TreeWorth
from specsot_drafter.core.budget import (
    UNKNOWN_SECONDS,
    BudgetPolicy,
    FixedBudget,
    SeedBudget,
    StepSeconds,
    TreeOutcome,
    observations_of,
)
from specsot_drafter.core.device_costs import DeviceCosts
from specsot_drafter.core.selection import (
    Candidates,
    Flags,
    Floats,
    Ints,
    acceptance_chances,
    best_overall,
    falling,
    keep_best,
    stacked,
)
from specsot_drafter.core.step_costs import HELD_STEPS, LOOK_STEPS, RECENT, StepCosts, size_group

# "The gate" is `python -m tests.drafter.gate`: it replays all recorded traces and compares the policy with
# fixed settings.
# Baseline steps. How much drafting may lose on the sequences that are being written: 2.5 % of the steps of
# 200 tokens. Chosen by the gate, from 4 to 6.
REGRET: Final = 5.0
# Multiple of REGRET. How much drafting may lose on future sequences, with all numbers of sequences together;
# gains refill it up to this limit. Chosen by the gate.
POOL: Final = 8.0
# Fraction of baseline time. The loss that is always allowed, however long drafting is not profitable.
# Chosen by the gate: 0.01 is worse.
REGRET_SHARE: Final = 0.005


@dataclass(slots=True)
class DraftChoice:
    """How much to draft in steps whose numbers of sequences are of one group (`size_group`).

    levels: Number of levels of the trees. 0 before the first choice.
    nodes: Number of nodes of each tree, without its root. 0 before the first choice.
    rate: Expected tokens per second with this choice when it was made, or without drafts if that was more.
    extra_steps: Extra time of a step with this choice over a step without drafts, in baseline steps.
    sure_to_gain: True if the choice was sure to gain and the pool was positive, so that the regret budget did
        not have to cover the choice.
    min_available: If the available regret budget falls below this value, in baseline steps, the choice has
        lost too much and is made anew.
    num_choices: Number of choices so far, since the last pause that was longer than a look.
    reuses_left: Number of further steps that may reuse the choice.
    max_saved: The largest share of the time of steps with this choice, 0 to 1, that steps without drafts
        could save for the same number of tokens. Steps without drafts count as if they took the fewest
        seconds that are possible, see `DeviceCosts.min_baseline`. For steps with this choice, the tokens per
        second are those expected, or those of the mean gain of drafting so far if these are fewer. 0 before
        the first choice, and if drafts gain even in this comparison. 1 where growth can stop between levels,
        because the fewest seconds are not known there.
    """

    levels: int = 0
    nodes: int = 0
    rate: float = 0.0
    extra_steps: float = 0.0
    sure_to_gain: bool = False
    min_available: float = 0.0
    num_choices: int = 0
    reuses_left: int = 0
    max_saved: float = 0.0


@dataclass(slots=True)
class RegretPool:
    """The loss that drafting may still cause on future sequences: one limit for the budgets of all groups of
    numbers of sequences.

    The pool is shared, because a server that gets busy passes through many of these groups: with a pool for
    each, drafts that are not profitable could lose many times as much.

    left: Baseline steps that may be lost. Only gains and losses change it, not what a budget is granted.
    """

    left: float = POOL * REGRET

    def record(self, more: float) -> None:
        """Add a gain or a loss. The pool is bounded above by POOL * REGRET and below by -REGRET.

        more: Baseline steps; negative for a loss.
        """
        self.left = min(max(self.left + more, -REGRET), POOL * REGRET)


class RegretBudget:
    """The loss that drafting may still cause with the numbers of sequences of one group (`size_group`), in
    baseline steps (the time of one step without drafts).

    available: Budget for the sequences that are being written, in baseline steps. Negative after a loss that
        was larger than expected.
    """

    def __init__(self, pool: RegretPool) -> None:
        """Start with REGRET, whatever the pool has left, so that each number of sequences is tried once.

        pool: The limit for future sequences, which all groups share.
        """
        self.available = REGRET
        self._pool = pool

    def record(self, gained: float, steps: float = 1.0) -> None:
        """Book the result of drafting, in the pool, too. The budget is bounded above by 2 * REGRET and below
        by -REGRET, so that one bad phase does not end drafting for good.

        gained: Baseline steps that drafting saved; negative if drafting cost time.
        steps: Number of steps that passed. Each adds REGRET_SHARE to the budget.
        """
        more = gained + REGRET_SHARE * steps
        self.available = min(max(self.available + more, -REGRET), 2 * REGRET)
        self._pool.record(more)

    def begin_sequences(self) -> None:
        """Raise the budget for new sequences, which have lost nothing yet: to REGRET, or to what the pool has
        left if that is less. A larger budget is kept, and the pool stays as it is.
        """
        self.available = max(self.available, min(self._pool.left, REGRET))

    def steps_until(self, needed: float) -> float:
        """Return the number of steps without drafts after which the budget covers a loss. Return 0 if it
        covers the loss now.

        needed: Baseline steps that may be lost.

        With 1.0 available and 2.0 needed, (2.0 - 1.0) / REGRET_SHARE = 200 steps.
        """
        return max(needed - self.available, 0.0) / REGRET_SHARE


class DraftPolicy(BudgetPolicy):
    """Policy that chooses the depth and the number of nodes with the most expected tokens per second.

    Only choices whose cost the regret budget covers are considered. If there is none, drafting is paused.
    From time to time the policy looks: it pauses for LOOK_STEPS steps to measure steps without drafts.

    drafting: True if a step with drafts has finished since the last pause began. False before the first one.
    keep_growing: `is_deeper_profitable`. None if all levels are launched at once, so that growth cannot stop.
    costs: Model of the seconds of steps, learned from finished steps.
    acceptance: How likely drafts are accepted by depth, learned from verified trees.
    """

    adaptive = True
    holding = False

    def __init__(
        self,
        shape: TreeShape,
        step: Curve,
        level: Curve,
        widths: Sequence[int],
        stepwise: bool = True,
        overlapping_stages: int = 1,
        max_rows: int = sys.maxsize,
    ) -> None:
        """Start without observations.

        shape: The largest tree: its number of nodes and its depth.
        step: (tokens, seconds) points of one forward pass through all stages, see `StepCosts`.
        level: (rows, seconds) points of one forward pass of the draft head, see `StepCosts`.
        widths: Rows per tree that the head computes for levels 2, 3, ...; they also bound the depth.
        stepwise: True if growth can stop between levels. Then trees start small, and at most double from the
            largest so far, because every node adds to the cost of a step. False if all levels are launched at
            once. Then the host may take most of a step, whatever the size of the trees, and `costs` is a
            `DeviceCosts`.
        overlapping_stages: Number of stages that may compute at the same time, see `StepCosts`. If `stepwise`
            is False, costs do not depend on this number.
        max_rows: Maximum number of rows of a step: one root per sequence, and all draft nodes. Nodes for
            which a step has no room are not considered.

        The depth of the shape is cut to the number of widths.
        """
        super().__init__(replace(shape, depth=min(shape.depth, len(widths))))
        self.costs = (
            StepCosts(step, level, widths, overlapping_stages)
            if stepwise
            else DeviceCosts(step, level, widths)
        )
        self.acceptance = AcceptanceRates(self._levels)
        self.likeliest_first = overlapping_stages > 1
        self._worth = TreeWorth(self.acceptance)
        # The budget of future sequences, and the budgets by `size_group` of the number of sequences.
        self._pool = RegretPool()
        self._regrets = defaultdict[int, RegretBudget](lambda: RegretBudget(self._pool))
        # The budget for the number of sequences of the step that was planned last.
        self._regret = self._regrets[0]
        self._stepwise = stepwise
        self._max_rows = max_rows
        # The time by which the last first step after a pause exceeded the estimate of a step with drafts, in
        # baseline steps. It stays 0 where growth can stop between levels.
        self._restart = 0.0
        # The number of sequences in the step that get no tree.
        self._others = 0
        self.drafting = False
        self.keep_growing = self.is_deeper_profitable if stepwise else None
        # True if the duration of the last recorded step was known. Steps with prompt tokens are not timed.
        self._timed = True
        # Groups (`size_group`) of numbers of sequences with which drafting was paused at least once, for a
        # look or for longer. Their baseline counts as measured.
        self._looked = set[int]()
        # The number of finished steps with drafts since the last look or other pause began.
        self._since_look = 0
        # Running mean of the tokens per second relative to the baseline.
        self._gain = 1.0
        # The last choices, by `size_group` of the number of sequences. With eight clients, a sequence begins
        # or ends in many steps. Each size has its own choice, so that these steps do not choose anew.
        self._choices = defaultdict[int, DraftChoice](DraftChoice)
        # The choice for the step that was planned last.
        self._choice = DraftChoice()
        # Candidates of one tree of each step since the worth was updated last, at most RECENT. All of them
        # have the same depths. Empty where growth can stop between levels.
        self._samples = deque[Candidates](maxlen=RECENT)
        # The number of sampled trees that the worth was updated with so far.
        self._num_sampled = 0
        # Number of nodes, without the root, of the largest grown tree that was verified so far.
        self._largest = 0
        # Observations of verified trees, oldest first, that the acceptance rates have not been updated with.
        # Only the newest 384 are kept, because DECAY leaves less than a ten-thousandth of the weight of older
        # ones. With 64 sequences, 3,000 trees return between two choices. With the observations of all these
        # trees, a choice took 4 ms instead of 1 ms on an H200.
        self._returned = deque[tuple[int, Sequence[float], int]](maxlen=HELD_STEPS * RECENT)

    def plan_levels(self, num_trees: int, max_levels: int, num_due: int = 0, num_others: int = 0) -> int:
        """Return the number of levels that trees may grow. Return 0 if nothing is to be drafted; then
        `paused_trees` is the number of trees for which drafting is paused.

        num_trees: Number of trees. 0: the result is 0, and nothing is paused.
        max_levels: Maximum number of levels of the deepest tree. 0: as for no trees.
        num_due: Number of rows of committed tokens that the drafter must compute before the trees can grow.
        num_others: Number of sequences that have no tree in this step.

        If growth can stop between levels, the result is `max_levels`, and `is_deeper_profitable` decides
        where growth stops. Otherwise the result is the chosen number of levels, at most `max_levels`.

        A result of 0 with `paused_trees` set has one of two reasons: a look is due (LOOK_STEPS steps), or
        `_choose` found no choice that can gain and that the regret budget covers. If a choice is reused,
        `holding` becomes True unless growth can stop between levels.
        """
        self.paused_trees = 0
        self.holding = False
        self._others = num_others
        sequences = num_trees + num_others
        if not num_trees or max_levels <= 0:
            return 0
        self._regret = self._regrets[size_group(sequences)]
        self._choice = self._choices[size_group(sequences)]
        if self.looks_next(sequences):
            pause_steps = float(LOOK_STEPS)
        else:
            pause_steps = (
                0.0
                if self._reuses_choice(num_trees, max_levels, num_due)
                else self._choose(num_trees, max_levels, num_due)
            )
        if pause_steps:
            self._pause(pause_steps, sequences)
            return 0
        return max_levels if self._stepwise else min(self._choice.levels, max_levels)

    def _reuses_choice(self, num_trees: int, max_levels: int, num_due: int) -> bool:
        """Return whether the last choice for about as many sequences is reused for this step. If it is, one
        of its remaining reuses is used up, and `holding` becomes True unless growth can stop between levels.

        num_trees: Number of trees, at least 1.
        max_levels: Maximum number of levels.
        num_due: Number of rows of committed tokens that the drafter must compute first.

        The choice is reused if all of the following conditions hold:

        * The regret budget covers the cost of the choice, or the choice is sure to gain.
        * A step with drafts has finished since the last pause began.
        * Reuses remain. `_choose` sets their number.
        * The regret budget has not fallen by more than half of REGRET since the choice.
        * Where growth can stop between levels: the choice has at most `max_levels` levels. Where levels are
          launched at once, this is no condition: `plan_levels` cuts the choice to `max_levels` for this step.
          Near the end of every sequence `max_levels` is small, and a new choice would delay the step.

        If more than levels + 2 rows per tree are due, the cost of computing them is added to the cost that
        the budget must cover, and it is booked in the budget if the choice is reused.
        """
        choice = self._choice
        # The extra time for computing the due rows, in baseline steps.
        catch_up = 0.0
        is_applicable = not self._stepwise or choice.levels <= max_levels
        if num_due > num_trees * (choice.levels + 2):
            catch_up = self.costs.growth.catch_up(num_due) / self.costs.baseline(num_trees + self._others)
        is_covered = choice.sure_to_gain or choice.extra_steps + catch_up <= self._regret.available
        is_reused = (
            is_applicable
            and is_covered
            and self._regret.available >= choice.min_available
            and self.drafting
            and choice.reuses_left > 0
        )
        if is_reused:
            choice.reuses_left -= 1
            self._regret.record(-catch_up, 0)
        self.holding = is_reused and not self._stepwise
        return is_reused

    def _choose(self, num_trees: int, max_levels: int, num_due: int) -> float:
        """Choose the levels and the nodes per tree with the most expected tokens per second.

        num_trees: Number of trees, at least 1.
        max_levels: Maximum number of levels, at least 1.
        num_due: Number of rows of committed tokens that the drafter must compute first.

        Return 0 if a choice is made. Otherwise return the number of steps to pause. A choice must meet two
        conditions:

        * It can gain: it would save time if a node of every level were accepted. Where growth can stop
          between levels, every choice meets this condition until a tree with draft nodes was verified.
        * The regret budget covers the sum of the choice's cost (`extra_steps`), the cost of computing the due
          rows, and the extra time that the first step after the most recent pause took (`_restart`), at most
          one baseline step. The extra time is part of the sum even if no pause precedes this step. If the
          choice is expected to lose, half of REGRET is added to the sum, so that a head that is seldom right
          is tried less often than one that was right so far. If levels are launched at once and the pool is
          positive, a choice that is sure to gain need not be covered.

        Example: a step without drafts takes 10 ms, a step with trees of 3 levels and 3 nodes 15 ms, and no
            rows are due. The cost is 15 / 10 - 1 = 0.5 baseline steps. The choice can gain, because 3
            accepted tokens per sequence outweigh 0.5. If 0.8 accepted tokens are expected, 1.8 tokens in
            15 ms are more than 1 in 10 ms, and the choice is allowed if the budget is at least 0.5. If only
            0.3 are expected, the budget must be at least 0.5 + REGRET / 2 = 3.

        The pause has LOOK_STEPS steps if the baseline is to be measured anew, or if no choice can gain but
        fewer levels than the deepest were allowed. Otherwise, it has 1 / REGRET_SHARE steps if no choice can
        gain, and else as many as it takes until the budget covers the cheapest choice that can gain, at least
        LOOK_STEPS.

        If a choice is made, it is stored with the number of its reuses, and the cost of computing the due
        rows is booked in the budget. There are HELD_STEPS reuses; where levels are launched at once, the n-th
        choice of this size group since the last pause that was longer than a look has n / 2 times as many in
        addition: with HELD_STEPS = 8, the first choice has 12 reuses, the second 16 and the third 20. While
        the costs know fewer steps with drafts than that, there are as many reuses as known steps, at least 2.
        """
        self._learn_acceptance()
        self._learn_worth()
        self.costs.learn()
        sequences = num_trees + self._others
        # Where levels are launched at once, the choice may have all levels even if every sequence is near its
        # end, because the choice will be reused for steps in which no sequence is.
        max_levels = max_levels if self._stepwise else self._levels
        each = min(
            self._each,
            max((self._max_rows - sequences) // num_trees, 1),
            max(2 * self._largest, 1) if self._stepwise else self._each,
        )
        # The arrays below are [levels, nodes]: row 0 is a tree of one level, column 0 a tree of one node
        # besides its root. In `cumulative_worth`, a further column before these stands for a tree of its root
        # alone.
        levels = np.arange(1, max_levels + 1)
        nodes = np.arange(1, each + 1)
        baseline = self.costs.baseline(sequences)
        cumulative_worth = self._worth.best(self._levels, self._each)[:max_levels, : each + 1]
        worth = cumulative_worth[:, 1:]
        seconds = self.costs.drafted(
            sequences, num_trees, levels[:, None], num_trees * nodes, cumulative_worth
        )
        extra_steps = np.maximum(seconds / baseline - 1, 0.0)
        rates = (sequences + num_trees * worth) / seconds
        # What must remain of the budget: half of REGRET if the choice is expected to lose. Half was chosen by
        # the gate; none of REGRET and all of it are worse.
        reserve = np.where(rates > sequences / baseline, 0.0, REGRET / 2)
        # At most one baseline step: a single first step that was slow, as one that compiles kernels is, must
        # not keep drafts away for a thousand steps.
        restart = min(self._restart, 1.0)
        needed = extra_steps + reserve + restart + self.costs.growth.catch_up(num_due) / baseline
        # If another process disturbed the measurement of the curves at startup, they must not rule out drafts
        # that were never tried. So the first trees are only bounded by the budget.
        untried = self._stepwise and not self._largest
        can_gain = untried | (extra_steps < num_trees / sequences * np.minimum(levels[:, None], nodes))
        sure_to_gain = num_trees / sequences * self.acceptance.sure_tokens()[levels - 1, None] > extra_steps
        # Where the host's work is most of a step, other work of the machine slows steps with and without
        # drafts alike. So the baseline is measured anew before a long pause.
        stale = not self._stepwise and self._since_look * 2 * REGRET_SHARE >= 1.0
        may_borrow = not self._stepwise and self._pool.left > 0
        allowed = can_gain & (sure_to_gain & may_borrow | (needed <= self._regret.available))
        if not allowed.any():
            if stale or (max_levels < self._levels and not can_gain.any()):
                return LOOK_STEPS
            # If no choice can gain, 1 more than is available is asked for: a pause of 1 / REGRET_SHARE steps.
            cheapest = needed[can_gain].min() if can_gain.any() else self._regret.available + 1
            return max(self._regret.steps_until(float(cheapest)), LOOK_STEPS)
        level, node = np.unravel_index(np.argmax(np.where(allowed, rates, 0.0)), rates.shape)
        min_baseline = (
            min(self.costs.min_baseline(sequences), baseline) if isinstance(self.costs, DeviceCosts) else 0.0
        )
        choice = self._choice
        # Tokens per second of each sequence: as expected from the choice, or as the mean gain so far says if
        # these are fewer. Steps without drafts write at most 1 / min_baseline.
        rate_per_sequence = min(float(rates[level, node]) / sequences, self._gain / baseline)
        choice.max_saved = max(1 - min_baseline * rate_per_sequence, 0.0)
        choice.rate = max(float(rates[level, node]), sequences / baseline)
        choice.extra_steps = float(extra_steps[level, node])
        choice.sure_to_gain = may_borrow and bool(sure_to_gain[level, node])
        choice.levels = int(levels[level])
        choice.nodes = int(nodes[node])
        # Where levels are launched at once, a choice delays steps. Traced on an H200: with one sequence, the
        # three steps after a choice took 2 ms longer in all than others, which took 2.4 ms each; with eight
        # sequences 9 ms longer, but most of those choices were made beside prompts. So the n-th choice is
        # reused for longer.
        choice.num_choices += 1
        max_reuses = HELD_STEPS if self._stepwise else HELD_STEPS * (choice.num_choices + 2) // 2
        choice.reuses_left = min(max(self.costs.known, 2), max_reuses)
        self._regret.record(-self.costs.growth.catch_up(num_due) / baseline, 0)
        choice.min_available = self._regret.available - REGRET / 2
        return 0.0

    def _learn_acceptance(self) -> None:
        """Update the acceptance rates with the verified trees that were collected. Nothing happens if there
        are none.
        """
        self.acceptance.record(self._returned)
        self._returned.clear()

    def _learn_worth(self) -> None:
        """Update the worth of nodes with the candidates that `keep_sample` has kept, as if they were of one
        step, and drop these candidates. Nothing happens if there are none.

        The weight of these trees is their share of all sampled trees so far, but at least WORTH_WEIGHT. The
        first choices follow each other after a few steps, later ones after dozens. If the weight were always
        WORTH_WEIGHT, the few trees before the first choices would count for most: after eight updates, the
        trees of the first update would still have a fifth of all weight. On an H200, one sequence got trees
        of 4 levels for 300 steps because of that, where 7 levels were better.

            # updates with 1, 1, 3 and 20 trees -> weights 1, 1/2, 3/5 and 20/25
        """
        if self._samples:
            candidates = stacked(self._samples)
            self._num_sampled += len(self._samples)
            self._worth.record(
                self.score(candidates),
                candidates.depths,
                max(WORTH_WEIGHT, len(self._samples) / self._num_sampled),
            )
            self._samples.clear()

    def looks_next(self, num_sequences: int) -> bool:
        """Return whether the next step measures the baseline instead of drafting. False if the last step was
        not timed.

        num_sequences: Number of sequences in the step.

        If drafting was never paused with about as many sequences, a look is due at once, because only a
        measurement tells how long the host takes for steps with so many sequences. An estimate from other
        numbers of sequences is mostly too low, and then large trees seem to lose.

        Later, a look is due if its loss is at most the time that steps without drafts could have saved since
        the last pause. This time is a share of the steps with drafts since then: `max_saved` of the last
        choice for about as many sequences, but at most 2 * REGRET_SHARE. If `max_saved` is 0, no look is due,
        because drafts gain whatever the look would measure, or because no choice was made yet.

        The loss of a look is estimated from the mean gain of drafting so far and the extra time that the last
        first step after a pause took. The loss counts as at least 1 baseline step, so that a look is due
        after 100 steps with drafts at the earliest.

            # 64 sequences take 7.8 ms with drafts for 3 tokens each, and 2.3 ms or more without drafts
            # -> max_saved = 1 - 3 * 2.3 / 7.8 = 0.12, more than 2 * REGRET_SHARE = 0.01; a look that loses
            #    3 steps is due after 300 steps
        """
        size = size_group(num_sequences)
        lost = LOOK_STEPS * (1 - 1 / max(self._gain, 1.0)) + self._restart
        saved_share = min(self._choices[size].max_saved, 2 * REGRET_SHARE)
        is_due = size not in self._looked or self._since_look * saved_share >= max(lost, 1.0)
        return self._timed and is_due

    def is_deeper_profitable(self, scores: Floats, depth: int) -> int:
        """Return how many nodes of each tree's frontier to expand, best first. Return 0 to stop growing.

        scores: Cumulative log-probabilities of the frontier at `depth`, [num_trees, width], falling in each
            row.
        depth: Distance of the frontier from the root, at least 1.

        Another level is profitable if the tokens that the level is expected to add exceed the tokens that
        would be written in the same time otherwise.

        The rate of the last choice is what would be written otherwise. At most as many nodes as the frontier
        is wide are returned.
        """
        num_trees = len(scores)
        costs = self.costs
        assert isinstance(costs, StepCosts)
        reached = np.minimum(np.cumsum(np.exp(scores), 1) * self.acceptance.trust()[depth - 1], 1.0).sum(0)
        rows = num_trees * np.arange(1, scores.shape[1] + 1)
        seconds = costs.one_more_level(rows, num_trees, num_trees * depth + self._others)
        gains = reached * self.acceptance.by_depth()[depth] - self._choice.rate * seconds
        best = int(np.argmax(gains))
        return best + 1 if gains[best] > 0 else 0

    def predict_nodes(self, num_trees: int, levels: int, max_nodes: int) -> int:
        """Return the number of nodes of each tree, without its root: that of the last choice, at most the
        tree's equal share of `max_nodes`. Return 0 if growth can stop between levels, as `select` then
        decides.

        num_trees: Number of trees, at least 1.
        levels: Ignored.
        max_nodes: Maximum number of nodes of all trees together, roots not counted.
        """
        return 0 if self._stepwise else min(self._choice.nodes, max_nodes // num_trees)

    def score(self, offer: Candidates) -> Floats:
        """Return the chance of each candidate to be accepted, [num_trees, n]: the head's probability,
        corrected by what was learned; -inf where a candidate is barred.

        offer: Candidates of all trees, n each.
        """
        return acceptance_chances(offer, self.acceptance.trust())

    def log_trust(self) -> Floats:
        """Return the logarithm of the factor by which `score` multiplies the head's probability, for each
        depth: [levels].
        """
        return np.log(self.acceptance.trust())

    def select(self, values: Floats, levels: int, max_nodes: int) -> Flags:
        """Return flags of the candidates to send, bool [num_trees, n].

        values: Chance of acceptance of each candidate, [num_trees, n]; -inf where a candidate is barred.
        levels: Number of levels of the trees.
        max_nodes: Maximum number of candidates of all trees together, roots not counted.

        The candidates of all trees compete with each other. Their number is the one with the most expected
        tokens per second, which may be 0.

        At most twice the chosen number of nodes, or twice the largest tree so far, are considered per tree,
        and never more than the tree shape allows. With `max_nodes` 0 or less, no flag is set. Barred
        candidates are never selected.
        """
        num_trees = len(values)
        open_to = keep_best(values, min(self._each, 2 * max(self._choice.nodes, self._largest)))
        worth = falling(open_to)[: max(max_nodes, 0)]
        cumulative_worth = np.concatenate(([0.0], np.cumsum(worth)))
        sequences, nodes = num_trees + self._others, np.arange(len(cumulative_worth))
        seconds = self.costs.drafted(sequences, num_trees, levels, nodes, cumulative_worth)
        rates = (sequences + cumulative_worth) / seconds
        return best_overall(open_to, int(np.argmax(rates)))

    def record_worth(self, values: Floats, depths: Ints) -> None:
        """Learn the worth of the drafter's own candidates. Nothing happens where levels are launched at once,
        because `keep_sample` is used there.

        values: Chance of acceptance of each candidate, [num_trees, n]; -inf where a candidate is barred.
        depths: Depth of each candidate, [n], at least 1.
        """
        if self._stepwise:
            self._worth.record(values, depths)

    def keep_sample(self, candidates: Candidates) -> None:
        """Keep the candidates of one tree, to learn their worth at the next choice. Nothing happens where
        growth can stop between levels.

        The host has no time to score all trees of every step, and the candidates of a single step say little:
        with one sequence, the tokens that a tree adds vary between 0 and all its levels.

        candidates: Candidates of the trees of a step, at least one tree. Those that cannot be accepted need
            not be barred.

        The trees take turns: after n steps with drafts since the last pause began, the tree n modulo the
        number of trees is kept. If the candidates have other depths than the kept ones, the kept ones are
        dropped, because `_learn_worth` takes all of them to have the same depths. If the candidates of RECENT
        trees are kept already, those of the oldest tree are dropped.
        """
        if self._stepwise:
            return
        # All candidates that the same graph has grown have the same array as `depths`. So in most steps, the
        # identity of the array suffices, and its contents need not be compared.
        if self._samples and not (
            self._samples[0].depths is candidates.depths
            or np.array_equal(self._samples[0].depths, candidates.depths)
        ):
            self._samples.clear()
        self._samples.append(candidates.only(self._since_look % len(candidates)))

    def start_sequences(self, num_sequences: int) -> bool:
        """Grant new sequences their regret budget, in the budgets of all numbers of sequences. Return whether
        the budget for their present number is positive, so that a pause ends for them.

        num_sequences: Number of sequences that run now, at least 1.
        """
        for regret in self._regrets.values():
            regret.begin_sequences()
        return self._regrets[size_group(num_sequences)].available > 0

    def record_pause(self, num_trees: int, num_sequences: int) -> None:
        """Record that trees were not drafted during a pause; every step without drafts adds to the regret
        budget of the number of sequences with which the pause began.

        num_trees: Number of these trees.
        num_sequences: Number of sequences per step.
        """
        self._regret.record(0.0, num_trees / num_sequences)

    def record_step(self, trees: Sequence[TreeOutcome], spent: StepSeconds = UNKNOWN_SECONDS) -> None:
        """Learn costs and acceptance from a finished step with drafts, and book its gain or loss in the
        regret budget of its number of sequences.

        trees: Outcomes of the step's trees, one per sequence. Empty: nothing happens.
        spent: Duration of the step. Costs are learned only if its wall-clock seconds are known.

        If no tree was grown, only the baseline is recorded, if the wall-clock seconds are known. The duration
        of the first step after a pause does not change the costs; where levels are launched at once, the time
        by which it exceeds the estimate is booked in the budget, at most REGRET, and remembered as the extra
        time of the next start. A step without any duration counts as not timed, so that no look follows.
        """
        if not trees:
            return
        self._timed = spent.computed + spent.wall > 0
        num_sequences = len(trees)
        rows = sum([tree.rows for tree in trees])
        if not (drafted := [tree for tree in trees if tree.grown]):
            if spent.wall:
                self.costs.record_baseline(num_sequences, spent)
            return
        grown = drafted[0].grown
        accepted = sum([tree.accepted for tree in drafted]) / num_sequences
        self._largest = max(self._largest, max([tree.rows for tree in drafted]) - 1)
        # The first step after a pause takes longer than the following ones, so its duration is not recorded.
        if spent.wall and rows > num_sequences and self.drafting:
            self.costs.record_drafted(num_sequences, len(drafted), grown, rows, spent)
            if self.costs.known <= HELD_STEPS:
                self.costs.learn()
        baseline = self.costs.baseline(num_sequences)
        cumulative_worth = self._worth.best(self._levels, self._each)[grown - 1]
        seconds = self.costs.drafted(
            num_sequences, len(drafted), grown, rows - num_sequences, cumulative_worth
        )
        extra_steps = max(float(seconds) / baseline - 1, 0.0)
        restart = 0.0
        if spent.wall and not (self.drafting or self._stepwise):
            # The first step after a pause is booked at its real duration, at most REGRET above the estimate.
            self._restart = restart = min(max(spent.wall / baseline - 1 - extra_steps, 0.0), REGRET)
        self._regrets[size_group(num_sequences)].record(accepted - extra_steps - restart)
        self._gain += ((1 + accepted) / (1 + extra_steps) - self._gain) / RECENT
        self.drafting = True
        self._since_look += 1
        self._returned += observations_of(drafted)
        # Where all levels are launched at once, the host has no time here, and learns when it chooses next.
        if self._stepwise:
            self._learn_acceptance()

    def _pause(self, steps: float, sequences: int) -> None:
        """Pause drafting, and set `paused_trees` to the number of trees for which it is paused.

        steps: Number of steps of the pause.
        sequences: Number of sequences per step.

        If a step with drafts has finished since the previous pause, the costs forget slow steps, see
        `StepCosts.forget`. Where all levels are launched at once, they forget nothing before a look, because
        there the mean duration counts, and the mean of only the fastest steps would be too low. The number of
        steps since the last look becomes 0, and the last choice for about as many sequences is not reused. A
        pause that is longer than a look also lets the number of choices for about as many sequences begin
        with 0 again, so that the next choices are reused for fewer steps. From now on, the baseline for about
        as many sequences counts as measured, see `looks_next`.
        """
        if self.drafting and (self._stepwise or steps > LOOK_STEPS):
            self.costs.forget()
        self.drafting = False
        self._since_look = 0
        self._looked.add(size_group(sequences))
        self._choice.reuses_left = 0
        if steps > LOOK_STEPS:
            self._choice.num_choices = 0
        self.paused_trees = math.ceil(steps * sequences)


def make_budget(
    name: TunerName,
    shape: TreeShape,
    step: Curve,
    level: Curve,
    widths: Sequence[int],
    at_once: bool = False,
    overlapping_stages: int = 1,
    graph_rows: Sequence[int] = (),
    max_rows: int = sys.maxsize,
) -> BudgetPolicy:
    """Return the policy that the tuner option names. A fixed tree shape always gets `FixedBudget`.

    name: Value of the option `--tuner`: fixed, seed or measured.
    shape: The largest tree.
    step: (tokens, seconds) points of one forward pass through all stages, see `StepCosts`.
    level: (rows, seconds) points of one forward pass of the draft head, see `StepCosts`.
    widths: Rows per tree that the head computes for levels 2, 3, ...
    at_once: True if all levels are launched at once, so that growth cannot stop between levels.
    overlapping_stages: Number of stages that may compute at the same time, see `StepCosts`.
    graph_rows: Numbers of rows for which the stages have captured graphs. A step is counted as the next
        larger of them: with (256, 384), one of 320 rows takes as long as one of 384. Empty: every number of
        rows has its own time.
    max_rows: Maximum number of rows of a step, see `DraftPolicy`.

    The name `seed` gives `SeedBudget`, and every other name `DraftPolicy`.
    """
    if shape.fixed or name == "fixed":
        return FixedBudget(shape)
    if name == "seed":
        return SeedBudget(shape)
    rows_curve = tuple((int(rows), seconds) for rows, seconds in CostCurve(step).in_sizes(graph_rows).points)
    return DraftPolicy(shape, rows_curve, level, widths, not at_once, overlapping_stages, max_rows)
