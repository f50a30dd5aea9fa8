"""What a lap takes, with and without drafts: measured curves, kept honest by what laps really take.

Refuses to know clocks, tokens, and whether anything pays: counts in, seconds out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsot.members import Curve
from specsot_drafter.timing import RowCurve

Floats = NDArray[np.floating[Any]]
Counts = Floats | NDArray[np.int64] | int

MAX_TREE_SLOWDOWN = 3.0  # times what the curve says, beyond which a lap with trees is not believed
MAX_HOP_FACTOR = (
    4.0  # times a lap's computing and the least that hops took lately, which hops may seem to take
)
MAX_BESIDE_FACTOR = 2.0  # times a plain lap's computing that all else of it may seem to take
RECENT_LAPS = 16  # laps that are lately
HOP_MEDIAN_LAPS = {
    True: 9,
    False: 3,
}  # laps with drafts and without, of which the median is taken for the next one
LAP_WEIGHT = 0.2  # of one lap in what is typical
CATCHUP_ROW_SHARE = (
    0.1  # of a pass over as many grown rows: over rows that are only caught up with, until it is measured
)


class CostModel:
    """Seconds of a lap of `live` trees and of all that drafting adds to it."""

    def __init__(self, lap: Curve, level: Curve, widths: Sequence[int]) -> None:
        """lap: seconds per rows of all stages; level: seconds per rows of one level of growth.
        widths: rows per tree that level 2, 3, ... of growth takes.
        """
        self.lap, self.level = RowCurve(lap), RowCurve(level)
        self._widths = widths
        self._hops = {drafted: deque[float](maxlen=laps) for drafted, laps in HOP_MEDIAN_LAPS.items()}
        self._recent_hops: deque[float] = deque(maxlen=RECENT_LAPS)
        self._beside = dict[int, float]()  # seconds of a plain lap beside what `lap` says, by about how many
        self._tree_slowdown = 1.0
        self._pass = RowCurve(tuple((rows, CATCHUP_ROW_SHARE * seconds) for rows, seconds in level))

    def plain_lap(self, live: int) -> float:
        """A lap without drafts, with all that lies between its computing."""
        return float(self.lap.at(live)) + self._beside.get(live.bit_length(), self._plain_hop())

    def draft_seconds(self, live: int, levels: Counts) -> Floats:
        """What trees of so many levels cost before any of their rows is fed."""
        return self._growth_seconds(live, levels) + self.handover()

    def next_level(self, live: int, depth: int) -> float:
        """One more level below so many."""
        return float(self.level.at(live * self._widths[depth - 1]))

    def tree_rows(self, live: int, nodes: Counts) -> Floats:
        """What so many nodes add to a lap of `live` roots."""
        drafted = self.lap.at(live + np.asarray(nodes, dtype=float)) * self._tree_slowdown
        return np.where(np.asarray(nodes) > 0, drafted - self.lap.at(live), 0.0)

    def catchup(self, rows: int) -> float:
        """Rows that must be caught up with before anything grows."""
        return float(self._pass.at(rows)) if rows else 0.0

    def handover(self) -> float:
        """What waiting for trees adds to a lap."""
        return max(self._drafted_hop() - self._plain_hop(), 0.0)

    def record_growth(self, live: int, levels: int, due: int, seconds: float) -> None:
        """Growing `live` trees of so many levels took so long, `due` rows caught up with included."""
        expected = float(self._growth_seconds(live, levels))
        if due <= live * (len(self._widths) + 2):  # what the lap before brought
            self.level.record(expected, seconds)
        else:
            self._pass.record(self.catchup(due), seconds - expected)

    def record_lap(self, live: int, rows: int, seconds: float) -> None:
        """All stages took so long for it.

        Laps without drafts move the curve, and so does any lap that was faster than it says; how much
        more laps with trees take (their masks, their branching, each sequence's own context) is kept apart.
        """
        expected = float(self.lap.at(rows))
        if rows == live or not self.lap.measured or 0.0 < seconds < expected:
            self.lap.record(expected, seconds)
            expected = float(self.lap.at(rows))
        if rows > live and seconds > 0.0 and expected > 0.0:
            self._tree_slowdown += LAP_WEIGHT * (
                min(max(seconds / expected, 1.0), MAX_TREE_SLOWDOWN) - self._tree_slowdown
            )

    def knows_plain(self, live: int) -> bool:
        """Whether a lap of about so many texts was seen without drafts."""
        return live.bit_length() in self._beside

    def record_plain(self, live: int, wall: float) -> None:
        """A lap of `live` texts without drafts took so long by the clock.

        What that is beside the curve depends on how many they are: 0.5 to 1 ms for one, 3.2 to 3.8 for 64,
        served on an H200.
        """
        computed, about = float(self.lap.at(live)), live.bit_length()
        beside = min(max(wall - computed, 0.0), MAX_BESIDE_FACTOR * computed)
        before = self._beside.get(about, beside)
        self._beside[about] = before + LAP_WEIGHT * (beside - before)

    def record_hop(self, drafted: bool, seconds: float, computed: float) -> None:
        """What a lap took beside the stages' and the drafter's computing; waiting for clients is cut off.

        Laps that wait for trees hop more often, and judge more rows: the difference is a cost of drafts. A
        median, because one lap that a busy machine held up says nothing about the next.
        """
        self._recent_hops.append(max(seconds, 0.0))
        self._hops[drafted].append(
            min(self._recent_hops[-1], MAX_HOP_FACTOR * (computed + min(self._recent_hops)))
        )

    def _growth_seconds(self, live: int, levels: Counts) -> Floats:
        """The first level takes a pass over one row per tree, each further one over its width."""
        passes = self.level.at(live * np.array((1, *self._widths)))
        return np.cumsum(passes)[np.asarray(levels) - 1]

    def _drafted_hop(self) -> float:
        return median(self._hops[True]) if self._hops[True] else 0.0

    def _plain_hop(self) -> float:
        """Taken as half of that of drafted laps as long as none without drafts was seen."""
        return median(self._hops[False]) if self._hops[False] else self._drafted_hop() / 2
