"""Routes requests over several rings to the least loaded one, and workers to rings that lack one.

A *replica* is one complete ring with its engine and its fleet.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

import structlog

from specsot.core.info import Info, PagesInfo, ReplicaInfo, RequestsInfo, StepsInfo
from specsot.errors import InvalidRequest, TooLarge
from specsot.members import Registration
from specsot.params import Ask
from specsot.transport.links import Link
from specsot_master.core.inputs import RequestMoved
from specsot_master.core.request import RequestState
from specsot_master.core.ring.epoch import count_drafters, with_one_gpu
from specsot_master.engine import Caller, Engine
from specsot_master.engine.event_stream import Subscription
from specsot_master.fleet import Fleet
from specsot_master.journal import JournaledRequest

# Characters of a block of a prompt; prompts agree in whole blocks. Untuned.
BLOCK_CHARACTERS = 256
# Blocks of one prompt that are compared. Untuned.
MAX_PROMPT_BLOCKS = 64
# Blocks that are remembered, the most recently used ones. Untuned.
MAX_KNOWN_BLOCKS = 4096


class PrefixAffinity:
    """Remembers which ring has served which beginnings of prompts, because that ring may still cache their
    KV.

    Beginnings are known by the hashes of their blocks; each hash includes all blocks before it.
    """

    def __init__(self) -> None:
        """Start without known beginnings of prompts."""
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def note(self, ask: Ask, replica_number: int) -> None:
        """Remember that a ring serves this request, for all beginnings of the request's prompt. The least
        recently used blocks are forgotten if there are more than MAX_KNOWN_BLOCKS. A beginning that another
        ring had served is now this ring's.

        ask: what the client asks for.
        replica_number: the number of the ring.
        """
        for mark in block_hashes(ask):
            self._replicas[mark] = replica_number
            self._replicas.move_to_end(mark)
        while len(self._replicas) > MAX_KNOWN_BLOCKS:
            self._replicas.popitem(last=False)

    def find(self, ask: Ask) -> int | None:
        """Return the number of the ring that served the longest known beginning of this request's prompt, or
        None if no beginning is known.

        ask: what the client asks for.
        """
        known = [self._replicas[mark] for mark in block_hashes(ask) if mark in self._replicas]
        return known[-1] if known else None


def block_hashes(ask: Ask) -> Iterator[bytes]:
    """Yield the hashes of ever longer beginnings of a prompt, in steps of BLOCK_CHARACTERS, at most
    MAX_PROMPT_BLOCKS. Nothing is yielded for a prompt shorter than a block. Token ids are written as decimal
    numbers with commas. The prompt counts if there is one, else the messages, else the tokens.

        # mode and prompt of 600 characters -> hashes of characters 0..255, 0..511; the last 88 are left out

    The mode is a part of the text, since modes have different prompts.

    ask: the request, with a prompt, messages or token ids.
    """
    turns = "".join(f"{one.role}\0{one.content}\0" for one in ask.messages)
    text = ask.mode + (
        ask.prompt or turns or ",".join(map(str, ask.tokens[: BLOCK_CHARACTERS * MAX_PROMPT_BLOCKS]))
    )
    hasher = blake2b(digest_size=16)
    for block in range(min(len(text) // BLOCK_CHARACTERS, MAX_PROMPT_BLOCKS)):
        begin = block * BLOCK_CHARACTERS
        hasher.update(text[begin : begin + BLOCK_CHARACTERS].encode(errors="surrogatepass"))
        yield hasher.digest()


@dataclass(frozen=True, slots=True, order=True)
class ReplicaLoad:
    """The load of one ring of a master; loads compare by `waiting` first, then by `used`.

    waiting: Number of requests that are not in the ring yet.
    used: Fraction of the KV pages that requests have reserved.
    """

    waiting: int
    used: float


def least_loaded(loads: Mapping[int, ReplicaLoad], familiar_number: int | None = None) -> int:
    """Return the number of the least loaded ring; among equals `familiar_number` if it is one of them, else
    the first.

    loads: the load of each ring by its number, at least one.
    familiar_number: the ring that may have the prompt's beginning cached; None if no ring has.
    """
    smallest_load = min(loads.values())
    equal = [number for number, load in loads.items() if load == smallest_load]
    return familiar_number if familiar_number in equal else equal[0]


def total_info(replica_infos: Sequence[ReplicaInfo]) -> Info:
    """Return the state of all rings together; the master is ready as soon as one ring is. With several rings,
    `pages` is None while no ring is complete, and the model's and members' fields are left empty.

    The state of a single ring is returned as it is. Otherwise counts are summed, and each ring's own state is
    listed in `replicas`.

    replica_infos: the state of each ring, at least one, in the order of the rings.
    """
    if len(replica_infos) == 1:
        copied = {
            one.name: getattr(replica_infos[0], one.name)
            for one in fields(ReplicaInfo)
            if one.name != "number"
        }
        return Info(**copied)
    pages = [one.pages for one in replica_infos if one.pages]
    return Info(
        epoch=max(one.epoch for one in replica_infos),
        ready=any(one.ready for one in replica_infos),
        waiting_for=tuple(
            f"replica {one.number}: {line}" for one in replica_infos for line in one.waiting_for
        ),
        pages=PagesInfo(rows=pages[0].rows, **_sums(pages, "total", "free", "kept")) if pages else None,
        steps=_total_steps([one.steps for one in replica_infos if one.steps]),
        requests=_total_requests([one.requests for one in replica_infos if one.requests]),
        plan="; ".join(f"replica {one.number}: {one.plan}" for one in replica_infos if one.plan),
        replicas=tuple(replica_infos),
    )


def _sums(records: Sequence[object], *attributes: str) -> dict[str, Any]:
    """Return the sum of each attribute over all records, by the attribute's name.

    records: objects that all have these attributes, with numbers in them.
    attributes: the names of the attributes to add up.
    """
    return {name: sum(getattr(one, name) for one in records) for name in attributes}


def _total_steps(step_infos: Sequence[StepsInfo]) -> StepsInfo:
    """Return the step statistics of all rings together. Means are weighted by each ring's steps per second,
    and 0 if no ring makes steps.

    step_infos: the statistics of each ring; may be empty.
    """
    pace = sum(one.per_second for one in step_infos)

    def mean(attribute: str) -> float:
        """Return the mean of an attribute of `StepsInfo` over all rings, weighted by their steps per second;
        0 if no ring makes steps.

        attribute: the name of the attribute, which holds a number.
        """
        return sum(getattr(one, attribute) * one.per_second for one in step_infos) / pace if pace else 0.0

    return StepsInfo(
        **_sums(step_infos, "steps", "tokens"),
        per_second=pace,
        tokens_per_step=mean("tokens_per_step"),
        rows_per_step=mean("rows_per_step"),
    )


def _total_requests(request_infos: Sequence[RequestsInfo]) -> RequestsInfo:
    """Return the request counts of all rings together: sums, but for `kept`, which all rings share. Reasons
    of ended requests are added up, and sorted.

    request_infos: the counts of each ring, at least one.
    """
    ended: Counter[str] = Counter()
    for one in request_infos:
        ended.update(dict(one.ended))
    return RequestsInfo(
        **_sums(request_infos, "waiting", "running", "writing", "refused", "prompt_tokens", "cached_tokens"),
        # All rings share one store of ended requests, so each reports the same number.
        kept=max(one.kept for one in request_infos),
        ended=tuple(sorted(ended.items())),
    )


@dataclass(frozen=True, slots=True)
class Replica:
    """One of several rings behind a master.

    number: The ring's number; the first one has 0.
    engine: Runs the ring's requests.
    fleet: Manages the ring's members.
    """

    number: int
    engine: Engine
    fleet: Fleet

    @property
    def drafts(self) -> bool:
        """True if the ring is complete and has a drafter."""
        ring = self.fleet.ring
        return ring is not None and ring.drafter is not None

    @property
    def pages(self) -> int:
        """KV pages of the ring; 0 while the ring is not complete."""
        return self.fleet.ring.pages if self.fleet.ring else 0

    def info(self) -> ReplicaInfo:
        """Return the present state of this ring for status pages; `pages` of the result is None while the
        ring is not complete. `waiting_for` is empty once the ring is complete.
        """
        fleet = self.fleet
        engine = self.engine
        ring = self.fleet.ring
        waiting = self.fleet.waiting_for()
        pages = None
        if ring:
            pages = PagesInfo(ring.pages, engine.free_pages, ring.page_rows, engine.prefix_pages)
        return ReplicaInfo(
            number=self.number,
            epoch=fleet.epoch,
            ready=fleet.ready,
            waiting_for=(waiting,) if waiting else (),
            pages=pages,
            steps=engine.steps.info(),
            requests=engine.requests(),
            plan=fleet.plan,
        )


log = structlog.get_logger()


class RequestRouter:
    """Routes requests to rings: opens, cancels, restores and moves them. It takes the place of the engine in
    a master with several rings.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        """Create a router without requests.

        replicas: the rings by their numbers; the list may be filled after this object is created.
        """
        self._replicas = replicas
        self._affinity = PrefixAffinity()
        # By request id: the rings to which calls with this id went that are still being validated.
        self._arriving: dict[str, list[Replica]] = {}

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """Open a request in the ring that knows it already, else in the least loaded ring. If that ring is
        too small for the request, the larger rings are tried.

        ask: what the client asks for. None, or a call with `offset`, resumes a known request in its ring; if
            no ring has it, the first ring refuses the call.
        caller: who asks: the request id that the client chose, its name for fairness, its time limit, and the
            owner.
        offset: number of the first event to yield of the caller's known request; None for a new request.

        Raises the errors of `Engine.open`.
        """
        if ask is None or offset is not None:
            replica = self.home(caller.request) or self._replicas[0]
            return await replica.engine.open(ask, caller, offset)
        with self._reserved(caller.request, ask) as replica:
            try:
                return await replica.engine.open(ask, caller)
            except TooLarge as refusal:
                return await self._open_in_larger(ask, caller, replica, refusal)

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """Cancel a request in whichever ring has it. Return False if no ring has such a request of this
        owner.

        request_id: the id under which the request was opened.
        owner: the owner of the caller's token; "" for a caller without a token.
        """
        return any(replica.engine.cancel(request_id, owner) for replica in self._replicas)

    def home(self, request_id: str | None) -> Replica | None:
        """Return the ring that has a request of this id, or None if no ring has.

        request_id: the id under which the request was opened; None or "" for a caller that named none, of
            which no ring has a request.
        """
        known = (one for one in self._replicas if request_id and one.engine.has_request(request_id))
        return next(known, None)

    async def revive(self, journaled_requests: Iterable[JournaledRequest]) -> None:
        """Restore the requests of the journal, dealt out evenly over the rings. If a ring is not complete,
        `move_parked` later moves its requests to another ring. Request n goes to the ring with the number n
        modulo the number of rings.

        journaled_requests: what the journal of an earlier master holds.
        """
        listed = list(journaled_requests)
        for replica in self._replicas:
            await replica.engine.revive(listed[replica.number :: len(self._replicas)])

    def move_parked(self) -> None:
        """Move requests to complete rings that can continue them; move nothing if there is no such ring.

        All requests of a ring that cannot be formed now are moved; of other rings, those that are too large
        for their ring.
        """
        for replica in self._replicas:
            engine = replica.engine
            self._move(replica, engine.all_requests if replica.fleet.lacks_members else engine.parked)

    @contextmanager
    def _reserved(self, request_id: str | None, ask: Ask) -> Generator[Replica]:
        """Yield the ring for a call; concurrent calls with the same request id get the same ring. An engine
        knows a request only once it has been validated, so calls under way are remembered here. Without a
        known request the least loaded ring is chosen.

        request_id: the id that the client chose; None if it chose none, so that nothing is remembered.
        ask: what the client asks for, by which the ring is chosen for a new request.
        """
        arriving = self._arriving.get(request_id or "", ())
        replica = self.home(request_id) or next(iter(arriving), None) or self._choose(ask)
        if request_id is None:
            yield replica
            return
        calls = self._arriving.setdefault(request_id, [])
        calls.append(replica)
        try:
            yield replica
        finally:
            calls.remove(replica)
            if not calls:
                del self._arriving[request_id]

    async def _open_in_larger(
        self, ask: Ask, caller: Caller, refusing_replica: Replica, refusal: TooLarge
    ) -> Subscription:
        """Open a request in the largest complete ring that takes it, and return its events. Other errors than
        TooLarge are raised at once.

        ask: what the client asks for.
        caller: who asks: the request id that the client chose, its name for fairness, its time limit, and the
            owner.
        refusing_replica: the ring that was too small for the request; only rings with more KV pages are
            tried.
        refusal: the error of that ring.

        Raises the refusal of the largest ring, or `refusal` if no ring is larger.
        """
        complete = [self._replicas[number] for number in self._complete()]
        larger = sorted(
            (one for one in complete if one.pages > refusing_replica.pages), key=lambda one: -one.pages
        )
        refused: TooLarge | None = None
        for replica in larger:
            try:
                opened = await replica.engine.open(ask, caller)
            except TooLarge as error:
                refused = refused or error
            else:
                self._affinity.note(ask, replica.number)
                return opened
        raise refused or refusal

    def _move(self, source_replica: Replica, requests: Sequence[RequestState]) -> None:
        """Move those requests that another complete ring can continue. A request that no complete ring can
        hold stays, and waits for its own ring. Each move is logged.

        source_replica: the ring that has the requests now.
        requests: requests of that ring.
        """
        for request in requests:
            target = self._adopt_in_least_loaded(request)
            if target is None:
                # The request is too large for every complete ring, and waits for its own ring.
                continue
            source_replica.engine.handle(RequestMoved(request))
            log.info(
                "request moved", **request.log_fields, replica=target.number, before=source_replica.number
            )

    def _adopt_in_least_loaded(self, request: RequestState) -> Replica | None:
        """Let the least loaded complete ring that can hold the request take it over. Return this ring, or
        None if no complete ring can hold the request. A ring that refuses the request is passed over.

        request: a request of another ring, without a sequence in a running ring.
        """
        loads = self._complete()
        for number in sorted(loads, key=lambda one: loads[one]):
            with suppress(InvalidRequest):
                self._replicas[number].engine.adopt(request)
                return self._replicas[number]
        return None

    def _choose(self, ask: Ask) -> Replica:
        """Return the ring for a new request: the least loaded complete ring; among equals, one that may have
        cached the beginning of the prompt. If no ring is complete, return the first one, whose engine raises
        what is missing. The ring is remembered as the one that may have the prompt cached.

        ask: what the client asks for.
        """
        complete = self._complete()
        number = least_loaded(complete, self._affinity.find(ask)) if complete else 0
        self._affinity.note(ask, number)
        return self._replicas[number]

    def _complete(self) -> dict[int, ReplicaLoad]:
        """Return the loads of all complete rings by their numbers; empty if no ring is complete."""
        return {one.number: _load_of(one) for one in self._replicas if one.fleet.ready}


def _load_of(replica: Replica) -> ReplicaLoad:
    """Return the load of a ring: how many requests wait for it, and which fraction of its KV pages is
    reserved (1.0 while the ring is not complete).

    replica: the ring whose load is wanted.
    """
    ring = replica.fleet.ring
    used = 1 - replica.engine.free_pages / ring.pages if ring else 1.0
    return ReplicaLoad(replica.engine.waiting, used)


class MemberRouter:
    """Routes members to fleets; it takes the place of the fleet in a master with several rings."""

    def __init__(self, fleets: Sequence[Fleet], on_change: Callable[[], None]) -> None:
        """Create a router without members.

        fleets: the fleets of the rings, in the order of the rings.
        on_change: called without arguments when a member has joined or has been lost.
        """
        self._fleets = fleets
        self._changed = on_change
        self._homes: dict[str, Fleet] = {}

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Admit a member to one of the fleets: to its former fleet if that still knows it, else to the one
        that needs it most. Its GPU is chosen so that members of all fleets share the GPUs evenly.

        registration: what the member says of itself: kind, name, address, model fingerprint, layers.
        downlink: the master's link to this member.

        Raises Refused if the member belongs to none of the fleets.
        """
        others = [
            one for fleet in self._fleets for one in fleet.registrations if one.name != registration.name
        ]
        registration = with_one_gpu(registration, others)
        # A member may come back before its old link is known to be lost; then it returns to its fleet.
        fleet = self._homes.get(registration.name)
        self._add_to_fleet(fleet or self._choose(registration), registration, downlink)
        self._changed()

    def on_message(self, name: str, message: object, downlink: Link | None = None) -> None:
        """Pass a message to the fleet of its sender; a message of an unknown sender is ignored.

        name: the sender's name.
        message: a decoded message, see `Fleet.on_message`.
        downlink: the master's link to the sender; None accepts any process of this name.
        """
        if fleet := self._homes.get(name):
            fleet.on_message(name, message, downlink)

    def on_disconnect(self, name: str, reason: str, downlink: Link | None = None) -> None:
        """Report a lost member to its fleet, unless a newer process has joined under the member's name. An
        unknown name is ignored. Without a link that differs, the member's fleet is forgotten before the fleet
        handles the loss. The member's fleet is forgotten, so that the member may join another one.

        name: the lost member's name.
        reason: why it is lost, in words.
        downlink: the master's link to the lost member; None means whichever process has this name.
        """
        fleet = self._homes.get(name)
        if fleet is None or (fleet.knows(name) and not fleet.knows(name, downlink)):
            return
        del self._homes[name]
        fleet.on_disconnect(name, reason)
        self._changed()

    def lend_workers(self) -> None:
        """Move idle workers of other fleets to each fleet that can form a ring with their help; move nothing
        if no fleet can. Each moved worker leaves its fleet and joins the other one by the same link.
        """
        for needy in self._fleets:
            for lender, worker in self._helping_workers(needy):
                member = lender.release(worker.name)
                log.info("worker moved", name=worker.name, replica=self._fleets.index(needy))
                self._add_to_fleet(needy, member.registration, member.downlink)

    def _add_to_fleet(self, fleet: Fleet, registration: Registration, downlink: Link) -> None:
        """Add a member to a fleet, and remember to which. Raises Refused if the fleet does not accept the
        member.

        fleet: the fleet that gets the member.
        registration: what the member says of itself.
        downlink: the master's link to the member.
        """
        fleet.add(registration, downlink)
        self._homes[registration.name] = fleet

    def _choose(self, registration: Registration) -> Fleet:
        """Return the fleet for a new member. Among equals the first fleet is chosen.

        A worker goes to a fleet that lacks a worker, first to one where it ran before; if no fleet lacks one,
        to the smallest fleet, where it stands by for all fleets. A drafter goes where the fewest drafters
        are. If no fleet accepts the member, return the first one, which raises the refusal.

        registration: what the member says of itself.
        """
        accepting = [fleet for fleet in self._fleets if fleet.accepts(registration)]
        if not accepting:
            return self._fleets[0]
        if registration.kind == "drafter":
            return min(accepting, key=lambda fleet: count_drafters(fleet.registrations))
        short = [fleet for fleet in accepting if fleet.lacks_workers]
        before = [fleet for fleet in short if fleet.has_run(registration.name)]
        return (before or short or sorted(accepting, key=lambda fleet: len(fleet.registrations)))[0]

    def _helping_workers(self, needy_fleet: Fleet) -> list[tuple[Fleet, Registration]]:
        """Return as many idle workers of other fleets as a fleet needs to form a ring, each with the fleet
        that has it now. Return an empty list if all of them together do not suffice. Workers that the fleet
        does not accept are passed over.

        Idle workers of running rings come first, because a broken ring may need its remaining workers itself.
        A fleet that could form a ring, and waits for something else such as its drafter, lends none: two such
        fleets would take each other's workers without end.

        needy_fleet: the fleet that lacks workers.
        """
        others = [one for one in self._fleets if one is not needy_fleet and (one.formed or one.lacks_members)]
        lenders = sorted(others, key=lambda one: not one.formed)
        helpers: list[tuple[Fleet, Registration]] = []
        for lender in lenders:
            for worker in filter(needy_fleet.accepts, lender.idle_workers):
                helpers.append((lender, worker))
                if needy_fleet.completed_by([one for _, one in helpers]):
                    return helpers
        return []
