"""What may be risked: every lap is booked against what plain decoding would have taken for its tokens.

Refuses to know why anything is tried. Whatever is tried, losses stay below ALLOWANCE of plain time plus
one GRANT: this is what keeps drafting from ever costing more than it may.
"""

from __future__ import annotations

RISK_SHARE = 0.0125  # of plain time, for trying things out
FIRST_CREDIT_LAPS = 0.4  # plain laps of credit to begin with
MAX_CREDIT_LAPS = 20.0  # plain laps of credit that good times may leave to bad ones


class RiskBudget:
    """Seconds of credit; `plain` is what a lap without drafts takes now."""

    def __init__(self) -> None:
        self._credit: float | None = None

    def available(self, plain: float) -> float:
        """Seconds that may be risked now."""
        return FIRST_CREDIT_LAPS * plain if self._credit is None else self._credit

    def record(self, plain: float, gained: float = 0.0, laps: float = 1.0) -> None:
        """So many laps passed, which gained so many seconds on plain decoding (or lost them)."""
        credit = self.available(plain) + RISK_SHARE * laps * plain + gained
        self._credit = min(credit, MAX_CREDIT_LAPS * plain)

    def laps_until(self, seconds: float, plain: float) -> float:
        """Laps without drafts until so much may be risked."""
        return max(seconds - self.available(plain), 0.0) / (RISK_SHARE * plain)
