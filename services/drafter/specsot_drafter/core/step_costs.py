"""Model of the seconds that steps of a ring take, where growth of trees can stop between levels, as on CPUs.

`device_costs` has the other model, and shares the functions and constants of this module.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np

from specsot.core.cost_curve import UNIT_CURVE, CostCurve
from specsot.members import Curve
from specsot_drafter.core.budget import StepSeconds
from specsot_drafter.core.part_costs import PartCosts
from specsot_drafter.core.selection import Floats, Ints

# "The gate" is `python -m tests.drafter.gate`: it replays all recorded traces and compares the policy with
# fixed settings.
# Fraction. The seconds of feeding committed tokens that the drafter has not seen, relative to growing one
# level of as many rows. Untuned.
CATCH_UP_SHARE: Final = 0.3
# Steps with drafts. The number of most recent steps that the costs are learned from. Chosen by the gate: 24
# is worse.
RECENT: Final = 48
# Fraction. The estimate is this quantile of the recent durations of steps, so that steps that other processes
# slowed down do not raise it. Also the share of steps that `fastest` keeps. Chosen by the gate.
QUANTILE: Final = 0.4
# Steps. How often a choice of levels and nodes is reused, because choosing takes host time. Also the number
# of steps with drafts that must be recorded before estimates bound the durations that are recorded next.
# Chosen by the gate.
HELD_STEPS: Final = 8
# Steps. The length of a look: a short pause that measures steps without drafts. Chosen by the gate: 4 and 8
# are worse.
LOOK_STEPS: Final = 6

Point = tuple[float, float]
# Any kind of recorded step.
Recorded = TypeVar("Recorded", bound=tuple[float, ...])


class GrowthSeconds:
    """Seconds of growing trees and of catching up, by the curve of the draft head that was measured at
    startup. Nothing is learned from steps.

    curve: Seconds of one forward pass of the head, by its number of rows.
    """

    def __init__(self, level: Curve, widths: Sequence[int]) -> None:
        """Start with the measured curve.

        level: (rows, seconds) points of one forward pass of the draft head. An empty curve counts as one
            second for any number of rows.
        widths: The rows per tree that the head computes for levels 2, 3, ...; level 1 takes one row per tree.
        """
        self.curve = CostCurve(level) or UNIT_CURVE
        self._widths = 1, *widths
        # The results of `levels`, by its argument.
        self._levels = dict[int, Floats]()

    def levels(self, grown: int) -> Floats:
        """Return the seconds of growing 1, 2, ... levels, [number of widths + 1]. The array is shared between
        calls and must not be changed.

        grown: Number of trees that grow together, at least 1.

        For example:

            # 2 trees and widths (1, 4, 4): the levels compute 2, 8 and 8 rows
            # -> [at(2), at(2) + at(8), at(2) + 2 * at(8)]
        """
        if grown not in self._levels:
            self._levels[grown] = np.cumsum(self.curve.at_each(grown * np.array(self._widths)))
        return self._levels[grown]

    def catch_up(self, rows: int) -> float:
        """Return the seconds of feeding committed tokens that the drafter has not seen; 0 for none.

        rows: Number of these tokens.
        """
        return CATCH_UP_SHARE * self.curve.at(rows) if rows else 0.0


class StepCosts:
    """Model of the wall-clock seconds of a step, with drafts and without.

    The time of a step with drafts is the time to grow the trees plus the time that the stages need for the
    step's rows (one root per sequence, and all draft nodes). Both times are measured as curves at startup.
    The curves may be wrong at run time, because the machine is busy or because the host takes most of a step.
    So three corrections are learned from recent steps:

    * The step curve is scaled to the durations of steps without drafts. The result is the baseline curve.
    * A straight line (offset + slope * baseline) is fitted to steps with drafts by the Theil-Sen estimator.
      For the numbers of rows that ran lately, the line is scaled to their durations.
    * A straight line from measured to observed seconds of growth is fitted by the Theil-Sen estimator.

    Where stages are far from each other, hops take most of a step, whatever its number of rows. In this case,
    `hops` is subtracted from every recorded duration and added to every estimate, so that the curve of rows
    is not scaled by the time of hops.

    growth: Seconds of growth and of catching up, by the measured curve of the draft head.

    Where stages compute at the same time, the tree of a single sequence may travel in parts. Such a step is
    recorded and estimated as one with the rows of a smaller tree that travels whole (`PartCosts`).
    """

    def __init__(
        self,
        step: Curve,
        level: Curve,
        widths: Sequence[int],
        overlapping_stages: int = 1,
    ) -> None:
        """Start with the curves that were measured at startup.

        step: (tokens, seconds) points of one forward pass through all stages. An empty curve counts as one
            second for any number of tokens.
        level: (rows, seconds) points of one forward pass of the draft head. An empty curve counts likewise.
        widths: The rows per tree that the head computes for levels 2, 3, ...; level 1 takes one row per tree.
        overlapping_stages: Number of stages that may compute at the same time.

        Until steps are recorded, all estimates are those of the curves.
        """
        self._step = CostCurve(step) or UNIT_CURVE
        self.growth = GrowthSeconds(level, widths)
        self._parts = PartCosts(self._step, overlapping_stages)
        # Steps without drafts as (sequences, seconds), by `size_group`.
        self._baseline = defaultdict[int, deque[Point]](lambda: deque(maxlen=LOOK_STEPS))
        # Steps with drafts as (rows of a tree that travels whole and takes as long, seconds without growth),
        # of all numbers of sequences together.
        self._drafted = deque[Point](maxlen=RECENT)
        # Recent steps as (seconds in which neither a stage computed nor a tree grew, seconds of computing of
        # all stages).
        self._away = deque[Point](maxlen=RECENT)
        # Growth as (seconds by the measured curve, observed seconds).
        self._grown = deque[Point](maxlen=RECENT)
        self._baseline_curve = self._drafted_curve = self._step
        # Offset and slope of the line from measured to observed seconds of growth.
        self._growth_line = 0.0, 1.0
        # The growth line and the curve of steps with drafts when `learn` last ran with at least HELD_STEPS
        # recorded steps with drafts. They bound the durations that are recorded next.
        self._bound = self._growth_line, self._drafted_curve

    @property
    def known(self) -> int:
        """The number of recorded steps with drafts, at most RECENT."""
        return len(self._drafted)

    @property
    def hops(self) -> float:
        """The seconds of a step in which no stage computes and no tree grows, if they exceed the seconds in
        which stages compute. Otherwise 0: then they are mostly the host's work, which grows with the rows. 0
        if no step with known seconds of computing was recorded.
        """
        if not self._away:
            return 0.0
        between_stages, computing = map(quantile, zip(*self._away))
        return between_stages if between_stages > computing else 0.0

    def _record_away(self, spent: StepSeconds) -> None:
        """Record how a step's duration is divided into computing of the stages, growth, and the rest. Nothing
        is recorded if the seconds of computing are unknown.

        spent: Duration of the step.
        """
        if spent.computed:
            self._away.append((spent.wall - spent.computed - spent.growing, spent.computed))

    def baseline(self, sequences: int) -> float:
        """Return the estimated seconds of a step without drafts. The estimate never exceeds that of a step
        with drafts that has as many tokens and grows no tree.

        sequences: Number of sequences, each with one root token.
        """
        return self.hops + min(self._baseline_curve.at(sequences), self._drafted_curve.at(sequences))

    def drafted(
        self,
        sequences: int,
        grown: int,
        levels: Ints | int,
        nodes: Ints | int,
        worth: Floats | None = None,
    ) -> Floats:
        """Return the estimated seconds of steps with drafts; `levels` and `nodes` are broadcast against each
        other.

        sequences: Number of sequences in the step, each with one root.
        grown: Number of those sequences for which a tree is grown.
        levels: Levels of each grown tree, at least 1.
        nodes: Number of draft nodes of all trees together, without roots.
        worth: Expected number of accepted nodes among the first 0, 1, 2, ... nodes, [..., more than
            max(nodes)], of the one tree; ignored with several sequences. It says how many parts of the tree
            are awaited, see `PartCosts.whole_rows`. None: all of them.

        The result has the broadcast shape of `levels` and `nodes`. Levels beyond the widths are not allowed.
        """
        offset, slope = self._growth_line
        growth = offset + slope * self.growth.levels(grown)[np.asarray(levels) - 1]
        rows = self._drafted_curve.at_each(self._whole_rows(sequences, np.asarray(nodes), worth))
        return self.hops + growth + rows

    def one_more_level(self, rows: Ints, sequences: int, nodes: int) -> Floats:
        """Return the estimated seconds that one more level adds, [n]: growth of that level, plus the stages'
        time for one more node per sequence.

        rows: [n], the number of rows that the head would compute for the level, for each of n options.
        sequences: Number of sequences with a tree, each with one root.
        nodes: Number of the step's other rows before that level: draft nodes of all trees, and the roots of
            sequences without a tree.
        """
        before, after = self._whole_rows(sequences, np.array([nodes, nodes + sequences]))
        more = self._drafted_curve.at(after) - self._drafted_curve.at(before)
        return self._growth_line[1] * self.growth.curve.at_each(rows) + more

    def _whole_rows(self, sequences: int, nodes: Ints, worth: Floats | None = None) -> Floats:
        """Return how many rows a step has that passes through the stages in one part and takes as long as
        this step, in the shape of `nodes`. That is `sequences` + `nodes`, unless there is one sequence and
        stages overlap. Trees of several sequences occupy all stages anyway, and are never divided into parts.

        sequences: Number of sequences in the step, each with one root.
        nodes: Numbers of draft nodes of all trees together, an array of any shape.
        worth: As for `drafted`.
        """
        if sequences > 1 or not self._parts.overlap:
            return np.asarray(sequences + nodes, float)
        return self._parts.whole_rows(nodes, worth)

    def record_baseline(self, sequences: int, spent: StepSeconds) -> None:
        """Record a step without drafts. `learn` must run before estimates change, except that of `hops`.

        sequences: Number of sequences in the step.
        spent: Duration of the step. Its wall-clock seconds must be known.
        """
        self._record_away(spent)
        self._baseline[size_group(sequences)].append((sequences, max(spent.wall - self.hops, 0.0)))

    def record_drafted(self, sequences: int, grown: int, levels: int, rows: int, spent: StepSeconds) -> None:
        """Record a step with drafts. `learn` must run before estimates change, except that of `hops`.

        A duration counts at most as twice the larger of two estimates: that of such a step when `learn` last
        ran with at least HELD_STEPS recorded steps with drafts (at first that of the curves from startup),
        and that of a step without drafts that has as many rows. The first steps of a new size compile kernels
        and take a hundred times as long as the next ones. If such a duration counted in full, the loss would
        exceed the regret budget for good. If steps become slower for good, the bound follows, because it can
        double whenever `learn` runs.

        sequences: Number of sequences in the step.
        grown: Number of trees that were grown.
        levels: Levels of each of these trees, at least 1.
        rows: Number of all tree nodes of the step, roots included.
        spent: Duration of the step, its wall-clock seconds as if all parts of a cut tree had been awaited. If
            the seconds of growth are 0, they are unknown, and all seconds are attributed to the rows.
        """
        passes = float(self.growth.levels(grown)[levels - 1])
        self._record_away(spent)
        (offset, slope), curve = self._bound
        whole = float(self._whole_rows(sequences, np.array(rows - sequences)))
        computing = max(curve.at(whole), self._baseline_curve.at(whole))
        if spent.growing:
            self._grown.append((passes, min(spent.growing, 2 * (offset + slope * passes + computing))))
        computing = min(max(spent.wall - self.hops - spent.growing, 0.0), 2 * computing)
        self._drafted.append((whole, computing))

    def learn(self) -> None:
        """Fit the curves to the recorded steps without drafts and with drafts, and the line to their growth.
        If at least HELD_STEPS steps with drafts are recorded, the estimates also become the bound of the
        durations that are recorded next.

        Steps with drafts are grouped by half octaves of rows. Without recorded steps, the curves are those
        measured at startup.

        Beyond the largest number of rows that was recorded with drafts, each further row costs at least what
        it costs in steps without drafts. Otherwise a line through a few steps of nearly equal rows, which
        noise makes flat, would promise that trees of many nodes cost nothing.

            # drafted steps of up to 8 rows, line 0.5 ms + 0.1 * baseline; baseline 8 rows 3 ms, 16 rows 5 ms
            # -> 8 rows 0.5 + 0.3 = 0.8 ms, 16 rows 0.8 + 1 * (5 - 3) = 2.8 ms
        """
        self._baseline_curve = self._step.corrected(map(typical, self._baseline.values()))
        sizes = defaultdict[int, list[Point]](list)
        for rows, seconds in self._drafted:
            # One group per half octave of rows: 8 to 11 rows have the key 6, 12 to 15 rows have the key 7.
            sizes[int(2 * math.log2(rows))].append((rows, seconds))
        offset, slope = fit_line((self._baseline_curve.at(rows), seconds) for rows, seconds in self._drafted)
        # The baseline seconds of the largest number of rows that was recorded with drafts.
        largest = self._baseline_curve.at(max((rows for rows, _ in self._drafted), default=0.0))
        line = CostCurve(
            (rows, offset + slope * min(seconds, largest) + max(slope, 1.0) * max(seconds - largest, 0.0))
            for rows, seconds in self._baseline_curve.points
        )
        self._drafted_curve = line.corrected(map(typical, sizes.values()))
        self._growth_line = fit_line(self._grown)
        if self.known >= HELD_STEPS:
            self._bound = self._growth_line, self._drafted_curve

    def forget(self) -> None:
        """Drop all but the fastest recorded steps with drafts, because a pause begins. Recorded steps without
        drafts stay. The estimates change when `learn` runs.

        No steps with drafts are recorded during a pause. If steps that another process slowed down stayed,
        drafting would seem expensive for the whole pause.

        Steps are compared by their seconds relative to those of the measured curve, and so is growth.
        """
        self._drafted = fastest(self._drafted, lambda step: step[1] / self._step.at(step[0]))
        self._grown = fastest(self._grown, lambda growth: growth[1] / growth[0])


def size_group(sequences: int) -> int:
    """Return the group to which a number of sequences belongs: its base-2 logarithm, rounded; -1 for 0.
    Measurements with one number of sequences count for all numbers of its group.

    sequences: Number of sequences, at least 0.

        # 6 to 11 sequences -> 3, 46 to 90 sequences -> 6: if one of eight sequences ends, the group stays
    """
    return round(math.log2(sequences)) if sequences else -1


def quantile(values: Iterable[float]) -> float:
    """Return the value at QUANTILE of the sorted values, without interpolation.

    values: At least one number.
    """
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * QUANTILE)]


def typical(steps: Iterable[Point]) -> Point:
    """Return one point that stands for recorded steps: the mean of their sizes, and the `quantile` of their
    seconds.

    steps: (size, seconds) of each step, at least one. The size is a number of rows or of sequences.
    """
    sizes, seconds = zip(*steps)
    return sum(sizes) / len(sizes), quantile(seconds)


def fastest(steps: Iterable[Recorded], slowness: Callable[[Recorded], float]) -> deque[Recorded]:
    """Return the fastest recorded steps, fastest first: QUANTILE of all steps, rounded down, and one more.
    The result is empty if there are no steps. Later, it can grow up to RECENT steps.

    steps: The recorded steps, at most RECENT.
    slowness: Returns the number by which steps are compared; that of a fast step is low.

        # 10 steps -> the 5 fastest
    """
    ordered = sorted(steps, key=slowness)
    return deque(ordered[: 1 + int(len(ordered) * QUANTILE)], RECENT)


def fit_line(points: Iterable[Point]) -> tuple[float, float]:
    """Return offset and slope of a line through points; neither is negative. The result is (0, 1) if there
    are no points.

    points: (expected, observed) seconds.

    The slope is the median slope over all pairs of points (Theil-Sen), and the offset is the `quantile` of
    the residuals. If all points have the same expected seconds, the pairs have no slope. Then the slope is 1
    and the excess over the expected seconds is the offset; if the observed seconds are fewer than the
    expected ones, the offset is 0 and the slope is below 1.

        # (1, 3), (2, 5), (3, 7) -> slopes of pairs 2, 2, 2, residuals 1, 1, 1 -> (1, 2)
        # (2, 3) alone -> (1, 1)
        # (2, 1) alone -> (0, 0.5)
    """
    found = np.array([*points], float).reshape(-1, 2)
    if not len(found):
        return 0.0, 1.0
    expected, observed = found.T
    if expected.min() < expected.max():
        # [n, n] differences of every pair: across[i, j] = x[i] - x[j], up[i, j] = y[i] - y[j].
        across = expected[:, None] - expected
        up = observed[:, None] - observed
        later = across > 0
        slope = max(float(np.median(up[later] / across[later])), 0.0)
    else:
        slope = min(quantile(observed.tolist()) / float(expected[0] or 1.0), 1.0)
    return max(quantile((observed - slope * expected).tolist()), 0.0), slope
