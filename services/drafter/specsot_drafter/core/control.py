"""How much to draft now: how deep, how many nodes, or for how long not at all.

One policy for CPUs and GPUs. It chooses the depth and the number of nodes with the most expected tokens per
second, from one model of acceptance (`acceptance`) and one of costs (`StepCosts`: seconds of whole steps, by
the clock). A regret budget bounds what it may lose to the baseline, which drafts nothing: once that is spent,
drafting is paused for as long as it takes until the next step with drafts is paid for. Counts, probabilities
and measured seconds in, counts out.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from specsot.core.cost_curve import UNIT_CURVE, CostCurve
from specsot.drafting import TunerName
from specsot.members import Curve, TreeShape
from specsot_drafter.core.acceptance import AcceptanceRates, TreeWorth
from specsot_drafter.core.budget import (
    UNKNOWN_SECONDS,
    BudgetPolicy,
    FixedBudget,
    LapSeconds,
    SeedBudget,
    TreeOutcome,
    lessons_of,
)
from specsot_drafter.core.selection import (
    Candidates,
    Flags,
    Floats,
    Ints,
    KeepGrowing,
    acceptance_chances,
    best_overall,
    falling,
    keep_best,
)

# "The gate" is `python -m tests.drafter.gate`: all recorded traces, beside fixed settings.
REGRET: Final = (
    5.0  # Baseline steps. What sequences may lose: 2.5 % of 200 tokens. Chosen by the gate: 4 to 6.
)
POOL: Final = (
    8.0  # Times REGRET. What sequences to come may lose, and what gains save up. Chosen by the gate.
)
REGRET_SHARE: Final = (
    0.005  # Of baseline time. What drafting may lose for ever. Chosen by the gate: 0.01 is worse.
)
# Times what drafts add to a step. How much longer the first step with drafts, or without, takes where all
# levels are launched at once. Chosen by measurement: 1.3 and 3.1 ms of 2.4 (SmolLM2-135M, H100).
CHANGE: Final = 0.75
CATCH_UP_SHARE: Final = 0.3  # Fraction. Of a level over as many rows, for rows caught up with. Untuned.
RECENT: Final = 48  # Steps with drafts. How many costs are learned from. Chosen by the gate: 24 is worse.
QUANTILE: Final = (
    0.4  # Fraction. Of recent step times, believed: neighbours only slow down. Chosen by the gate.
)
HELD_STEPS: Final = 8  # Steps. How long a choice is held, as choosing takes a host 1 ms. Chosen by the gate.
LOOK_STEPS: Final = 6  # Steps. Without drafts, to see what those take. Chosen by the gate: 4 and 8 are worse.
# Sequences, and times. How many are drafted for after a pause, and how many times more with every step: 64
# prompts at once delayed a step by 35 ms (8B, H100). Untuned.
RAMP: Final = 4

Point = tuple[float, float]


class StepCosts:
    """Seconds of a step with drafts and without, by the clock.

    A step with drafts takes what growth takes, and what its rows take. Both are measured beforehand as
    curves, which may be wrong: for a busy machine, or because a host takes most of a step. So growth is a
    straight line of its curve, and so are rows, through recent steps (Theil and Sen); sizes that were seen
    lately are scaled to what they took.
    """

    def __init__(self, step: Curve, level: Curve, widths: Sequence[int]) -> None:
        """step: seconds per rows of all stages; level: seconds per rows of one level of growth.
        widths: rows per tree that level 2, 3, ... takes.
        """
        self._step = CostCurve(step) or UNIT_CURVE
        self._level = CostCurve(level) or UNIT_CURVE
        self._widths = 1, *widths
        # By bits of the number of sequences: (sequences, seconds) of steps without drafts.
        self._baseline = defaultdict[int, deque[Point]](lambda: deque(maxlen=LOOK_STEPS))
        # (rows, seconds without growth) of steps with drafts.
        self._drafted = deque[Point](maxlen=RECENT)
        # (seconds by the curve, seconds) of growth.
        self._grown = deque[Point](maxlen=RECENT)
        self._baseline_curve = self._drafted_curve = self._step
        self._growth_line = 0.0, 1.0

    @property
    def known(self) -> int:
        """How many steps with drafts say what such take."""
        return len(self._drafted)

    def baseline(self, sequences: int) -> float:
        """Return the seconds of a step without drafts: never more than the rows of one with drafts take."""
        return min(self._baseline_curve.at(sequences), self._drafted_curve.at(sequences))

    def drafted(self, sequences: int, grown: int, levels: Ints | int, nodes: Ints | int) -> Floats:
        """Return the seconds of steps with drafts, elementwise.

        grown: of the sequences, those with a tree of so many levels. nodes: of all trees, without roots.
        """
        offset, slope = self._growth_line
        growth = offset + slope * self._passes(grown)[np.asarray(levels) - 1]
        return growth + self._drafted_curve.at_each(sequences + np.asarray(nodes))

    def one_more_level(self, rows: Ints, sequences: int, nodes: int) -> Floats:
        """Return the seconds of growing one more level over `rows`, and of a node more for every sequence."""
        before = sequences + nodes
        more = self._drafted_curve.at(before + sequences) - self._drafted_curve.at(before)
        return self._growth_line[1] * self._level.at_each(rows) + more

    def catch_up(self, rows: int) -> float:
        """Return the seconds of feeding so many rows that the drafter has not seen."""
        return CATCH_UP_SHARE * self._level.at(rows) if rows else 0.0

    def record_baseline(self, sequences: int, seconds: float) -> None:
        self._baseline[sequences.bit_length()].append((sequences, seconds))

    def record_drafted(self, grown: int, levels: int, rows: int, seconds: float, growing: float) -> None:
        """growing: seconds of growth among `seconds`; 0 where they are not known."""
        if growing:
            self._grown.append((float(self._passes(grown)[levels - 1]), growing))
        self._drafted.append((rows, max(seconds - growing, 0.0)))

    def learn(self) -> None:
        """Fit the curves to the steps that were recorded."""
        self._baseline_curve = self._step.corrected(map(_typical, self._baseline.values()))
        sizes = defaultdict[int, list[Point]](list)
        for rows, seconds in self._drafted:
            sizes[int(2 * math.log2(rows))].append((rows, seconds))  # half an octave each
        offset, slope = _line((self._baseline_curve.at(rows), seconds) for rows, seconds in self._drafted)
        line = CostCurve((rows, offset + slope * seconds) for rows, seconds in self._baseline_curve.points)
        self._drafted_curve = line.corrected(map(_typical, sizes.values()))
        self._growth_line = _line(self._grown)

    def forget(self) -> None:
        """A pause begins. The fastest steps stay: else steps that a neighbour slowed down would be believed
        for as long as nothing is drafted.
        """
        self._drafted = _fastest(self._drafted, self._step)
        self._grown = _fastest(self._grown, None)

    def _passes(self, grown: int) -> Floats:
        """[levels] seconds of growing 1, 2, ... levels, by the curve."""
        return np.cumsum(self._level.at_each([grown * width for width in self._widths]))


def _quantile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * QUANTILE)]


def _typical(seen: Iterable[Point]) -> Point:
    """The mean size, and a quantile of the seconds."""
    sizes, seconds = zip(*seen)
    return sum(sizes) / len(sizes), _quantile(seconds)


def _fastest(seen: Iterable[Point], curve: CostCurve | None) -> deque[Point]:
    """Those that took least, as multiples of their curve."""
    ordered = sorted(seen, key=lambda one: one[1] / (curve.at(one[0]) if curve else one[0]))
    return deque(ordered[: 1 + int(len(ordered) * QUANTILE)], RECENT)


def _line(points: Iterable[Point]) -> tuple[float, float]:
    """Offset and slope of a line: the median slope of all pairs, and a quantile of what it leaves over.

    Neither is negative. One size alone has the slope 1: what it took beyond the curve is the same for all.
    """
    found = np.array([*points], float).reshape(-1, 2)
    if not len(found):
        return 0.0, 1.0
    across, up = (column[:, None] - column for column in found.T)
    later = across > 0
    slope = max(float(np.median(up[later] / across[later])), 0.0) if later.any() else 1.0
    return max(_quantile(found[:, 1] - slope * found[:, 0]), 0.0), slope


class RegretBudget:
    """Baseline steps that drafting may still lose, for sequences that are written and for those to come."""

    def __init__(self) -> None:
        self.available = REGRET
        self.pool = POOL * REGRET

    def record(self, gained: float, steps: float = 1.0) -> None:
        """So many steps passed, which gained so many baseline steps, or lost them."""
        more = gained + REGRET_SHARE * steps
        self.available = min(self.available + more, 2 * REGRET)
        self.pool = min(self.pool + more, POOL * REGRET)

    def begin_sequences(self) -> None:
        """Others are written now, which lost nothing yet."""
        self.available = max(self.available, min(self.pool, REGRET))

    def steps_until(self, needed: float) -> float:
        """Return the steps without drafts until so much may be lost."""
        return max(needed - self.available, 0.0) / REGRET_SHARE


class DraftPolicy(BudgetPolicy):
    """Chooses the depth and the nodes with the most expected tokens per second that its budget pays for."""

    adaptive = True
    holding = False

    def __init__(
        self, shape: TreeShape, step: Curve, level: Curve, widths: Sequence[int], stepwise: bool = True
    ) -> None:
        """step, level, widths: see `StepCosts`. stepwise: growth can stop between levels, and trees begin
        small, since each one's cost is nearly its own; else all levels are launched at once, and a host may
        take most of a step whatever is drafted.
        """
        super().__init__(replace(shape, depth=min(shape.depth, len(widths))))
        self.costs, self.acceptance = StepCosts(step, level, widths), AcceptanceRates(self._levels)
        self._worth = TreeWorth(self.acceptance)
        self._regret = RegretBudget()
        self._stepwise = stepwise
        self._change = 0.0 if stepwise else CHANGE
        # How many sequences to draft for at most, and how many more the step has.
        self._few = RAMP
        self._others = 0
        # Whether the step before had drafts, and whether it was timed: steps with prompts are not.
        self._drafts = False
        self._timed = True
        # Bits of numbers of sequences whose baseline was looked at; steps with drafts since the last look.
        self._looked = set[int]()
        self._since_look = 0
        # Tokens per second, as multiples of the baseline's, and the most expected per second now.
        self._gain = 1.0
        self._rate = 0.0
        # For how many steps more the choice is held; sequences, others and levels it was made for; nodes of a
        # tree; baseline steps that such a step takes beyond one.
        self._held = 0
        self._choice = (0, 0, 0)
        self._nodes = 0
        self._stake = 0.0
        # Nodes that a step had at most.
        self._largest = 0
        self._returned = list[tuple[int, Sequence[float], int]]()

    @property
    def drafting(self) -> bool:
        return self._drafts

    @property
    def keep_growing(self) -> KeepGrowing | None:
        return self.pays_deeper if self._stepwise else None

    def limit_texts(self, live: int) -> int:
        return min(live, self._few)

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        self.rest = 0
        self.holding = False
        self._others = beside
        sequences = live + beside
        if not live or most <= 0:
            return 0
        if self.looks_next(sequences):
            self._looked.add(sequences.bit_length())
            few = self._few  # what they must catch up with after a look is little
            self._pause(LOOK_STEPS, sequences)
            self._few = few
            return 0
        if not self._holds(live, most, due) and (steps := self._choose(live, most, due)):
            self._pause(steps, sequences)
            return 0
        return most if self._stepwise else self._choice[2]

    def _holds(self, live: int, most: int, due: int) -> bool:
        """Whether what was chosen last holds for this step, too."""
        levels = self._choice[2]
        same = self._choice == (live, self._others, levels) and levels <= most and due <= live * (levels + 2)
        paid = (1 + self._change) * self._stake <= self._regret.available
        holds = same and paid and self._drafts and self._held > 0
        self._held -= holds
        self.holding = holds and not self._stepwise
        return holds

    def _choose(self, live: int, most: int, due: int) -> float:
        """Choose the levels and nodes with the most tokens per second, of those that the budget pays for and
        that would gain if all their levels were accepted. Returns for how many steps to pause where there are
        none; 0: draft.
        """
        self._learn_acceptance()
        self.costs.learn()
        sequences = live + self._others
        each = min(self._each, max(2 * self._largest, 1)) if self._stepwise else self._each
        levels = np.arange(1, most + 1)
        nodes = np.arange(1, each + 1)
        baseline = self.costs.baseline(sequences)
        seconds = self.costs.drafted(sequences, live, levels[:, None], live * nodes)
        stakes = np.maximum(seconds / baseline - 1, 0.0)
        needed = (1 + self._change) * stakes + self.costs.catch_up(due) / baseline
        hopeful = stakes < live / sequences * np.minimum(levels[:, None], nodes)
        if not hopeful.any():
            return 1 / REGRET_SHARE
        if (least := needed[hopeful].min()) > self._regret.available:
            return max(self._regret.steps_until(float(least)), LOOK_STEPS)
        rates = (sequences + live * self._worth.best(self._levels, self._each)[levels - 1, :each]) / seconds
        best = np.argmax(np.where(hopeful & (needed <= self._regret.available), rates, 0.0))
        level, node = np.unravel_index(best, rates.shape)
        self._rate = max(float(rates[level, node]), sequences / baseline)
        self._stake = float(stakes[level, node])
        self._nodes = int(nodes[node])
        self._choice = live, self._others, int(levels[level])
        self._held = min(max(self.costs.known, 2), HELD_STEPS)
        self._regret.record(-self.costs.catch_up(due) / baseline, 0)
        return 0.0

    def _learn_acceptance(self) -> None:
        if self._returned:
            self.acceptance.record(self._returned)
            self._returned = []

    def looks_next(self, texts: int) -> bool:
        if not self._timed:
            return False
        lost = LOOK_STEPS * (1 - 1 / max(self._gain, 1.0)) + 2 * self._change * self._stake
        return texts.bit_length() not in self._looked or self._since_look * 2 * REGRET_SHARE >= max(lost, 1.0)

    def pays_deeper(self, scores: Floats, depth: int) -> int:
        """How many nodes of a frontier to feed, best first; 0: no deeper.

        scores: [live, width] cumulative log-probabilities of the frontier at `depth`. Another level pays when
        it brings more tokens than its seconds would bring otherwise.
        """
        live = len(scores)
        trust = self.acceptance.trust()
        chances = self.acceptance.by_depth()
        reached = np.minimum(np.cumsum(np.exp(scores), 1) * trust[depth - 1], 1.0).sum(0)
        rows = live * np.arange(1, scores.shape[1] + 1)
        seconds = self.costs.one_more_level(rows, live, live * depth + self._others)
        gains = reached * chances[depth] - self._rate * seconds
        best = int(np.argmax(gains))
        return best + 1 if gains[best] > 0 else 0

    def foreseen_nodes(self, live: int, levels: int, most: int) -> int:
        return 0 if self._stepwise else min(self._nodes, most // live)

    def score(self, offer: Candidates) -> Floats:
        """[live, n] the chance of each candidate to be accepted, as far as its drafter can be trusted."""
        return acceptance_chances(offer, self.acceptance.trust())

    def log_trust(self) -> Floats:
        return np.log(self.acceptance.trust())

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all: the best, as many as bring most."""
        live = len(values)
        open_to = keep_best(values, min(self._each, 2 * max(self._nodes, self._largest)))
        worth = falling(open_to)[: max(most, 0)]
        seconds = self.costs.drafted(live + self._others, live, levels, np.arange(len(worth) + 1))
        rates = (live + self._others + np.concatenate(([0.0], np.cumsum(worth)))) / seconds
        return best_overall(open_to, int(np.argmax(rates)))

    def record_worth(self, values: Floats, depths: Ints) -> None:
        if not self.holding:
            self._worth.record(values, depths)

    def begin_texts(self) -> bool:
        self._regret.begin_sequences()
        return not self._drafts and self._regret.available > 0

    def record_rest(self, trees: int, live: int) -> None:
        self._regret.record(0.0, trees / live)

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None:
        """A step came back: learn from it, and book what it gained or lost."""
        if not trees:
            return
        self._timed = spent.computed + spent.wall > 0
        live = len(trees)
        rows = sum(tree.rows for tree in trees)
        if not (drafted := [tree for tree in trees if tree.grown]):
            if spent.wall:
                self.costs.record_baseline(live, spent.wall)
            return
        grown = drafted[0].grown
        accepted = sum(tree.accepted for tree in drafted) / live
        self._largest = max(self._largest, max(tree.rows for tree in drafted) - 1)
        if spent.wall and rows > live and self._drafts:  # the first step after a pause is no usual one
            self.costs.record_drafted(len(drafted), grown, rows, spent.wall, spent.growing)
            if self.costs.known <= HELD_STEPS:
                self.costs.learn()
        seconds = float(self.costs.drafted(live, len(drafted), grown, rows - live))
        stake = max(seconds / self.costs.baseline(live) - 1, 0.0)
        self._regret.record(accepted - stake - (0.0 if self._drafts else self._change * stake))
        self._gain += ((1 + accepted) / (1 + stake) - self._gain) / RECENT
        self._drafts = True
        self._since_look = self._since_look + 1
        self._few *= RAMP if len(drafted) == self._few else 1
        self._returned += lessons_of(drafted)
        if self._stepwise:  # else a host learns when it chooses: it has no time now
            self._learn_acceptance()

    def _pause(self, steps: float, sequences: int) -> None:
        if self._drafts:
            self._regret.record(-self._change * self._stake, 0)
            self.costs.forget()
        self._drafts = False
        self._since_look = 0
        self._few = RAMP
        self._held = 0
        self.rest = math.ceil(steps * sequences)


def make_budget(
    name: TunerName, shape: TreeShape, lap: Curve, level: Curve, widths: Sequence[int], at_once: bool = False
) -> BudgetPolicy:
    """lap, level, widths: see `StepCosts`. at_once: growth cannot stop between levels. A fixed shape is
    always drafted whole.
    """
    if shape.fixed or name == "fixed":
        return FixedBudget(shape)
    if name == "seed":
        return SeedBudget(shape)
    return DraftPolicy(shape, lap, level, widths, stepwise=not at_once)
