"""A ring whose members live in this process and meet over TCP, every hop through a proxy that delays.

Asked for branches (tokens in, tokens out) or, under a master of its own, for whole answers. Master and
stage 0 share a host, so do the last stage and the drafter; everything else that is said travels.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.core.frames import Close, Fork, Frame, Open, Opening, Result
from specsot.errors import Unavailable
from specsot.events import Finished
from specsot.members import Configuration, HopDtype, Registration
from specsot.params import Ask
from specsot.service.compute import ComputeThread
from specsot.service.membership import RingMember, run_membership
from specsot.transport.grpc_links import GrpcDialer, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Dialer, Inbox, Link, LocalLink
from specsot_app.fleet.embedded import MemberUplink
from specsot_bench.results import Clock, now
from specsot_lab.bench.delay_proxy import DelayProxy
from specsot_master.core.inputs import RingEvent, RingLost
from specsot_master.core.ring.ring_state import RingConfig, RingOptions, RingState
from specsot_master.fleet import Fleet
from specsot_master.master import assemble
from specsot_master.members import Membership
from specsot_worker.observer import WorkerObserver
from specsot_worker.ring_links import stage_index
from specsot_worker.stage_provider import StageRunner


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One frame's way through the ring.

    rows: tokens of the frame. elapsed: seconds from stage 0 and back to it. seconds: of each stage's
        computation. alone: no other frame was in flight meanwhile.
    """

    rows: int
    elapsed: float
    seconds: tuple[float, ...]
    alone: bool = True


class StepProbe(WorkerObserver):
    """Observes one worker: its steps, and how long frames waited for it.

    stage: number of the worker's stage, once that is known. flying: when each frame left stage 0, by number.
        queued: seconds that frames waited here. changed: called for every step that is back.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.stage = 0
        self.steps: list[StepTimes] = []
        self.queued = 0.0
        self.opened = self.closed = 0
        self.flying: dict[int, float] = {}
        self._met = set[int]()  # those that flew beside others

    def formed(self, configuration: Configuration, stage: StageRunner) -> None:
        """Record the number of the worker's stage. configuration: of the ring. stage: not used."""
        self.stage = stage_index(configuration)

    def launched(self, frame: Frame, now: float) -> Frame:
        """Record that stage 0 sends a frame, and return the frame unchanged. now: the time in seconds."""
        self.flying[frame.number] = now
        self._met.update(self.flying if len(self.flying) > 1 else ())
        self.opened += len(frame.openings)
        self.closed += len(frame.closings)
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        """Add the seconds that a frame waited here."""
        self.queued += seconds

    def returned(self, result: Result, now: float) -> None:
        """Record the step of a result that came back, and call `changed`. now: the time in seconds."""
        if (began := self.flying.pop(result.number, None)) is not None:
            alone = result.number not in self._met
            self.steps.append(StepTimes(result.rows, now - began, result.seconds, alone))
            self._met.discard(result.number)
        self._changed()


WorkerMaker = Callable[[str, Dialer, Executor, WorkerObserver], RingMember]
DrafterMaker = Callable[[str, Dialer, Executor], RingMember]
# Tokens that a sequence might write; it is closed long before.
FAR = 4096  # tokens that a sequence might write: it is closed long before
# Seconds without news, after which the ring counts as broken. Untuned.
SILENCE = 60.0  # seconds without news, after which there will be none


@dataclass(frozen=True, slots=True)
class Site:
    """A ring to be set up.

    base: the model's directory. stages: number of workers. worker: makes a worker. drafter: makes the
        drafter; None: no drafter. hop: data type in which hidden rows travel.
    """

    base: Path
    stages: int
    worker: WorkerMaker
    drafter: DrafterMaker | None = None
    hop: HopDtype = "auto"


@dataclass(frozen=True, slots=True)
class Line:
    """What lies between two hosts. delay: seconds of each direction. rate: bytes a second of each direction;
    None: no limit.
    """

    delay: float = 0.0
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class BranchJob:
    """Branches of one prefix, written side by side.

    prefix: token ids that all share. suffixes: token ids of each branch after the prefix. tokens: that each
        branch writes after its first one. drafted: branches may be drafted for.
    """

    prefix: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    tokens: int
    drafted: bool = True


@dataclass(frozen=True, slots=True)
class Written:
    """What came of a job, from the moment when all branches have begun until the last has enough tokens.

    texts: tokens of every branch, the first one included. tokens: of all, within `seconds`. draft_rounds:
        trees of each branch. steps: frames within them. queued: seconds that frames waited at each stage.
        carried: bytes over all hops.
    """

    texts: tuple[tuple[int, ...], ...]
    tokens: int
    seconds: float
    draft_rounds: tuple[int, ...]
    steps: tuple[StepTimes, ...]
    queued: tuple[float, ...]
    carried: int


@dataclass(slots=True)
class _BranchProgress:
    """What one sequence has written so far: its tokens, and how many draft rounds that took."""

    tokens: list[int] = field(default_factory=list[int])
    draft_rounds: int = 0


@dataclass(slots=True)
class Hosts:
    """Where members are: what leads them, and what lies between them. proxies, probes: of the workers."""

    membership: Membership
    line: Line
    wake: Callable[[], None]
    on_end: Callable[[str, asyncio.Task[None]], None]
    proxies: list[DelayProxy] = field(default_factory=list[DelayProxy])
    probes: list[StepProbe] = field(default_factory=list[StepProbe])


class RingFleet:
    """A ring that is asked for branches, made by `ring_of`. site: what its members are. line: what lies
    between them. clock: returns seconds.
    """

    def __init__(self, site: Site, line: Line, clock: Clock = now) -> None:
        wishes = RingConfig(
            workers=site.stages,
            drafter="none" if site.drafter is None else "eagle",
            fingerprint=fingerprint(site.base),
            model_layers=read_config(site.base).layers,
            hop_dtype=site.hop,
        )
        self.fleet = Fleet(wishes, self.wake)
        self.fleet.user = self
        self.hosts = Hosts(self.fleet, line, self.wake, self.over)
        self._clock = clock
        self._numbers = itertools.count(1)
        self._texts: dict[int, _BranchProgress] = {}
        self._news = asyncio.Event()
        self._broken: str | None = None
        self._now = 0.0

    @property
    def at_work(self) -> int:
        """Return the number of requests that a new epoch would interrupt: always 0."""
        return 0

    def fitting(self, ring: RingState) -> int:
        """Return how many of the known requests would fit a ring like this one: always 0, since there are no
        requests of a master.
        """
        return self.at_work

    def final_rows(self) -> dict[int, int]:
        """Return, by sequence id, for how many leading tokens the KV on every stage is final: always nothing,
        since no KV is handed over.
        """
        return {}

    @property
    def stages(self) -> list[StepProbe]:
        """Return the probe of each stage in the ring's order, which is not the one in which the workers
        joined.
        """
        return sorted(self.hosts.probes, key=lambda probe: probe.stage)

    async def complete(self, drafts: bool) -> None:
        """Wait until the ring is complete. drafts: also wait for a drafter. Raises Unavailable if the ring
        cannot be formed.
        """
        while not self.fleet.ready or (drafts and self.fleet.ring and self.fleet.ring.drafter is None):
            if self.fleet.complaint:
                raise Unavailable(self.fleet.complaint)
            await self.hear()

    async def write(self, job: BranchJob) -> Written:
        """Write the branches of a job, and return what came of it. Raises Unavailable if the ring breaks."""
        prefix = await self._open(job.prefix, None, decodes=False)
        fork = Fork(prefix, len(job.prefix))
        ids = [await self._open(suffix, fork, drafted=job.drafted, ordinal=n, family=prefix)
               for n, suffix in enumerate(job.suffixes)]  # fmt: skip
        await self._reach(ids, 1)
        began = self._now
        marks = self._marks(ids)
        await self._reach(ids, 1 + job.tokens)
        written = self._written(ids, self._now - began, marks)
        for sequence in (*ids, prefix):
            await self.fleet.order(Close(sequence))
        await self._rest()
        return written

    async def _open(self, tokens: Sequence[int], fork: Fork | None, **fields: Any) -> int:
        """Open a sequence and return its id. tokens: after the fork. fork: the prefix, or None. fields:
        further ones of the opening.
        """
        number = next(self._numbers)
        length = len(tokens) + (fork.length if fork else 0)
        self._texts[number] = _BranchProgress()
        opening = Opening(number, length, fork=fork, limit=FAR, **fields)
        await self.fleet.order(Open(opening, tuple(tokens), lease=length + FAR))
        return number

    async def _reach(self, ids: Sequence[int], tokens: int) -> None:
        """Wait until every sequence has at least `tokens` tokens. ids: of the sequences."""
        while min(len(self._texts[sequence].tokens) for sequence in ids) < tokens:
            await self.hear()

    async def _rest(self) -> None:
        """Wait until no frame is in flight and no sequence is open, so that the next job begins with a quiet
        ring.
        """
        first = self.stages[0]
        while first.flying or first.closed < first.opened:
            await self.hear()
        self._texts.clear()

    async def hear(self) -> None:
        """Wait for news of the ring. Raises Unavailable if the ring breaks, or SILENCE seconds pass without
        news.
        """
        if self._broken:
            raise Unavailable(self._broken)
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), SILENCE)
        except TimeoutError:
            raise Unavailable(f"the ring said nothing for {SILENCE:g} s") from None

    def _marks(self, ids: Sequence[int]) -> _Marks:
        """Return the counters at this moment. ids: sequences whose tokens are counted."""
        return _Marks(
            tokens=sum(len(self._texts[sequence].tokens) for sequence in ids),
            draft_rounds=tuple(self._texts[sequence].draft_rounds for sequence in ids),
            steps=len(self.stages[0].steps),
            queued=tuple(probe.queued for probe in self.stages),
            carried=sum(proxy.carried for proxy in self.hosts.proxies),
        )

    def _written(self, ids: Sequence[int], seconds: float, since: _Marks) -> Written:
        """Return what was written between two moments. ids: of the sequences. seconds: between the moments.
        since: counters at the first one.
        """
        until = self._marks(ids)
        return Written(
            texts=tuple(tuple(self._texts[sequence].tokens) for sequence in ids),
            tokens=until.tokens - since.tokens,
            seconds=seconds,
            draft_rounds=tuple(
                after - before for before, after in zip(since.draft_rounds, until.draft_rounds)
            ),
            steps=tuple(self.stages[0].steps[since.steps :]),
            queued=tuple(after - before for before, after in zip(since.queued, until.queued)),
            carried=until.carried - since.carried,
        )

    def handle(self, event: RingEvent) -> None:
        """Handle an event of the ring. While the ring is formed, `complete` looks for its complaint."""
        if isinstance(event, Result):
            self._read(event)
        elif isinstance(event, RingLost) and self._texts:
            self._fail(event.reason)
        self.wake()

    def _read(self, result: Result) -> None:
        """Record the tokens and draft rounds of a result, and when it came."""
        self._now = self._clock()
        for outcome in result.outcomes:
            if text := self._texts.get(outcome.sequence):
                text.tokens += outcome.tokens
                text.draft_rounds += outcome.draft_round > 0

    def wake(self) -> None:
        """Wake whoever waits in `hear`."""
        self._news.set()

    def over(self, name: str, member: asyncio.Task[None]) -> None:
        """Record that a member has ended, whether or not it failed. name: of the member. member: its task,
        which is done.
        """
        failure = None if member.cancelled() else member.exception()
        self._fail(f"{name} ended: {failure or 'it left'}")
        self.wake()

    def _fail(self, reason: str) -> None:
        """Store why the ring broke; `hear` raises it, since nothing can be raised in a callback. The first
        reason is kept.
        """
        self._broken = self._broken or f"the ring broke: {reason}"


@dataclass(frozen=True, slots=True)
class _Marks:
    """Counters of a ring at one moment, as `Written` has them."""

    tokens: int
    draft_rounds: tuple[int, ...]
    steps: int
    queued: tuple[float, ...]
    carried: int


@asynccontextmanager
async def ring_of(site: Site, line: Line) -> AsyncGenerator[RingFleet]:
    """Yield a complete ring; its members leave when the context ends. site: what it is. line: what lies
    between its members. Raises what loading raises.
    """
    ring = RingFleet(site, line)
    async with _settled(site, ring.hosts):
        await ring.complete(site.drafter is not None)
        yield ring


Answer = Callable[[Ask], Coroutine[Any, Any, Finished]]


@asynccontextmanager
async def answers_of(site: Site, line: Line) -> AsyncGenerator[Answer]:
    """Yield a function that asks the same ring, under a master of its own, for whole answers,
    plan included.
    """
    drafter = "none" if site.drafter is None else "eagle"
    master = assemble(site.base, RingOptions(workers=site.stages, drafter=drafter, hop_dtype=site.hop))

    async def answer(ask: Ask) -> Finished:
        """Return the last event of a request. Raises what ends the request."""
        events = [numbered.event async for numbered in master.requests.generate(ask)]
        assert isinstance(events[-1], Finished)
        return events[-1]

    async with _settled(site, Hosts(master.members, line, lambda: None, lambda name, member: None)):
        await master.complete(with_drafter=site.drafter is not None)
        yield answer


@asynccontextmanager
async def _settled(site: Site, hosts: Hosts) -> AsyncGenerator[None]:
    """Run all members of a site until the context ends. hosts: where they are."""
    leaving = asyncio.Event()
    async with AsyncExitStack() as stack:
        members = [await _settle(hosts, f"worker-{n}", site, leaving, stack) for n in range(site.stages)]
        if site.drafter:
            members.append(await _settle(hosts, "drafter", site, leaving, stack))
        try:
            yield
        finally:
            leaving.set()
            await asyncio.gather(*members, return_exceptions=True)


async def _settle(
    hosts: Hosts, name: str, site: Site, leaving: asyncio.Event, stack: AsyncExitStack
) -> asyncio.Task[None]:
    """Return the task of a member with an endpoint, a thread and, unless it drafts, a proxy of its own.

    hosts: where it is. name: of the member. site: makes it. leaving: set when it has to end. stack: closes
        what it opened.
    """
    inbox, compute = Inbox(), ComputeThread(name)
    stack.callback(compute.shutdown)
    endpoint = await open_server("127.0.0.1:0", {"specsot.v1.Ring": RingService(inbox, name).attach})
    stack.push_async_callback(endpoint.close, 0)
    make = site.drafter
    address = f"127.0.0.1:{endpoint.port}"
    if name != "drafter":
        address = await _open_proxy(hosts, endpoint.port, stack)
        make = partial(_with_watch, site.worker, hosts.probes[-1])
    assert make is not None
    dialer = GrpcDialer(name, inbox)
    ring_member = await asyncio.get_running_loop().run_in_executor(compute, make, name, dialer, compute)

    async def connect(registration: Registration) -> Link:
        """Register the member at the address of its proxy, and return its link to the master."""
        await hosts.membership.join(replace(registration, address=address), LocalLink("master", inbox))
        hosts.wake()  # there may be a complaint
        return MemberUplink(hosts.membership, name)

    member = asyncio.create_task(run_membership(ring_member, inbox, connect, leaving))
    member.add_done_callback(partial(hosts.on_end, name))
    return member


async def _open_proxy(hosts: Hosts, port: int, stack: AsyncExitStack) -> str:
    """Return the address of a proxy before the worker at this port, through which all others reach the
    worker. stack: closes the proxy.
    """
    proxy = DelayProxy(port, hosts.line.delay, hosts.line.rate)
    await proxy.open()
    stack.push_async_callback(proxy.close)
    hosts.proxies.append(proxy)
    hosts.probes.append(StepProbe(hosts.wake))
    return proxy.address


def _with_watch(
    make: WorkerMaker, observer: WorkerObserver, name: str, dialer: Dialer, compute: Executor
) -> RingMember:
    """Make a worker with an observer. make: makes it. The others are the worker's name, dialer and thread."""
    return make(name, dialer, compute, observer)
