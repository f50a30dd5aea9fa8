"""How long laps take by the clock, with everything that lies between their verdicts.

Refuses to know clocks, who waits for whom, and what the times are used for.
"""

from __future__ import annotations

import statistics
from collections import deque

from specsot.frames import Chunk, Frame

RECENT = 15  # laps


class Pace:
    """Seconds per lap: of one with trees its own; of one without, what such laps take when nobody drafts."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._last: Frame | None = None
        self._at = 0.0

    def wall(self, frame: Frame, now: float) -> float:
        """Note that `frame` was judged at `now` (seconds); 0 where nothing is known of such laps."""
        before, began = self._last, self._at
        self._last, self._at = frame, now
        if before is None or not frame.segments:
            return 0.0
        sizes = [0 if isinstance(one, Chunk) else len(one.tree) for one in frame.segments]
        if 0 in sizes:
            return 0.0
        if sum(sizes) > len(sizes):
            return now - began
        laps = self._plain.setdefault(len(sizes), deque(maxlen=RECENT))
        if before.resting:
            laps.append(now - began)
        return statistics.median(laps) if laps and not frame.resting else 0.0
