"""What laps cost with and without drafts, as measured by laps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsot.members import Curve

Floats = NDArray[np.floating[Any]]
Counts = Floats | NDArray[np.int64] | int

UNMEASURED = [(1, 1.0), (2, 1.0)]
FAR = 1e9  # rows beyond the last point of a curve, to which it goes on straight


def size_of(rows: Counts) -> NDArray[np.int64]:
    """Laps of about as many rows are of one size: half an octave, from 2 on."""
    return np.floor(2 * np.log2(rows) + 1e-9).astype(np.int64)


def one_size(rows: int) -> int:
    """The same of one number, in a tenth of the time."""
    return int(2 * math.log2(rows) + 1e-9)


class RowCurve:
    """A measured curve, never falling, straight between points and beyond the last; scaled by observation.

    Without points: one second whatever the rows, until the first observation says how long really.
    """

    def __init__(self, curve: Sequence[tuple[int, float]], believed: int = 0) -> None:
        """believed: observations that what was told counts for."""
        self._told = (1.0,) * believed
        self._seen = deque[float](maxlen=SPEED_LAPS)
        points = sorted(curve) or UNMEASURED
        seconds = list(accumulate((seconds for _, seconds in points), max))
        far = FAR * _last_slope([rows for rows, _ in points], seconds)
        self._rows = np.array([*(rows for rows, _ in points), points[-1][0] + FAR], dtype=float)
        self._seconds = np.array([*seconds, seconds[-1] + far])
        self._known = dict[int, Floats]()  # most are asked for again and again
        self.scale = 1.0

    def at(self, rows: Counts) -> Floats:
        """Seconds for so many rows, elementwise."""
        if not isinstance(rows, int):
            return self.scale * np.asarray(np.interp(rows, self._rows, self._seconds))
        if (known := self._known.get(rows)) is None:
            known = self._known[rows] = np.asarray(np.interp(rows, self._rows, self._seconds))
        return self.scale * known

    def record(self, expected: float, seconds: float) -> None:
        """What this curve said would take `expected` seconds took `seconds`; the median of a few counts."""
        if expected <= 0 or seconds <= 0:
            return
        self._seen.append(self.scale * seconds / expected)
        self.scale = median((*self._seen, *self._told))

    def rebase(self, rows: int, seconds: float) -> None:
        """So many rows take so long: what was told is right in its shape alone."""
        self._seconds *= seconds / float(self.at(rows))
        self._known.clear()
        self.scale = 1.0


def _last_slope(rows: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of one more row beyond the last."""
    if len(rows) < 2:
        return seconds[-1] / rows[-1]
    return (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])


MAX_HOP_FACTOR = 4.0  # times a lap's computing plus the least recent hop, which a hop is cut to; not measured
RECENT_LAPS = 16  # laps whose least hop counts as the network's; not measured
SPEED_LAPS = 9  # laps of which the median says how fast the machine is now; replayed traces hold it
CHANGED_SPEED = 2.0  # times: what plain laps took beside computing is of another time; replayed with 1.5, too
STRAIN_LAPS = 32  # comparisons of laps with trees and without, of which the median counts; not measured
# Times a plain lap's hops, and times its computing, that those of a drafted lap take more at most as long as
# none was seen: 1 ms beside 0.6 and 4.1 with SmolLM2 in 8 bits on two cores.
UNSEEN_HOPS, UNSEEN_SHARE = 1.5, 0.25
ENOUGH_HOPS = 5  # of drafted laps, from which on their median is believed; replayed traces hold it
SIZED_LAPS = 12  # drafted laps that say what a row's bytes take; replayed texts gain nothing by 24
NEAR_LAPS = 5  # unheard laps, after which those before are of another time; not measured
BELIEVED_STRAINS = (1.0,) * 2  # comparisons that the curve counts for; with one, noisy replays lose 2 to 6 %
KNOWN_PASSES = 512  # sums of the curve of levels that are kept
ENOUGH_STRAINS = 3  # comparisons from which on it is known how a size compares with plain laps
STRAIN_NEAR = 4  # laps before one that it is compared with; not measured
MIN_STRAIN, MAX_STRAIN = 0.5, 3.0  # times what the curve says, of one comparison; not measured
# Of a pass over as many grown rows, for rows only caught up with, a guess until laps measure it.
CATCHUP_ROW_SHARE = 0.1


class CostModel:
    """Seconds of a lap of `live` trees and of all that drafting adds to it.

    A neighbour on the same machine slows down whatever runs beside it, for a moment or for minutes. So laps
    with trees and without are compared only with laps of the other kind just before, and what differs between
    those that are far apart is the machine's speed, which all costs share.
    """

    def __init__(self, lap: Curve, level: Curve, widths: Sequence[int]) -> None:
        """lap: seconds per rows of all stages; level: seconds per rows of one level of growth.
        widths: rows per tree that level 2, 3, ... of growth takes.
        """
        self.lap, self._level = RowCurve(lap), RowCurve(level)
        self._growth = dict[int, GrowthTimes]()  # by bits of trees
        self._told = dict[tuple[int, tuple[int, ...]], Floats]()  # what the curve says of trees and nodes fed
        self._given, self._widths = bool(lap), widths
        self._hops = {drafted: deque[tuple[int, float]](maxlen=SPEED_LAPS) for drafted in (True, False)}
        self._sized: deque[tuple[int, float]] = deque(maxlen=SIZED_LAPS)  # rows of drafted laps, their hops
        self._row_hop = 0.0  # seconds of the hops that one more row takes
        self._handover: float | None = None  # None: hops have come since it was asked for
        self._rebased = False  # a plain lap was seen
        self._warm = False  # a lap with drafts was seen
        self._recent_hops: deque[float] = deque(maxlen=RECENT_LAPS)
        self._beside = dict[int, deque[float]]()  # of plain laps, what `lap` leaves out, by live
        self._beside_drafted = dict[int, deque[float]]()  # of drafted ones
        self._plain_scale: float | None = None  # of the curve, when a plain lap was seen
        # Sizes of drafted laps, 0 of others; times what the curve says.
        self._laps: deque[tuple[int, float]] = deque(maxlen=SPEED_LAPS)
        # By the size of a drafted lap, times what plain laps near it say that it took: the curve may
        # be flatter than laps are, and they have masks, and each sequence its own context.
        self._strains = dict[int, deque[float]]()
        self._strain = np.ones(64)
        # The first prompts may load kernels, and seldom are there others.
        self._pass = RowCurve([(rows, CATCHUP_ROW_SHARE * seconds) for rows, seconds in level], 2)

    def plain_lap(self, live: int) -> float:
        """A lap without drafts, with all that lies between its computing."""
        size, alone = live.bit_length(), float(self.lap.at(live))
        if not (beside := self._beside.get(size)):
            return alone + self._plain_hop() + self._row_hop * live
        if not (drafted := self._beside_drafted.get(size)):
            return alone + median(beside)
        return alone + min(median(beside), median(drafted))  # drafted laps hop more often, and came since

    @property
    def plain_is_old(self) -> bool:
        """The machine is a faster or slower one than when a plain lap was seen."""
        was = self._plain_scale
        return was is not None and not 1 / CHANGED_SPEED < self.lap.scale / was < CHANGED_SPEED

    def draft_seconds(self, live: int, levels: Counts, fed: Sequence[int] | None = None) -> Floats:
        """What trees of so many levels cost before any of their rows is fed. fed: see `record_growth`."""
        return self._growth_seconds(live, levels, fed) + self.handover()

    def level_seconds(self, live: int, rows: Counts) -> Floats:
        """One more level of so many rows, of `live` trees."""
        return self._level.at(rows) * self._speed * self._times(live).scale

    def tree_rows(self, live: int, nodes: Counts) -> Floats:
        """What so many nodes add to a lap of `live` roots."""
        if isinstance(nodes, int):
            return np.asarray(self._node_seconds(live, nodes))
        rows = live + np.asarray(nodes, dtype=float)
        sizes = size_of(rows)
        more = np.maximum(self.lap.at(rows) * self._strain[sizes] - self.lap.at(live), 0.0)
        more = more + self._row_hop * np.asarray(nodes)
        return np.where(np.asarray(nodes) > 0, more, 0.0)

    def _node_seconds(self, live: int, nodes: int) -> float:
        if nodes <= 0:
            return 0.0
        whole = float(self.lap.at(live + nodes)) * float(self._strain[one_size(live + nodes)])
        return max(whole - float(self.lap.at(live)), 0.0) + self._row_hop * nodes

    def catchup(self, rows: int) -> float:
        """Rows that must be caught up with before anything grows."""
        return float(self._pass.at(rows)) * self._speed if rows else 0.0

    def handover(self) -> float:
        """What waiting for trees adds to a lap."""
        if self._handover is None or not self._hops[True]:
            self._handover = max(self._drafted_hop() - self._plain_hop(), 0.0)
        return self._handover

    def record_growth(
        self, live: int, levels: int, due: int, seconds: float, fed: Sequence[int] | None = None
    ) -> None:
        """Growing `live` trees of so many levels took so long, `due` rows caught up with included.

        fed: nodes of each tree that were fed for level 2, 3, ..., where it was asked between levels.
        """
        if due <= live * (len(self._widths) + 2):  # what the lap before brought
            times, told = (
                self._growth.setdefault(live.bit_length(), GrowthTimes()),
                self._passes(live, levels, fed),
            )
            times.record(float(told[levels - 1]), seconds / self._speed)
        else:
            expected = float(self._growth_seconds(live, levels, fed))
            self._pass.record(self.catchup(due), seconds - expected)

    def record_lap(self, live: int, rows: int, seconds: float) -> None:
        """All stages took so long for it."""
        if seconds <= 0.0:
            return
        size = one_size(rows) if rows > live else 0
        if not (self._rebased or size):  # it may have been measured beside a busy neighbour
            self._rebased = True
            self.lap.rebase(rows, seconds)
        ratio = seconds * self.lap.scale / float(self.lap.at(rows))
        self._compare(size, ratio)
        self._laps.append((size, ratio))
        # Of a size that was hardly seen nobody knows whether it or the machine is slower than the curve says.
        told = [(size, one) for size, one in self._laps if self._compared(size)]
        self.lap.scale = median(one / self._strain[size] for size, one in told or self._laps)

    def skip_laps(self, laps: float) -> None:
        """So many laps go by without a word: what was measured before is not of this minute.

        Of the hops of drafted laps, and of what growing took, the least stays: else one that was held up
        would be believed for ever.
        """
        if laps > NEAR_LAPS:
            self._laps.clear()
            self._handover = None
            if hops := self._hops[True]:
                least = min(hops, key=self._without_rows)
                hops.clear()
                hops.append(least)
            for times in self._growth.values():
                times.keep_least()

    def doubt(self) -> None:
        """Nothing could be tried behind rests, as it was too dear: half of what was measured beyond what was
        told is not believed any more. Else a trial that was held up would be the last.
        """
        self._doubt_hops(0.5)
        self._sized.clear()
        self._row_hop /= 2
        for times in self._growth.values():
            times.doubt()

    def _doubt_hops(self, share: float) -> None:
        told, hops = self._unseen_hop(), self._hops[True]
        less = ((rows, min(hop, hop + share * (told - hop))) for rows, hop in hops)
        self._hops[True] = deque(less, SPEED_LAPS)
        self._handover = None

    def record_plain(self, live: int, wall: float, computed: float) -> None:
        """A lap of `live` texts without drafts took so long by the clock, its stages so long (0: unknown).

        What that is beside the curve depends on how many they are: 0.5 to 1 ms for one, 3.2 to 3.8 for 64,
        served on an H200.
        """
        computed = computed or float(self.lap.at(live))
        if self.plain_is_old:  # so is what any lap took beside its computing
            self._beside.clear()
            self._beside_drafted.clear()
            self._doubt_hops(1.0)
        self._plain_scale = self.lap.scale
        beside = self._beside.setdefault(live.bit_length(), deque(maxlen=SPEED_LAPS))
        beside.append(max(wall - computed, 0.0))

    def record_hop(
        self, drafted: bool, seconds: float, computed: float, rows: int = 0, live: int = 0
    ) -> None:
        """What a lap took beside the stages' and the drafter's computing; waiting for clients is cut off.
        rows: of the whole lap, which are bytes of every hop. live: texts of a lap with drafts.

        Laps that wait for trees hop more often, and judge more rows: the difference is a cost of drafts. A
        median, because one lap that a busy machine held up says nothing about the next. The first lap with
        drafts tells nothing: it loads and compiles what the others have.
        """
        if drafted and not self._warm:
            self._warm = True
            return
        self._recent_hops.append(max(seconds, 0.0))
        hop = min(self._recent_hops[-1], MAX_HOP_FACTOR * (computed + min(self._recent_hops)))
        self._hops[drafted].append((rows, hop))
        self._handover = None
        if drafted:
            self._sized.append((rows, hop))
            slopes = slopes_of(self._sized)
            # No more than a lap's hops beyond those of the shortest plain one: the rest is a cost of drafts.
            fewest, least = min(self._hops[False], key=lambda one: one[1], default=(0, 0.0))
            most = min(max(hop - least, 0.0) / max(rows - fewest, 1) for rows, hop in self._sized)
            self._row_hop = max(min(median(slopes), most), 0.0) if slopes else 0.0
            seen = self._beside_drafted.setdefault(live.bit_length(), deque(maxlen=SPEED_LAPS))
            seen.append(max(hop - self._row_hop * (rows - live), 0.0))

    @property
    def _speed(self) -> float:
        """Times what the curves say that anything takes now."""
        return self.lap.scale if self._given else 1.0

    def _compare(self, size: int, ratio: float) -> None:
        """A lap with drafts with plain and smaller ones near it, a plain one with those of each size."""
        near = [*self._laps][-STRAIN_NEAR:]
        known = [one / self._strain[other] for other, one in near if other < size and self._compared(other)]
        if known:
            self._record_strain(size, ratio / median(known))
        for other in {other for other, _ in near if other} if not size else ():
            self._record_strain(other, median(one for like, one in near if like == other) / ratio)

    def _compared(self, size: int) -> bool:
        """It is known how such laps compare with plain ones, which all others are compared with."""
        return not size or len(self._strains.get(size, ())) >= ENOUGH_STRAINS

    def _record_strain(self, size: int, strain: float) -> None:
        """Sizes that were never compared are taken to be like the next smaller one that was."""
        seen = self._strains.setdefault(size, deque(maxlen=STRAIN_LAPS))
        seen.append(min(max(strain, MIN_STRAIN), MAX_STRAIN))
        next_larger = min((one for one in self._strains if one > size), default=len(self._strain))
        self._strain[size:next_larger] = median((*seen, *BELIEVED_STRAINS))

    def _growth_seconds(self, live: int, levels: Counts, fed: Sequence[int] | None) -> Floats:
        times, told = self._times(live), self._passes(live, int(np.max(levels)), fed)
        return times.scale * told[np.asarray(levels) - 1] * self._speed

    def _passes(self, live: int, levels: int, fed: Sequence[int] | None) -> Floats:
        """What the curve says of 1, 2, ... levels: the first takes a pass over one row per tree, each further
        one over what is fed.
        """
        fed = tuple(self._widths if fed is None or len(fed) < levels - 1 else fed)
        if (told := self._told.get((live, fed))) is None:
            if len(self._told) >= KNOWN_PASSES:
                self._told.clear()
            told = self._told[live, fed] = np.cumsum(self._level.at(live * np.array((1, *fed))))
        return told

    def _times(self, live: int) -> GrowthTimes:
        """Of about as many trees; where they were never seen, of those that are most like them."""
        bits = live.bit_length()
        nearest = min(self._growth, key=lambda one: abs(one - bits), default=None)
        return AS_TOLD if nearest is None else self._growth[nearest]

    def _drafted_hop(self) -> float:
        """Without what its rows take: the least of a few, which may have been held up, the median of more."""
        if not self._hops[True]:
            return self._unseen_hop()
        hops = [self._without_rows(one) for one in self._hops[True]]
        return max(median(hops) if len(hops) >= ENOUGH_HOPS else min(hops), 0.0)

    def _unseen_hop(self) -> float:
        """Of a drafted lap, as long as there was none."""
        plain = self._plain_hop() if self._hops[False] else 0.0
        return plain + min(UNSEEN_HOPS * plain, UNSEEN_SHARE * float(self.lap.at(1)))

    def _without_rows(self, hop: tuple[int, float]) -> float:
        return hop[1] - self._row_hop * hop[0]

    def _plain_hop(self) -> float:
        """Taken as half of that of drafted laps as long as none without drafts was seen."""
        hops = self._hops[False]
        return max(median(map(self._without_rows, hops)), 0.0) if hops else self._drafted_hop() / 2


class GrowthTimes:
    """What growing takes: times what the curve says of its levels."""

    def __init__(self) -> None:
        self._newest = deque[tuple[float, float]](maxlen=SPEED_LAPS)  # as told, as measured
        self.scale = 1.0

    def keep_least(self) -> None:
        """Forget all but the fastest of the newest ones."""
        least = min(self._newest, key=lambda one: one[1] / one[0])
        self._newest.clear()
        self._newest.append(least)
        self._fit()

    def doubt(self) -> None:
        """Half of what was measured beyond what was told is not believed any more."""
        self._newest = deque(
            ((told, min(took, (told + took) / 2)) for told, took in self._newest), SPEED_LAPS
        )
        self._fit()

    def record(self, told: float, seconds: float) -> None:
        self._newest.append((told, seconds))
        self._fit()

    def _fit(self) -> None:
        self.scale = median(took / said for said, took in self._newest)


AS_TOLD = GrowthTimes()


def slopes_of(hops: Iterable[tuple[int, float]]) -> list[float]:
    """Seconds per row, by every pair of laps of different sizes, whose median counts (Theil and Sen)."""
    return [(b - a) / (n - m) for (m, a), (n, b) in combinations(hops, 2) if n != m]
