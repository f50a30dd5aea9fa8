"""What may be risked: every lap is booked against what plain decoding would have taken for its tokens.

Refuses to know why anything is tried. Whatever is tried, losses stay below ALLOWANCE of plain time plus
one GRANT: this is what keeps drafting from ever costing more than it may.
"""

from __future__ import annotations

ALLOWANCE = 0.0125  # of plain time, for trying things out
GRANT = 0.4  # plain laps of credit to begin with
CEILING = 20.0  # plain laps of credit that good times may leave to bad ones


class Purse:
    """Seconds of credit; `plain` is what a lap without drafts takes now."""

    def __init__(self) -> None:
        self._credit: float | None = None

    def holds(self, plain: float) -> float:
        """Seconds that may be risked now."""
        return GRANT * plain if self._credit is None else self._credit

    def book(self, plain: float, gained: float = 0.0, laps: float = 1.0) -> None:
        """So many laps passed, which gained so many seconds on plain decoding (or lost them)."""
        credit = self.holds(plain) + ALLOWANCE * laps * plain + gained
        self._credit = min(credit, CEILING * plain)

    def laps_until(self, seconds: float, plain: float) -> float:
        """Laps without drafts until so much may be risked."""
        return max(seconds - self.holds(plain), 0.0) / (ALLOWANCE * plain)
