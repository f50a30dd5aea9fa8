"""One answer of one method, lap by lap, and what it had come to when so many tokens were written.

Times are passed in, in seconds from the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LapSample:
    """How far an answer was behind one lap; all is counted from its beginning.

    tokens:    written, those of a plan included. grown: those of them that trees brought.
    laps:      of the base, behind prompts. proposed, accepted: drafted tokens; None: nobody tells.
    held:      bytes that the method held at most: KV pages, and what drafts with its own.
    evictions: how often a window gave pages back. evicted: rows in them.
    """

    seconds: float
    tokens: int
    grown: int
    laps: int
    proposed: int | None = None
    accepted: int | None = None
    held: int = 0
    evictions: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """An answer up to a length: its tokens, their seconds, the first one's, and the moment itself."""

    tokens: int
    seconds: float
    first: float
    moment: LapSample
    text: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Tokens a second, from the call on."""
        return self.tokens / self.seconds

    @property
    def per_token(self) -> float:
        """Seconds of a token behind the first: TPOT."""
        return (self.seconds - self.first) / max(self.tokens - 1, 1)

    @property
    def per_lap(self) -> float | None:
        """Tokens that a lap brought; of all branches, where there are several."""
        return self.moment.grown / self.moment.laps if self.moment.laps else None


@dataclass(frozen=True, slots=True)
class Recording:
    """moments: one a lap, in order. text: of the answer itself. planned: it was written in branches."""

    moments: tuple[LapSample, ...]
    text: tuple[int, ...]
    seconds: float
    planned: bool = False
    prompt: tuple[int, ...] = field(default=(), repr=False)

    def up_to(self, tokens: int) -> Excerpt:
        """As it stood when so many tokens were written, which may be a few more; a planned one at its end."""
        first, last = self.moments[0].seconds, self.moments[-1]
        if self.planned:
            return Excerpt(len(self.text), self.seconds, first, last, self.text)
        then = next((one for one in self.moments if one.tokens >= tokens), last)
        return Excerpt(then.tokens, then.seconds, first, then, self.text[: then.tokens])
