"""A worker in the ring: takes frames, results, drafts and orders; computes; passes on.

Refuses to know transports, text and requests. Thin: every decision is the sequencer's or the judge's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import structlog

from specsot.compute import Compute
from specsot.deadline import Deadline
from specsot.errors import SpecsotError, Unavailable
from specsot.frames import Close, Drafts, Frame, Lease, Open, Result, rows_of
from specsot.links import Arrival, Dialer, Link, Lost, part_with
from specsot.members import Configuration, Ready, Registration, Rejoined, Stage, StandBy, Tap
from specsot.membership import telling
from specsot.pages import PageTable
from specsot.tasks import start
from specsot_worker.early import Early
from specsot_worker.flow import Flow
from specsot_worker.patience import Patience
from specsot_worker.place import Links, belongs, connect, index_of, own_taps
from specsot_worker.provider import LayerRange, Provider
from specsot_worker.reading import Launched, Reading, launch
from specsot_worker.sequencer import Budget, Sequencer
from specsot_worker.verdict import LastStage, Verdict
from specsot_worker.watching import Watch

log = structlog.get_logger()

GLANCE = 0.01  # seconds


@dataclass(slots=True)
class _Epoch:
    """Everything that lives exactly as long as one epoch."""

    configuration: Configuration
    stage: LayerRange
    links: Links
    missing_taps: set[int]
    sequencer: Sequencer | None
    judge: LastStage | None
    deadline: Deadline
    drafter_lost: bool = False
    returning: Link | None = None  # to a drafter that is back
    reading: Reading | None = None  # who awaits verdicts, where that is not who computes


class WorkerPart:
    """One worker. `compute` runs tensor work, one job at a time, off the event loop; `watch` follows it.

    reading: another thread, in which the last stage behind others awaits verdicts. For GPUs: they compute
             what is launched meanwhile.
    """

    def __init__(
        self,
        source: Provider,
        dialer: Dialer,
        compute: Executor,
        clock: Callable[[], float] = time.monotonic,
        watch: Watch | None = None,
        reading: Executor | None = None,
    ) -> None:
        self._source, self._dialer, self._reading = source, dialer, reading
        self._compute = Compute(source.name, compute)
        self._clock, self._watch = clock, watch or Watch()
        self._now: _Epoch | None = None
        self._early = Early()
        self._beside: set[asyncio.Task[None]] = set()  # nobody waits for these
        self._ahead: asyncio.Task[None] | None = None  # loads what it may be asked for

    @property
    def epoch(self) -> int:
        return self._now.configuration.epoch if self._now else 0

    @property
    def free_pages(self) -> int | None:
        """KV pages that no sequence owns, by this stage's own table; None outside an epoch."""
        return self._now.stage.table.free if self._now else None

    async def registration(self) -> Registration:
        return await self._compute.run(self._source.registration)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Load the range, make pages, dial; Ready goes out once every tap is here too."""
        if self._ahead:
            self._ahead.cancel()
        index = index_of(configuration)
        mine = configuration.stages[index]
        async with telling(uplink, configuration.epoch, lambda: self._source.loaded, len(mine.layers) + 1):
            await self._begin(configuration, index, mine, uplink)
        await self._ready_if_complete()
        for arrival in self._early.take(configuration.epoch):
            await self.handle(arrival)

    async def _begin(self, configuration: Configuration, index: int, mine: Stage, uplink: Link) -> None:
        if self._reading:  # what is still read of the epoch before holds its memory
            await Compute(self._source.name, self._reading).run(lambda: None)
        stage = await self._compute.run(self._source.stage, configuration, mine.layers)
        links = await connect(configuration, self._dialer, uplink)
        last = index == len(configuration.stages) - 1
        judge = await self._compute.run(self._source.judge, stage, configuration) if last else None
        self._now = _Epoch(
            configuration,
            stage,
            links,
            set(own_taps(configuration, mine)),
            _sequencer(configuration, self._source.vocabulary) if index == 0 else None,
            judge,
            Deadline(configuration.curve),
        )
        if judge and index and self._reading:
            self._now.reading = Reading(self._source.name, self._reading, self._read)
        self._watch.formed(configuration, stage.table)

    def _believes(self, configuration: Configuration, arrival: Arrival) -> bool:
        return belongs(configuration, arrival)

    async def handle(self, arrival: Arrival) -> None:
        """Take one message; frames run at once, everything else waits for `settle`."""
        now, message = self._now, arrival.message
        if isinstance(message, StandBy):
            self._ahead = self._do_beside(self._load_ahead())
            return
        epoch = getattr(message, "epoch", self.epoch)
        if epoch > self.epoch:
            self._early.keep(epoch, arrival)
        if now is None or epoch != self.epoch:
            return
        if not self._believes(now.configuration, arrival):
            log.warning("out of its role", sender=arrival.sender, message=type(message).__name__)
            return
        match message:
            case Frame():
                if arrival.at is not None:
                    self._watch.waited(message, max(self._clock() - arrival.at, 0.0))
                await self._pass_on(now, message)
            case Result() if now.sequencer:
                self._learn(now.sequencer, message)
            case Drafts() if now.sequencer:
                now.sequencer.offer(message, self._clock())
            case Drafts() if now.links.sequencer:
                await now.links.sequencer.send(message)  # the drafter speaks to its neighbour alone
            case Open() | Close() | Lease() if now.sequencer:
                now.sequencer.obey(message)
            case Tap():
                await self._take_tap(now, message)
            case Rejoined() if now.judge:
                self._do_beside(self._dial_drafter(now, message.address))
            case Lost():
                await self._lose(now, message)
            case _:
                pass

    async def settle(self) -> float | None:
        """Judge what had to wait; compose and run the next frame, if this is stage 0 and one is due."""
        now = self._now
        if now is None:
            return None
        reads = now.reading is not None and now.reading.busy()
        if not reads:
            await self._come_between(now)
        glance = GLANCE if reads or (now.judge and now.judge.waits) else None
        waits = [wait for wait in (await self._lead(now), glance) if wait is not None]
        return min(waits, default=None)

    async def _come_between(self, now: _Epoch) -> None:
        """Two verdicts."""
        if now.returning:
            self._take_back(now, now.returning)
        if now.judge and now.judge.late:
            await self._announce(now, await (now.reading or self._compute).run(now.judge.judge_late))

    async def _lead(self, now: _Epoch) -> float | None:
        """Compose and run the next frame, if this is stage 0 and one is due."""
        if now.sequencer is None or now.missing_taps:
            return None
        frame = now.sequencer.compose(self._clock())
        await self._report_rejections(now)
        if frame is not None:
            await self._pass_on(now, self._watch.launched(frame, self._clock()))
            return 0.0
        deadline = now.sequencer.deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    async def disband(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            self._watch.disbanded()
            if now.reading:
                now.reading.close()
            await part_with(now.links.close())

    async def _pass_on(self, now: _Epoch, frame: Frame) -> None:
        """Run a frame and send what comes of it: to the next stage, or to all who learn from it."""
        if now.judge is None:
            passed = await self._work(now, frame, now.stage.run, frame)
            self._worked(now, frame, passed.seconds[-1])
            assert now.links.following is not None
            await now.links.following.send(passed)
            return
        if now.reading:
            now.reading.add(await self._compute.run(launch, now.stage, frame, within=_patience(now, frame)))
            return
        verdict = await self._work(now, frame, _run_and_judge, now.stage, now.judge, frame)
        self._worked(now, frame, verdict.result.seconds[-1])
        await self._announce(now, verdict)

    async def _read(self, launched: Launched) -> None:
        """While later frames are launched."""
        now = self._now
        assert now is not None
        assert now.reading is not None
        assert now.judge is not None
        with self._watch.working(launched.frame):
            verdict = await now.reading.run(now.judge.judge, launched, _patience(now, launched.frame))
        self._worked(now, launched.frame, verdict.result.seconds[-1])
        await self._announce(now, verdict)
        await self._come_between(now)

    async def _work(self, now: _Epoch, frame: Frame, work: Callable[..., Any], *arguments: Any) -> Any:
        """Compute a frame, in the time that its rows may take. Raises Hung."""
        with self._watch.working(frame):
            return await self._compute.run(work, *arguments, within=_patience(now, frame))

    def _worked(self, now: _Epoch, frame: Frame, seconds: float) -> None:
        now.deadline.took(_rows(frame), seconds)
        self._watch.worked(frame, seconds)

    async def _announce(self, now: _Epoch, verdict: Verdict) -> None:
        """Stage 0 first (the next lap waits for it), then the drafter, then the master."""
        if now.sequencer:
            self._learn(now.sequencer, verdict.result)
        elif now.links.sequencer:
            await now.links.sequencer.send(verdict.result)
        await self._teach(now, verdict)
        await now.links.master.send(verdict.result)

    def _learn(self, sequencer: Sequencer, result: Result) -> None:
        now = self._clock()
        sequencer.learn(result, now)
        self._watch.returned(result, now)

    async def _teach(self, now: _Epoch, verdict: Verdict) -> None:
        """Features to the drafter; a lost drafter stops nobody."""
        if (link := now.links.drafter) is None:
            return
        try:
            for features in verdict.features:
                await link.send(features)
        except Unavailable as error:
            self._teach_anew(now, None)
            await self._lose(now, Lost("drafter", str(error), self.epoch))

    async def _dial_drafter(self, now: _Epoch, address: str) -> None:
        """While the ring goes on."""
        try:
            link = await self._dialer.dial(address, now.configuration.epoch, "drafter")
        except SpecsotError as error:
            log.warning("the drafter cannot be reached", at=address, reason=str(error))
            return
        if now is self._now:
            now.returning = link
        else:
            await link.close()

    def _take_back(self, now: _Epoch, link: Link) -> None:
        """Between two frames: from now on it is told everything, a stretch with every lap."""
        now.returning, now.drafter_lost = None, False
        self._teach_anew(now, link)

    def _teach_anew(self, now: _Epoch, drafter: Link | None) -> None:
        assert now.judge is not None
        if now.links.drafter is not None:
            self._do_beside(now.links.drafter.close())
        now.links = replace(now.links, drafter=drafter)
        now.judge.teach_anew(drafter is not None)

    async def _load_ahead(self) -> None:
        """Bit by bit, so that a configuration finds the compute thread free."""
        try:
            while await self._compute.run(self._source.load_ahead):
                pass
            log.info("loaded ahead", until="a range is assigned")
        except SpecsotError as error:
            log.warning("nothing more is loaded ahead", reason=str(error))

    def _do_beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = start(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _take_tap(self, now: _Epoch, tap: Tap) -> None:
        """Another stage's rides on to it."""
        if now.configuration.tapping(tap.layer).name != now.configuration.you:
            if now.links.onward:
                await now.links.onward.send(tap)
            return
        if tap.layer in now.missing_taps:
            await self._compute.run(now.stage.tap, tap.layer, tap.weight)
            now.missing_taps.discard(tap.layer)
            await self._ready_if_complete()

    async def _ready_if_complete(self) -> None:
        now = self._now
        if now and not now.missing_taps:
            await self._compute.run(now.stage.prepare)
            await now.links.master.send(Ready(now.configuration.epoch))

    async def _lose(self, now: _Epoch, lost: Lost) -> None:
        """A lost drafter is done without, and stage 0 is told; a lost stage ends the epoch."""
        if lost.peer in {stage.name for stage in now.configuration.stages}:
            raise Unavailable(f"lost {lost.peer}: {lost.reason}")
        if now.missing_taps:
            raise Unavailable(f"lost the drafter before its taps came: {lost.reason}")
        told, now.drafter_lost = now.drafter_lost, True
        if now.sequencer:
            now.sequencer.lose_drafter()
        elif now.links.sequencer and not told:
            await now.links.sequencer.send(lost)

    async def _report_rejections(self, now: _Epoch) -> None:
        assert now.sequencer is not None
        if rejected := now.sequencer.rejections():
            await now.links.master.send(Result(self.epoch, 0, rejected))


def _patience(now: _Epoch, frame: Frame) -> float:
    return now.deadline.seconds(_rows(frame))


def _rows(frame: Frame) -> int:
    return sum(map(rows_of, frame.segments))


def _run_and_judge(stage: LayerRange, judge: LastStage, frame: Frame) -> Verdict:
    return judge.judge(stage.run(frame))


def _sequencer(configuration: Configuration, vocabulary: int | None) -> Sequencer:
    budget = Budget(configuration.rows, configuration.flight, configuration.slots)
    table = PageTable(configuration.pages, configuration.page_rows)
    patience = Patience(configuration.draft_timeout, configuration.drafter is not None)
    stages = len(configuration.stages)
    flow = Flow(stages, configuration.curve) if stages > 1 else None
    return Sequencer(configuration.epoch, budget, table, patience, flow, vocabulary)
