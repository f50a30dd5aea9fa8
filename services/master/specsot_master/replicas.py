"""Several complete rings behind one master: requests go to the least loaded ring, workers to where one is
missing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

import structlog

from specsot.core.info import Info, LapsInfo, PagesInfo, ReplicaInfo, RequestsInfo
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

# Characters of a block that must agree, and blocks compared; not measured.
BLOCK_CHARACTERS = 256
MAX_PROMPT_BLOCKS = 64
MAX_KNOWN_BLOCKS = 4096  # blocks remembered, the newest; not measured


class PrefixAffinity:
    """Prompts are known by hashes of their first blocks, each with all before it."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def note(self, ask: Ask, replica: int) -> None:
        for mark in block_hashes(ask):
            self._replicas[mark] = replica
            self._replicas.move_to_end(mark)
        while len(self._replicas) > MAX_KNOWN_BLOCKS:
            self._replicas.popitem(last=False)

    def find(self, ask: Ask) -> int | None:
        """Where the one went that agrees longest; None where none agrees."""
        known = [self._replicas[mark] for mark in block_hashes(ask) if mark in self._replicas]
        return known[-1] if known else None


def block_hashes(ask: Ask) -> Iterator[bytes]:
    """Of the prompt's beginnings, ever longer."""
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
    """How much there is to do; the first difference counts.

    waiting: requests that are not in the ring yet. used: share of KV pages that somebody needs.
    """

    waiting: int
    used: float


def least_loaded(loads: Mapping[int, ReplicaLoad], familiar: int | None = None) -> int:
    """Of those that are equally little loaded the one that is `familiar` with how the request begins."""
    least = min(loads.values())
    equal = [number for number, load in loads.items() if load == least]
    return familiar if familiar in equal else equal[0]


def total_info(parts: Sequence[ReplicaInfo]) -> Info:
    """It is ready as soon as one of them is. Stages are told by each. One alone is the whole."""
    if len(parts) == 1:
        told = {one.name: getattr(parts[0], one.name) for one in fields(ReplicaInfo) if one.name != "number"}
        return Info(**told)
    pages = [one.pages for one in parts if one.pages]
    return Info(
        epoch=max(one.epoch for one in parts),
        ready=any(one.ready for one in parts),
        waiting_for=tuple(f"replica {one.number}: {line}" for one in parts for line in one.waiting_for),
        pages=PagesInfo(rows=pages[0].rows, **_sums(pages, "total", "free", "kept")) if pages else None,
        laps=_total_laps([one.laps for one in parts if one.laps]),
        requests=_total_requests([one.requests for one in parts if one.requests]),
        plan="; ".join(f"replica {one.number}: {one.plan}" for one in parts if one.plan),
        replicas=tuple(parts),
    )


def _sums(parts: Sequence[object], *names: str) -> dict[str, Any]:
    return {name: sum(getattr(one, name) for one in parts) for name in names}


def _total_laps(parts: Sequence[LapsInfo]) -> LapsInfo:
    """Means are of one lap, whichever ring's."""
    pace = sum(one.per_second for one in parts)

    def mean(name: str) -> float:
        return sum(getattr(one, name) * one.per_second for one in parts) / pace if pace else 0.0

    return LapsInfo(
        **_sums(parts, "laps", "tokens"),
        per_second=pace,
        tokens_per_lap=mean("tokens_per_lap"),
        rows_per_lap=mean("rows_per_lap"),
    )


def _total_requests(parts: Sequence[RequestsInfo]) -> RequestsInfo:
    ended: Counter[str] = Counter()
    for one in parts:
        ended.update(dict(one.ended))
    return RequestsInfo(
        **_sums(parts, "waiting", "running", "writing", "refused", "prompt_tokens", "cached_tokens"),
        kept=max(one.kept for one in parts),  # requests that are over are kept once, for all rings
        ended=tuple(sorted(ended.items())),
    )


@dataclass(frozen=True, slots=True)
class Replica:
    """number: 0 for the first."""

    number: int
    engine: Engine
    fleet: Fleet

    @property
    def drafts(self) -> bool:
        ring = self.fleet.ring
        return ring is not None and ring.drafter is not None

    @property
    def pages(self) -> int:
        """KV pages of its ring; 0 while that does not run."""
        return self.fleet.ring.pages if self.fleet.ring else 0

    def info(self) -> ReplicaInfo:
        fleet = self.fleet
        engine = self.engine
        ring = self.fleet.ring
        waiting = self.fleet.waiting_for()
        pages = None
        if ring:
            pages = PagesInfo(ring.pages, engine.free_pages, ring.page_rows, engine.kept_pages)
        return ReplicaInfo(
            number=self.number,
            epoch=fleet.epoch,
            ready=fleet.ready,
            waiting_for=(waiting,) if waiting else (),
            pages=pages,
            laps=engine.laps.info(),
            requests=engine.requests(),
            plan=fleet.plan,
        )


log = structlog.get_logger()


class RequestRouter:
    """What an engine is to a master with one ring."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._beginnings = PrefixAffinity()
        self._arriving: dict[str, list[Replica]] = {}  # where calls with an id of their own went

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """As the engine's, of the ring that has the request already, or of the least loaded one; where that
        is too small, of a larger one.
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
        return any(replica.engine.cancel(request_id, owner) for replica in self._replicas)

    def home(self, request_id: str | None) -> Replica | None:
        known = (one for one in self._replicas if request_id and one.engine.has_request(request_id))
        return next(known, None)

    async def revive(self, kept: Iterable[JournaledRequest]) -> None:
        """Dealt out evenly; where a ring is not complete in time another takes its share."""
        listed = list(kept)
        for replica in self._replicas:
            await replica.engine.revive(listed[replica.number :: len(self._replicas)])

    def move_stranded(self) -> None:
        """Whoever waits in a ring that cannot be formed now, or has become too small, goes on in one that is
        complete.
        """
        for replica in self._replicas:
            engine = replica.engine
            self._move(replica, engine.all_requests if replica.fleet.lacking else engine.stranded)

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

    async def _open_in_larger(
        self, ask: Ask, caller: Caller, small: Replica, refusal: TooLarge
    ) -> Subscription:
        """In the largest complete ring that takes it. Raises the refusal of the largest one."""
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
        for request in requests:
            target = self._adopted(request)
            if target is None:
                continue  # too large for all that are complete: it waits for its own
            source.engine.handle(RequestMoved(request))
            log.info("goes on elsewhere", **request.log_fields, replica=target.number, before=source.number)

    def _adopted(self, request: RequestState) -> Replica | None:
        """The least loaded complete ring that can go on with it, and does now."""
        loads = self._complete()
        for number in sorted(loads, key=lambda one: loads[one]):
            with suppress(InvalidRequest):
                self._replicas[number].engine.adopt(request)
                return self._replicas[number]
        return None

    def _choose(self, ask: Ask) -> Replica:
        """Of complete rings, if there are any; else whichever, which says what is missing."""
        complete = self._complete()
        number = least_loaded(complete, self._beginnings.find(ask)) if complete else 0
        self._beginnings.note(ask, number)
        return self._replicas[number]

    def _complete(self) -> dict[int, ReplicaLoad]:
        return {one.number: _load_of(one) for one in self._replicas if one.fleet.ready}


def _load_of(replica: Replica) -> ReplicaLoad:
    ring = replica.fleet.ring
    used = 1 - replica.engine.free_pages / ring.pages if ring else 1.0
    return ReplicaLoad(replica.engine.waiting, used)


class MemberRouter:
    """What a fleet is to a master with one ring.

    changed: somebody came or went.
    """

    def __init__(self, fleets: Sequence[Fleet], changed: Callable[[], None]) -> None:
        self._fleets = fleets
        self._changed = changed
        self._homes: dict[str, Fleet] = {}

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused when it belongs into none of the rings."""
        others = [
            one for fleet in self._fleets for one in fleet.registrations if one.name != registration.name
        ]
        registration = with_one_gpu(registration, others)
        fleet = self._homes.get(registration.name)  # back before its old link was known to be lost
        self._enter(fleet or self._choose(registration), registration, downlink)
        self._changed()

    def on_message(self, name: str, message: object, by: Link | None = None) -> None:
        if fleet := self._homes.get(name):
            fleet.on_message(name, message, by)

    def on_disconnect(self, name: str, reason: str, by: Link | None = None) -> None:
        fleet = self._homes.get(name)
        if fleet is None or (fleet.knows(name) and not fleet.knows(name, by)):
            return
        del self._homes[name]
        fleet.on_disconnect(name, reason)
        self._changed()

    def lend_workers(self) -> None:
        for needy in self._fleets:
            for lender, worker in self._helpers(needy):
                member = lender.release(worker.name)
                log.info("goes to another ring", name=worker.name, replica=self._fleets.index(needy))
                self._enter(needy, member.registration, member.downlink)

    def _enter(self, fleet: Fleet, registration: Registration, downlink: Link) -> None:
        fleet.add(registration, downlink)
        self._homes[registration.name] = fleet

    def _choose(self, registration: Registration) -> Fleet:
        """Where it ran before and is missing; else the first where one is missing; else the smallest, where
        it stands by for all of them. A drafter goes where the fewest are.
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
        """As many as make it complete; none where that cannot be. Those of complete rings first: what is
        left of a broken one may be needed there.
        """
        lenders = sorted((one for one in self._fleets if one is not needy), key=lambda one: not one.formed)
        helpers: list[tuple[Fleet, Registration]] = []
        for lender in lenders:
            for worker in filter(needy.accepts, lender.idle_workers):
                helpers.append((lender, worker))
                if needy.completed_by([one for _, one in helpers]):
                    return helpers
        return []
