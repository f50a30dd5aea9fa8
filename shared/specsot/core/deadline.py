"""Bounds how long a member's computation may take for a number of rows before it counts as hung.

The input is a measured curve of seconds, the output a number of seconds.
"""

from __future__ import annotations

from specsot.core.cost_curve import CostCurve
from specsot.members import Curve

# Factor. How many times the expected seconds a computation may take. Untuned.
TOLERANCE = 8.0
# Seconds. The shortest limit, because the machine may be busy with something else. Untuned.
MIN_SECONDS = 10.0
# Seconds. The shortest limit for a number of rows that was not computed before, because kernels are compiled
# and memory is touched for the first time. Untuned.
FIRST_RUN_SECONDS = 120.0
# Fraction. How much of the worst observed ratio is kept after each computation. Untuned.
WORST_DECAY = 0.9


class Deadline:
    """The time limit of a member's computations, by their number of rows. Learns from every computation how
    much longer it takes than the curve that was measured before.

    Numbers of rows count as computed before if their bit length is the same: 5, 6 and 7 rows, for example.
    """

    def __init__(self, curve: Curve) -> None:
        """Begin with the measured curve, no number of rows computed before, and no slowdown.

        curve: (rows, seconds) as measured before, by ascending rows. Its seconds may be too small, and it may
            be empty; then only MIN_SECONDS and FIRST_RUN_SECONDS apply.
        """
        self._curve = CostCurve(curve)
        # The largest recent ratio of measured to expected seconds, at least 1.
        self._worst = 1.0
        self._known: set[int] = set()

    def seconds(self, rows: int) -> float:
        """Return how many seconds a computation may take before it counts as hung.

        The result is never less than MIN_SECONDS, or FIRST_RUN_SECONDS if no computation of a similar size
        was recorded.

        rows: number of tokens in the computation's batch.
        """
        min_seconds = MIN_SECONDS if rows.bit_length() in self._known else FIRST_RUN_SECONDS
        return max(min_seconds, TOLERANCE * self._worst * self._curve.at(rows))

    def record(self, rows: int, seconds: float) -> None:
        """Record how long a computation took, so that later limits follow the machine's present speed.

        rows: number of tokens in the computation's batch.
        seconds: how long the computation took.

        The number of rows counts as computed before from now on. A computation that took longer than the
        curve says raises the later limits at once; after faster ones, they fall by the factor WORST_DECAY per
        computation, but never below the curve. A curve that says 0 seconds counts as met.
        """
        self._known.add(rows.bit_length())
        expected = self._curve.at(rows)
        ratio = seconds / expected if expected else 1.0
        self._worst = max(ratio, WORST_DECAY * self._worst, 1.0)
