"""How long a member's compute may take for so many rows before it counts as hung.

Pure. Refuses to know clocks and what is computed: measured seconds in, seconds out.
"""

from __future__ import annotations

from specsot.members import Curve

TOLERANCE = 8.0  # what is expected
MIN_SECONDS = 10.0  # seconds; a machine may be busy with something else
FIRST_RUN_SECONDS = (
    120.0  # seconds for an amount of work that is new here: kernels are compiled, memory is touched
)
WORST_DECAY = 0.9  # of what was worst, with every piece of work


class Deadline:
    """Learns from every piece of work how much longer it takes here than was measured beforehand."""

    def __init__(self, curve: Curve) -> None:
        """curve: seconds per rows; may promise too much, and may be empty."""
        self._curve = sorted(curve)
        self._worst = 1.0  # measured by expected
        self._known: set[int] = set()

    def seconds(self, rows: int) -> float:
        """From when it begins."""
        least = MIN_SECONDS if rows.bit_length() in self._known else FIRST_RUN_SECONDS
        return max(least, TOLERANCE * self._worst * self._expected(rows))

    def took(self, rows: int, seconds: float) -> None:
        """So many rows were computed."""
        self._known.add(rows.bit_length())
        expected = self._expected(rows)
        now = seconds / expected if expected else 1.0
        self._worst = max(now, WORST_DECAY * self._worst, 1.0)

    def _expected(self, rows: int) -> float:
        """As of the next size that was measured; beyond the last one in proportion."""
        if not self._curve:
            return 0.0
        last, longest = self._curve[-1]
        return next((time for size, time in self._curve if size >= rows), longest * rows / last)
