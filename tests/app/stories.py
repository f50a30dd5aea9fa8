"""Recorded requests as lists of events, and a fleet that tells them.

What the fleet answers is written down here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import reduce

from specsot.core.info import Info
from specsot.core.skeleton import Point
from specsot.core.view import View, advance
from specsot.errors import SpecsotError
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Event,
    Finished,
    MergedText,
    Numbered,
    Planned,
    Reason,
    SkeletonText,
    Started,
    Statistics,
)
from specsot.params import Ask


def watch(events: Iterable[Event]) -> View:
    """The view after a whole list of events."""
    return reduce(advance, events, View())


POINTS = (
    Point(1, 80, "NREM Stages of Sleep"),
    Point(2, 60, "REM 睡眠 🌙"),
    Point(3, 40, "What both have in common", needs=(1, 2)),
)
MERGED = (
    "## 1. NREM Stages of Sleep\nSlow waves.\n\n"
    "## 2. REM 睡眠 🌙\nDreams.\n\n"
    "## 3. What both have in common\nRest."
)
STATISTICS = Statistics(
    mode="sot",
    prompt_tokens=21,
    completion_tokens=60,
    merged_tokens=44,
    plan_tokens=9,
    heading_tokens=4,
    seconds=0.5,
    seconds_to_first_token=0.05,
    tokens_per_second=88.0,
    steps=24,
    mean_accepted=2.5,
    branches=3,
    phases={"skeleton": 0.2, "branches": 0.3},
)

PLANNED: tuple[Event, ...] = (
    Started("r-1", "demo", "auto", 7, 21),
    SkeletonText("[PLAN]\n1.<80><None>[-]NREM"),
    SkeletonText(" Stages of Sleep\n"),
    Planned(POINTS),
    BranchStarted(1, "NREM Stages of Sleep", 80),
    BranchStarted(2, "REM 睡眠 🌙", 60),
    BranchText(2, 0, "Dre", 2),
    BranchText(1, 0, "Slow ", 3),
    MergedText(0, "## 1. NREM Stages of Sleep\nSlow "),
    BranchText(2, 3, "ams.", 3),
    BranchFinished(2, Reason.STOP, 5),
    BranchText(1, 5, "waves.", 2),
    BranchFinished(1, Reason.LENGTH, 5),
    BranchStarted(3, "What both have in common", 40),
    BranchText(3, 0, "Rest.", 2),
    BranchFinished(3, Reason.STOP, 2),
    MergedText(32, MERGED[32:]),
    Finished(Reason.STOP, MERGED, (5, 6, 7), STATISTICS),
)

DIRECT: tuple[Event, ...] = (
    Started("r-2", "demo", "direct", 7, 9),
    Planned(()),
    MergedText(0, "Yes"),
    MergedText(3, ", it is."),
    Finished(Reason.LENGTH, "Yes, it is.", (1, 2), Statistics(completion_tokens=2, merged_tokens=2)),
)


class StoryFleet:
    """A fleet that tells one story to every request, or fails with an error behind it."""

    def __init__(self, story: Sequence[Event], error: SpecsotError | None = None) -> None:
        self.story, self.error = story, error
        self.asks: list[Ask] = []
        self.left_early = 0
        self.closed = 0

    async def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        self.asks.append(ask)
        told = 0
        try:
            for event in self.story:
                await asyncio.sleep(0)
                yield Numbered(told, event)
                told += 1
            if self.error is not None:
                raise self.error
        finally:
            self.left_early += told < len(self.story)

    async def cancel(self, request: str) -> bool:
        return False

    async def info(self) -> Info:
        return Info()

    async def close(self) -> None:
        self.closed += 1
