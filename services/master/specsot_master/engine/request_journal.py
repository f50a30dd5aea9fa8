"""Writes requests to the journal, and checks what comes back from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specsot import errors
from specsot.errors import PlanError, SpecsotError, Unavailable
from specsot_master.engine.request_state import RequestState
from specsot_master.journal import BranchRecord, Journal, JournaledRequest, Record, fingerprint_of
from specsot_master.prompts import PromptTurn


class RequestJournal:
    """now in seconds of the engine's clock. wall: seconds of a clock that goes on without the master."""

    def __init__(self, journal: Journal | None = None, wall: Callable[[], float] = time.time) -> None:
        self._journal, self._wall = journal, wall

    def record_arrival(self, request: RequestState, now: float) -> None:
        if self._journal and request.ask.resumable:
            began = self._wall() - (now - request.since)
            wording = fingerprint_of(request.wording)
            kept = JournaledRequest(
                request.id, request.client, request.ask, request.seed, began, (), request.owner, wording
            )
            self._journal.put(request.id, kept)

    def age(self, kept: JournaledRequest) -> float:
        """Seconds since it came."""
        return max(self._wall() - kept.began, 0.0)

    def record(self, request: RequestState, record: Record) -> None:
        if self._journal and request.ask.resumable:
            self._journal.put(request.id, record)

    def branch_record(self, point: int, turn: PromptTurn) -> BranchRecord:
        """With a fingerprint of its prompt where that is written down."""
        return BranchRecord(point, fingerprint_of(turn.suffix) if self._journal else "")

    def forget(self, id: str) -> None:
        """Nobody can resume it any more."""
        if self._journal:
            self._journal.put(id, None)

    async def secure(self, request: RequestState) -> None:
        """What its client is about to see is written down."""
        if self._journal and request.ask.resumable:
            await self._journal.secure()


def check_prompt_unchanged(before: str, tokens: Sequence[int]) -> None:
    """Raises Unavailable: what was written then answered another prompt. before: "" for unknown."""
    if before and before != fingerprint_of(tokens):
        raise Unavailable("the master was restarted, and words its prompts differently now; ask again")


def error_of(name: str, message: str) -> SpecsotError:
    """As it was told then."""
    kind = getattr(errors, name, SpecsotError)
    return PlanError(message, "") if kind is PlanError else kind(message)
