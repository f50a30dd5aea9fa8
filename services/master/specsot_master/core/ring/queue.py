"""The request queue: waiting and running requests, and the order of admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from specsot_master.core.request import RequestState
from specsot_master.core.ring.quarantine import BreakHistory, Quarantine
from specsot_master.core.ring.ring_state import EngineConfig


@dataclass(frozen=True, slots=True)
class Claim:
    """Somebody who wants a place. `held`: places its client has; `own`: places it has itself.

    waited: seconds.
    """

    request: str
    client: str
    held: int
    own: int
    arrival: int
    priority: int = 0
    waited: float = 0.0


def pick_fairest(claims: Iterable[Claim], aging: float | None = None) -> Claim | None:
    """Whose turn it is: the highest priority; there the client that holds least, there the request that
    holds least, then first come.

    aging: seconds of waiting that raise a claim by one priority, up to the highest there is; None: never.
    So priorities order those who wait, but keep nobody waiting for ever: whoever has risen to the top
    competes there like everybody else.
    """
    listed = list(claims)
    highest = max((claim.priority for claim in listed), default=0)

    def turn(claim: Claim) -> tuple[int, int, int, int]:
        risen = int(claim.waited // aging) if aging else 0
        return -min(claim.priority + risen, highest), claim.held, claim.own, claim.arrival

    return min(listed, key=turn, default=None)


def pick_displaced(waiting: Iterable[Claim], newcomer: Claim) -> Claim | None:
    """Who makes room in a full queue: the last of the client that has most places in it, the lowest
    priority first, if the newcomer's client would even then have fewer; None: nobody, it is refused.

    So one client can fill the queue while nobody else comes, but keeps nobody out.
    """
    listed = list(waiting)
    places = Counter(claim.client for claim in listed)
    most = max(places.values(), default=0)
    if places[newcomer.client] + 1 >= most:
        return None
    crowd = [claim for claim in listed if places[claim.client] == most]
    return max(crowd, key=lambda claim: (-claim.priority, claim.arrival))


class QueueFull(Exception):
    """The queue has no place for this client."""


class RequestQueue:
    """Requests by id."""

    def __init__(self, config: EngineConfig, quarantine: Quarantine) -> None:
        self._config = config
        self._quarantine = quarantine
        self._waiting: dict[str, RequestState] = {}
        self._live: dict[str, RequestState] = {}

    def find(self, id: str) -> RequestState | None:
        return self._live.get(id) or self._waiting.get(id)

    def has(self, request: RequestState) -> bool:
        return self.find(request.id) is request

    def is_live(self, request: RequestState) -> bool:
        return self._live.get(request.id) is request

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def all_requests(self) -> list[RequestState]:
        return [*self._live.values(), *self._waiting.values()]

    @property
    def interrupted(self) -> list[RequestState]:
        """Those in the ring of which not all is there again."""
        return [request for request in self._live.values() if request.lost]

    @property
    def suspects(self) -> list[BreakHistory]:
        """Of those in the ring, the newest first: what came last is the likeliest to have broken it."""
        inside = [request for request in self._live.values() if request.inside]
        return [one.breaks for one in sorted(inside, key=lambda one: -one.arrival)]

    def make_room(self, client: str) -> RequestState | None:
        """Whom a newcomer of this client displaces from a full queue; None while there is room.

        Raises QueueFull: the newcomer is the one for whom there is no room.
        """
        if self.waiting < self._config.queue:
            return None
        fresh = {id: one for id, one in self._waiting.items() if not one.begun}
        last = pick_displaced(self._claims(fresh, Counter()), Claim("", client, 0, 0, 0))
        if last is None:
            raise QueueFull
        return self._waiting[last.request]

    @property
    def stranded(self) -> list[RequestState]:
        """Those that wait for a larger ring."""
        return [request for request in self._waiting.values() if request.misfit]

    def wait(self, request: RequestState) -> None:
        self._waiting[request.id] = request

    def next_to_admit(self, now: float) -> RequestState | None:
        """Whose turn it is to enter the ring; None when nobody waits, or as many are in as may be.

        Strictly in turn: a large request is not passed by smaller ones for ever. Those that ran before their
        ring broke come first; those in quarantine are not asked, nor those that wait for a larger ring.
        """
        if self.live >= self._config.live:
            return None
        fits = {id: one for id, one in self._waiting.items() if one.misfit is None}
        free = {id: one for id, one in fits.items() if self._quarantine.admits(one.breaks)}
        interrupted = {id: one for id, one in free.items() if one.begun}
        held = Counter(one.client for one in self._live.values())
        claims = self._claims(interrupted or free, held, now)
        claim = pick_fairest(claims, self._config.aging)
        return self._waiting[claim.request] if claim else None

    def admit(self, request: RequestState) -> None:
        self._live[request.id] = self._waiting.pop(request.id)

    def next_to_branch(self, stuck: set[str]) -> RequestState | None:
        """Whose further branch comes next; those in `stuck` are passed over."""
        held = Counter(one.client for one in self._live.values() for _ in one.sequences)
        wanting = {id: one for id, one in self._live.items() if id not in stuck and one.plan.ready()}
        claim = pick_fairest(self._claims(wanting, held))
        return wanting[claim.request] if claim else None

    def remove(self, request: RequestState) -> None:
        """The request is over. Unknown ones are ignored."""
        if self._waiting.get(request.id) is request:
            del self._waiting[request.id]
        elif self.is_live(request):
            del self._live[request.id]

    def suspend(self) -> list[RequestState]:
        """Everybody waits for the next ring; returns who that is."""
        self._waiting = {**self._live, **self._waiting}
        self._live = {}
        return list(self._waiting.values())

    def _claims(
        self, wanting: dict[str, RequestState], held: Counter[str], now: float | None = None
    ) -> list[Claim]:
        return [
            Claim(
                request=one.id,
                client=one.client,
                held=held[one.client],
                own=len(one.sequences),
                arrival=one.arrival,
                priority=one.ask.priority,
                waited=0.0 if now is None else now - one.since,
            )
            for one in wanting.values()
        ]
