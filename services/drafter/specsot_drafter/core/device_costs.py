"""Model of the seconds that steps take where a GPU computes the stage and the drafts."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final, NamedTuple

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

# Fraction of a step. If the host waits for the device for less than this, the host is taken to be the
# bottleneck of the step. Chosen by the gate: in the traces of an H200, the policy reaches 0.971 of the best
# fixed setting with 0.05 and 0.1, and 0.961 with 0.
MIN_WAIT_SHARE: Final = 0.1


class DeviceStep(NamedTuple):
    """The duration of one step with drafts, divided into the host's seconds and the seconds in which host and
    device worked at the same time. With the device's seconds by the curves, its wall-clock seconds are
    host + max(device - overlap, 0), unless `host` was raised to 0.

    sequences: Number of sequences in the step.
    host: Seconds in which the host did not wait for the device. If the wait is unknown, these are the
        wall-clock seconds minus the device's seconds by the curves; 0 if that is negative.
    overlap: The device's seconds by the curves, minus the seconds for which the host waited for the device.
        Negative if the host waited for longer than the curves say. 0 if the wait is unknown. At least `host`
        if the host waited for less than MIN_WAIT_SHARE of the step: then the device had finished first, and
        how much longer it could have computed at no cost is unknown.
    """

    sequences: float
    host: float
    overlap: float


class DeviceCosts:
    """Model of the wall-clock seconds of a step, with drafts and without, where a GPU launches all levels of
    a tree at once.

    The curve of the device's seconds is measured at startup, and is taken to be exact. The host works, too:
    its seconds depend on the number of sequences, and hardly on the number of rows. The device computes
    during some of them:

        host     [launch][= other work =]..........[result]     10 ms, of which it waits 4 ms (dots)
        device           [====== computes ======]               7 ms, of which 3 ms overlap with the host

    So the estimate of a step is host + max(device - overlap, 0):

        # host 10 - 4 = 6 ms, overlap 7 - 4 = 3 ms
        # -> trees for which the device computes 9 ms take 6 + (9 - 3) = 12 ms
        # -> trees for which the device computes 3 ms or less take 6 ms: their nodes cost nothing

    If the host hardly waits (MIN_WAIT_SHARE), the device has finished first, by an unknown time. Then all of
    the host's seconds are taken to overlap until a step with larger trees shows otherwise:

        # host 6 ms, of which it waits 0 ms; device 2 ms -> overlap 6 ms
        # -> trees for which the device computes 5 ms take 6 ms

    growth: Seconds of growth and of catching up, by the measured curve of the draft head.

    The host's seconds and the overlap are learned from recent steps, by the number of sequences. A line from
    the measured to the observed seconds of growth is learned until trees grow asynchronously for the first
    time. From then on, the measured seconds of growth are taken as they are. No time is added for hops,
    because the stages of a GPU's ring are close to each other.
    """

    def __init__(self, step: Curve, level: Curve, widths: Sequence[int]) -> None:
        """Start with the curves that were measured at startup.

        step: (tokens, seconds) points of one forward pass through all stages. An empty curve counts as one
            second for any number of tokens.
        level: (rows, seconds) points of one forward pass of the draft head. An empty curve counts likewise.
        widths: The rows per tree that the head computes for levels 2, 3, ...; level 1 takes one row per tree.

        Until steps are recorded, all estimates are those of the curves.
        """
        self._step = CostCurve(step) or UNIT_CURVE
        self.growth = GrowthSeconds(level, widths)
        # Recent steps without drafts as (sequences, seconds), by `size_group`.
        self._baseline = defaultdict[int, deque[Point]](lambda: deque(maxlen=LOOK_STEPS))
        # Recent steps with drafts, by `size_group`.
        self._drafted = defaultdict[int, deque[DeviceStep]](lambda: deque(maxlen=RECENT))
        # Growth of trees as (seconds by the measured curve, observed seconds). Empty once trees have grown
        # asynchronously.
        self._grown = deque[Point](maxlen=RECENT)
        # True once the wait of a recorded step was known, which means that its trees grew asynchronously.
        self._grew_async = False
        # Offset and slope of the line from measured to observed seconds of growth.
        self._growth_line = 0.0, 1.0
        # The seconds by which steps without drafts exceed the curve. Negative if the curve has more.
        self._baseline_host = SecondsBySequences()
        # The mean `DeviceStep.host` and `DeviceStep.overlap` of recent steps.
        self._drafted_host = self._overlap = SecondsBySequences()
        # The values of `_drafted_host` and `_overlap` when `learn` last ran with at least HELD_STEPS recorded
        # steps with drafts. They bound the durations that are recorded next.
        self._bound = self._drafted_host, self._overlap

    @property
    def known(self) -> int:
        """The number of recorded steps with drafts, at most RECENT for each group of numbers of sequences."""
        return sum(map(len, self._drafted.values()))

    def baseline(self, sequences: int) -> float:
        """Return the estimated seconds of a step without drafts. The estimate never exceeds that of a step
        with drafts that has as many tokens and grows no tree.

        sequences: Number of sequences, each with one root token.
        """
        computed = self._step.at(sequences)
        drafted = self._drafted_host.at(sequences) + max(computed - self._overlap.at(sequences), 0.0)
        return min(computed + self._baseline_host.at(sequences), drafted)

    def min_baseline(self, sequences: int) -> float:
        """Return the fewest seconds that a step without drafts can take: those of the device by its curve, as
        if the host took no time.

        sequences: Number of sequences, each with one root token.

        If recorded steps without drafts took less than the curve says, the difference is subtracted. It is
        estimated from other numbers of sequences as in `SecondsBySequences.at`.

            # 2.3 ms by the curve: steps without drafts took 5.1 ms -> 2.3 ms; they took 2.2 ms -> 2.2 ms
        """
        return self._step.at(sequences) + min(self._baseline_host.at(sequences), 0.0)

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
        """Return the seconds for which the device computes in steps with drafts: those of the stages, by
        their curve, and those of growth, by the curve of the draft head and the line of growth. The arguments
        and the shape of the result are those of `drafted`.
        """
        offset, slope = self._growth_line
        growth = offset + slope * self.growth.levels(grown)[levels - 1]
        return growth + self._step.at_each(sequences + nodes)

    def record_baseline(self, sequences: int, spent: StepSeconds) -> None:
        """Record a step without drafts. `learn` must run before estimates change.

        sequences: Number of sequences in the step.
        spent: Duration of the step. Only its wall-clock seconds are recorded.
        """
        self._baseline[size_group(sequences)].append((sequences, spent.wall))

    def record_drafted(self, sequences: int, grown: int, levels: int, rows: int, spent: StepSeconds) -> None:
        """Record a step with drafts. `learn` must run before estimates change.

        A duration counts at most as twice the larger of two estimates: that of such a step when `learn` last
        ran with at least HELD_STEPS recorded steps with drafts, and that of a step without drafts that has as
        many rows. See `StepCosts.record_drafted` for the reason.

        sequences: Number of sequences in the step.
        grown: Number of trees that were grown.
        levels: Levels of each of these trees, at least 1.
        rows: Number of all tree nodes of the step, roots included.
        spent: Duration of the step. If the seconds for which the host waited for the device (`waited`) are
            unknown, the host is taken to wait for as long as the device computes by the curves, so that
            nothing overlaps. In this case, the trees did not grow asynchronously, and the seconds of growth
            are recorded, too, if they are known and if trees never grew asynchronously before. If the wait is
            known, the trees grew asynchronously: all recorded seconds of growth are dropped, and none are
            recorded from then on.
        """
        computed = float(self._computed(sequences, grown, levels, rows - sequences))
        bound_host, bound_overlap = self._bound
        expected = max(
            bound_host.at(sequences) + max(computed - bound_overlap.at(sequences), 0.0),
            self._step.at(rows) + self._baseline_host.at(sequences),
        )
        wall = min(spent.wall, 2 * expected)
        if spent.waited is not None:
            # Where trees grow asynchronously, they do so in most steps. In the few other steps, the drafter
            # also catches up, so that the seconds of growth of these steps would be too high for the others.
            # On an H200, a single such step of 64 sequences made the levels of a small draft model seem too
            # slow for any choice, even for one sequence. So drafting stayed paused, and no step with drafts
            # followed that could have corrected the line.
            self._grown.clear()
            self._grew_async = True
        elif spent.growing and not self._grew_async:
            self._grown.append(
                (float(self.growth.levels(grown)[levels - 1]), min(spent.growing, 2 * expected))
            )
        waited = computed if spent.waited is None else min(spent.waited, wall)
        # If other processes slowed down the measurement of the curves at startup, `computed` may exceed the
        # whole step. This must not make the host's seconds negative.
        host = max(wall - waited, 0.0)
        overlap = computed - waited
        if spent.waited is not None and waited < MIN_WAIT_SHARE * wall:
            overlap = max(overlap, host)
        self._drafted[size_group(sequences)].append(DeviceStep(sequences, host, overlap))

    def learn(self) -> None:
        """Fit the host's seconds, the overlap and the line of growth to the recorded steps. The host's
        seconds and the overlap have one point for each group of numbers of sequences (`size_group`). If at
        least HELD_STEPS steps with drafts are recorded, the estimates also become the bound of the durations
        that are recorded next.

        For example:

            # the curve has 2.5 ms for 64 rows and 2.9 ms for 256 rows, and growth takes no time
            # 64 sequences took 5.1 ms without drafts; with trees of a root and 3 nodes they took 8.1 ms, of
            # which the host waited 2.9 ms, so that nothing overlapped
            # -> seconds of the host with 64 sequences: 2.6 ms without drafts, 5.2 ms with drafts

        For steps with drafts, groups with fewer than HELD_STEPS steps are ignored, unless every group has
        fewer. Without any step with drafts, the host's seconds without drafts are used for both.
        """
        self._baseline_host = SecondsBySequences(
            [(sequences, seconds - self._step.at(sequences)) for sequences, seconds in steps]
            for steps in self._baseline.values()
        )
        # Groups of few steps are left out, because the first steps with drafts of a new number of sequences
        # compile kernels and capture graphs.
        groups = [steps for steps in self._drafted.values() if len(steps) >= HELD_STEPS] or [
            *self._drafted.values()
        ]
        self._overlap = SecondsBySequences(
            [(step.sequences, step.overlap) for step in steps] for steps in groups
        )
        self._drafted_host = (
            SecondsBySequences([(step.sequences, step.host) for step in steps] for steps in groups)
            if groups
            else self._baseline_host
        )
        self._growth_line = fit_line(self._grown)
        if self.known >= HELD_STEPS:
            self._bound = self._drafted_host, self._overlap

    def forget(self) -> None:
        """Drop all but the fastest recorded steps with drafts of each group, because a pause begins; see
        `StepCosts.forget`. Recorded steps without drafts stay. The estimates change when `learn` runs.

        Steps are compared by host - overlap, which are mostly their wall-clock seconds minus the device's
        seconds by the curves. Growth is compared by observed relative to measured seconds.
        """
        for group, steps in self._drafted.items():
            self._drafted[group] = fastest(steps, lambda step: step.host - step.overlap)
        self._grown = fastest(self._grown, lambda growth: growth[1] / growth[0])


class SecondsBySequences:
    """Mean seconds of recorded steps, by the number of sequences in the step.

    A mean is used and not a low quantile as in `StepCosts`, because on a GPU it is the host's own work that
    makes some steps slower. With a model of 1.5B parameters on an H200, a low quantile was a third below the
    seconds of steps with drafts in service.
    """

    def __init__(self, groups: Iterable[Sequence[Point]] = ()) -> None:
        """Reduce each group of recorded steps to one point: the mean number of sequences and the mean
        seconds.

        groups: Each group has the (sequences, seconds) of steps with about as many sequences. Seconds may be
            negative. Groups without steps are ignored. Without groups, `at` returns 0.
        """
        self._points = [tuple(map(fmean, zip(*group))) for group in groups if group]
        # Results of `at`: a step asks several times for the same number of sequences.
        self._seconds = dict[int, float]()

    def at(self, sequences: int) -> float:
        """Return the estimated seconds of steps with some number of sequences. Return 0 if no step was
        recorded.

        sequences: Number of sequences, at least 1.

        The estimate is that of the recorded group whose number of sequences is nearest as a ratio. If that
        group has more sequences, its seconds are scaled down in proportion. If it has fewer, its seconds are
        not scaled up, so that the policy tries numbers of sequences that never ran.

            # 6 ms recorded for 60 sequences -> 30 sequences take 3 ms, 64 sequences take 6 ms
        """
        if sequences not in self._seconds:
            nearest = min(
                self._points, key=lambda point: abs(math.log(point[0] / sequences)), default=(1, 0.0)
            )
            self._seconds[sequences] = nearest[1] * min(sequences / nearest[0], 1.0)
        return self._seconds[sequences]
