"""The interface of a drafter's observer; it must be quick, as the ring may be waiting for a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from specsot.core.frames import Drafts, Features
from specsot.members import Configuration


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
