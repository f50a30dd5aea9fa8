"""A drafter's part in traces: what it drafts behind a lap that is traced.

Refuses to know requests and laps: features bring a context, or none.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from specsot.core.frames import Features
from specsot.tracing import Tracer
from specsot_drafter.watching import DrafterObserver


class DraftSpans(DrafterObserver):
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def drafting(self, lessons: Sequence[Features]) -> AbstractContextManager[object]:
        contexts = [features.trace for features in lessons if features.trace]
        return self._draft(contexts, lessons) if contexts else nullcontext()

    @contextmanager
    def _draft(self, contexts: Sequence[str], lessons: Sequence[Features]) -> Generator[None]:
        taught = sum(len(features.lessons) for features in lessons)
        span = self._tracer.begin("draft", contexts[-1], contexts[:-1], {"specsot.lessons": taught})
        try:
            yield
        except BaseException as error:
            span.end(error=error)
            raise
        span.end()
