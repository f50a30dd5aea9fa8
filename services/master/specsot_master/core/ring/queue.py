"""The request queue: waiting and running requests, and the order of admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from specsot_master.core.request import RequestState
from specsot_master.core.ring.quarantine import BreakHistory, Quarantine
from specsot_master.core.ring.ring_state import EngineConfig

# Sequences. A speculative plan is begun only if all requests together may then decode no more of them: one
# plan of 7 sequences and at most five direct answers. Every further sequence slows down each step, and so do
# the prompts of a plan. Direct answers that are admitted later may exceed the number. Chosen by measurement
# (1.5B, H200, 8 clients): with 32, 28 of 60 answers were planned, and all answers together took 1.16 times as
# long as direct ones, since those without a plan took 1.6 times as long. With 12, eight clients leave no
# place for a plan. Otherwise untuned.
MAX_SEQUENCES_WITH_PLAN: Final = 12


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that competes for a place: in the ring, or for a further branch.

    request: the request's id.
    client: the client's name.
    held: places that the client's requests already have.
    own: places that the request itself already has.
    arrival: the request's position in the order of arrival.
    priority: the request's priority; higher is more urgent, 0 is usual.
    waited: seconds since the request arrived; 0.0 where waiting does not count.
    """

    request: str
    client: str
    held: int
    own: int
    arrival: int
    priority: int = 0
    waited: float = 0.0


def pick_fairest(claims: Iterable[Claim], aging_seconds: float | None = None) -> Claim | None:
    """Return the claim that gets the next place, or None if there are no claims. `held` and `own` are those
    of the claims.

    Claims are ordered by priority (highest first), then by the places that the client holds (fewest first),
    then by the places that the request holds (fewest first), then by arrival.

        (client, held, arrival, priority): (a, 2, 0, 0), (b, 0, 1, 0) -> b holds fewer places
        ... and (c, 9, 2, 1) -> c has the highest priority

    claims: the requests that compete for the place; may be empty.
    aging_seconds: so many seconds of waiting raise a claim's priority by one, up to the highest priority
        among the claims. So priorities order the claims, but no claim waits forever: a claim that has risen
        to the top competes there by the other rules. None: waiting does not raise priorities.
    """
    listed = list(claims)
    highest = max((claim.priority for claim in listed), default=0)

    def sort_key(claim: Claim) -> tuple[int, int, int, int]:
        """Return the sort key of a claim; the claim with the smallest key gets the place.

        claim: one of `listed`.
        """
        risen = int(claim.waited // aging_seconds) if aging_seconds else 0
        return -min(claim.priority + risen, highest), claim.held, claim.own, claim.arrival

    return min(listed, key=sort_key, default=None)


def pick_displaced(waiting_claims: Iterable[Claim], newcomer: Claim) -> Claim | None:
    """Return the waiting claim that must leave a full queue for the newcomer, or None if the newcomer is
    refused. It is refused unless another client has at least two places more than the newcomer's client, and
    so also if no request waits.

    The queue belongs to the client with the most places in it. If the newcomer's client would have fewer
    places even after it joined, that client loses a claim: the one with the lowest priority, and among equals
    the newest. So a single client can fill the queue, but cannot keep other clients out.

        waiting a a a b, newcomer b -> the newest claim of a   (b would have 2 places, a has 3)
        waiting a a b,   newcomer b -> None                    (b would have 2 places, a has 2)

    waiting_claims: the requests in the queue that may be displaced; may be empty.
    newcomer: the request that has arrived; only its client matters.
    """
    listed = list(waiting_claims)
    places = Counter(claim.client for claim in listed)
    max_places = max(places.values(), default=0)
    if places[newcomer.client] + 1 >= max_places:
        return None
    crowd = [claim for claim in listed if places[claim.client] == max_places]
    return max(crowd, key=lambda claim: (-claim.priority, claim.arrival))


class QueueFull(Exception):
    """Raised if the queue is full and no request may be displaced for this client."""


class RequestQueue:
    """The requests of one ring by id: those that wait, and those that are in the ring ("live"); decides which
    request enters next.
    """

    def __init__(self, config: EngineConfig, quarantine: Quarantine) -> None:
        """Create an empty queue.

        config: the bounds of both groups, and how fast waiting raises priorities.
        quarantine: decides which requests may be in the ring together.
        """
        self._config = config
        self._quarantine = quarantine
        self._waiting: dict[str, RequestState] = {}
        self._live: dict[str, RequestState] = {}

    def find(self, request_id: str) -> RequestState | None:
        """Return the waiting or live request with this id, or None.

        request_id: the id under which the request was opened.
        """
        return self._live.get(request_id) or self._waiting.get(request_id)

    def has(self, request: RequestState) -> bool:
        """Return True if this very request waits or is live, and not another one with its id.

        request: the request, compared by identity.
        """
        return self.find(request.id) is request

    def is_live(self, request: RequestState) -> bool:
        """Return True if this very request is in the ring, and not another one with its id.

        request: the request, compared by identity.
        """
        return self._live.get(request.id) is request

    @property
    def waiting(self) -> int:
        """Number of waiting requests, the parked ones included."""
        return len(self._waiting)

    @property
    def live(self) -> int:
        """Number of requests in the ring."""
        return len(self._live)

    @property
    def all_requests(self) -> list[RequestState]:
        """All requests: the live ones, then the waiting ones; [] if there are none."""
        return [*self._live.values(), *self._waiting.values()]

    @property
    def interrupted(self) -> list[RequestState]:
        """Live requests with a sequence that still has to be opened again after the last ring broke; empty if
        none has.
        """
        return [request for request in self._live.values() if request.has_lost]

    @property
    def suspects(self) -> list[BreakHistory]:
        """The break histories of requests with a sequence in the ring, the newest request first: the request
        that came last is the likeliest cause of a break. Empty if no request has a sequence in the ring.
        """
        in_ring = [request for request in self._live.values() if request.in_ring]
        return [one.breaks for one in sorted(in_ring, key=lambda one: -one.arrival)]

    def make_room(self, client: str) -> RequestState | None:
        """Return the waiting request that a newcomer displaces, or None if the queue has room. Requests that
        have already been in a ring are never displaced. The caller must remove the returned request. A queue
        of full length whose requests were all in a ring has no room.

        client: the name of the newcomer's client.

        Raises QueueFull if the queue has no room and the newcomer may displace no request.
        """
        if self.waiting < self._config.queue:
            return None
        fresh = {id: one for id, one in self._waiting.items() if not one.entered_ring}
        last = pick_displaced(self._claims(fresh, Counter()), Claim("", client, 0, 0, 0))
        if last is None:
            raise QueueFull
        return self._waiting[last.request]

    @property
    def parked(self) -> list[RequestState]:
        """Waiting requests that are too large for the current ring; empty if there are none."""
        return [request for request in self._waiting.values() if request.misfit]

    def wait(self, request: RequestState) -> None:
        """Add a request to the waiting ones, as the last one.

        request: the request; it must not be in the queue already.
        """
        self._waiting[request.id] = request

    def next_to_admit(self, now: float) -> RequestState | None:
        """Return the request that must enter the ring next. Return None if no request may enter, or if the
        ring already has the configured number of requests. Otherwise the order is that of `pick_fairest`;
        waiting raises priorities by the configured aging.

        The caller must not skip the returned request in favour of a smaller one, or a large request could
        wait forever. Requests that were interrupted by a broken ring come before new ones. Requests in
        quarantine, and those that are too large for the ring, are passed over.

        now: the present time, in seconds of the engine's clock.
        """
        if self.live >= self._config.live:
            return None
        fits = {id: one for id, one in self._waiting.items() if one.misfit is None}
        free = {id: one for id, one in fits.items() if self._quarantine.admits(one.breaks)}
        interrupted = {id: one for id, one in free.items() if one.entered_ring}
        held = Counter(one.client for one in self._live.values())
        claims = self._claims(interrupted or free, held, now)
        claim = pick_fairest(claims, self._config.aging)
        return self._waiting[claim.request] if claim else None

    def has_places(self, request: RequestState) -> bool:
        """Return True if a speculative plan of this request may be begun: its branches, and all sequences
        that live requests may still decode at the same time, are no more than MAX_SEQUENCES_WITH_PLAN, and no
        more than the requests that the ring may have. A ring without live requests always has places.

        So a plan takes places that no other request asks for, and a busy ring answers directly:

            64 requests allowed, a plan of at most 8 sequences: 4 direct answers -> 4 + 8 <= 12: True;
            5 direct answers, or another plan -> 5 + 8 > 12, 8 + 8 > 12: False

        request: a waiting request.
        """
        taken = sum(one.max_sequences for one in self._live.values())
        places = min(self._config.live, MAX_SEQUENCES_WITH_PLAN)
        return not self._live or taken + request.max_sequences <= places

    def admit(self, request: RequestState) -> None:
        """Move a waiting request to the live ones.

        request: the request that enters the ring.

        Raises KeyError if the request does not wait.
        """
        self._live[request.id] = self._waiting.pop(request.id)

    def next_to_branch(self, skipped_ids: set[str]) -> RequestState | None:
        """Return the live request whose next branch should be opened, or None if none has a branch to open.
        Priority, places of the client, own sequences and arrival decide as in `pick_fairest`; waiting raises
        no priority here.

        skipped_ids: ids of requests that are passed over, because the ring has no pages for their next branch
            now.
        """
        held = Counter(one.client for one in self._live.values() for _ in one.sequences)
        wanting = {id: one for id, one in self._live.items() if id not in skipped_ids and one.plan.ready()}
        claim = pick_fairest(self._claims(wanting, held))
        return wanting[claim.request] if claim else None

    def remove(self, request: RequestState) -> None:
        """Remove a request that is over, whether it waits or is live. A request that is not in the queue is
        ignored. Another request with the same id stays.

        request: the request, compared by identity.
        """
        if self._waiting.get(request.id) is request:
            del self._waiting[request.id]
        elif self.is_live(request):
            del self._live[request.id]

    def suspend(self) -> list[RequestState]:
        """Make all live requests wait for the next ring, before those that already waited. Return all of
        them; empty if there are none. No request is live afterwards.
        """
        self._waiting = {**self._live, **self._waiting}
        self._live = {}
        return list(self._waiting.values())

    def _claims(
        self, requests: dict[str, RequestState], places_of_clients: Counter[str], now: float | None = None
    ) -> list[Claim]:
        """Return the claims of the given requests, in the same order.

        requests: the requests that compete, by id.
        places_of_clients: how many places each client has already, by the client's name.
        now: the present time, in seconds of the engine's clock; None where waiting does not count.
        """
        return [
            Claim(
                request=one.id,
                client=one.client,
                held=places_of_clients[one.client],
                own=len(one.sequences),
                arrival=one.arrival,
                priority=one.ask.priority,
                waited=0.0 if now is None else now - one.since,
            )
            for one in requests.values()
        ]
