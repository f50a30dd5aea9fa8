"""A ring whose members run in this process and are connected over TCP, every hop through a proxy that delays.

It writes branches (tokens in, tokens out) or, with a master of its own, whole answers. Master and stage 0
share a host, and so do the last stage and the drafter; all other messages pass a proxy.
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
from typing import Any, Final

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
    """The times of one frame on its way through the ring.

    rows: Number of rows of the frame.
    elapsed: Seconds from stage 0 until the result is back at stage 0.
    seconds: Seconds of computation of each stage.
    alone: True if no other frame was in flight meanwhile.
    """

    rows: int
    elapsed: float
    seconds: tuple[float, ...]
    alone: bool = True


class StepProbe(WorkerObserver):
    """Observes one worker: its steps, and how long frames waited for it.

    stage: Number of the worker's stage; 0 until the ring is formed.
    steps: The steps whose results have returned; only stage 0 has any.
    queued: Seconds that frames waited at this worker, in total.
    opened: Number of sequences that were opened.
    closed: Number of sequences that were closed.
    departures: Time at which each frame in flight left stage 0, in seconds, by its number.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        """Start without steps.

        on_step: Called for every step whose result has returned.

        All counters begin at 0, and no frame is in flight.
        """
        self._on_step = on_step
        self.stage = 0
        self.steps: list[StepTimes] = []
        self.queued = 0.0
        self.opened = self.closed = 0
        self.departures: dict[int, float] = {}
        # Numbers of frames that were in flight together with others.
        self._not_alone = set[int]()

    def formed(self, configuration: Configuration, stage: StageRunner) -> None:
        """Record the number of the worker's stage.

        configuration: The ring's configuration.
        stage: The worker's stage; not used.
        """
        self.stage = stage_index(configuration)

    def launched(self, frame: Frame, now: float) -> Frame:
        """Record that stage 0 sends a frame, and return the frame unchanged.

        frame: The frame.
        now: The time, in seconds.

        If other frames are in flight, this frame and all of those are marked as not alone. The frame's
        openings and closings are added to `opened` and `closed`.
        """
        self.departures[frame.number] = now
        self._not_alone.update(self.departures if len(self.departures) > 1 else ())
        self.opened += len(frame.openings)
        self.closed += len(frame.closings)
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        """Add the time that a frame waited at this worker.

        frame: The frame; not used.
        seconds: How long it waited.
        """
        self.queued += seconds

    def returned(self, result: Result, now: float) -> None:
        """Record the step of a result that has returned, and call `on_step`. A result whose frame is unknown
        is not recorded.

        result: The result.
        now: The time, in seconds.

        `on_step` is called for an unknown frame, too.
        """
        if (departure := self.departures.pop(result.number, None)) is not None:
            alone = result.number not in self._not_alone
            self.steps.append(StepTimes(result.rows, now - departure, result.seconds, alone))
            self._not_alone.discard(result.number)
        self._on_step()


# Makes a worker from its name, its dialer, the executor of its stage, and its observer.
WorkerMaker = Callable[[str, Dialer, Executor, WorkerObserver], RingMember]
# Makes a drafter from its name, its dialer, and the executor of its engine.
DrafterMaker = Callable[[str, Dialer, Executor], RingMember]
# Tokens that a sequence could write. It is closed long before.
MAX_LENGTH: Final = 4096
# Seconds without news after which the ring counts as broken. Untuned.
SILENCE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Site:
    """A ring to be set up.

    base: Directory of the base model.
    stages: Number of workers.
    worker: Makes a worker.
    drafter: Makes the drafter; None: there is no drafter.
    hop: The type in which hidden rows travel.
    """

    base: Path
    stages: int
    worker: WorkerMaker
    drafter: DrafterMaker | None = None
    hop: HopDtype = "auto"


@dataclass(frozen=True, slots=True)
class Line:
    """The line between two hosts.

    delay: Seconds in each direction.
    rate: Bytes per second in each direction; None: no limit.
    """

    delay: float = 0.0
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class BranchJob:
    """Branches of one prefix that are written at the same time.

    prefix: Token ids that all branches share.
    suffixes: Token ids of each branch after the prefix.
    tokens: Number of tokens that each branch writes after its first one.
    drafted: False if no drafter may propose tokens.
    """

    prefix: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    tokens: int
    drafted: bool = True


@dataclass(frozen=True, slots=True)
class Written:
    """What a job wrote, measured from the moment at which all branches have one token until the last branch
    has enough.

    token_ids: Token ids of every branch, the first one included.
    tokens: Number of tokens of all branches within `seconds`.
    seconds: Duration of the measurement.
    draft_rounds: Number of trees of each branch within `seconds`.
    steps: The steps within `seconds`.
    queued: Seconds that frames waited at each stage.
    carried: Bytes over all hops together.
    """

    token_ids: tuple[tuple[int, ...], ...]
    tokens: int
    seconds: float
    draft_rounds: tuple[int, ...]
    steps: tuple[StepTimes, ...]
    queued: tuple[float, ...]
    carried: int


@dataclass(slots=True)
class _BranchProgress:
    """What one sequence has written so far.

    tokens: Its token ids.
    draft_rounds: The number of its trees.
    """

    tokens: list[int] = field(default_factory=list[int])
    draft_rounds: int = 0


@dataclass(slots=True)
class Hosts:
    """The members' surroundings: who registers them, and what connects them.

    membership: Where members register.
    line: The line before each worker.
    wake: Called when a member has registered.
    on_end: Called with a member's name and its task, when the member has ended.
    proxies: The proxy before each worker.
    probes: The observer of each worker, in the order in which they started.
    """

    membership: Membership
    line: Line
    wake: Callable[[], None]
    on_end: Callable[[str, asyncio.Task[None]], None]
    proxies: list[DelayProxy] = field(default_factory=list[DelayProxy])
    probes: list[StepProbe] = field(default_factory=list[StepProbe])


class RingFleet:
    """A ring that writes branches, made by `ring_of`.

    site: What its members are.
    line: The line between the members.
    clock: Returns the time in seconds.
    """

    def __init__(self, site: Site, line: Line, clock: Clock = now) -> None:
        """Make a fleet that waits for the site's members. Nothing is started; `ring_of` starts the members.
        The fleet reports its events to this object.

        site: What the members are. Without a drafter maker the ring has no drafter, otherwise an EAGLE
            drafter.
        line: The line between the members.
        clock: Returns the time in seconds.
        """
        config = RingConfig(
            workers=site.stages,
            drafter="none" if site.drafter is None else "eagle",
            fingerprint=fingerprint(site.base),
            model_layers=read_config(site.base).layers,
            hop_dtype=site.hop,
        )
        self.fleet = Fleet(config, self.wake)
        self.fleet.user = self
        self.hosts = Hosts(self.fleet, line, self.wake, self.on_exit)
        self._clock = clock
        self._numbers = itertools.count(1)
        self._progress: dict[int, _BranchProgress] = {}
        self._changed = asyncio.Event()
        self._broken: str | None = None
        self._result_time = 0.0

    @property
    def at_work(self) -> int:
        """Return the number of requests that a new epoch would interrupt: always 0."""
        return 0

    def fitting(self, ring: RingState) -> int:
        """Return how many of the known requests would fit a ring: always 0, since there is no master with
        requests.

        ring: The sizes and limits of a ring that need not run; not used.
        """
        return self.at_work

    def final_rows(self) -> dict[int, int]:
        """Return, by sequence id, how many of its first tokens have final KV on every stage: always {}, since
        no KV is migrated.
        """
        return {}

    @property
    def stages(self) -> list[StepProbe]:
        """Return the probe of each stage in the ring's order, which may differ from the order in which the
        workers registered.
        """
        return sorted(self.hosts.probes, key=lambda probe: probe.stage)

    async def complete(self, drafts: bool) -> None:
        """Wait until the ring is complete.

        drafts: True: also wait for a drafter.

        Raises Unavailable if the ring cannot be formed.

        If the ring is complete already, return at once. A complaint that the fleet has is the text of the
        error; Unavailable is also raised if a member ends or if nothing happens for SILENCE_SECONDS.
        """
        while not self.fleet.ready or (drafts and self.fleet.ring and self.fleet.ring.drafter is None):
            if self.fleet.complaint:
                raise Unavailable(self.fleet.complaint)
            await self.wait_for_news()

    async def write(self, job: BranchJob) -> Written:
        """Write the branches of a job, and return what they wrote. Then wait until the ring is quiet.

        job: The branches.

        Raises Unavailable if the ring breaks.

        The prefix is opened as a sequence that only prefills; each suffix forks from it. The measurement
        begins when every branch has its first token and ends with the result after which every branch has 1 +
        job.tokens tokens; branches may have more. All sequences are closed afterwards. Raises ValueError if
        the job has no suffixes. Unavailable also follows if nothing is received for SILENCE_SECONDS.
        """
        prefix = await self._open(job.prefix, None, decodes=False)
        fork = Fork(prefix, len(job.prefix))
        ids = [await self._open(suffix, fork, drafted=job.drafted, ordinal=n, family=prefix)
               for n, suffix in enumerate(job.suffixes)]  # fmt: skip
        await self._wait_for_tokens(ids, 1)
        start_time = self._result_time
        counters = self._counters(ids)
        await self._wait_for_tokens(ids, 1 + job.tokens)
        written = self._written(ids, self._result_time - start_time, counters)
        for sequence in (*ids, prefix):
            await self.fleet.order(Close(sequence))
        await self._wait_until_quiet()
        return written

    async def _open(self, tokens: Sequence[int], fork: Fork | None, **fields: Any) -> int:
        """Open a sequence, and return its id.

        tokens: Token ids after those of the fork.
        fork: The prefix that the sequence forks, or None.
        fields: Further fields of the opening.

        Ids count from 1 and are never reused. The sequence may write MAX_LENGTH tokens, and its lease covers
        its prompt, the fork included, and those tokens. Returns once the order has been given to the ring,
        before anything is computed.
        """
        number = next(self._numbers)
        length = len(tokens) + (fork.length if fork else 0)
        self._progress[number] = _BranchProgress()
        opening = Opening(number, length, fork=fork, limit=MAX_LENGTH, **fields)
        await self.fleet.order(Open(opening, tuple(tokens), lease=length + MAX_LENGTH))
        return number

    async def _wait_for_tokens(self, ids: Sequence[int], tokens: int) -> None:
        """Wait until every sequence has at least `tokens` tokens.

        ids: Ids of the sequences, at least one.
        tokens: Number of tokens.

        Raises Unavailable if the ring breaks.
        """
        while min(len(self._progress[sequence].tokens) for sequence in ids) < tokens:
            await self.wait_for_news()

    async def _wait_until_quiet(self) -> None:
        """Wait until no frame is in flight and no sequence is open, so that the next job starts with a quiet
        ring.

        Then forget what all sequences wrote. Raises Unavailable if the ring breaks or nothing happens for
        SILENCE_SECONDS.
        """
        first_stage = self.stages[0]
        while first_stage.departures or first_stage.closed < first_stage.opened:
            await self.wait_for_news()
        self._progress.clear()

    async def wait_for_news(self) -> None:
        """Wait for the next event of the ring.

        Raises Unavailable if the ring has broken, or if nothing happens for SILENCE_SECONDS.

        Events before the call are not counted. A ring that has broken stays broken, so that each later call
        raises the same reason.
        """
        if self._broken:
            raise Unavailable(self._broken)
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), SILENCE_SECONDS)
        except TimeoutError:
            raise Unavailable(f"nothing was received from the ring for {SILENCE_SECONDS:g} s") from None

    def _counters(self, ids: Sequence[int]) -> _Counters:
        """Return the ring's counters at this moment.

        ids: Sequences whose tokens and trees are counted.
        """
        return _Counters(
            tokens=sum(len(self._progress[sequence].tokens) for sequence in ids),
            draft_rounds=tuple(self._progress[sequence].draft_rounds for sequence in ids),
            steps=len(self.stages[0].steps),
            queued=tuple(probe.queued for probe in self.stages),
            carried=sum(proxy.carried for proxy in self.hosts.proxies),
        )

    def _written(self, ids: Sequence[int], seconds: float, before: _Counters) -> Written:
        """Return what was written between two moments, the later one of which is now.

        ids: Ids of the sequences.
        seconds: Seconds between the moments.
        before: The counters at the first moment.
        """
        after = self._counters(ids)
        return Written(
            token_ids=tuple(tuple(self._progress[sequence].tokens) for sequence in ids),
            tokens=after.tokens - before.tokens,
            seconds=seconds,
            draft_rounds=tuple(
                later - earlier for earlier, later in zip(before.draft_rounds, after.draft_rounds)
            ),
            steps=tuple(self.stages[0].steps[before.steps :]),
            queued=tuple(later - earlier for earlier, later in zip(before.queued, after.queued)),
            carried=after.carried - before.carried,
        )

    def handle(self, event: RingEvent) -> None:
        """Handle an event of the ring. A lost ring is an error only while sequences are open; while the ring
        is formed, `complete` looks for a complaint.

        event: The event.

        A result is recorded; all events, those of other types included, wake the task in `wait_for_news`.
        """
        if isinstance(event, Result):
            self._record_result(event)
        elif isinstance(event, RingLost) and self._progress:
            self._fail(event.reason)
        self.wake()

    def _record_result(self, result: Result) -> None:
        """Record the tokens and trees of a result, and when it arrived. Sequences that are unknown are
        ignored.

        result: The result.

        The arrival time is recorded also if all sequences are unknown. A draft round is counted if the
        outcome's number of it is above 0, that is, if a tree was verified rather than only the sequence's
        prompt.
        """
        self._result_time = self._clock()
        for outcome in result.outcomes:
            if progress := self._progress.get(outcome.sequence):
                progress.tokens += outcome.tokens
                progress.draft_rounds += outcome.draft_round > 0

    def wake(self) -> None:
        """Wake the task that waits in `wait_for_news`."""
        self._changed.set()

    def on_exit(self, name: str, member: asyncio.Task[None]) -> None:
        """Record that a member has ended, whether or not it failed, so that `wait_for_news` raises an error.

        name: Name of the member.
        member: Its task, which is done.

        The recorded reason names the error, or says "without an error" for a member that was cancelled or
        returned. If the ring had broken before, the earlier reason is kept.
        """
        failure = None if member.cancelled() else member.exception()
        self._fail(f"{name} ended: {failure or 'without an error'}")
        self.wake()

    def _fail(self, reason: str) -> None:
        """Store why the ring broke, unless it is broken already. `wait_for_news` raises the error, because
        callbacks cannot.

        reason: Why the ring broke.
        """
        self._broken = self._broken or f"the ring broke: {reason}"


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters of a ring at one moment.

    tokens: Tokens of all sequences together.
    draft_rounds: Trees of each sequence.
    steps: Steps whose results have returned.
    queued: Seconds that frames waited at each stage.
    carried: Bytes over all hops together.
    """

    tokens: int
    draft_rounds: tuple[int, ...]
    steps: int
    queued: tuple[float, ...]
    carried: int


@asynccontextmanager
async def ring_of(site: Site, line: Line) -> AsyncGenerator[RingFleet]:
    """Yield a complete ring. Its members leave at the end of the context.

    site: What its members are.
    line: The line between its members.

    Raises Unavailable if the ring cannot be formed, and whatever error loading a model raises.

    "Complete" means that all workers have joined, and the drafter if the site has one. Whatever the body of
    the context raises passes through after the members have left.
    """
    ring = RingFleet(site, line)
    async with _members_of(site, ring.hosts):
        await ring.complete(site.drafter is not None)
        yield ring


# Sends a request to the fleet, and returns its last event.
Answer = Callable[[Ask], Coroutine[Any, Any, Finished]]


@asynccontextmanager
async def answers_of(site: Site, line: Line) -> AsyncGenerator[Answer]:
    """Yield a function that sends requests to the same ring with a master of its own, for whole answers, plan
    included.

    site: What the ring's members are.
    line: The line between its members.

    The function waits for the request's end and returns its last event; it raises whatever error ends the
    request. The ring is complete, the drafter included if the site has one, before the function is yielded;
    the members leave at the end of the context. Raises whatever error forming the ring or loading a model
    raises.
    """
    drafter = "none" if site.drafter is None else "eagle"
    master = assemble(site.base, RingOptions(workers=site.stages, drafter=drafter, hop_dtype=site.hop))

    async def answer(ask: Ask) -> Finished:
        """Return the last event of a request.

        ask: The request.

        Raises whatever error ends the request.
        """
        events = [numbered.event async for numbered in master.requests.generate(ask)]
        assert isinstance(events[-1], Finished)
        return events[-1]

    async with _members_of(site, Hosts(master.members, line, lambda: None, lambda name, member: None)):
        await master.complete(with_drafter=site.drafter is not None)
        yield answer


@asynccontextmanager
async def _members_of(site: Site, hosts: Hosts) -> AsyncGenerator[None]:
    """Run all members of a site until the context ends. The context gets None.

    site: Makes the members.
    hosts: Where they register, and what connects them.

    Workers are named "worker-0", "worker-1" and so on, and start one after the other; the drafter, if the
    site has one, is started last. When the context ends, also by an error, all members are told to leave and
    are waited for; the errors of members are not raised here. If starting a member fails, its error is
    raised.
    """
    leaving = asyncio.Event()
    async with AsyncExitStack() as stack:
        members = [
            await _start_member(hosts, f"worker-{n}", site, leaving, stack) for n in range(site.stages)
        ]
        if site.drafter:
            members.append(await _start_member(hosts, "drafter", site, leaving, stack))
        try:
            yield
        finally:
            leaving.set()
            await asyncio.gather(*members, return_exceptions=True)


async def _start_member(
    hosts: Hosts, name: str, site: Site, leaving: asyncio.Event, stack: AsyncExitStack
) -> asyncio.Task[None]:
    """Start a member with an endpoint and a thread and, if it is a worker, a proxy of its own. Return its
    task, which returns None when the member has left.

    hosts: Where the member registers, and what connects it.
    name: Name of the member; "drafter" for the drafter.
    site: Makes the member.
    leaving: Set when the member has to end.
    stack: Closes what was opened for the member.

    The member is created on its own thread, so that loading a model does not block the event loop; what the
    maker raises is raised here. The drafter has no proxy. `hosts.on_end` is called with the member's name and
    task when the task ends.
    """
    inbox, compute = Inbox(), ComputeThread(name)
    stack.callback(compute.shutdown)
    endpoint = await open_server("127.0.0.1:0", {"specsot.v1.Ring": RingService(inbox, name).attach})
    stack.push_async_callback(endpoint.close, 0)
    make_member = site.drafter
    address = f"127.0.0.1:{endpoint.port}"
    if name != "drafter":
        address = await _open_proxy(hosts, endpoint.port, stack)
        make_member = partial(_observed_worker, site.worker, hosts.probes[-1])
    assert make_member is not None
    dialer = GrpcDialer(name, inbox)
    ring_member = await asyncio.get_running_loop().run_in_executor(
        compute, make_member, name, dialer, compute
    )

    async def connect(registration: Registration) -> Link:
        """Register the member at the address of its proxy, and return its link to the master.

        registration: What the member registers with.
        """
        await hosts.membership.join(replace(registration, address=address), LocalLink("master", inbox))
        # Registering may have led to a complaint, for which `RingFleet.complete` looks.
        hosts.wake()
        return MemberUplink(hosts.membership, name)

    member = asyncio.create_task(run_membership(ring_member, inbox, connect, leaving))
    member.add_done_callback(partial(hosts.on_end, name))
    return member


async def _open_proxy(hosts: Hosts, port: int, stack: AsyncExitStack) -> str:
    """Open a proxy before a worker, and return its address, at which all other members reach the worker.

    hosts: Gets the proxy and an observer of the worker.
    port: Port at which the worker listens.
    stack: Closes the proxy.

    The proxy has the delay and the rate of `hosts.line`. The proxy and a new observer are appended to
    `hosts.proxies` and `hosts.probes`.
    """
    proxy = DelayProxy(port, hosts.line.delay, hosts.line.rate)
    await proxy.open()
    stack.push_async_callback(proxy.close)
    hosts.proxies.append(proxy)
    hosts.probes.append(StepProbe(hosts.wake))
    return proxy.address


def _observed_worker(
    make_worker: WorkerMaker, observer: WorkerObserver, name: str, dialer: Dialer, compute: Executor
) -> RingMember:
    """Return a worker with an observer.

    make_worker: Makes the worker.
    observer: Observes the worker.
    name: Name of the worker.
    dialer: Connects the worker to others.
    compute: The executor of its stage.
    """
    return make_worker(name, dialer, compute, observer)
