"""Bounds how long a member's computation may take for a number of rows before it counts as hung.

Measured seconds in, seconds out.
"""

from __future__ import annotations

from specsot.core.cost_curve import CostCurve
from specsot.members import Curve

TOLERANCE = 8.0  # times the expected seconds; not measured
MIN_SECONDS = 10.0  # a machine may be busy with something else; not measured
# For a number of rows that is new here: kernels are compiled, memory is touched. Not measured.
FIRST_RUN_SECONDS = 120.0
WORST_DECAY = 0.9  # share of the worst ratio that is kept after each piece of work; not measured


class Deadline:
    """Learns from every piece of work how much longer it takes here than was measured beforehand."""

    def __init__(self, curve: Curve) -> None:
        """curve: seconds per rows; may promise too much, and may be empty."""
        self._curve = CostCurve(curve)
        self._worst = 1.0  # measured by expected
        self._known: set[int] = set()

    def seconds(self, rows: int) -> float:
        """From when it begins."""
        least = MIN_SECONDS if rows.bit_length() in self._known else FIRST_RUN_SECONDS
        return max(least, TOLERANCE * self._worst * self._curve.at(rows))

    def took(self, rows: int, seconds: float) -> None:
        self._known.add(rows.bit_length())
        expected = self._curve.at(rows)
        now = seconds / expected if expected else 1.0
        self._worst = max(now, WORST_DECAY * self._worst, 1.0)
