"""A worker of the ring: receives frames, runs its stage, and sends frames or results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog

from specsot.core.deadline import Deadline
from specsot.core.device_verification import ColocatedDrafter
from specsot.core.frames import Close, Drafts, Frame, Lease, Open, Result
from specsot.core.pages import PageTable
from specsot.core.tree_parts import cut_frame
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
from specsot.phases import log_start
from specsot.service.compute import Compute, allow
from specsot.service.membership import report_progress
from specsot.tasks import start
from specsot.transport.links import (
    Arrival,
    Dialer,
    Link,
    LocalLink,
    Lost,
    RingLink,
    close_in_background,
)
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, PipelineDepth
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.frame_work import (
    Verify,
    reporting,
    run_and_pass_on,
    run_and_verify,
    run_and_verify_part,
    run_stage,
)
from specsot_worker.migrated_kv import Copies, KeepsRows, LayerRows, RowHandover
from specsot_worker.observer import WorkerObserver
from specsot_worker.overlap.async_verify import AsyncVerifier, LaunchedFrame, launch_frame
from specsot_worker.ring_links import FutureEpochMessages, RingLinks, connect, may_send, stage_index
from specsot_worker.stage_provider import StageProvider, StageRunner
from specsot_worker.verifier import VerifiedFrame, Verifier

log = structlog.get_logger()

# Seconds. Time between two looks at a computation that is still running. Untuned.
POLL_SECONDS = 0.01


def depth_of(configuration: Configuration) -> PipelineDepth:
    """Return the estimator that decides from measured step times how many frames are in flight and in how
    many parts a tree travels.

    configuration: The epoch as the master has configured it.
    """
    return PipelineDepth(len(configuration.stages), configuration.curve, configuration.flight > 1)


@dataclass(slots=True)
class _WorkerEpoch:
    """Everything that lives exactly as long as one epoch.

    configuration: The epoch as the master has configured it.
    stage: The layer range with its KV pages.
    links: Links to the other members.
    missing_taps: Layers whose slice of the draft head's weights has not arrived yet. Ready is sent once there
        are none.
    sequencer: The scheduler. None on every stage but stage 0.
    verifier: The verifier. None on every stage but the last.
    deadline: How long the computation of a frame may take.
    lost_drafters: Names of drafters whose loss is known to this worker.
    leaving_drafters: Names of drafters that the master has lost. They are removed between two verifications.
    joining_drafters: Links by name to drafters that join the running epoch. They are added between two
        verifications.
    async_verifier: Verifies on a thread of its own. None if frames are verified on the compute thread.
    """

    configuration: Configuration
    stage: StageRunner
    links: RingLinks
    missing_taps: set[int]
    sequencer: Sequencer | None
    verifier: Verifier | None
    deadline: Deadline
    lost_drafters: set[str] = field(default_factory=set[str])
    leaving_drafters: set[str] = field(default_factory=set[str])
    joining_drafters: dict[str, RingLink] = field(default_factory=dict[str, RingLink])
    async_verifier: AsyncVerifier[VerifiedFrame] | None = None


class Worker:
    """One worker process. It receives messages, runs tensor work on `compute`, one job at a time and off the
    event loop, and reports to `observer`.
    """

    def __init__(
        self,
        loader: StageProvider,
        dialer: Dialer,
        compute: Executor,
        clock: Callable[[], float] = time.monotonic,
        observer: WorkerObserver | None = None,
        verify_thread: Executor | None = None,
        make_depth: Callable[[Configuration], PipelineDepth] = depth_of,
    ) -> None:
        """Start outside any epoch.

        loader: Makes the stage and the verifier of every epoch.
        dialer: Opens links to other members.
        compute: Executor that runs tensor work.
        clock: Returns the time in seconds.
        observer: Is called at the moments of a frame's life. None: nothing is observed.
        verify_thread: Executor of another thread, on which a last stage that is not also the first awaits
            verification results. Used on GPUs, which meanwhile compute frames that have been launched
            already. None: frames are verified on the compute thread.
        make_depth: Returns the estimator that decides, on stage 0, from measured step times how many frames
            are in flight and in how many parts a tree travels.
        """
        self._make_depth = make_depth
        self._loader = loader
        self._dialer = dialer
        self._verify_thread = verify_thread
        self._compute = Compute(loader.name, compute)
        self._clock = clock
        self._observer = observer or WorkerObserver()
        self._active: _WorkerEpoch | None = None
        # The last epoch after its end, whose KV may be of use to the next one, until that begins.
        self._former: _WorkerEpoch | None = None
        self._future_epoch_messages = FutureEpochMessages()
        self._handover = RowHandover(loader.name, dialer)
        # Tasks that are not awaited.
        self._background = set[asyncio.Task[Any]]()
        # Loads layers ahead of an assignment.
        self._preloading: asyncio.Task[Any] | None = None
        # Slices of a draft head's weights by layer, of this epoch or a previous one.
        self._taps = dict[int, object]()
        # Returns whether a message is waiting. Without `watch` the answer is always yes.
        self._arrived: Callable[[], bool] = lambda: True

    @property
    def epoch(self) -> int:
        """Number of the current epoch; 0 outside an epoch."""
        return self._active.configuration.epoch if self._active else 0

    @property
    def free_pages(self) -> int | None:
        """Number of KV pages that no sequence owns, by this stage's own table. None outside an epoch."""
        return self._active.stage.table.free if self._active else None

    def watch(self, arrived: Callable[[], bool]) -> None:
        """Set the function that returns whether messages wait.

        arrived: Returns whether a message has arrived that was not handled yet.
        """
        self._arrived = arrived

    async def registration(self) -> Registration:
        """Measure the layers, and return what the master is to know of this worker: its memory, speed and
        layers. Raises ModelError if the worker has a fixed layer range for which there is no room.
        """
        return await self._compute.run(self._loader.registration)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Enter an epoch: load the layer range, allocate pages and dial the other members.

        configuration: The epoch as the master has configured it: stages, drafters, pages and head.
        uplink: Link to the master.

        Ready is sent to the master once every tap has arrived, too. Messages of this epoch that arrived
        before it are handled at the end. Raises Refused if the configuration has no stage for this worker,
        Unavailable if a member cannot be reached, ModelError if there is no room for the layers.

        Preloading of layers that is still running is cancelled first. Nothing of the new epoch is used if an
        error is raised before its stage, links and verifier or sequencer exist.
        """
        if self._preloading:
            self._preloading.cancel()
        self._handover.turn(configuration.epoch)
        # Free its pages before those of this epoch are allocated.
        self._former = None
        index = stage_index(configuration)
        own_stage = configuration.stages[index]
        loader = self._loader
        num_parts = len(own_stage.layers) + 1
        async with report_progress(
            uplink, configuration.epoch, lambda: loader.loaded, num_parts, lambda: loader.fetched
        ):
            await self._form(configuration, index, own_stage, uplink)
        await self._ready_if_complete()
        for arrival in self._future_epoch_messages.release(configuration.epoch):
            await self.handle(arrival)

    async def _form(self, configuration: Configuration, index: int, own_stage: Stage, uplink: Link) -> None:
        """Make the stage, the links, and the verifier or sequencer of a new epoch, which is then the current
        one.

        configuration: The epoch as the master has configured it.
        index: Index of this worker's stage in the ring.
        own_stage: This worker's stage, with its layer range.
        uplink: Link to the master.

        The previous epoch's verification, if it runs on a thread of its own, is awaited first. On the last
        stage, a verifier is made and given the drafters and the migrated features; on stage 0, a sequencer
        is made (both on a ring of one stage). Raises what `make_stage`, `connect` and `make_verifier` raise;
        the current epoch then stays as it was.
        """
        # Verification of the previous epoch holds memory of that epoch, so wait until it is done.
        if self._verify_thread:
            await Compute(self._loader.name, self._verify_thread).run(lambda: None)
        stage: StageRunner = await self._compute.run(self._loader.make_stage, configuration, own_stage.layers)
        if isinstance(stage, KeepsRows):
            stage.rows.migrated = self._handover.ready
        links = await connect(configuration, self._dialer, uplink)
        is_last = index == len(configuration.stages) - 1
        verifier = (
            await self._compute.run(self._loader.make_verifier, stage, configuration) if is_last else None
        )
        if verifier:
            verifier.colocated.drafter = colocated_drafter(configuration, links.drafters)
            verifier.set_drafters(links.drafters)
            verifier.take_features_from(self._handover.ready)
        self._active = _WorkerEpoch(
            configuration,
            stage,
            links,
            set(configuration.taps_of(own_stage)),
            self._make_sequencer(configuration, stage, verifier) if index == 0 else None,
            verifier,
            Deadline(configuration.curve),
        )
        if verifier and (sequencer := self._active.sequencer):
            # The verifier launches the next frame by itself only if no message or prompt would change it.
            verifier.quiet = lambda: sequencer.next_is_predictable(self._arrived())
            verifier.passes = sequencer.passes_ahead
        if verifier and index and self._verify_thread:
            name = self._loader.name
            thread = self._verify_thread
            self._active.async_verifier = AsyncVerifier(name, thread, self._verify_launched)
        await self._reuse_taps(self._active)
        self._observer.formed(configuration, stage)

    def _make_sequencer(
        self, configuration: Configuration, stage: StageRunner, verifier: Verifier | None
    ) -> Sequencer:
        """Return a new sequencer for stage 0, without sequences.

        configuration: The epoch as the master has configured it.
        stage: The stage of this worker, which says how many tokens a frame of prompts only may have.
        verifier: The verifier of this worker, which says whether frames may have several forward passes. None
            on every stage but the last.

        If the epoch has no drafter, no sequence waits for trees.
        """
        budget = FrameBudget(
            configuration.rows,
            configuration.flight,
            configuration.reserved_slots,
            stage.prompt_rows(configuration.rows),
        )
        return Sequencer(
            configuration.epoch,
            budget,
            PageTable(configuration.pages, configuration.page_rows),
            DraftTimeout(configuration.draft_timeout, configuration.drafter is not None),
            self._make_depth(configuration),
            self._loader.vocabulary,
            (lambda: verifier.runs_ahead) if verifier else (lambda: False),
        )

    def _may_send(self, configuration: Configuration, arrival: Arrival) -> bool:
        """Return whether the sender of a message may send it to this stage; False for a sender of another
        role or place, see `may_send`. Subclasses may allow more.

        configuration: The current epoch.
        arrival: The message with its sender.
        """
        return may_send(configuration, arrival)

    async def _reuse_taps(self, active: _WorkerEpoch) -> None:
        """Use the taps of a previous epoch again, if the master says that they are still valid by sending
        none. Taps of layers that other stages run now are not used. Without a draft head or a drafter,
        nothing is used.

        active: The epoch that begins.

        If the configuration says that its head sends taps, all remembered taps are discarded.
        """
        current = active.configuration
        if current.head and current.head.taps:
            self._taps.clear()
        for layer, weight in self._taps.items() if current.head and current.drafter else ():
            if current.tapping(layer).name == current.you:
                await self._compute.run(active.stage.tap, layer, weight)

    async def prepare(self, order: StandBy | HandOver, uplink: Link) -> None:
        """Load layers ahead, or migrate KV to other workers, in the background. The current epoch goes on.

        order: StandBy names layers to load for a later epoch; HandOver names KV to migrate. Either replaces
            an earlier order of its kind. If this worker has no KV of the HandOver's epoch, it receives only.
        uplink: Link to the master, which is sent the progress.

        A StandBy cancels layers that are still being preloaded for an earlier StandBy, and frees the KV of an
        epoch that has ended. A HandOver is carried out for the KV of its epoch, which runs or has just ended,
        if the stage can migrate KV.
        """
        if isinstance(order, HandOver):
            source = self._active or self._former
            known = source is not None and source.configuration.epoch == order.epoch
            self._handover.begin(order, self._copies_of(source) if source and known else None, uplink)
            return
        self._former = None
        if self._preloading:
            self._preloading.cancel()
        self._preloading = self._in_background(self._preload(order, uplink))

    def _copies_of(self, active: _WorkerEpoch) -> Copies | None:
        """Return a function that copies KV and features of an epoch. Return None if the stage cannot migrate
        its KV.

        active: The running epoch, or the last one.

        Features are copied on the thread that verifies, because that thread also writes them.

        The returned coroutine function takes requests (a range of positions of one sequence, and a layer
        number) and returns a tensor or None for each. It computes on the verification thread only for
        features, and only if frames are verified there.
        """
        stage = active.stage
        verifier = active.verifier
        if not isinstance(stage, KeepsRows):
            return None
        thread = self._verify_thread if active.async_verifier else None
        verifying = Compute(self._loader.name, thread) if thread else self._compute

        async def copies(asked: Sequence[LayerRows]) -> Sequence[Any]:
            """Return copies on the host, one for each request: KV of one layer, or features if the layer
            number is the one after the last layer. None for a closed sequence.

            asked: The requests: a sequence and a range of its positions, and a layer. Features are never
                mixed with KV.
            """
            if verifier and asked[0][1] == stage.layers.last:
                return await verifying.run(verifier.feature_rows, [one for one, _ in asked])
            return await self._compute.run(stage.rows.copies, asked)

        return copies

    async def handle(self, arrival: Arrival) -> None:
        """Handle one message. A frame runs at once. Other messages change the state on which the next
        `run_due` acts.

        arrival: The message with its sender, and the time of its arrival if that is known.

        Messages of later epochs are kept until that epoch begins. Messages of earlier epochs, messages that
        the sender may not send, and messages that only another stage can handle are dropped. Raises
        Unavailable if the loss of a member ends the epoch, Hung if a frame exceeds its time limit.

        `KvRows` are stored in and outside an epoch, but only from a sender that may act as a worker. A
        message without an epoch number counts as one of the current epoch. Dropping a message for its
        sender's role logs a warning. Drafts that reach a worker without a sequencer are forwarded to stage 0
        if this worker has a link to it, and are dropped otherwise. Open, Close and Lease are dropped on
        other stages than stage 0; Rejoined and DrafterLost are dropped on other stages than the last.
        """
        active = self._active
        message = arrival.message
        if isinstance(message, KvRows):
            if arrival.may_act_as("worker"):
                await self._handover.take(arrival.sender, message)
            return
        epoch = getattr(message, "epoch", self.epoch)
        if epoch > self.epoch:
            self._future_epoch_messages.hold(epoch, arrival)
        if active is None or epoch != self.epoch:
            return
        if not self._may_send(active.configuration, arrival):
            log.warning(
                "message dropped: its sender has another role",
                sender=arrival.sender,
                message=type(message).__name__,
            )
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
                # In a closed ring (`--comm-mode ring`), the drafter is connected to the last stage only, so
                # that stage forwards its drafts to stage 0.
                await active.links.sequencer.send(message)
            case Open() | Close() | Lease() if active.sequencer:
                active.sequencer.apply_order(message)
            case Tap():
                await self._receive_tap(active, message)
            case Rejoined() if active.verifier:
                self._in_background(self._dial_drafter(active, message))
            case DrafterLost(name=name) if active.verifier:
                active.leaving_drafters.add(name)
                active.joining_drafters.pop(name, None)
            case Lost():
                await self._handle_loss(active, message)
            case _:
                pass

    async def run_due(self) -> float | None:
        """Run one turn of the main loop: first what had to wait for the end of a verification, then every
        frame that is due.

        Returns after how many seconds `run_due` must be called again, even if no message arrives. Returns
        None if it need not be called before the next message, and outside an epoch.

        While a frame is being verified on another thread, or while a grammar is being compiled, the result
        is at most POLL_SECONDS.
        """
        active = self._active
        if active is None:
            return None
        verifying = active.async_verifier is not None and active.async_verifier.busy()
        if not verifying:
            await self._between_verifications(active)
        poll = POLL_SECONDS if verifying or (active.verifier and active.verifier.has_pending) else None
        waits = [wait for wait in (await self._launch_next(active), poll) if wait is not None]
        return min(waits, default=None)

    async def _between_verifications(self, active: _WorkerEpoch) -> None:
        """Apply what may only change between two verifications: drafters that have left or joined, and
        grammars that are now compiled.

        active: The current epoch. No verification is running.

        If the grammar of a held-back segment has been compiled, that segment is verified and its result is
        sent.
        """
        for name in tuple(active.leaving_drafters):
            active.leaving_drafters.discard(name)
            await self._lose_drafter(active, name, "the master reported its loss")
        if active.joining_drafters:
            self._admit_drafters(active)
        if active.verifier and active.verifier.pending_ready:
            verify = reporting(active.links, active.verifier.verify_pending)
            await self._send_result(active, await (active.async_verifier or self._compute).run(verify))

    async def _launch_next(self, active: _WorkerEpoch) -> float | None:
        """Compose and run the next frame, part by part if it is cut, if this is stage 0 and a frame is due.

        active: The current epoch.

        If the verifier has already started the next step on the device, the frame of that step is composed at
        once, unless a message has arrived: its prompt may ride with the step.

        Returns the seconds until the next draft timeout; 0 if a frame was run, so that the caller comes back
        at once; None if no sequence waits for a draft, if this is not stage 0, or while taps are missing.

        Sequences that could not be opened are reported to the master, whether or not a frame was due.
        """
        if active.sequencer is None or active.missing_taps:
            return None
        verifier = active.verifier
        while frame := active.sequencer.compose(self._clock(), verifier.launched_passes if verifier else 0):
            await self._report_rejections(active)
            for part in cut_frame(self._observer.launched(frame, self._clock())):
                await self._run_frame(active, part)
            if not (verifier and verifier.next_confirmed) or self._arrived():
                return 0.0
            await self._between_verifications(active)
        if verifier and verifier.next_confirmed:
            # The launched step waits for its frame, which is no compute time.
            active.stage.pause_compute_timer()
        await self._report_rejections(active)
        deadline = active.sequencer.deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    async def disband(self) -> None:
        """Leave the epoch and close its links. Its KV stays until the next epoch begins, which may reuse it.
        Nothing happens outside an epoch.

        Links are closed in the background, so closing them does not delay the caller.
        """
        active = self._active
        self._active = None
        if active is not None:
            self._former = active
            self._observer.disbanded()
            if active.async_verifier:
                active.async_verifier.close()
            await close_in_background(active.links.close())

    async def _run_frame(self, active: _WorkerEpoch, frame: Frame) -> None:
        """Run a frame and send what comes of it: hidden states to the next stage, or results to every
        receiver. With an `async_verifier`, the frame is only launched here and queued for verification. A
        part of a frame is always computed here.

        active: The current epoch.
        frame: The frame from the preceding stage, or, on stage 0, from the sequencer.

        Raises Hung if the computation exceeds its time limit.

        On a stage that is not the last, the frame is run and passed on to the next stage. Compute seconds
        are recorded, except for a frame that is only launched here: its seconds are recorded once it has
        been verified.
        """
        if active.verifier is None:
            assert active.links.next_stage is not None
            seconds = await self._compute_frame(
                active, frame, run_and_pass_on, active.stage, active.links.next_stage, frame
            )
            self._record_compute(active, frame, seconds)
            return
        if frame.last_part:
            await self._run_part(active, active.verifier, frame)
            return
        if active.async_verifier:
            active.async_verifier.submit(
                await self._compute.run(
                    launch_frame,
                    partial(run_stage, active.stage),
                    frame,
                    timeout_seconds=_time_limit(active, frame),
                )
            )
            return
        verify = reporting(active.links, active.verifier.verify)
        if active.sequencer and active.links.results:
            steps = partial(self._run_steps, active, active.sequencer, active.verifier, verify)
            verified = await self._compute.run(steps, frame, timeout_seconds=_time_limit(active, frame))
            await self._send_features(active, verified)
            return
        verified = await self._compute_frame(active, frame, run_and_verify, active.stage, verify, frame)
        self._record_compute(active, frame, verified.result.seconds[-1])
        await self._send_result(active, verified)

    async def _run_part(self, active: _WorkerEpoch, verifier: Verifier, frame: Frame) -> None:
        """Run a part of a frame on the last stage, and send the frame's result if the parts so far decide it.

        active: The current epoch.
        verifier: Its verifier.
        frame: Any part of a frame.

        Nothing is sent for further parts of a frame whose result has been sent. Features are sent here; the
        result itself has been sent from the compute thread already, unless the epoch has no separate links
        for results.

        Raises Hung if the computation exceeds its time limit.
        """
        arguments = active.stage, verifier, active.links, frame
        seconds, verified = await self._compute_frame(active, frame, run_and_verify_part, *arguments)
        if seconds:
            self._record_compute(active, frame, seconds)
        if verified:
            await self._send_result(active, verified)

    def _run_steps(
        self, active: _WorkerEpoch, sequencer: Sequencer, verifier: Verifier, verify: Verify, frame: Frame
    ) -> VerifiedFrame:
        """Run steps one after the other on the compute thread of a worker that is the whole ring, as long as
        nothing but the thread's own results decides what follows. Return the last step, whose result has been
        applied, and whose features are to be sent.

        active: The current epoch.
        sequencer: Its sequencer. The event loop does not use it meanwhile, because it waits for this call.
        verifier: Its verifier.
        verify: Verifies a frame, and sends the result to the master.
        frame: The first frame.

        A step is then not passed to the event loop and back. The steps end if the next step has not been
        launched, if a message or another call waits, if features are to be sent, if the set of drafters
        changes, and if the epoch has ended.
        """
        while True:
            with self._observer.computing(frame):
                verified = run_and_verify(active.stage, verify, frame)
            self._record_compute(active, frame, verified.result.seconds[-1])
            self._apply_result(sequencer, verified.result, awaits_drafts=verified.drafts is None)
            for drafts in verified.drafts or ():
                sequencer.add_drafts(drafts)
            due = self._arrived() or self._compute.has_waiting or active is not self._active
            changes = active.leaving_drafters or active.joining_drafters or verifier.pending_ready
            if due or changes or verified.features or not verifier.next_confirmed:
                return verified
            following = sequencer.compose(self._clock(), verifier.launched_passes)
            if following is None:
                return verified
            frame = self._observer.launched(following, self._clock())
            allow(_time_limit(active, frame))

    async def _verify_launched(self, launched: LaunchedFrame) -> None:
        """Verify one frame on the verification thread and send its result, while later frames are being
        launched.

        launched: The frame whose layers have been launched.

        Its compute seconds are recorded, and then changes that had to wait for the end of a verification are
        applied. The frame must belong to the current epoch. Raises Hung if verification exceeds the frame's
        time limit.
        """
        active = self._active
        assert active is not None
        assert active.async_verifier is not None
        assert active.verifier is not None
        verify = reporting(active.links, active.verifier.verify)
        with self._observer.computing(launched.frame):
            verified = await active.async_verifier.run(verify, launched, _time_limit(active, launched.frame))
        self._record_compute(active, launched.frame, verified.result.seconds[-1])
        await self._send_result(active, verified)
        await self._between_verifications(active)

    async def _compute_frame(
        self, active: _WorkerEpoch, frame: Frame, work: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Compute a frame on the compute thread within its time limit, and return what `work` returns. Raises
        Hung if it takes longer.

        active: The current epoch.
        frame: The frame that is computed.
        work: The function that computes it.
        arguments: Arguments of `work`.
        """
        with self._observer.computing(frame):
            return await self._compute.run(work, *arguments, timeout_seconds=_time_limit(active, frame))

    def _record_compute(self, active: _WorkerEpoch, frame: Frame, seconds: float) -> None:
        """Record the compute time of a frame, for the time limits of later frames and for the observer.

        active: The current epoch.
        frame: The frame that was computed.
        seconds: Seconds that this stage computed it.
        """
        active.deadline.record(frame.num_tokens, seconds)
        self._observer.computed(frame, seconds)

    async def _send_result(self, active: _WorkerEpoch, verified: VerifiedFrame) -> None:
        """Send the result of a frame to its receivers: to the sequencer if it runs in this worker, then the
        features to the drafters, then the result to the master unless the compute thread has sent it already.

        active: The current epoch.
        verified: The result of the frame, with features or with the trees of a drafter on this thread.

        The result is also sent to the master here if the epoch has no separate links for results
        (`links.results`).
        """
        if active.sequencer:
            self._apply_result(active.sequencer, verified.result, awaits_drafts=verified.drafts is None)
            for drafts in verified.drafts or ():
                active.sequencer.add_drafts(drafts)
        await self._send_features(active, verified)
        if not active.links.results:
            await active.links.master.send(verified.result)

    def _apply_result(self, sequencer: Sequencer, result: Result, awaits_drafts: bool = True) -> None:
        """Apply a result to the sequencer, and notify the observer.

        sequencer: The sequencer of this worker.
        result: The result of one frame.
        awaits_drafts: False if the drafter has already answered this result, so that no tree is awaited.
        """
        now = self._clock()
        sequencer.apply_result(result, now, awaits_drafts)
        self._observer.returned(result, now)

    async def _send_features(self, active: _WorkerEpoch, verified: VerifiedFrame) -> None:
        """Send features to the drafters. The loss of a drafter fails no sequence: its sequences move to
        another drafter.

        active: The current epoch.
        verified: Its `features` are the messages by drafter. Messages to drafters that are not linked are
            dropped.

        If sending to a drafter fails, its remaining messages are dropped, its link is removed, and stage 0
        is informed.
        """
        links = active.links.drafters
        for drafter, messages in verified.features.items():
            try:
                for features in messages if drafter in links else ():
                    await links[drafter].send(features)
            except Unavailable as error:
                await self._lose_drafter(active, drafter, str(error))

    async def _lose_drafter(self, active: _WorkerEpoch, drafter: str, reason: str) -> None:
        """Send nothing more to a drafter, and inform stage 0 of its loss. Nothing happens if it had been
        removed before.

        active: The current epoch.
        drafter: Name of the drafter.
        reason: Why it is lost, for logs and errors.

        Raises Unavailable if the drafter is lost before its taps have arrived, see `_handle_loss`.
        """
        present = active.links.drafters
        if drafter in present:
            self._set_drafters(active, {name: link for name, link in present.items() if name != drafter})
            await self._handle_loss(active, Lost(drafter, reason, self.epoch))

    async def _dial_drafter(self, active: _WorkerEpoch, joining: Rejoined) -> None:
        """Connect to a drafter that joins the running epoch. If it cannot be reached, the ring continues
        without it, and a warning is logged.

        active: The epoch that the drafter joins. If another epoch has started meanwhile, the link is closed
            again.
        joining: Name and address of the drafter.

        A reached drafter is only added to `joining_drafters`, by its name, or by its address if it has no
        name. It is sent nothing before `_admit_drafters`.
        """
        try:
            link = await self._dialer.dial(joining.address, active.configuration.epoch, "drafter")
        except SpecsotError as error:
            log.warning(
                "drafter not reached, the ring continues without it",
                address=joining.address,
                reason=str(error),
            )
            return
        if active is self._active:
            active.joining_drafters[joining.name or joining.address] = link
        else:
            await link.close()

    def _admit_drafters(self, active: _WorkerEpoch) -> None:
        """Start sending to the drafters that have joined. Each is sent what belongs to its sequences, a part
        with every step.

        active: The current epoch, whose `joining_drafters` are admitted.

        A drafter that was present under the same name is removed first, so that it counts as one that knows
        nothing.

        Admitted drafters no longer count as lost. Without joining drafters, the links stay as they are.
        """
        joining = active.joining_drafters
        active.joining_drafters = {}
        active.lost_drafters -= joining.keys()
        present = active.links.drafters
        self._set_drafters(active, {name: link for name, link in present.items() if name not in joining})
        self._set_drafters(active, {**active.links.drafters, **joining})

    def _set_drafters(self, active: _WorkerEpoch, drafters: Mapping[str, RingLink]) -> None:
        """Use these links to drafters and no others. Links that are no longer used are closed in the
        background.

        active: The current epoch. This worker has its verifier.
        drafters: Links by name of the drafter. Empty: no drafter is left.

        Sequences of drafters that are missing in `drafters` move to the other ones.
        """
        assert active.verifier is not None
        for name, link in active.links.drafters.items():
            if drafters.get(name) is not link:
                self._in_background(link.close())
        active.links = replace(active.links, drafters=drafters)
        active.verifier.colocated.drafter = colocated_drafter(active.configuration, drafters)
        active.verifier.set_drafters(drafters)

    async def _preload(self, order: StandBy, uplink: Link) -> None:
        """Load layers ahead of an assignment, and report the progress to the master. If there is no room for
        them, a warning is logged and the master is sent a progress of 0.

        order: The layers to load. No layers: as many as fit, and nothing is reported.
        uplink: Link to the master.

        Files are fetched on another thread. The compute thread then loads one layer at a time, so that
        frames, or a configuration, find it free in between.

        Layers are loaded until `StageProvider.preload` returns False. Errors that are no SpecsotError are
        raised.
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
        """Start a task that is not awaited, keep a reference to it until it is done, and return it.

        work: The coroutine to run.

        An error of the coroutine is not raised here.
        """
        task = start(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _receive_tap(self, active: _WorkerEpoch, tap: Tap) -> None:
        """Use a slice of the draft head's weights. A slice that belongs to another stage is forwarded along
        the ring, or dropped where the ring ends. A slice that is not missing is ignored.

        active: The current epoch.
        tap: A layer number, and the slice of weights for that layer's input.

        If the slice was the last missing one, Ready is sent to the master.
        """
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
        """Send Ready to the master if every tap has arrived; otherwise do nothing. The stage captures its
        graphs first. Afterwards, the start of this process is logged, if that was not done before.

        Nothing happens outside an epoch.
        """
        active = self._active
        if active and not active.missing_taps:
            await self._compute.run(active.stage.capture)
            await active.links.master.send(Ready(active.configuration.epoch))
            log_start()

    async def _handle_loss(self, active: _WorkerEpoch, lost: Lost) -> None:
        """Handle a lost link. The ring continues without a lost drafter, of which stage 0 is informed. A lost
        stage ends the epoch.

        active: The current epoch.
        lost: Name of the member to which the link is lost, and the reason.

        Raises Unavailable if the epoch cannot continue: a stage was lost, or the drafter before its taps
        arrived.

        The loss is recorded in `lost_drafters` in any case where nothing is raised. Stage 0 applies the loss
        to its sequencer each time; another stage informs stage 0 once per drafter, and not at all if it has
        no link to stage 0. A peer that is not a stage counts as a drafter.
        """
        if lost.peer in {stage.name for stage in active.configuration.stages}:
            raise Unavailable(f"lost {lost.peer}: {lost.reason}")
        if active.missing_taps:
            raise Unavailable(f"lost the drafter before its slices of the head arrived: {lost.reason}")
        known = lost.peer in active.lost_drafters
        active.lost_drafters.add(lost.peer)
        if active.sequencer:
            active.sequencer.lose_drafter(lost.peer)
        elif active.links.sequencer and not known:
            await active.links.sequencer.send(lost)

    async def _report_rejections(self, active: _WorkerEpoch) -> None:
        """Send the master an outcome for every sequence that could not be opened. Nothing is sent if there is
        none.

        active: The current epoch. This worker has its sequencer.
        """
        assert active.sequencer is not None
        if rejected := active.sequencer.rejections():
            await active.links.master.send(Result(self.epoch, 0, rejected))


def colocated_drafter(configuration: Configuration, links: Mapping[str, RingLink]) -> ColocatedDrafter | None:
    """Return the drafter if it is the only one and runs on this worker's compute thread. Otherwise, and
    without drafters, return None.

    configuration: The epoch as the master has configured it.
    links: Links to the drafters by name.

    It is also None if several stages may have several frames in flight: while such a drafter drafts, frames
    of other sequences would wait.

    A link to a drafter in another process, or to several drafters, gives None.
    """
    link = next(iter(links.values())) if len(links) == 1 else None
    return (
        link.drafter
        if isinstance(link, LocalLink) and 1 in (len(configuration.stages), configuration.flight)
        else None
    )


async def _tell(uplink: Link, progress: Progress) -> None:
    """Send progress to the master. An error is ignored, because the loss of the master is detected elsewhere.

    uplink: Link to the master.
    progress: What has been loaded.
    """
    # The loss of the master is detected elsewhere.
    with suppress(SpecsotError):
        await uplink.send(progress)


def _time_limit(active: _WorkerEpoch, frame: Frame) -> float:
    """Return for how many seconds the computation of a frame may run.

    active: The current epoch, which has recorded the times of earlier frames.
    frame: The frame, whose number of tokens counts.
    """
    return active.deadline.seconds(frame.num_tokens)
