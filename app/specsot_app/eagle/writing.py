"""One batch being written: laps as pieces of text, and the count of what they cost.

Refuses to know how callers spell prompts, and what the ring computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specsot.frames import End, Growth, Open, Opening, Outcome
from specsot.kernels.statistics import summarize
from specsot_app.eagle.config import EagleConfig
from specsot_app.eagle.models import TargetAndDraft
from specsot_app.eagle.ring import Lap, LapLoop
from specsot_app.eagle.stats import EagleStats, Piece, SequenceStats

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What is wanted of each sequence of a batch.

    limit: tokens it may write. seed: of all draws; a sequence's ordinal is its number in the batch.
    """

    limit: int
    seed: int
    stop_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])
    end: End | None = None

    def hear(self, outcome: Outcome) -> None:
        self.tokens += outcome.tokens
        self.end = outcome.end
        if outcome.accepted:
            self.accepted.append(len(outcome.accepted) - 1)


class Generation:
    """A generation; `pieces` runs it, once."""

    def __init__(
        self,
        models: TargetAndDraft,
        config: EagleConfig,
        prompts: Prompts,
        wish: GenerationLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ring = LapLoop(models, config.shape, orders_of(prompts, config, wish, models.draft is not None))
        self._texts = [_Sequence() for _ in prompts]
        self._steps, self._seed, self._clock = config.num_steps, wish.seed, clock
        self._proposed = self._laps = 0
        self._seconds = 0.0

    def pieces(self) -> Iterator[Piece]:
        """What is written, lap by lap, until every sequence has ended."""
        while any(text.end is None for text in self._texts):
            began = self._clock()
            lap = self._ring.turn()
            self._seconds += self._clock() - began
            yield from self._hear(lap)

    @property
    def tokens(self) -> list[list[int]]:
        """What each sequence has written."""
        return [text.tokens for text in self._texts]

    @property
    def stats(self) -> EagleStats:
        """The count so far."""
        lengths = [accepted for text in self._texts for accepted in text.accepted]
        return EagleStats(
            tuple(SequenceStats(tuple(one.tokens), one.end, tuple(one.accepted)) for one in self._texts),
            self._seed,
            self._laps,
            self._seconds,
            summarize(lengths, self._proposed, self._steps),
        )

    def _hear(self, lap: Lap) -> Iterator[Piece]:
        self._laps += 1
        self._proposed += sum(len(one.tree) - 1 for one in lap.frame.segments if isinstance(one, Growth))
        for outcome in lap.result.outcomes:
            self._texts[outcome.sequence].hear(outcome)
        for outcome in lap.result.outcomes:
            yield Piece(outcome.sequence, outcome.tokens, outcome.end)


def orders_of(prompts: Prompts, config: EagleConfig, wish: GenerationLimits, drafted: bool) -> list[Open]:
    """Every sequence opened whole, with a lease to its end."""
    return [
        Open(
            Opening(
                sequence,
                len(prompt),
                drafted=drafted,
                sampling=config.sampling,
                seed=wish.seed,
                ordinal=sequence,
                stop_ids=wish.stop_ids,
                limit=wish.limit,
            ),
            prompt,
            len(prompt) + wish.limit,
        )
        for sequence, prompt in enumerate(prompts)
    ]
