"""How many frames keep a ring busy: how many may fly, over how many a family is spread, how long a chunk is.

Pure. Refuses to know sequences, frames and clocks: counts and measured seconds in, counts out. Nothing that
is answered depends on it.

A lap of n rows takes the stages' time for n rows one after the other, and the hops. While a stage takes the
same time for many rows as for few, one frame for all is best: of several, each would take as long. Past the
knee, or where rows take long to travel, frames of fewer rows follow each other through the stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

from specsot.members import Curve

LAP_WEIGHT = 0.2  # of one lap in what is typical
RECENT_LAPS = 9  # laps of about as many rows that are remembered
MIN_GAIN = 0.2  # of a lap that another spread must bring, so that figures that waver change nothing
CHUNK_DIVISORS = (1, 2, 4, 8)  # parts of the row budget that a chunk of a prompt may be


class RowMedians:
    """A measured quantity by rows: straight lines between medians of what was seen lately, level beyond."""

    def __init__(self) -> None:
        self._bins: dict[int, deque[tuple[int, float]]] = {}

    def __bool__(self) -> bool:
        return bool(self._bins)

    def record(self, rows: int, value: float) -> None:
        self._bins.setdefault(rows.bit_length(), deque(maxlen=RECENT_LAPS)).append((rows, value))

    def at(self, rows: float) -> float:
        return _interpolate(sorted(map(_medians, self._bins.values())), rows)


class PipelineDepth:
    """Feed it every lap that returns; ask it before frames are composed."""

    def __init__(self, stages: int = 1, curve: Curve = ()) -> None:
        """curve: seconds per rows of all stages together, measured beforehand; corrected by every lap."""
        self._curve = [(float(rows), seconds) for rows, seconds in sorted(curve)]
        self._stages = stages
        self._shares = [1 / stages] * stages
        self._slowdown, self._hops = (
            RowMedians(),
            RowMedians(),
        )  # measured by expected seconds; seconds of all hops
        self._gap = 0.0
        self.parts = 1

    def record_lap(self, rows: int, seconds: Sequence[float], elapsed: float, alone: bool) -> None:
        """A lap is over. seconds: of every stage; elapsed: of the whole. alone: nothing else flew then."""
        spent = sum(seconds)
        if not rows or spent <= 0 or len(seconds) != self._stages:
            return
        self._shares = [old + LAP_WEIGHT * (new / spent - old) for old, new in zip(self._shares, seconds)]
        self._slowdown.record(rows, spent / self._expected_seconds(rows))
        if alone:
            self._hops.record(rows, max(elapsed - spent, 0.0))

    def record_gap(self, seconds: float) -> None:
        """So long a family stayed with stage 0 between two of its laps: its trees were on their way."""
        self._gap += LAP_WEIGHT * (seconds - self._gap)

    def max_frames(self, least: int, limit: int) -> int:
        """Frames that may fly: as many as fit into a lap without waiting for each other, up to `limit`.
        least: as long as nothing is known.
        """
        if not self._hops:
            return min(least, limit)
        lap, slowest = self._lap_seconds(1), self._slowest_stage_seconds(1)
        return min(max(round(lap / slowest), 1), limit) if slowest else limit

    def frames_per_family(self, rows: int, branches: int, most: int) -> int:
        """Over how many frames (at most `most`) a family of so many rows goes: the fewest that are not worse
        than the best by GAIN; as many as now while they are better than those by half of that.
        """
        choices = range(1, max(min(branches, most), 1) + 1)
        cycles = {parts: self._cycle_seconds(rows, parts) for parts in choices}
        few = min(parts for parts in choices if (1 - MIN_GAIN) * cycles[parts] <= min(cycles.values()))
        now = min(self.parts, choices[-1])
        stays = now > few and cycles[now] <= (1 - MIN_GAIN / 2) * cycles[few]
        self.parts = now if stays else few
        return self.parts

    def chunk_rows(self, rows: int, budget: int) -> int:
        """Rows of a prompt's chunk, such that so many rows are through all stages soonest."""
        sizes = [max(budget // part, 1) for part in CHUNK_DIVISORS]
        return min(sizes, key=lambda size: (self._prefill_seconds(rows, size), -size))

    def _prefill_seconds(self, rows: int, size: int) -> float:
        """Chunks follow each other: the last one passes all stages behind the others."""
        return self._compute_seconds(min(rows, size)) + (-(-rows // size) - 1) * self._slowest_stage_seconds(
            min(rows, size)
        )

    def _cycle_seconds(self, rows: int, parts: int) -> float:
        """Seconds from a family's frame to its next: a whole lap, or as long as its frames keep a stage or a
        hop busy."""
        each = -(-rows // parts)
        sending = (self._hop_seconds(each) - self._hop_seconds(1)) / self._stages
        bound = self._hop_seconds(rows) - self._hop_seconds(1) > self._compute_seconds(
            rows
        )  # else it is but noise
        lap = self._compute_seconds(each) + self._hop_seconds(each if bound else rows) + self._gap
        return max(lap, parts * self._slowest_stage_seconds(each), parts * sending if bound else 0.0)

    def _lap_seconds(self, rows: int) -> float:
        return self._compute_seconds(rows) + self._hop_seconds(rows)

    def _compute_seconds(self, rows: int) -> float:
        """All stages, one after the other."""
        return self._expected_seconds(rows) * (self._slowdown.at(rows) if self._slowdown else 1.0)

    def _slowest_stage_seconds(self, rows: int) -> float:
        return self._compute_seconds(rows) * max(self._shares)

    def _hop_seconds(self, rows: int) -> float:
        return self._hops.at(rows) if self._hops else 0.0

    def _expected_seconds(self, rows: int) -> float:
        """As it was measured beforehand; beyond that as steep as it was last."""
        if len(self._curve) < 2:
            return 1.0
        (first, low), (last, high) = self._curve[-2:]
        beyond = max(rows - last, 0.0) * max(high - low, 0.0) / (last - first)
        return max(_interpolate(self._curve, rows) + beyond, 1e-9)


def _medians(seen: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """A slow lap or two, as when a process begins, say nothing about the next."""
    return median(rows for rows, _ in seen), median(value for _, value in seen)


def _interpolate(points: Sequence[tuple[float, float]], rows: float) -> float:
    """On the straight lines between points (rows ascending); level beyond them."""
    place = bisect_left(points, (rows,))
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (first, low), (last, high) = points[place - 1 : place + 1]
    return low + (high - low) * (rows - first) / (last - first) if last > first else high
