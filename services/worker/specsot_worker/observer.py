"""The interface of a worker's observer. The ring waits while an observer is called, so it must be quick."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from specsot.core.frames import Frame, Result
from specsot.members import Configuration
from specsot_worker.stage_provider import StageRunner


class WorkerObserver:
    """An observer that does nothing. Subclasses override the moments that they observe. Times are in
    seconds.
    """

    def formed(self, configuration: Configuration, stage: StageRunner) -> None:
        """Called when an epoch begins.

        configuration: The epoch as the master has configured it.
        stage: The stage of this worker. Its `table` has the present number of free pages.
        """

    def launched(self, frame: Frame, now: float) -> Frame:
        """Called when stage 0 is about to launch a frame. Return the frame to launch, which may carry a
        trace.

        frame: The composed frame.
        now: Time in seconds.
        """
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        """Called when a frame that arrived by a link is handled.

        frame: The frame.
        seconds: Seconds that it waited at this worker, at least 0.
        """

    def computing(self, frame: Frame) -> AbstractContextManager[object]:
        """Return a context that is entered while this stage computes a frame. The context of this class does
        nothing.

        frame: The frame.
        """
        return nullcontext()

    def computed(self, frame: Frame, seconds: float) -> None:
        """Called when this stage has computed a frame.

        frame: The frame.
        seconds: Seconds that this stage computed it.
        """

    def returned(self, result: Result, now: float) -> None:
        """Called when the result of a frame reaches stage 0.

        result: The verification result, with the compute seconds of every stage. Its frame number is 0 if the
            result belongs to no step.
        now: Time in seconds.
        """

    def disbanded(self) -> None:
        """Called when the epoch has ended. Frames whose results have not arrived are lost."""
