"""Requests over several rings: a new one goes to the least loaded, one whose ring cannot go on to another.

Refuses to know members and how a ring answers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import structlog

from specsot.errors import InvalidRequest
from specsot.params import Ask
from specsot_master.conductor import Caller
from specsot_master.conductor.live import LiveRequest
from specsot_master.conductor.streams import EventStream, RequestStreams
from specsot_master.journal import Kept
from specsot_master.replicas.beginnings import Beginnings
from specsot_master.replicas.loads import Load, least_loaded
from specsot_master.replicas.replica import Replica

log = structlog.get_logger()


class Router(RequestStreams):
    """What a conductor is to a master with one ring."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._beginnings = Beginnings()
        self._arriving: dict[str, list[Replica]] = {}  # where calls with an id of their own went

    async def open(self, ask: Ask, caller: Caller) -> EventStream:
        """As the conductor's, of the ring that has the request already, or of the least loaded one."""
        with self._reserved(caller.request, ask) as replica:
            return await replica.conductor.open(ask, caller)

    async def reopen(self, request_id: str, offset: int, ask: Ask | None, caller: Caller) -> EventStream:
        """As the conductor's."""
        replica = self.home(request_id) or self._replicas[0]
        return await replica.conductor.reopen(request_id, offset, ask, caller)

    def cancel(self, request_id: str, owner: str = "") -> bool:
        return any(replica.conductor.cancel(request_id, owner) for replica in self._replicas)

    def home(self, request_id: str | None) -> Replica | None:
        """The ring that has a request, running or over."""
        known = (one for one in self._replicas if request_id and one.conductor.knows(request_id))
        return next(known, None)

    async def revive(self, kept: Iterable[Kept]) -> None:
        """Dealt out evenly; where a ring is not complete in time another takes its share."""
        listed = list(kept)
        for replica in self._replicas:
            await replica.conductor.revive(listed[replica.number :: len(self._replicas)])

    def drop(self, request: LiveRequest) -> None:
        """As the conductor's, of whichever ring has it."""
        for replica in self._replicas:
            replica.conductor.drop(request)

    def renew(self, request: LiveRequest) -> None:
        """As the conductor's, of whichever ring has it."""
        for replica in self._replicas:
            replica.conductor.renew(request)

    def relieve(self) -> None:
        """Whoever waits in a ring that cannot be formed now goes on in one that is complete."""
        for replica in self._replicas:
            if replica.fleet.lacking:
                self._move(replica)

    @contextmanager
    def _reserved(self, id: str | None, ask: Ask) -> Generator[Replica]:
        """The ring for a call, the same for all calls with this id: a ring knows a request only once it was
        looked into.
        """
        arriving = self._arriving.get(id or "", ())
        replica = self.home(id) or next(iter(arriving), None) or self._choose(ask)
        if id is None:
            yield replica
            return
        calls = self._arriving.setdefault(id, [])
        calls.append(replica)
        try:
            yield replica
        finally:
            calls.remove(replica)
            if not calls:
                del self._arriving[id]

    def _move(self, source: Replica) -> None:
        for request in source.conductor.everybody:
            complete = self._complete()
            if not complete:
                return
            target = self._replicas[least_loaded(complete)]
            try:
                target.conductor.adopt(request)
            except InvalidRequest:
                continue  # too large for that one: it waits for its own
            source.conductor.let_go(request)
            log.info("goes on elsewhere", **request.named, replica=target.number, before=source.number)

    def _choose(self, ask: Ask) -> Replica:
        """Of complete rings, if there are any; else whichever, which says what is missing."""
        complete = self._complete()
        number = least_loaded(complete, self._beginnings.find(ask)) if complete else 0
        self._beginnings.note(ask, number)
        return self._replicas[number]

    def _complete(self) -> dict[int, Load]:
        return {one.number: _load_of(one) for one in self._replicas if one.fleet.ready}


def _load_of(replica: Replica) -> Load:
    conductor, ring = replica.conductor, replica.fleet.ring
    used = 1 - conductor.free_pages / ring.pages if ring else 1.0
    return Load(conductor.waiting, used)
