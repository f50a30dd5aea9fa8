"""Whoever follows a worker's laps: what they are told, and where one may add to a frame.

Refuses to know what is made of it. A watch must be quick: the ring waits meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from specsot.core.frames import Frame, Result
from specsot.core.pages import PageTable
from specsot.members import Configuration


class WorkerObserver:
    """Looks at nothing; those who do say so for the moments they care about. Times are seconds."""

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        """An epoch begins; `table` says how many pages are free at any moment."""

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


class WorkerObservers(WorkerObserver):
    """Several as one."""

    def __init__(self, watches: Sequence[WorkerObserver]) -> None:
        self._observers = watches

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        for watch in self._observers:
            watch.formed(configuration, table)

    def launched(self, frame: Frame, now: float) -> Frame:
        for watch in self._observers:
            frame = watch.launched(frame, now)
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        for watch in self._observers:
            watch.dequeued(frame, seconds)

    def computing(self, frame: Frame) -> AbstractContextManager[object]:
        stack = ExitStack()
        for watch in self._observers:
            stack.enter_context(watch.computing(frame))
        return stack

    def computed(self, frame: Frame, seconds: float) -> None:
        for watch in self._observers:
            watch.computed(frame, seconds)

    def returned(self, result: Result, now: float) -> None:
        for watch in self._observers:
            watch.returned(result, now)

    def disbanded(self) -> None:
        for watch in self._observers:
            watch.disbanded()
