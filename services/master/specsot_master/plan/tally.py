"""Counts what a request cost: tokens, laps, accepted lengths, seconds per phase.

Pure: the time is passed in, in seconds of any clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from specsot.events import Statistics
from specsot.frames import Outcome


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """Tokens of a request's output. written: by the model, up to where each sequence was over; what drafts
    brought behind that is not counted, so the count does not depend on them. plan: those of them that no
    answer holds. merged: of the answer. headings: what its headings take.
    """

    written: int
    plan: int
    merged: int
    headings: int = 0


@dataclass(slots=True)
class RequestTally:
    """Running figures of one request that arrived at `began`."""

    began: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    laps: int = 0
    trees: int = 0
    tree_tokens: int = 0
    first_token: float | None = None
    phase: str | None = None
    phase_began: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def enter(self, phase: str | None, now: float) -> None:
        """The phase before ends here. None: no phase follows."""
        if self.phase is not None:
            self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self.phase_began
        self.phase, self.phase_began = phase, now

    def rename(self, phase: str) -> None:
        """The running phase turned out to be another one."""
        self.phase = phase

    def lap(self, outcomes: Iterable[Outcome], now: float) -> None:
        """One lap of the ring that brought these outcomes for this request."""
        self.laps += 1
        for outcome in outcomes:
            if outcome.step:
                self.trees += 1
                self.tree_tokens += len(outcome.tokens)
            if self.first_token is None and outcome.tokens:
                self.first_token = now

    def close(self, mode: str, counts: OutputTokens, branches: int, now: float) -> Statistics:
        """The figures as the client gets them."""
        self.enter(None, now)
        seconds = now - self.began
        return Statistics(
            mode=mode,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=counts.written + counts.headings,
            merged_tokens=counts.merged,
            plan_tokens=counts.plan,
            heading_tokens=counts.headings,
            seconds=seconds,
            seconds_to_first_token=self.first_token - self.began if self.first_token is not None else 0.0,
            tokens_per_second=counts.merged / seconds if seconds > 0 else 0.0,
            laps=self.laps,
            mean_accepted=self.tree_tokens / self.trees if self.trees else 1.0,
            branches=branches,
            phases=dict(self.phases),
        )
