"""The drafter as a member of the ring: receives features, drafts trees, and sends them to stage 0.

The ring never waits for the drafter longer than the draft timeout, so a late, wrong or lost drafter does not
stop any sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from typing import Any, Protocol

import structlog

from specsot.core.deadline import Deadline
from specsot.core.device_verification import DeviceVerification, DraftHandle
from specsot.core.frames import Features
from specsot.core.info import memory_in_words
from specsot.errors import Unavailable
from specsot.members import Configuration, HandOver, Ready, Registration, StandBy, Tap
from specsot.service.compute import Compute
from specsot.service.membership import report_progress
from specsot.transport.links import Arrival, Dialer, Link, Lost, close_in_background
from specsot_drafter.engine import DraftEngine
from specsot_drafter.epoch import DrafterEpoch, rows_of_batches
from specsot_drafter.observer import DrafterObserver
from specsot_drafter.overlap.colocated import ColocatedHandle

log = structlog.get_logger()


class Drafter:
    """A drafter, as a member of the ring that joins one epoch after another."""

    def __init__(
        self,
        loader: EngineProvider,
        dialer: Dialer,
        compute: Executor,
        observer: DrafterObserver | None = None,
    ) -> None:
        """Create a drafter outside any epoch.

        loader: Makes the engine of every epoch.
        dialer: Opens links to stages.
        compute: Executor that runs tensor work off the event loop, one job at a time.
        observer: Is notified of the work. None: no observer is notified.
        """
        self._loader = loader
        self._dialer = dialer
        self._compute = Compute(loader.name, compute)
        self._observer = observer or DrafterObserver()
        self._active: DrafterEpoch | None = None

    @property
    def epoch(self) -> int:
        """Number of the current epoch; 0 outside an epoch."""
        return self._active.configuration.epoch if self._active else 0

    @property
    def free_pages(self) -> int | None:
        """The number of KV pages that no sequence owns. None outside an epoch."""
        return self._active.engine.free_pages if self._active else None

    async def registration(self) -> Registration:
        """Load and measure the draft model if necessary, and return what the drafter registers with at the
        master. Raises ModelError if the device has too little memory.
        """
        return await self._compute.run(self._loader.registration)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Join an epoch: make its engine, send the tapping stages their slices of fc, and report Ready.

        configuration: The epoch as the master has configured it.
        uplink: Link to the master.

        Raises Unavailable if a stage does not take its slice.

        The engine's errors are raised as they are: ModelError if the device has too little memory. The
        drafter is outside the new epoch until everything has been sent.
        """
        taps = configuration.head.taps if configuration.head else ()
        sent = list[int]()
        async with report_progress(uplink, configuration.epoch, lambda: len(sent), 1 + len(taps)):
            engine = await self._compute.run(self._loader.make_engine, configuration)
            await self._send_taps(configuration, taps, sent)
            stage = await self._dialer.dial(configuration.drafted_for.address, configuration.epoch)
        self._active = DrafterEpoch(
            self._loader.name, configuration, engine, stage, Deadline(configuration.curve)
        )
        self._observer.formed(configuration, lambda: engine.free_pages)
        await uplink.send(Ready(configuration.epoch))

    async def prepare(self, order: StandBy | HandOver, uplink: Link) -> None:
        """Do nothing: only workers prepare layers for an epoch.

        order: Ignored.
        uplink: Ignored.
        """

    async def handle(self, arrival: Arrival) -> None:
        """Keep features of this epoch's last stage for `run_due`; ignore those of another epoch or another
        sender. Outside an epoch, and for messages of other kinds, nothing happens.

        arrival: The message with its sender.

        Raises the error of a colocated draft, and Unavailable if a stage that the drafter needs is lost.

        Features are kept only if their sender is the last stage.
        """
        active = self._active
        message = arrival.message
        if active is None:
            return
        if active.failure is not None:
            raise active.failure
        last = active.configuration.stages[-1].name
        if isinstance(message, Features) and message.epoch == self.epoch and arrival.sender == last:
            active.pending.append(message)
        if isinstance(message, Lost) and message.epoch == self.epoch:
            self._handle_loss(active, arrival, message)

    async def run_due(self) -> float | None:
        """Observe all features that have arrived, then draft once for the newest state. Nothing happens if
        none has arrived, or outside an epoch. Return None: the next call is due with the next message.

        Trees for an older state would be useless, so a burst of messages leads to one draft. Raises Hung if
        drafting exceeds its time limit, Unavailable if the link to stage 0 is lost.

        If nothing is to be sent, because no tree was requested, only the observer is informed.
        """
        active = self._active
        if active is None or not active.pending:
            return None
        batches = active.pending
        active.pending = []
        with self._observer.drafting(batches):
            finished = await self._compute.run(
                active.observe_and_draft,
                batches,
                timeout_seconds=active.deadline.seconds(rows_of_batches(batches)),
            )
        self._observer.drafted(finished.drafts, finished.seconds)
        if finished.sent:
            await active.stage.send(finished.drafts)
        return None

    def start_drafts(self, verification: DeviceVerification | None = None) -> DraftHandle | None:
        """Start the drafts that follow one frame, for a verifier on the same thread; see `ColocatedDrafter`.
        Return None outside an epoch, and after an error in this one.

        verification: The verification result on the device, which the host has not read. None: nothing grows
            until the host has read the result.

        Growth starts at once if a verification result of this epoch is given and the engine can grow from
        it.
        """
        active = self._active
        if active is None or active.failure is not None:
            return None
        return ColocatedHandle(active, lambda: active is self._active, self._observer, verification)

    async def disband(self) -> None:
        """Leave the epoch, and close its link in the background. Nothing happens outside an epoch."""
        active = self._active
        self._active = None
        if active is not None:
            self._observer.disbanded()
            await close_in_background(active.stage.close())

    def _handle_loss(self, active: DrafterEpoch, arrival: Arrival, lost: Lost) -> None:
        """Raise Unavailable if the lost peer is a stage that the drafter needs. Only a worker may report its
        own loss; other reports are ignored.

        active: The current epoch.
        arrival: The message, with its sender.
        lost: The report: name of the lost member, and the reason.
        """
        needed = {active.configuration.drafted_for.name, active.configuration.stages[-1].name}
        if lost.peer in needed and lost.peer == arrival.sender and arrival.may_act_as("worker"):
            raise Unavailable(f"lost {lost.peer}: {lost.reason}")

    async def _send_taps(
        self, configuration: Configuration, taps: Collection[int], sent_layers: list[int]
    ) -> None:
        """Send each tap's slice of fc to the stage that taps that layer. In the communication mode `ring`,
        the neighbouring stage passes the slices on.

        configuration: The epoch as the master has configured it.
        taps: Numbers of the tapped layers. Empty: nothing is sent.
        sent_layers: Layers whose slices have been delivered; extended here, for progress reports.

        Raises Unavailable if a stage does not take its slice.

        In the mode `ring`, all slices go to the stage that the drafter sends its drafts to.
        """
        slices = await self._compute.run(self._loader.tap_slices) if taps else {}
        for layer, weight in ((tap, slices[tap]) for tap in taps):
            in_ring = configuration.comm_mode == "ring"
            stage = configuration.drafted_for if in_ring else configuration.tapping(layer)
            link = await self._dialer.dial(stage.address, configuration.epoch)
            await link.send(Tap(configuration.epoch, layer, weight))
            if await link.close() is False:
                raise Unavailable(f"{stage.name} did not take its slice of the head, of layer {layer}")
            sent_layers.append(layer)
            size = memory_in_words(weight.nbytes)
            log.info("a stage received its slice of the head", layer=layer, stage=stage.name, size=size)


class EngineProvider(Protocol):
    """Loader of the models that draft, and maker of the engine of every epoch. `DraftLoader` implements
    it.
    """

    @property
    def name(self) -> str:
        """The name of the drafter in the ring."""
        ...

    def tap_slices(self) -> Mapping[int, Any]:
        """Return the slice of the head's weights `fc` for each tapped layer, [feature_size, hidden_size], by
        layer number. Return an empty mapping if the drafter reads no features.
        """
        ...

    def registration(self) -> Registration:
        """Return what the drafter registers with at the master. The model is loaded and measured if that has
        not been done yet. Raises ModelError if the device has too little memory.
        """
        ...

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        """Return an engine for one epoch, with empty pages.

        configuration: The epoch as the master has configured it.

        Raises ModelError if the device has too little memory for the pages.
        """
        ...
