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
    """Remembers which ring has served which beginnings of prompts, whose KV the ring may still cache.

    Beginnings are known by the hashes of their blocks; each hash includes all blocks before it.
    """

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def note(self, ask: Ask, replica: int) -> None:
        """Remember that this ring serves the request, for all beginnings of its prompt."""
        for mark in block_hashes(ask):
            self._replicas[mark] = replica
            self._replicas.move_to_end(mark)
        while len(self._replicas) > MAX_KNOWN_BLOCKS:
            self._replicas.popitem(last=False)

    def find(self, ask: Ask) -> int | None:
        """Return the ring that served the longest known beginning of this prompt, or None."""
        known = [self._replicas[mark] for mark in block_hashes(ask) if mark in self._replicas]
        return known[-1] if known else None


def block_hashes(ask: Ask) -> Iterator[bytes]:
    """Yield the hashes of ever longer beginnings of a prompt, in steps of BLOCK_CHARACTERS.

    # mode and prompt of 600 characters -> hashes of characters 0..255 and 0..511; the last 88 are left out

    A prompt shorter than a block has no hash. The mode is a part of the text, since modes have different
    prompts.
    """
    turns = "".join(f"{one.role}\0{one.content}\0" for one in ask.messages)
    text = ask.mode + (
        ask.prompt or turns or ",".join(map(str, ask.tokens[: BLOCK_CHARACTERS * MAX_PROMPT_BLOCKS]))
    )
    seen = blake2b(digest_size=16)
    for block in range(min(len(text) // BLOCK_CHARACTERS, MAX_PROMPT_BLOCKS)):
        begin = block * BLOCK_CHARACTERS
        seen.update(text[begin : begin + BLOCK_CHARACTERS].encode(errors="surrogatepass"))
        yield seen.digest()


@dataclass(frozen=True, slots=True, order=True)
class ReplicaLoad:
    """The load of a ring; loads compare by `waiting` first, then by `used`.

    waiting: Number of requests that are not in the ring yet.
    used: Fraction of the KV pages that requests have reserved.
    """

    waiting: int
    used: float


def least_loaded(loads: Mapping[int, ReplicaLoad], familiar: int | None = None) -> int:
    """Return the number of the least loaded ring; among equals, `familiar` if possible, else the first.

    loads: the load of each ring, at least one. familiar: a ring that may have the prompt's beginning cached.
    """
    least = min(loads.values())
    equal = [number for number, load in loads.items() if load == least]
    return familiar if familiar in equal else equal[0]


def total_info(parts: Sequence[ReplicaInfo]) -> Info:
    """Return the state of all rings together; the master is ready as soon as one ring is.

    The state of a single ring is returned as it is. Otherwise counts are summed, and each ring's own state is
    listed in `replicas`.
    """
    if len(parts) == 1:
        told = {one.name: getattr(parts[0], one.name) for one in fields(ReplicaInfo) if one.name != "number"}
        return Info(**told)
    pages = [one.pages for one in parts if one.pages]
    return Info(
        epoch=max(one.epoch for one in parts),
        ready=any(one.ready for one in parts),
        waiting_for=tuple(f"replica {one.number}: {line}" for one in parts for line in one.waiting_for),
        pages=PagesInfo(rows=pages[0].rows, **_sums(pages, "total", "free", "kept")) if pages else None,
        steps=_total_steps([one.steps for one in parts if one.steps]),
        requests=_total_requests([one.requests for one in parts if one.requests]),
        plan="; ".join(f"replica {one.number}: {one.plan}" for one in parts if one.plan),
        replicas=tuple(parts),
    )


def _sums(parts: Sequence[object], *names: str) -> dict[str, Any]:
    """Return, for each of these attributes, its sum over all parts."""
    return {name: sum(getattr(one, name) for one in parts) for name in names}


def _total_steps(parts: Sequence[StepsInfo]) -> StepsInfo:
    """Return the step statistics of all rings; means are weighted by each ring's steps per second."""
    pace = sum(one.per_second for one in parts)

    def mean(name: str) -> float:
        return sum(getattr(one, name) * one.per_second for one in parts) / pace if pace else 0.0

    return StepsInfo(
        **_sums(parts, "steps", "tokens"),
        per_second=pace,
        tokens_per_step=mean("tokens_per_step"),
        rows_per_step=mean("rows_per_step"),
    )


def _total_requests(parts: Sequence[RequestsInfo]) -> RequestsInfo:
    """Return the request counts of all rings together."""
    ended: Counter[str] = Counter()
    for one in parts:
        ended.update(dict(one.ended))
    return RequestsInfo(
        **_sums(parts, "waiting", "running", "writing", "refused", "prompt_tokens", "cached_tokens"),
        # All rings share one store of ended requests, so each reports the same number.
        kept=max(one.kept for one in parts),
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
        """Whether the ring is complete and has a drafter."""
        ring = self.fleet.ring
        return ring is not None and ring.drafter is not None

    @property
    def pages(self) -> int:
        """KV pages of the ring; 0 while the ring is not complete."""
        return self.fleet.ring.pages if self.fleet.ring else 0

    def info(self) -> ReplicaInfo:
        """Return the present state of this ring."""
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
    """Routes requests to rings; it takes the place of the engine in a master with several rings."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._beginnings = PrefixAffinity()
        # By request id: the rings to which calls with this id went that are still being validated.
        self._arriving: dict[str, list[Replica]] = {}

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """Open a request in the ring that knows it already, else in the least loaded ring.

        If that ring is too small for the request, the larger rings are tried. See `Engine.open` for arguments
        and errors.
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
        """Cancel a request in whichever ring has it; see `Engine.cancel`."""
        return any(replica.engine.cancel(request_id, owner) for replica in self._replicas)

    def home(self, request_id: str | None) -> Replica | None:
        """Return the ring that has a request of this id, or None."""
        known = (one for one in self._replicas if request_id and one.engine.has_request(request_id))
        return next(known, None)

    async def revive(self, kept: Iterable[JournaledRequest]) -> None:
        """Restore the journal's requests, dealt out evenly over the rings.

        If a ring is not complete, `move_stranded` later moves its requests to another ring.
        """
        listed = list(kept)
        for replica in self._replicas:
            await replica.engine.revive(listed[replica.number :: len(self._replicas)])

    def move_stranded(self) -> None:
        """Move requests to complete rings that can continue them.

        All requests of a ring that cannot be formed now are moved; of other rings, those that are too large
        for their ring.
        """
        for replica in self._replicas:
            engine = replica.engine
            self._move(replica, engine.all_requests if replica.fleet.lacking else engine.stranded)

    @contextmanager
    def _reserved(self, id: str | None, ask: Ask) -> Generator[Replica]:
        """Yield the ring for a call; concurrent calls with the same request id get the same ring.

        An engine knows a request only once it has been validated, so calls under way are remembered here.
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

    async def _open_in_larger(
        self, ask: Ask, caller: Caller, small: Replica, refusal: TooLarge
    ) -> Subscription:
        """Open a request in the largest complete ring that takes it.

        small: the ring that refused. Raises the refusal of the largest ring, or `refusal` if none is larger.
        """
        complete = [self._replicas[number] for number in self._complete()]
        larger = sorted((one for one in complete if one.pages > small.pages), key=lambda one: -one.pages)
        refused: TooLarge | None = None
        for replica in larger:
            try:
                opened = await replica.engine.open(ask, caller)
            except TooLarge as error:
                refused = refused or error
            else:
                self._beginnings.note(ask, replica.number)
                return opened
        raise refused or refusal

    def _move(self, source: Replica, requests: Sequence[RequestState]) -> None:
        """Move those requests that another complete ring can continue."""
        for request in requests:
            target = self._adopted(request)
            if target is None:
                # The request is too large for every complete ring, and waits for its own ring.
                continue
            source.engine.handle(RequestMoved(request))
            log.info("goes on elsewhere", **request.log_fields, replica=target.number, before=source.number)

    def _adopted(self, request: RequestState) -> Replica | None:
        """Let the least loaded complete ring that can hold the request adopt it.

        Return this ring, or None.
        """
        loads = self._complete()
        for number in sorted(loads, key=lambda one: loads[one]):
            with suppress(InvalidRequest):
                self._replicas[number].engine.adopt(request)
                return self._replicas[number]
        return None

    def _choose(self, ask: Ask) -> Replica:
        """Choose a ring for a new request: the least loaded complete ring.

        If no ring is complete, choose the first one, whose engine raises what is missing.
        """
        complete = self._complete()
        number = least_loaded(complete, self._beginnings.find(ask)) if complete else 0
        self._beginnings.note(ask, number)
        return self._replicas[number]

    def _complete(self) -> dict[int, ReplicaLoad]:
        """Return the loads of all complete rings by their numbers."""
        return {one.number: _load_of(one) for one in self._replicas if one.fleet.ready}


def _load_of(replica: Replica) -> ReplicaLoad:
    """Return how loaded a ring is."""
    ring = replica.fleet.ring
    used = 1 - replica.engine.free_pages / ring.pages if ring else 1.0
    return ReplicaLoad(replica.engine.waiting, used)


class MemberRouter:
    """Routes members to fleets; it takes the place of the fleet in a master with several rings.

    The argument `changed` is called when a member has joined or has been lost.
    """

    def __init__(self, fleets: Sequence[Fleet], changed: Callable[[], None]) -> None:
        self._fleets = fleets
        self._changed = changed
        self._homes: dict[str, Fleet] = {}

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Admit a member to one of the fleets. Raises Refused if it belongs to none of them."""
        others = [
            one for fleet in self._fleets for one in fleet.registrations if one.name != registration.name
        ]
        registration = with_one_gpu(registration, others)
        # A member may come back before its old link is known to be lost; then it returns to its fleet.
        fleet = self._homes.get(registration.name)
        self._enter(fleet or self._choose(registration), registration, downlink)
        self._changed()

    def on_message(self, name: str, message: object, by: Link | None = None) -> None:
        """Pass a message to the fleet of its sender; see `Fleet.on_message`."""
        if fleet := self._homes.get(name):
            fleet.on_message(name, message, by)

    def on_disconnect(self, name: str, reason: str, by: Link | None = None) -> None:
        """Report a lost member to its fleet, unless a newer process has the member's name."""
        fleet = self._homes.get(name)
        if fleet is None or (fleet.knows(name) and not fleet.knows(name, by)):
            return
        del self._homes[name]
        fleet.on_disconnect(name, reason)
        self._changed()

    def lend_workers(self) -> None:
        """Move idle workers of other fleets to each fleet that can form a ring with their help."""
        for needy in self._fleets:
            for lender, worker in self._helpers(needy):
                member = lender.release(worker.name)
                log.info("goes to another ring", name=worker.name, replica=self._fleets.index(needy))
                self._enter(needy, member.registration, member.downlink)

    def _enter(self, fleet: Fleet, registration: Registration, downlink: Link) -> None:
        """Add a member to a fleet, and remember to which. Raises Refused."""
        fleet.add(registration, downlink)
        self._homes[registration.name] = fleet

    def _choose(self, registration: Registration) -> Fleet:
        """Choose the fleet for a new member.

        A worker goes to a fleet that lacks a worker, first to one where it ran before; if no fleet lacks one,
        to the smallest fleet, where it stands by for all fleets. A drafter goes where the fewest drafters
        are. If no fleet accepts the member, choose the first one, which raises the refusal.
        """
        accepting = [fleet for fleet in self._fleets if fleet.accepts(registration)]
        if not accepting:
            return self._fleets[0]
        if registration.kind == "drafter":
            return min(accepting, key=lambda fleet: count_drafters(fleet.registrations))
        short = [fleet for fleet in accepting if fleet.short]
        before = [fleet for fleet in short if fleet.ran(registration.name)]
        return (before or short or sorted(accepting, key=lambda fleet: len(fleet.registrations)))[0]

    def _helpers(self, needy: Fleet) -> list[tuple[Fleet, Registration]]:
        """Return as many idle workers of other fleets as `needy` needs to form a ring, each with its fleet.

        Return none if all of them together do not suffice. Idle workers of running rings come first, because
        a broken ring may need its remaining workers itself.
        """
        lenders = sorted((one for one in self._fleets if one is not needy), key=lambda one: not one.formed)
        helpers: list[tuple[Fleet, Registration]] = []
        for lender in lenders:
            for worker in filter(needy.accepts, lender.idle_workers):
                helpers.append((lender, worker))
                if needy.completed_by([one for _, one in helpers]):
                    return helpers
        return []
