"""Model of what the steps of a stage on a GPU take, with drafts and without."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from specsot.core.cost_curve import UNIT_CURVE, CostCurve
from specsot.members import Curve
from specsot_drafter.core.budget import StepSeconds
from specsot_drafter.core.selection import Floats, Ints
from specsot_drafter.core.step_costs import (
    HELD_STEPS,
    LOOK_STEPS,
    RECENT,
    GrowthSeconds,
    Point,
    fastest,
    fit_line,
    size_group,
)


class DeviceStep(NamedTuple):
    """What a step with drafts took.

    sequences: Number of sequences in the step.
    host: Seconds in which the host did not wait for the device.
    overlap: Seconds by which the host waited for the device less than the device computed, by the curves.
        They passed while the host worked.
    """

    sequences: float
    host: float
    overlap: float


class DeviceCosts:
    """Model of the wall-clock seconds of a step, with drafts and without, where a GPU computes.

    The curve of steps is measured at startup and exact. But the host works, too, for a time that grows with
    the sequences and hardly with the rows, and the device computes during some of that time:

        host     [launch][= other work =]..........[result]     10 ms, of which it waits 4 ms (dots)
        device           [====== computes ======]               7 ms, of which 3 ms overlap with the host

    So a step takes the host's own time, and the device's time beyond what the host's work overlaps with. In
    the example, trees for which the device computes 9 ms would take 6 + (9 - 3) = 12 ms, and trees for which
    it computes 3 ms or less would take 6 ms. The host's time and the overlap are learned from recent steps.
    So is a line from the measured to the real time of growth, as long as growth does not overlap.
    """

    # No time is added for hops: the stages of a GPU's ring are close to each other.
    hops = 0.0

    def __init__(self, step: Curve, level: Curve, widths: Sequence[int]) -> None:
        """Start with the curves that were measured at startup.

        step: (tokens, seconds) points of one forward pass through all stages. An empty curve counts as one
            second for any number of tokens.
        level: (rows, seconds) points of one forward pass of the draft head. An empty curve counts likewise.
        widths: The rows per tree that the head computes for levels 2, 3, ...; level 1 takes one row per tree.

        Until steps are recorded, all estimates are those of the curves.
        """
        self._step = CostCurve(step) or UNIT_CURVE
        self._growth = GrowthSeconds(level, widths)
        # Steps without drafts as (sequences, seconds), and steps with drafts, by `size_group`.
        self._baseline = defaultdict[int, deque[Point]](lambda: deque(maxlen=LOOK_STEPS))
        self._drafted = defaultdict[int, deque[DeviceStep]](lambda: deque(maxlen=RECENT))
        # Growth that did not overlap, as (seconds by the measured curve, observed seconds).
        self._grown = deque[Point](maxlen=RECENT)
        self._growth_line = 0.0, 1.0
        # Seconds beyond the curve that steps without drafts take.
        self._baseline_host = SecondsBySequences()
        self._drafted_host = self._overlap = SecondsBySequences()
        # The host's seconds and the overlap, as at least HELD_STEPS steps with drafts have shown them.
        self._shown = self._drafted_host, self._overlap

    @property
    def known(self) -> int:
        """The number of recorded steps with drafts, at most RECENT for each group of numbers of sequences."""
        return sum(map(len, self._drafted.values()))

    def baseline(self, sequences: int) -> float:
        """Return the estimated seconds of a step without drafts. The estimate never exceeds the time of as
        many tokens in a step with drafts.

        sequences: Number of sequences, each with one root token.
        """
        computed = self._step.at(sequences)
        drafted = self._drafted_host.at(sequences) + max(computed - self._overlap.at(sequences), 0.0)
        return min(computed + self._baseline_host.at(sequences), drafted)

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
        worth: Ignored; see `StepCosts.drafted`.

        The result has the broadcast shape of `levels` and `nodes`. Levels beyond the widths are not allowed.
        """
        computed = self._computed(sequences, grown, levels, nodes)
        return self._drafted_host.at(sequences) + np.maximum(computed - self._overlap.at(sequences), 0.0)

    def _computed(self, sequences: int, grown: int, levels: Ints | int, nodes: Ints | int) -> Floats:
        """Return the seconds for which the device computes in steps with drafts, by the curve of steps and
        the line of growth. The arguments and the shape of the result are those of `drafted`.
        """
        offset, slope = self._growth_line
        growth = offset + slope * self._growth.levels(grown)[np.asarray(levels) - 1]
        return growth + self._step.at_each(np.asarray(sequences + nodes))

    def catch_up(self, rows: int) -> float:
        """Return the estimated seconds of feeding committed tokens that the drafter has not seen; 0 for none.

        rows: Number of these tokens.
        """
        return self._growth.catch_up(rows)

    def record_baseline(self, sequences: int, spent: StepSeconds) -> None:
        """Record a step without drafts.

        sequences: Number of sequences in the step.
        spent: Duration of the step, of which the wall-clock seconds count.
        """
        self._baseline[size_group(sequences)].append((sequences, spent.wall))

    def record_drafted(self, sequences: int, grown: int, levels: int, rows: int, spent: StepSeconds) -> None:
        """Record a step with drafts.

        A time counts at most as twice an estimate: that of the last HELD_STEPS steps, or the time of as many
        rows by steps without drafts, if that is more. See `StepCosts.record_drafted` for the reason.

        sequences: Number of sequences in the step.
        grown: Number of trees that were grown.
        levels: Levels of each of these trees, at least 1.
        rows: Number of all tree nodes of the step, roots included.
        spent: Duration of the step. If it is unknown for how long the host waited for the device, nothing
            overlaps: the host is taken to wait for as long as the device computes.
        """
        computed = float(self._computed(sequences, grown, levels, rows - sequences))
        host, overlap = self._shown
        expected = max(
            host.at(sequences) + max(computed - overlap.at(sequences), 0.0),
            self._step.at(rows) + self._baseline_host.at(sequences),
        )
        wall = min(spent.wall, 2 * expected)
        if spent.waited is None and spent.growing:
            passes = float(self._growth.levels(grown)[levels - 1])
            self._grown.append((passes, min(spent.growing, 2 * expected)))
        waited = computed if spent.waited is None else min(spent.waited, wall)
        self._drafted[size_group(sequences)].append(DeviceStep(sequences, wall - waited, computed - waited))

    def learn(self) -> None:
        """Fit the host's seconds and the overlap to the recorded steps, one point per number of sequences;
        about equal numbers share a point (`size_group`). After HELD_STEPS steps with drafts, the estimates
        also become the bound of the times that are recorded next.

        For example:

            # the curve has 2.5 ms for 64 rows and 2.9 ms for 256; 64 sequences took 5.1 ms without drafts and
            # 8.1 ms with trees of 3 nodes, and nothing overlapped
            # -> seconds of the host with 64 sequences: 2.6 ms without drafts, 5.2 ms with drafts

        For steps with drafts, numbers of sequences with fewer than HELD_STEPS steps are ignored, unless
        there are no others; without any step with drafts, the host's seconds without drafts are used.
        """
        self._baseline_host = SecondsBySequences(
            [(sequences, seconds - self._step.at(sequences)) for sequences, seconds in steps]
            for steps in self._baseline.values()
        )
        # The first steps with drafts of a new number of sequences compile kernels and capture graphs.
        recorded = [*self._drafted.values()]
        groups = [steps for steps in recorded if len(steps) >= HELD_STEPS] or recorded
        self._overlap = SecondsBySequences(
            [(one.sequences, one.overlap) for one in steps] for steps in groups
        )
        host = SecondsBySequences([(one.sequences, one.host) for one in steps] for steps in groups)
        self._drafted_host = host if groups else self._baseline_host
        self._growth_line = fit_line(self._grown)
        if self.known >= HELD_STEPS:
            self._shown = self._drafted_host, self._overlap

    def forget(self) -> None:
        """Drop all but the fastest recorded steps with drafts, because a pause begins, see
        `StepCosts.forget`. Steps are compared by the host's seconds without those that overlap. Recorded
        steps without drafts stay.
        """
        for group, steps in self._drafted.items():
            self._drafted[group] = fastest(steps, lambda step: step.host - step.overlap)
        self._grown = fastest(self._grown, lambda growth: growth[1] / growth[0])


class SecondsBySequences:
    """Mean seconds of recorded steps, by the number of sequences in the step.

    The mean counts, because what slows steps of a GPU down is the host's own work. A low quantile was a third
    below what steps with drafts took in service (1.5B, H200).
    """

    def __init__(self, groups: Iterable[Sequence[Point]] = ()) -> None:
        """Make one point of each group of recorded steps: the means of its sequences and of its seconds.

        groups: (sequences, seconds) of steps, by about equal numbers of sequences; the seconds may be
            negative. Without groups, every number of sequences has 0 seconds.
        """
        self._points = [tuple(map(fmean, zip(*group))) for group in groups if group]

    def at(self, sequences: int) -> float:
        """Return the mean seconds of the recorded group that is nearest in the ratio of sequences; 0 if no
        step was recorded. Fewer sequences than in that group take their share of its seconds; more sequences
        take no more than the group, so that numbers of sequences that never ran are tried.

        sequences: Number of sequences, at least 1.

        With 6 ms recorded for 60 sequences, 30 take 3 ms and 64 take 6 ms.
        """
        nearest = min(self._points, key=lambda point: abs(math.log(point[0] / sequences)), default=(1, 0.0))
        return nearest[1] * min(sequences / nearest[0], 1.0)
