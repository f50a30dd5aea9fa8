"""Quarantine of requests under which rings break: who may be in the ring while somebody is on trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLAME_HALF_LIFE_TOKENS = 64  # tokens a request writes that halve what a break counts against it; not measured
# Two breaks in a row, with little written before and between (1 + 0.5 or more); not measured.
SUSPECT_BLAME = 1.5
MAX_BREAKS = 8  # breaks under one request, however much it wrote between, before it is suspect; not measured
# Tokens that clear a suspect; the longest is within a first lease; not measured.
PROOF_TOKENS = 16
MAX_PROOF_TOKENS = 256
GUILTY_BREAKS = 1.5  # breaks in a row while alone in the ring, each halved by PROOF_TOKENS; not measured
MAX_BREAKS_ALONE = 8  # breaks while alone in the ring, over a request's whole life; not measured


@dataclass(slots=True, eq=False)
class BreakHistory:
    """A request's history with rings that broke. blame: breaks, halved by every
    BLAME_HALF_LIFE_TOKENS tokens.

    breaks: all of them. alone: those on trial with nobody else in the ring; guilt: those since it was cleared
            last, halved by every PROOF_TOKENS tokens. written: tokens since it entered this ring.
    """

    blame: float = 0.0
    guilt: float = 0.0
    breaks: int = 0
    alone: int = 0
    written: int = 0

    @property
    def suspect(self) -> bool:
        return self.blame > SUSPECT_BLAME or self.breaks > MAX_BREAKS

    @property
    def guilty(self) -> bool:
        return self.guilt > GUILTY_BREAKS or self.alone >= MAX_BREAKS_ALONE

    @property
    def proof(self) -> int:
        """Tokens that clear it; with every break beyond MAX_BREAKS twice as many."""
        return min(PROOF_TOKENS << min(max(self.breaks - MAX_BREAKS, 0), 8), MAX_PROOF_TOKENS)

    @property
    def summary(self) -> str:
        """What its client is told when it is given up."""
        return f"{self.breaks} rings broke while this request ran, {self.alone} of them with it alone in them"

    def on_break(self, alone: bool) -> None:
        """Its ring broke. alone: on trial, with nobody else in the ring."""
        self.breaks += 1
        if alone:
            self.alone += 1
            self.guilt = (self.guilt + 1) * 0.5 ** (self.written / PROOF_TOKENS)
        self.blame = (self.blame + 1) * 0.5 ** (self.written / BLAME_HALF_LIFE_TOKENS)
        self.written = 0


class Quarantine:
    """Who may be in the ring. While somebody is on trial, only those on trial and those cleared are."""

    def __init__(self) -> None:
        self._moved = False
        self._pending: list[BreakHistory] = []
        self._trial: list[BreakHistory] = []
        self._cleared: list[BreakHistory] = []

    def admits(self, record: BreakHistory) -> bool:
        return not self._trial or record in self._trial or record in self._cleared

    def has_changed(self) -> bool:
        """Whether others may enter, since this was asked last."""
        moved = self._moved
        self._moved = False
        return moved

    def on_break(self, present: Sequence[BreakHistory]) -> BreakHistory | None:
        """The ring broke with these in it, the most likely culprits first. Returns who is to be given up."""
        tried = [one for one in present if one in self._trial]
        alone = len(present) == len(tried) == 1
        for one in present:
            one.on_break(alone)
        if alone and tried[0].guilty:
            self.remove(tried[0])
            return tried[0]
        if present:
            untried = [*self._trial, *self._pending]
            suspects = tried or [*(one for one in present if one.suspect), *untried]
            self._begin(sorted(suspects, key=lambda one: -one.blame))
        return None

    def on_tokens(self, record: BreakHistory, tokens: int) -> None:
        """A request wrote tokens: perhaps enough to be cleared."""
        record.written += tokens
        if record in self._trial and record.written >= record.proof:
            record.guilt = 0.0
            self._cleared.append(record)
            self._end_trial(record)

    def remove(self, record: BreakHistory) -> None:
        for group in (self._pending, self._cleared):
            if record in group:
                group.remove(record)
        if record in self._trial:
            self._end_trial(record)

    def clear(self) -> None:
        self._begin([])

    def _begin(self, suspects: list[BreakHistory]) -> None:
        self._pending = suspects
        self._cleared = []
        self._take_half()

    def _end_trial(self, record: BreakHistory) -> None:
        """Once nobody is on trial, the next half of those who wait for theirs."""
        self._trial.remove(record)
        if not self._trial:
            self._take_half()
            self._moved = True

    def _take_half(self) -> None:
        half = (len(self._pending) + 1) // 2
        self._trial = self._pending[:half]
        self._pending = self._pending[half:]
