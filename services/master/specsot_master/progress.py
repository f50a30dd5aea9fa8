"""Whether the engine moves: work in the ring, and no lap for too long, means that it hangs.

Pure: the time is passed in, in seconds of any clock that only goes forward. Refuses to know rings,
requests and whom it is told.
"""

from __future__ import annotations


class StallDetector:
    """Look at it now and then. `patience`: seconds without a lap, while one is owed."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._laps, self._since = 0, float("inf")

    def moves(self, laps: int, owed: bool, now: float) -> bool:
        """laps: how many there have been. owed: something in the ring may go on. Idle is healthy."""
        if self._since > now or not owed or laps != self._laps:
            self._laps, self._since = laps, now
        return now - self._since < self._patience
