"""The token log of one sequence: the truth about what it is and what it has written.

Refuses to know text and pages. From it a broken sequence can be opened again: prompt and written
tokens together become the prompt of the new opening, which says how many were written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specsot.errors import WireError
from specsot.frames import End, Opening, Outcome


@dataclass(slots=True)
class TokenLog:
    """prompt: every token it was asked with, the forked part included. written: since then, over all its
    openings. next_step: of the outcome that comes next.
    """

    opening: Opening
    prompt: tuple[int, ...]
    written: list[int] = field(default_factory=list[int])
    next_step: int = 0
    end: End | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All there are."""
        return (*self.prompt, *self.written)

    @property
    def position(self) -> int:
        """Tokens there are, prompt included."""
        return len(self.prompt) + len(self.written)

    @property
    def last(self) -> int:
        """Tokens there can ever be."""
        return len(self.prompt) + self.opening.limit

    @property
    def spoken(self) -> bool:
        """It has an outcome, so its prompt is in the ring and its source is no longer needed."""
        return self.next_step > 0 or self.end is not None

    def reopen(self, opening: Opening) -> None:
        """It goes on as another sequence; what was under way is not known of."""
        self.opening, self.next_step = opening, 0

    def append(self, outcome: Outcome) -> tuple[int, ...]:
        """The new tokens; none for an outcome that was here before. Raises WireError if one is missing."""
        failed = outcome.end is End.FAILED  # may come at any step
        if self.end is not None or (outcome.step < self.next_step and not failed):
            return ()
        if outcome.step > self.next_step and not failed:
            missing = f"result of step {outcome.step} came, {self.next_step} is missing"
            raise WireError(f"sequence {outcome.sequence}: {missing}")
        self.written.extend(outcome.tokens)
        self.next_step, self.end = outcome.step + 1, outcome.end
        return outcome.tokens
