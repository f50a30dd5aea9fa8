"""What a drafter tells its observers, and its spans in traced laps.

An observer must be quick: the ring may wait for a tree meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from specsot.core.frames import Drafts, Features
from specsot.members import Configuration
from specsot.tracing import Tracer


class DrafterObserver:
    """Looks at nothing; those who do say so for the moments they care about."""

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        """An epoch begins; `free` tells how many pages are, at any moment."""

    def drafting(self, lessons: Sequence[Features]) -> AbstractContextManager[object]:
        """Entered while these are learned and trees are drafted."""
        return nullcontext()

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        """What came of it, and how long that took."""

    def disbanded(self) -> None:
        """The epoch is over."""


class DraftSpans(DrafterObserver):
    """Spans of drafts behind traced laps; another observer hears all it hears."""

    def __init__(self, tracer: Tracer, inner: DrafterObserver) -> None:
        self._tracer, self._inner = tracer, inner

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        self._inner.formed(configuration, free)

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        self._inner.drafted(drafts, seconds)

    def disbanded(self) -> None:
        self._inner.disbanded()

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
