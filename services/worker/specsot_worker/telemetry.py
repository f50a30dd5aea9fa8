"""What a worker tells its observers, lap by lap, and the spans of traced laps.

An observer must be quick: the ring waits meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from specsot.core.frames import Frame, Result, rows_of
from specsot.core.pages import PageTable
from specsot.members import Configuration
from specsot.tracing import Span, Tracer


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


class LapSpans(WorkerObserver):
    """Spans of sampled laps at stage 0, and of this stage's work in them; `inner` hears all it hears.

    Of laps that carry a sequence whose request is traced: one of `every`, and those that open one.
    """

    def __init__(self, tracer: Tracer, every: int, inner: WorkerObserver) -> None:
        self._tracer, self._every, self._inner = tracer, every, inner
        self._traced: dict[int, str] = {}
        self._in_flight: dict[int, Span] = {}
        self._layers = ""

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        mine = next(stage for stage in configuration.stages if stage.name == configuration.you)
        self._layers = str(mine.layers)
        self._inner.formed(configuration, table)

    def launched(self, frame: Frame, now: float) -> Frame:
        frame = self._inner.launched(frame, now)
        opened = {opening.sequence: opening.trace for opening in frame.openings if opening.trace}
        self._traced |= opened
        if self._traced and (opened or frame.number % self._every == 0):
            frame = self._trace(frame)
        for sequence in frame.closings:
            self._traced.pop(sequence, None)
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        self._inner.dequeued(frame, seconds)

    def computed(self, frame: Frame, seconds: float) -> None:
        self._inner.computed(frame, seconds)

    def computing(self, frame: Frame) -> AbstractContextManager[object]:
        return self._stage(frame, frame.trace) if frame.trace else nullcontext()

    def returned(self, result: Result, now: float) -> None:
        self._inner.returned(result, now)
        if span := self._in_flight.pop(result.number, None):
            brought = sum(len(outcome.tokens) for outcome in result.outcomes)
            span.end({"specsot.tokens": brought, "specsot.compute_seconds": sum(result.seconds)})

    def disbanded(self) -> None:
        self._inner.disbanded()
        for span in self._in_flight.values():
            span.end(error="the epoch ended")
        self._in_flight.clear()
        self._traced.clear()

    def _trace(self, frame: Frame) -> Frame:
        """As part of the first request it carries, beside the others."""
        carried = {segment.sequence: self._traced.get(segment.sequence) for segment in frame.segments}
        contexts = list(dict.fromkeys(context for context in carried.values() if context))
        if not contexts:
            return frame
        rows = sum(map(rows_of, frame.segments))
        about = {
            "specsot.frame": frame.number,
            "specsot.rows": rows,
            "specsot.sequences": len(carried),
        }
        span = self._tracer.begin("lap", contexts[0], contexts[1:], about)
        self._in_flight[frame.number] = span
        return replace(frame, trace=span.context)

    @contextmanager
    def _stage(self, frame: Frame, context: str) -> Generator[None]:
        about = {"specsot.frame": frame.number, "specsot.layers": self._layers}
        span = self._tracer.begin("stage", context, about=about)
        try:
            yield
        except BaseException as error:
            span.end(error=error)
            raise
        span.end()
