"""Who waits, who runs, and whose turn it is; with the pages that each was promised.

Refuses to know sequences, results and events.
"""

from __future__ import annotations

from specsot.errors import InvalidRequest, Overloaded
from specsot_master.conductor.admission import PageLedger
from specsot_master.conductor.live import LiveRequest
from specsot_master.conductor.ring import ConductorConfig
from specsot_master.schedule import Claim, fairest


class Roster:
    """Requests by id. The ledger is that of the running epoch."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._waiting: dict[str, LiveRequest] = {}
        self._live: dict[str, LiveRequest] = {}
        self.ledger = PageLedger(0)

    @property
    def crowded(self) -> bool:
        """Somebody waits to be admitted."""
        return bool(self._waiting)

    @property
    def quiet(self) -> bool:
        """Nobody is in the ring."""
        return not self._live

    def find(self, id: str) -> LiveRequest | None:
        return self._live.get(id) or self._waiting.get(id)

    def is_live(self, request: LiveRequest) -> bool:
        return self._live.get(request.id) is request

    def check(self, id: str | None) -> None:
        """Raises InvalidRequest (the id is in use), Overloaded."""
        if id is not None and self.find(id):
            raise InvalidRequest(f"request {id} is already running", field="request_id")
        if len(self._waiting) >= self._config.queue:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already", self._config.retry_after)

    def wait(self, request: LiveRequest) -> None:
        self._waiting[request.id] = request

    def admit_next(self) -> LiveRequest | None:
        """The next request that may run, its grant set aside; None when nobody waits or nothing fits.

        Strictly in turn: a large request is not passed by smaller ones for ever.
        """
        if len(self._live) >= self._config.live:
            return None
        request = self._turn(self._waiting, self._admitted())
        if request is None or not self.ledger.admit(request.id, request.grant):
            return None
        self._live[request.id] = self._waiting.pop(request.id)
        return request

    def next_to_branch(self, stuck: set[str]) -> LiveRequest | None:
        """Whose further branch comes next; those in `stuck` are passed over."""
        held: dict[str, int] = {}
        for request in self._live.values():
            held[request.client] = held.get(request.client, 0) + len(request.sequences)
        wanting = {id: one for id, one in self._live.items() if id not in stuck and one.plan.ready()}
        return self._turn(wanting, held)

    def leave(self, request: LiveRequest) -> None:
        """The request is over. Unknown ones are ignored."""
        if self._waiting.get(request.id) is request:
            del self._waiting[request.id]
        elif self.is_live(request):
            del self._live[request.id]
            self.ledger.leave(request.id)

    def clear(self) -> list[LiveRequest]:
        """Everybody goes; returns who was there."""
        everybody = [*self._live.values(), *self._waiting.values()]
        self._live.clear()
        self._waiting.clear()
        return everybody

    def _admitted(self) -> dict[str, int]:
        """Requests in the ring by client."""
        counts = dict.fromkeys((one.client for one in self._waiting.values()), 0)
        for one in self._live.values():
            counts[one.client] = counts.get(one.client, 0) + 1
        return counts

    def _turn(self, wanting: dict[str, LiveRequest], held: dict[str, int]) -> LiveRequest | None:
        claims = (
            Claim(one.id, one.client, held[one.client], len(one.sequences), one.arrival)
            for one in wanting.values()
        )
        claim = fairest(claims)
        return wanting[claim.request] if claim else None
