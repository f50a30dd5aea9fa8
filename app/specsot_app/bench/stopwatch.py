"""The clock that every measurement of `specsot bench` is timed by."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

now: Clock = time.perf_counter


class Stopwatch:
    """Runs from the moment it is made."""

    def __init__(self, clock: Clock = now) -> None:
        self._clock, self.begun = clock, clock()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._clock() - self.begun
