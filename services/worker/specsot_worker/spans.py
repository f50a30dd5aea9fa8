"""A worker's part in traces: sampled laps at stage 0, and this stage's work in them.

Refuses to know requests: a sequence has a context, or has none. Laps are not traced for their own sake,
only those that carry a sequence whose request is.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from specsot.core.frames import Frame, Result, rows_of
from specsot.core.pages import PageTable
from specsot.members import Configuration
from specsot.tracing import Span, Tracer
from specsot_worker.watching import WorkerObserver


class LapSpans(WorkerObserver):
    """every: of laps one is traced; those that open a traced sequence always are."""

    def __init__(self, tracer: Tracer, every: int) -> None:
        self._tracer, self._every = tracer, every
        self._traced: dict[int, str] = {}
        self._in_flight: dict[int, Span] = {}
        self._layers = ""

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        mine = next(stage for stage in configuration.stages if stage.name == configuration.you)
        self._layers = str(mine.layers)

    def launched(self, frame: Frame, now: float) -> Frame:
        opened = {opening.sequence: opening.trace for opening in frame.openings if opening.trace}
        self._traced |= opened
        if self._traced and (opened or frame.number % self._every == 0):
            frame = self._trace(frame)
        for sequence in frame.closings:
            self._traced.pop(sequence, None)
        return frame

    def computing(self, frame: Frame) -> AbstractContextManager[object]:
        return self._stage(frame, frame.trace) if frame.trace else nullcontext()

    def returned(self, result: Result, now: float) -> None:
        if span := self._in_flight.pop(result.number, None):
            brought = sum(len(outcome.tokens) for outcome in result.outcomes)
            span.end({"specsot.tokens": brought, "specsot.compute_seconds": sum(result.seconds)})

    def disbanded(self) -> None:
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
