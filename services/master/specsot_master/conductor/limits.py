"""How long a request may take, and how long it waits for a ring.

Refuses to know rings, pages and readers.
"""

from __future__ import annotations

from collections.abc import Callable

from specsot.errors import SpecsotError, TimedOut, Unavailable
from specsot_master.conductor.clock import Clock
from specsot_master.conductor.live import RequestState

DEADLINE, REPAIR = "deadline", "repair"  # alarms


class Deadlines:
    """fail: the request ends with an error. lacking: what the ring waits for, in words.

    repair_for: seconds for which requests wait for a new ring.
    """

    def __init__(
        self,
        clock: Clock,
        fail: Callable[[RequestState, SpecsotError], None],
        lacking: Callable[[], str],
        repair_for: float,
    ) -> None:
        self._clock, self._fail, self._lacking, self._repair_for = clock, fail, lacking, repair_for

    def give(self, request: RequestState, seconds: float | None) -> None:
        """From now on; None: as long as it needs."""
        request.deadline = None if seconds is None else self._clock.now() + seconds
        self.watch(request)

    def watch(self, request: RequestState) -> None:
        """Its deadline, whoever watched it before."""
        request.alarms.clear(DEADLINE)
        if request.deadline is not None:
            left = request.deadline - self._clock.now()
            request.alarms.set(DEADLINE, self._clock, left, lambda: self._expire(request))

    def await_ring(self, request: RequestState, reason: str) -> None:
        """The ring broke, or is not there yet."""

        def give_up() -> None:
            lacking = f"waiting for {self._lacking()}"
            told = f"{reason}; after {self._repair_for:g} s the ring is still {lacking}"
            self._fail(request, Unavailable(told))

        request.alarms.set(REPAIR, self._clock, self._repair_for, give_up)

    def has_ring(self, request: RequestState) -> None:
        """It waits for its turn alone."""
        request.alarms.clear(REPAIR)

    def _expire(self, request: RequestState) -> None:
        doing = "was answered" if request.begun else "waited for its turn"
        self._fail(request, TimedOut(f"the deadline passed while the request {doing}"))
