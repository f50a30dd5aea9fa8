"""What a drafter reports of its work: calls that observers override."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from specsot.core.frames import Drafts, Features
from specsot.members import Configuration


class DrafterObserver:
    """Observer of a drafter's work. This base class ignores everything; subclasses override the calls that
    they are interested in.
    """

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        """Called when an epoch begins.

        configuration: The epoch as the master has configured it.
        free: Returns the number of free KV pages at any moment.
        """

    def drafting(self, feature_batches: Sequence[Features]) -> AbstractContextManager[object]:
        """Return a context that is entered while features are observed and trees are drafted. The context of
        this class does nothing.

        feature_batches: The messages of the last stage that have arrived, in order.
        """
        return nullcontext()

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        """Called when trees have been drafted.

        drafts: The message for stage 0; without trees if drafting is paused.
        seconds: Seconds that observing and drafting took.
        """

    def disbanded(self) -> None:
        """Called when the epoch is over."""
