"""Requests that are timed from the call to the last event, on fleets that are opened for them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specsot.events import Finished
from specsot.params import Ask
from specsot_app.bench.core.pairing import Sample
from specsot_app.fleet.opening import Fleet, open_fleet
from specsot_app.fleet.options import FleetOptions


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One finished request and its wall seconds, from the call to the last event."""

    finished: Finished
    seconds: float

    def whole(self) -> Sample:
        """Tokens of the merged answer over the whole wall time."""
        return Sample(self.finished.statistics.merged_tokens, self.seconds)

    def branches(self) -> Sample:
        """Tokens of the branches over their phase alone."""
        statistics = self.finished.statistics
        return Sample(statistics.merged_tokens, statistics.phases["branches"])


@asynccontextmanager
async def opened(wanted: FleetOptions) -> AsyncGenerator[Fleet]:
    fleet = await open_fleet(wanted)
    try:
        yield fleet
    finally:
        await fleet.close()


async def answer(fleet: Fleet, ask: Ask) -> TimedAnswer:
    """Ask, read to the end, and time it."""
    begun = time.perf_counter()
    finished: Finished | None = None
    async for numbered in fleet.generate(ask):
        if isinstance(numbered.event, Finished):
            finished = numbered.event
    assert finished is not None
    return TimedAnswer(finished, time.perf_counter() - begun)
