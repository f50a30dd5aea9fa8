"""Listens at the stages of a ring: which laps were turned, and how long frames waited for their turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specsot.core.frames import Frame, Result
from specsot.core.pages import PageTable
from specsot.members import Configuration
from specsot_worker.observer import WorkerObserver
from specsot_worker.ring_links import stage_index


@dataclass(frozen=True, slots=True)
class LapTimes:
    """One frame's way. seconds: of each stage; elapsed: from stage 0 and back to it."""

    rows: int
    elapsed: float
    seconds: tuple[float, ...]


class LapProbe(WorkerObserver):
    """At one worker. changed: called for every lap that is back. stage: which one it is, once that is known.

    flying: when each frame left stage 0. queued: seconds that frames waited here.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.stage = 0
        self.laps: list[LapTimes] = []
        self.queued = 0.0
        self.opened = self.closed = 0
        self.flying: dict[int, float] = {}

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        self.stage = stage_index(configuration)

    def launched(self, frame: Frame, now: float) -> Frame:
        self.flying[frame.number] = now
        self.opened += len(frame.openings)
        self.closed += len(frame.closings)
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        self.queued += seconds

    def returned(self, result: Result, now: float) -> None:
        if (began := self.flying.pop(result.number, None)) is not None:
            self.laps.append(LapTimes(result.rows, now - began, result.seconds))
        self._changed()
