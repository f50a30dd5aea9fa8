"""What is written down of a request while it lives, if it may be resumed and there is a journal.

Refuses to know what is made of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from specsot.errors import SpecsotError
from specsot.frames import Outcome
from specsot_master.conductor.live import RequestState
from specsot_master.journal import (
    AdmittedRecord,
    BranchRecord,
    CancelledRecord,
    FailedRecord,
    Journal,
    JournaledRequest,
    LapRecord,
    Record,
    ReopenedRecord,
    fingerprint_of,
)


class RequestJournal:
    """now in seconds of the conductor's clock. wall: seconds of a clock that goes on without the master."""

    def __init__(self, journal: Journal | None = None, wall: Callable[[], float] = time.time) -> None:
        self._journal, self._wall = journal, wall

    def arrived(self, request: RequestState, now: float) -> None:
        if self._journal and request.ask.resumable:
            began = self._wall() - (now - request.since)
            wording = fingerprint_of(request.first_turn.tokens)
            kept = JournaledRequest(
                request.id, request.client, request.ask, request.seed, began, (), request.owner, wording
            )
            self._journal.begin(kept)

    def age(self, kept: JournaledRequest) -> float:
        """Seconds since it came."""
        return max(self._wall() - kept.began, 0.0)

    def begun(self, request: RequestState, now: float) -> None:
        self._note(request, AdmittedRecord(now - request.since, request.found))

    def branched(self, request: RequestState, point: int) -> None:
        if self._journal:
            self._note(request, BranchRecord(point, fingerprint_of(request.turn(point).suffix)))

    def heard(self, request: RequestState, said: Iterable[tuple[int, Outcome]], now: float) -> None:
        self._note(request, LapRecord(now - request.since, tuple(said)))

    def again(self, request: RequestState, ordinal: int) -> None:
        self._note(request, ReopenedRecord(ordinal))

    def stopped(self, request: RequestState, now: float) -> None:
        self._note(request, CancelledRecord(now - request.since))

    def failed(self, request: RequestState, error: SpecsotError) -> None:
        self._note(request, FailedRecord(type(error).__name__, str(error)))

    def forget(self, id: str) -> None:
        """Nobody can resume it any more."""
        if self._journal:
            self._journal.forget(id)

    async def secure(self, request: RequestState) -> None:
        """What its client is about to see is written down."""
        if self._journal and request.ask.resumable:
            await self._journal.secure()

    def _note(self, request: RequestState, record: Record) -> None:
        if self._journal and request.ask.resumable:
            self._journal.note(request.id, record)
