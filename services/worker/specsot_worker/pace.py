"""How long laps take by the clock, with everything that lies between their verdicts.

Refuses to know clocks, who waits for whom, and what the times are used for.
"""

from __future__ import annotations

import statistics
from collections import deque

from specsot.core.frames import Frame, TreeSegment

RECENT_LAPS = 15  # laps


class LapClock:
    """Seconds per lap: of one with trees its own; of one without, what such laps take when nobody drafts.

    A lap is from a sequence's verdict to its next, however many other frames are judged between.
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._verified: dict[int, tuple[float, bool]] = {}  # by sequence: when, and whether in a rest

    def lap_seconds(self, frame: Frame, now: float) -> float:
        """Note that `frame` was judged at `now` (seconds); 0 where nothing is known of such laps."""
        before = [self._verified.get(one.sequence) for one in frame.segments]
        self._note(frame, now)
        sizes = [len(one.tree) for one in frame.segments if isinstance(one, TreeSegment)]
        known = [one for one in before if one is not None]
        if not sizes or len(sizes) < len(frame.segments) or len(known) < len(before):
            return 0.0
        seconds = now - max(at for at, _ in known)
        if sum(sizes) > len(sizes):
            return seconds
        laps = self._plain.setdefault(len(sizes), deque(maxlen=RECENT_LAPS))
        if all(rested for _, rested in known):
            laps.append(seconds)
        return statistics.median(laps) if laps and not frame.resting else 0.0

    def _note(self, frame: Frame, now: float) -> None:
        for one in frame.segments:
            self._verified[one.sequence] = now, frame.resting
        for sequence in frame.closings:
            self._verified.pop(sequence, None)
