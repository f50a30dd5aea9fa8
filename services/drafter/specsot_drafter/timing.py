"""Seconds as a function of rows, from measured points and from what laps really take.

Refuses to know who measured, and any clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsot.members import Curve

Floats = NDArray[np.floating[Any]]

UNMEASURED = [(1, 1.0), (2, 1.0)]
SLOWER_WEIGHT, FASTER_WEIGHT = (
    0.1,
    0.3,
)  # weight of one observation; a disturbance never makes anything faster
MAX_RATIO = 5.0  # times slower than the curve, beyond which an observation is not believed


class RowCurve:
    """A measured curve, never falling, straight between points and beyond the last; scaled by observation.

    Without points: one second whatever the rows, until the first observation says how long really.
    """

    def __init__(self, curve: Curve) -> None:
        self.measured = bool(curve)
        points = sorted(curve) or UNMEASURED
        self._rows = np.array([rows for rows, _ in points], dtype=float)
        self._seconds = np.maximum.accumulate(np.array([seconds for _, seconds in points], dtype=float))
        self._slope = self._last_slope()
        self._scale = 1.0

    def at(self, rows: Floats | int) -> Floats:
        """Seconds for so many rows, elementwise."""
        beyond = np.maximum(np.asarray(rows, dtype=float) - self._rows[-1], 0.0) * self._slope
        return self._scale * (np.interp(rows, self._rows, self._seconds) + beyond)

    def record(self, expected: float, seconds: float) -> None:
        """Something this curve said would take `expected` seconds took `seconds`: move it a little."""
        if expected <= 0 or seconds <= 0:
            return
        if self.measured:
            ratio = min(seconds / expected, MAX_RATIO)
            self._scale *= 1 + (SLOWER_WEIGHT if ratio > 1 else FASTER_WEIGHT) * (ratio - 1)
        else:
            self._scale *= seconds / expected
            self.measured = True

    def _last_slope(self) -> float:
        if len(self._rows) < 2:
            return float(self._seconds[-1] / self._rows[-1])
        return float((self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2]))
