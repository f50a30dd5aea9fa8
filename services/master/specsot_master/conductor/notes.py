"""What is written down of a request while it lives, if it may be resumed and there is a journal.

Refuses to know what is made of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from specsot.errors import SpecsotError
from specsot.frames import Outcome
from specsot_master.conductor.live import LiveRequest
from specsot_master.journal import (
    Again,
    Begun,
    Branched,
    Failed,
    Heard,
    Journal,
    Kept,
    Record,
    Stopped,
    fingerprint_of,
)


class Notes:
    """now in seconds of the conductor's clock. wall: seconds of a clock that goes on without the master."""

    def __init__(self, journal: Journal | None = None, wall: Callable[[], float] = time.time) -> None:
        self._journal, self._wall = journal, wall

    def arrived(self, request: LiveRequest, now: float) -> None:
        if self._journal and request.ask.resumable:
            began = self._wall() - (now - request.since)
            wording = fingerprint_of(request.first_turn.tokens)
            kept = Kept(
                request.id, request.client, request.ask, request.seed, began, (), request.owner, wording
            )
            self._journal.begin(kept)

    def age(self, kept: Kept) -> float:
        """Seconds since it came."""
        return max(self._wall() - kept.began, 0.0)

    def begun(self, request: LiveRequest, now: float) -> None:
        self._note(request, Begun(now - request.since, request.found))

    def branched(self, request: LiveRequest, point: int) -> None:
        if self._journal:
            self._note(request, Branched(point, fingerprint_of(request.turn(point).suffix)))

    def heard(self, request: LiveRequest, said: Iterable[tuple[int, Outcome]], now: float) -> None:
        self._note(request, Heard(now - request.since, tuple(said)))

    def again(self, request: LiveRequest, ordinal: int) -> None:
        self._note(request, Again(ordinal))

    def stopped(self, request: LiveRequest, now: float) -> None:
        self._note(request, Stopped(now - request.since))

    def failed(self, request: LiveRequest, error: SpecsotError) -> None:
        self._note(request, Failed(type(error).__name__, str(error)))

    def forget(self, id: str) -> None:
        """Nobody can resume it any more."""
        if self._journal:
            self._journal.forget(id)

    async def secure(self, request: LiveRequest) -> None:
        """What its client is about to see is written down."""
        if self._journal and request.ask.resumable:
            await self._journal.secure()

    def _note(self, request: LiveRequest, record: Record) -> None:
        if self._journal and request.ask.resumable:
            self._journal.note(request.id, record)
