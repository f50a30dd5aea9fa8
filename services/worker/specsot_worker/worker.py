"""A worker in the ring: takes messages, runs its stage, announces results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from specsot.core.deadline import Deadline
from specsot.core.frames import Close, Drafts, Frame, Lease, Open, Result, rows_of
from specsot.core.pages import PageTable
from specsot.errors import SpecsotError, Unavailable
from specsot.members import (
    Configuration,
    DrafterLost,
    HandOver,
    KvRows,
    Progress,
    Ready,
    Registration,
    Rejoined,
    Stage,
    StandBy,
    Tap,
)
from specsot.service.compute import Compute
from specsot.service.membership import report_progress
from specsot.tasks import start
from specsot.transport.links import (
    Arrival,
    Dialer,
    Link,
    LocalLink,
    Lost,
    NearDrafter,
    RingLink,
    close_in_background,
)
from specsot_worker.async_verify import AsyncVerifier, LaunchedFrame, launch_frame
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, PipelineDepth
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.frame_work import reporting, run_and_pass_on, run_and_verify
from specsot_worker.handed_rows import Copies, KeepsRows, LayerRows, RowHandover
from specsot_worker.observer import WorkerObserver
from specsot_worker.ring_links import EarlyArrivals, RingLinks, connect, may_send, stage_index
from specsot_worker.stage_provider import StageProvider, StageRunner
from specsot_worker.verifier import VerifiedFrame, Verifier

log = structlog.get_logger()

POLL_SECONDS = 0.01  # seconds between looks at a computation that is still running; not measured


@dataclass(slots=True)
class _WorkerEpoch:
    """Everything that lives exactly as long as one epoch."""

    configuration: Configuration
    stage: StageRunner
    links: RingLinks
    missing_taps: set[int]
    sequencer: Sequencer | None
    verifier: Verifier | None
    deadline: Deadline
    # Names of drafters whose loss is known here.
    lost_drafters: set[str] = field(default_factory=set[str])
    # Names of drafters that the master has lost, and links by name to drafters that join the running epoch:
    # what both change waits until no frame is being verified.
    leaving_drafters: set[str] = field(default_factory=set[str])
    joining_drafters: dict[str, RingLink] = field(default_factory=dict[str, RingLink])
    async_verifier: AsyncVerifier | None = None  # who awaits verdicts, where that is not who computes


class Worker:
    """One worker. `compute` runs tensor work, one job at a time, off the event loop; `observer` follows it.

    reading: another thread, in which the last stage behind others awaits verdicts. For GPUs: they compute
             what is launched meanwhile.
    """

    def __init__(
        self,
        loader: StageProvider,
        dialer: Dialer,
        compute: Executor,
        clock: Callable[[], float] = time.monotonic,
        observer: WorkerObserver | None = None,
        verify_thread: Executor | None = None,
    ) -> None:
        self._loader = loader
        self._dialer = dialer
        self._verify_thread = verify_thread
        self._compute = Compute(loader.name, compute)
        self._clock = clock
        self._observer = observer or WorkerObserver()
        self._active: _WorkerEpoch | None = None
        self._early_arrivals = EarlyArrivals()
        self._handover = RowHandover(loader.name, dialer)
        self._background = set[asyncio.Task[Any]]()  # nobody waits for these
        self._preloading: asyncio.Task[Any] | None = None  # loads what it may be asked for
        self._taps = dict[int, object]()  # slices of a head, of this epoch or one before
        self._arrived: Callable[[], bool] = lambda: True  # nobody knows: something may have

    @property
    def epoch(self) -> int:
        return self._active.configuration.epoch if self._active else 0

    @property
    def free_pages(self) -> int | None:
        """KV pages that no sequence owns, by this stage's own table; None outside an epoch."""
        return self._active.stage.table.free if self._active else None

    def watch(self, arrived: Callable[[], bool]) -> None:
        self._arrived = arrived

    async def registration(self) -> Registration:
        return await self._compute.run(self._loader.registration)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Load the range, make pages, dial; Ready goes out once every tap is here too."""
        if self._preloading:
            self._preloading.cancel()
        self._handover.turn(configuration.epoch)
        index = stage_index(configuration)
        own = configuration.stages[index]
        loader = self._loader
        parts = len(own.layers) + 1
        async with report_progress(
            uplink, configuration.epoch, lambda: loader.loaded, parts, lambda: loader.fetched
        ):
            await self._form(configuration, index, own, uplink)
        await self._ready_if_complete()
        for arrival in self._early_arrivals.release(configuration.epoch):
            await self.handle(arrival)

    async def _form(self, configuration: Configuration, index: int, own: Stage, uplink: Link) -> None:
        if self._verify_thread:  # what is still read of the epoch before holds its memory
            await Compute(self._loader.name, self._verify_thread).run(lambda: None)
        stage: StageRunner = await self._compute.run(self._loader.make_stage, configuration, own.layers)
        if isinstance(stage, KeepsRows):
            stage.rows.handed = self._handover.ready
        links = await connect(configuration, self._dialer, uplink)
        last = index == len(configuration.stages) - 1
        verifier = await self._compute.run(self._loader.make_verifier, stage, configuration) if last else None
        if verifier:
            verifier.near.drafter = near_drafter(configuration, links.drafters)
            verifier.set_drafters(links.drafters)
            verifier.take_features_from(self._handover.ready)
        self._active = _WorkerEpoch(
            configuration,
            stage,
            links,
            set(configuration.taps_of(own)),
            _make_sequencer(configuration, self._loader.vocabulary, stage) if index == 0 else None,
            verifier,
            Deadline(configuration.curve),
        )
        if verifier and (sequencer := self._active.sequencer):
            verifier.quiet = lambda: not (self._arrived() or sequencer.prompt_rows_due)
        if verifier and index and self._verify_thread:
            name = self._loader.name
            thread = self._verify_thread
            self._active.async_verifier = AsyncVerifier(name, thread, self._verify_launched)
        await self._reuse_taps(self._active)
        self._observer.formed(configuration, stage)

    def _believes(self, configuration: Configuration, arrival: Arrival) -> bool:
        return may_send(configuration, arrival)

    async def _reuse_taps(self, active: _WorkerEpoch) -> None:
        """Those of an earlier epoch, if the master says that they are still right."""
        told = active.configuration
        if told.head and told.head.taps:
            self._taps.clear()
        for layer, weight in self._taps.items() if told.head and told.drafter else ():
            if told.tapping(layer).name == told.you:
                await self._compute.run(active.stage.tap, layer, weight)

    async def prepare(self, order: StandBy | HandOver, uplink: Link) -> None:
        """Load ahead, or hand rows over, in the background."""
        if isinstance(order, HandOver):
            copies = self._copies_of(self._active) if self._active else None
            self._handover.begin(order, copies, uplink)
            return
        if self._preloading:
            self._preloading.cancel()
        self._preloading = self._in_background(self._preload(order, uplink))

    def _copies_of(self, active: _WorkerEpoch) -> Copies | None:
        """Rows that this epoch has here. Features are asked for where they are kept: by whoever verifies."""
        stage = active.stage
        verifier = active.verifier
        if not isinstance(stage, KeepsRows):
            return None
        thread = self._verify_thread if active.async_verifier else None
        verifying = Compute(self._loader.name, thread) if thread else self._compute

        async def copies(asked: Sequence[LayerRows]) -> Sequence[Any]:
            if verifier and asked[0][1] == stage.layers.last:
                return await verifying.run(verifier.feature_rows, [one for one, _ in asked])
            return await self._compute.run(stage.rows.copies, asked)

        return copies

    async def handle(self, arrival: Arrival) -> None:
        """Take one message; frames run at once, everything else waits for `settle`."""
        active = self._active
        message = arrival.message
        if isinstance(message, KvRows):
            if arrival.of("worker"):
                await self._handover.take(arrival.sender, message)
            return
        epoch = getattr(message, "epoch", self.epoch)
        if epoch > self.epoch:
            self._early_arrivals.hold(epoch, arrival)
        if active is None or epoch != self.epoch:
            return
        if not self._believes(active.configuration, arrival):
            log.warning("out of its role", sender=arrival.sender, message=type(message).__name__)
            return
        match message:
            case Frame():
                if arrival.at is not None:
                    self._observer.dequeued(message, max(self._clock() - arrival.at, 0.0))
                await self._run_frame(active, message)
            case Result() if active.sequencer:
                self._apply_result(active.sequencer, message)
            case Drafts() if active.sequencer:
                active.sequencer.add_drafts(message, self._clock())
            case Drafts() if active.links.sequencer:
                await active.links.sequencer.send(message)  # the drafter speaks to its neighbour alone
            case Open() | Close() | Lease() if active.sequencer:
                active.sequencer.apply_order(message)
            case Tap():
                await self._take_tap(active, message)
            case Rejoined() if active.verifier:
                self._in_background(self._dial_drafter(active, message))
            case DrafterLost(name=name) if active.verifier:
                active.leaving_drafters.add(name)
                active.joining_drafters.pop(name, None)
            case Lost():
                await self._handle_loss(active, message)
            case _:
                pass

    async def settle(self) -> float | None:
        """One turn: compose, run, verify and announce what is due; first what had to wait."""
        active = self._active
        if active is None:
            return None
        verifying = active.async_verifier is not None and active.async_verifier.busy()
        if not verifying:
            await self._between_verdicts(active)
        poll = POLL_SECONDS if verifying or (active.verifier and active.verifier.has_pending) else None
        waits = [wait for wait in (await self._launch_next(active), poll) if wait is not None]
        return min(waits, default=None)

    async def _between_verdicts(self, active: _WorkerEpoch) -> None:
        """What happens between two verifications: a drafter is back, grammars are compiled."""
        for name in tuple(active.leaving_drafters):
            active.leaving_drafters.discard(name)
            await self._lose_drafter(active, name, "the master lost it")
        if active.joining_drafters:
            self._admit_drafters(active)
        if active.verifier and active.verifier.pending_ready:
            verify = reporting(active.links, active.verifier.verify_pending)
            await self._announce(active, await (active.async_verifier or self._compute).run(verify))

    async def _launch_next(self, active: _WorkerEpoch) -> float | None:
        """Compose and run the next frame, if this is stage 0 and one is due; and those that the verifier has
        begun by then, before anything that arrives makes other ones of them.
        """
        if active.sequencer is None or active.missing_taps:
            return None
        while (frame := active.sequencer.compose(self._clock())) is not None:
            await self._report_rejections(active)
            await self._run_frame(active, self._observer.launched(frame, self._clock()))
            if not (active.verifier and active.verifier.went_on):
                return 0.0
            await self._between_verdicts(active)
        if active.verifier and active.verifier.went_on:
            active.stage.hold()
        await self._report_rejections(active)
        deadline = active.sequencer.deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    async def disband(self) -> None:
        active = self._active
        self._active = None
        if active is not None:
            self._observer.disbanded()
            if active.async_verifier:
                active.async_verifier.close()
            await close_in_background(active.links.close())

    async def _run_frame(self, active: _WorkerEpoch, frame: Frame) -> None:
        """Run a frame and send what comes of it: to the next stage, or to all who learn from it."""
        if active.verifier is None:
            assert active.links.next_stage is not None
            seconds = await self._compute_frame(
                active, frame, run_and_pass_on, active.stage, active.links.next_stage, frame
            )
            self._record_compute(active, frame, seconds)
            return
        if active.async_verifier:
            active.async_verifier.submit(
                await self._compute.run(launch_frame, active.stage, frame, within=_time_limit(active, frame))
            )
            return
        verify = reporting(active.links, active.verifier.verify)
        verified = await self._compute_frame(active, frame, run_and_verify, active.stage, verify, frame)
        self._record_compute(active, frame, verified.result.seconds[-1])
        await self._announce(active, verified)

    async def _verify_launched(self, launched: LaunchedFrame) -> None:
        """Verify and announce one frame, while later ones are launched."""
        active = self._active
        assert active is not None
        assert active.async_verifier is not None
        assert active.verifier is not None
        verify = reporting(active.links, active.verifier.verify)
        with self._observer.computing(launched.frame):
            verified = await active.async_verifier.run(verify, launched, _time_limit(active, launched.frame))
        self._record_compute(active, launched.frame, verified.result.seconds[-1])
        await self._announce(active, verified)
        await self._between_verdicts(active)

    async def _compute_frame(
        self, active: _WorkerEpoch, frame: Frame, work: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Compute a frame, in the time that its rows may take. Raises Hung."""
        with self._observer.computing(frame):
            return await self._compute.run(work, *arguments, within=_time_limit(active, frame))

    def _record_compute(self, active: _WorkerEpoch, frame: Frame, seconds: float) -> None:
        active.deadline.took(sum(map(rows_of, frame.segments)), seconds)
        self._observer.computed(frame, seconds)

    async def _announce(self, active: _WorkerEpoch, verified: VerifiedFrame) -> None:
        """To the drafter, then to the master, if it does not know; stage 0 knows, or is this one."""
        if active.sequencer:
            self._apply_result(active.sequencer, verified.result, awaits=verified.drafts is None)
            for drafts in verified.drafts or ():
                active.sequencer.add_drafts(drafts)
        await self._send_features(active, verified)
        if not active.links.results:
            await active.links.master.send(verified.result)

    def _apply_result(self, sequencer: Sequencer, result: Result, awaits: bool = True) -> None:
        now = self._clock()
        sequencer.apply_result(result, now, awaits)
        self._observer.returned(result, now)

    async def _send_features(self, active: _WorkerEpoch, verified: VerifiedFrame) -> None:
        """Send features to the drafters. A lost drafter stops nobody: its sequences move to another."""
        links = active.links.drafters
        for drafter, messages in verified.features.items():
            try:
                for features in messages if drafter in links else ():
                    await links[drafter].send(features)
            except Unavailable as error:
                await self._lose_drafter(active, drafter, str(error))

    async def _lose_drafter(self, active: _WorkerEpoch, drafter: str, reason: str) -> None:
        """Send nothing more to this drafter, and tell stage 0, unless it was lost before."""
        present = active.links.drafters
        if drafter in present:
            self._set_drafters(active, {name: link for name, link in present.items() if name != drafter})
            await self._handle_loss(active, Lost(drafter, reason, self.epoch))

    async def _dial_drafter(self, active: _WorkerEpoch, joining: Rejoined) -> None:
        """While the ring goes on."""
        try:
            link = await self._dialer.dial(joining.address, active.configuration.epoch, "drafter")
        except SpecsotError as error:
            log.warning("the drafter cannot be reached", at=joining.address, reason=str(error))
            return
        if active is self._active:
            active.joining_drafters[joining.name or joining.address] = link
        else:
            await link.close()

    def _admit_drafters(self, active: _WorkerEpoch) -> None:
        """From now on they are sent what belongs to their sequences, bit by bit with every lap."""
        joining = active.joining_drafters
        active.joining_drafters = {}
        active.lost_drafters -= joining.keys()
        present = active.links.drafters
        self._set_drafters(active, {name: link for name, link in present.items() if name not in joining})
        self._set_drafters(active, {**active.links.drafters, **joining})

    def _set_drafters(self, active: _WorkerEpoch, drafters: Mapping[str, RingLink]) -> None:
        """Send features by these links alone; the others are closed."""
        assert active.verifier is not None
        for name, link in active.links.drafters.items():
            if drafters.get(name) is not link:
                self._in_background(link.close())
        active.links = replace(active.links, drafters=drafters)
        active.verifier.near.drafter = near_drafter(active.configuration, drafters)
        active.verifier.set_drafters(drafters)

    async def _preload(self, order: StandBy, uplink: Link) -> None:
        """Files are fetched beside the compute thread, which then loads layer by layer: frames, and a
        configuration, find it free in between.
        """
        layers = order.layers
        try:
            if layers:
                await asyncio.to_thread(self._loader.fetch, layers)
            while await self._compute.run(self._loader.preload, layers):
                pass
            log.info("loaded ahead", layers=str(layers or "as many as fit"), until="a range is assigned")
            if layers:
                await _tell(uplink, Progress(order.epoch, len(layers), len(layers), layers=layers))
        except SpecsotError as error:
            log.warning("nothing more is loaded ahead", reason=str(error))
            if layers:
                await _tell(uplink, Progress(order.epoch, 0, len(layers), layers=layers))

    def _in_background(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = start(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _take_tap(self, active: _WorkerEpoch, tap: Tap) -> None:
        """Another stage's rides on to it."""
        if active.configuration.tapping(tap.layer).name != active.configuration.you:
            if active.links.downstream:
                await active.links.downstream.send(tap)
            return
        if tap.layer in active.missing_taps:
            await self._compute.run(active.stage.tap, tap.layer, tap.weight)
            self._taps[tap.layer] = tap.weight
            active.missing_taps.discard(tap.layer)
            await self._ready_if_complete()

    async def _ready_if_complete(self) -> None:
        active = self._active
        if active and not active.missing_taps:
            await self._compute.run(active.stage.capture)
            await active.links.master.send(Ready(active.configuration.epoch))

    async def _handle_loss(self, active: _WorkerEpoch, lost: Lost) -> None:
        """A lost drafter is done without, and stage 0 is told; a lost stage ends the epoch."""
        if lost.peer in {stage.name for stage in active.configuration.stages}:
            raise Unavailable(f"lost {lost.peer}: {lost.reason}")
        if active.missing_taps:
            raise Unavailable(f"lost the drafter before its taps came: {lost.reason}")
        known = lost.peer in active.lost_drafters
        active.lost_drafters.add(lost.peer)
        if active.sequencer:
            active.sequencer.lose_drafter(lost.peer)
        elif active.links.sequencer and not known:
            await active.links.sequencer.send(lost)

    async def _report_rejections(self, active: _WorkerEpoch) -> None:
        assert active.sequencer is not None
        if rejected := active.sequencer.rejections():
            await active.links.master.send(Result(self.epoch, 0, rejected))


def near_drafter(told: Configuration, links: Mapping[str, RingLink]) -> NearDrafter | None:
    """The only drafter, if it drafts on the thread that computes here, unless other frames than the next may
    wait for that.
    """
    link = next(iter(links.values())) if len(links) == 1 else None
    return link.drafter if isinstance(link, LocalLink) and 1 in (len(told.stages), told.flight) else None


async def _tell(uplink: Link, progress: Progress) -> None:
    with suppress(SpecsotError):  # a lost master is heard of by itself
        await uplink.send(progress)


def _time_limit(active: _WorkerEpoch, frame: Frame) -> float:
    return active.deadline.seconds(sum(map(rows_of, frame.segments)))


def _make_sequencer(told: Configuration, vocabulary: int | None, stage: StageRunner) -> Sequencer:
    budget = FrameBudget(told.rows, told.flight, told.slots, stage.prompt_rows(told.rows))
    table = PageTable(told.pages, told.page_rows)
    draft_timeout = DraftTimeout(told.draft_timeout, told.drafter is not None)
    depth = PipelineDepth(len(told.stages), told.curve, told.flight > 1)
    return Sequencer(told.epoch, budget, table, draft_timeout, depth, vocabulary)
