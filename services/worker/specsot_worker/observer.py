"""The interface of a worker's observer, called in every lap; it must be quick, as the ring waits for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from specsot.core.frames import Frame, Result
from specsot.members import Configuration
from specsot_worker.stage_provider import StageRunner


class WorkerObserver:
    """Looks at nothing; those who do say so for the moments they care about. Times are seconds."""

    def formed(self, configuration: Configuration, stage: StageRunner) -> None:
        """An epoch begins; the stage's table says how many pages are free at any moment."""

    def launched(self, frame: Frame, now: float) -> Frame:
        """Stage 0 is about to send a frame on its way; this one goes."""
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        """A frame lay here so long before its turn came."""

    def computing(self, frame: Frame) -> AbstractContextManager[object]:
        """Entered while this stage computes a frame."""
        return nullcontext()

    def computed(self, frame: Frame, seconds: float) -> None:
        """This stage has computed a frame."""

    def returned(self, result: Result, now: float) -> None:
        """Stage 0 hears what came of a frame."""

    def disbanded(self) -> None:
        """The epoch is over; frames that have not returned never will."""
