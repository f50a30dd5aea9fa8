"""What drafting may lose: every lap is booked against what plain decoding would have taken for its tokens.

Losses stay below RISK_SHARE of plain time plus FIRST_CREDIT_LAPS, and MAX_TRIAL_LAPS behind each rest.
"""

from __future__ import annotations

import math

# What drafting may lose against plain decoding where it never pays; simulated laps hold it
# (tests/drafter/test_tuning.py, `test_not_even_...`).
RISK_SHARE = 0.005  # of plain time, for trials
FIRST_CREDIT_LAPS = 1.5  # plain laps of credit at the beginning; held by the same simulated laps
# Plain laps that good times may leave to bad ones, so that 200 tokens lose less than six: replayed texts in a
# row come to 0.965 of plain at worst with 3, to 0.973 with 2.
MAX_CREDIT_LAPS = 2.0
# Plain laps that new texts have for trials, half as many behind each that lost: of a kind that the head never
# learned all together lose twice that. With 3 replayed texts in a row come to 0.94 of plain at worst.
TEXT_CREDIT_LAPS, LEAST_TEXT_CREDIT = 2.0, 0.5
MAX_TRIAL_LAPS = 0.75  # plain laps that two trees behind a rest may take without credit; rests double


class RiskBudget:
    """Credit in plain laps, so that a machine which slows down takes none of it."""

    def __init__(self) -> None:
        self._credit = FIRST_CREDIT_LAPS
        self._hope, self._text = TEXT_CREDIT_LAPS, 0.0  # of new texts; what those that write gained

    def available(self, plain: float) -> float:
        """Seconds that may be risked now; plain: what a lap without drafts takes."""
        return self._credit * plain

    def record(self, gained: float = 0.0, laps: float = 1.0) -> None:
        """So many laps passed, which gained so many plain laps' time on plain decoding (or lost it)."""
        self._credit = min(self._credit + RISK_SHARE * laps + gained, MAX_CREDIT_LAPS)
        self._text += gained if laps else 0.0

    def begin_texts(self) -> bool:
        """Others write now, and drafts may pay for them as for those before; whether they have credit of
        their own.
        """
        if self._text:
            self._hope = TEXT_CREDIT_LAPS if self._text > 0 else self._hope / 2
        self._text = 0.0
        hopes = self._hope >= LEAST_TEXT_CREDIT
        self._credit = max(self._credit, self._hope if hopes else -math.inf)
        return hopes

    def grant(self, laps: float) -> None:
        """A trial behind a rest is paid for, whatever was lost before."""
        self._credit = max(self._credit, min(laps, MAX_TRIAL_LAPS))

    def laps_until(self, risked: float) -> float:
        """Laps without drafts until so many plain laps' time may be risked."""
        return max(risked - self._credit, 0.0) / RISK_SHARE
