"""The drafter as a member of the ring: receives features, drafts trees, and sends them to stage 0.

The ring never waits for the drafter longer than the draft timeout, so a late, wrong or lost drafter does not
stop any sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from specsot.core.deadline import Deadline
from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.frames import Drafts, Features, TreeSegment
from specsot.core.info import memory_in_words
from specsot.errors import SpecsotError, Unavailable
from specsot.members import Configuration, HandOver, Ready, Registration, StandBy, Tap
from specsot.service.compute import Compute, allow, explain_failure
from specsot.service.membership import report_progress
from specsot.transport.links import Arrival, Dialer, Link, Lost, close_in_background
from specsot_drafter.engine import DraftEngine

log = structlog.get_logger()


class DrafterObserver:
    """Is notified of a drafter's work. This base class ignores everything."""

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        """Called when an epoch begins. free: returns the number of free KV pages at any moment."""

    def drafting(self, feature_batches: Sequence[Features]) -> AbstractContextManager[object]:
        """Return a context that is entered while these features are observed and trees are drafted."""
        return nullcontext()

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        """Called with the result of a draft, and with the seconds that observing and drafting took."""

    def disbanded(self) -> None:
        """Called when the epoch is over."""


@dataclass(slots=True)
class _DrafterEpoch:
    """Everything that lives exactly as long as one epoch.

    configuration: The configuration of the epoch.
    engine: The draft engine of the epoch.
    stage: The link to the stage that the drafter sends trees to.
    pending: Features that arrived since the last draft.
    deadline: Bounds how long a job may compute.
    failure: The error of a colocated draft, which `handle` raises; None: there was none.
    """

    configuration: Configuration
    engine: DraftEngine
    stage: Link
    pending: list[Features]
    deadline: Deadline
    failure: SpecsotError | None = None


class Drafter:
    """A drafter that joins one epoch after another."""

    def __init__(
        self,
        loader: EngineProvider,
        dialer: Dialer,
        compute: Executor,
        observer: DrafterObserver | None = None,
    ) -> None:
        """Create a drafter outside any epoch.

        loader: makes the engine of every epoch. dialer: opens links to stages.
        compute: runs tensor work off the event loop, one job at a time.
        observer: is notified of the work; None: nothing is.
        """
        self._loader = loader
        self._dialer = dialer
        self._compute = Compute(loader.name, compute)
        self._observer = observer or DrafterObserver()
        self._active: _DrafterEpoch | None = None

    @property
    def epoch(self) -> int:
        return self._active.configuration.epoch if self._active else 0

    @property
    def free_pages(self) -> int | None:
        """Return the number of KV pages that no sequence owns; None outside an epoch."""
        return self._active.engine.free_pages if self._active else None

    async def registration(self) -> Registration:
        return await self._compute.run(self._loader.registration)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Join an epoch: make its engine, send the tapping stages their slices of fc, and report Ready.

        Raises Unavailable if a stage does not take its slice.
        """
        taps = configuration.head.taps if configuration.head else ()
        sent = list[int]()
        async with report_progress(uplink, configuration.epoch, lambda: len(sent), 1 + len(taps)):
            engine = await self._compute.run(self._loader.make_engine, configuration)
            await self._send_taps(configuration, taps, sent)
            stage = await self._dialer.dial(configuration.drafted_for.address, configuration.epoch)
        self._active = _DrafterEpoch(configuration, engine, stage, [], Deadline(configuration.curve))
        self._observer.formed(configuration, lambda: engine.free_pages)
        await uplink.send(Ready(configuration.epoch))

    async def prepare(self, order: StandBy | HandOver, uplink: Link) -> None:
        """Do nothing: only workers prepare layers for an epoch."""

    async def handle(self, arrival: Arrival) -> None:
        """Keep features of this epoch's last stage for `settle`; ignore those of another epoch.

        Raises the error of a colocated draft, and Unavailable if a stage that the drafter needs is lost.
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

    async def settle(self) -> float | None:
        """Observe all features that have arrived, then draft once for the newest state.

        Trees for an older state would be useless, so a burst of messages leads to one draft.
        """
        active = self._active
        if active is None or not active.pending:
            return None
        batches = active.pending
        active.pending = []
        with self._observer.drafting(batches):
            drafts, speaks, seconds = await self._compute.run(
                _observe_and_draft, active, batches, timeout_seconds=active.deadline.seconds(_rows(batches))
            )
        self._observer.drafted(drafts, seconds)
        if speaks:
            await active.stage.send(drafts)
        return None

    def begin_async(self, verdict: DeviceVerification) -> None:
        """See `ColocatedDrafter`."""
        active = self._active
        if active is not None and active.failure is None and verdict.epoch == active.configuration.epoch:
            with self._blamed(active):
                active.engine.begin_async(verdict)

    def choose_async(self, verified: Sequence[TreeSegment]) -> DeviceTrees | None:
        """See `ColocatedDrafter`."""
        active = self._active
        if active is not None and active.failure is None:
            with self._blamed(active):
                return active.engine.choose_async(verified)
        return None

    def draft(self, features: Sequence[Features], meanwhile: Callable[[], None]) -> tuple[Drafts, ...] | None:
        """See `ColocatedDrafter`; called on the thread that computes.

        Return None outside an epoch, and after an error. Errors of the drafter are kept and raised by
        `handle`, because here they would fail the worker that calls this method.
        """
        active = self._active
        if active is None or active.failure is not None or features[0].epoch != active.configuration.epoch:
            return None
        began = time.perf_counter()
        rows = 0
        with self._observer.drafting(features):
            with self._blamed(active):
                rows = _begin(active, features)
            if active.failure is None:
                meanwhile()
                with self._blamed(active):
                    drafts, speaks, seconds = _finish(active, rows, began)
                    self._observer.drafted(drafts, seconds)
                    return (drafts,) if speaks else ()
        return None

    @contextmanager
    def _blamed(self, active: _DrafterEpoch) -> Generator[None]:
        """Keep an error of the body as the failure of this epoch instead of raising it."""
        try:
            yield
        except Exception as error:
            ours = isinstance(error, SpecsotError)
            active.failure = error if ours else explain_failure(self._loader.name, error)

    async def disband(self) -> None:
        """Leave the epoch, and close its link in the background."""
        active = self._active
        self._active = None
        if active is not None:
            self._observer.disbanded()
            await close_in_background(active.stage.close())

    def _handle_loss(self, active: _DrafterEpoch, arrival: Arrival, lost: Lost) -> None:
        """Raise Unavailable if the lost peer is a stage that the drafter needs.

        Only a worker may report its own loss; other reports are ignored.
        """
        needed = {active.configuration.drafted_for.name, active.configuration.stages[-1].name}
        if lost.peer in needed and lost.peer == arrival.sender and arrival.may_act_as("worker"):
            raise Unavailable(f"lost {lost.peer}: {lost.reason}")

    async def _send_taps(self, configuration: Configuration, taps: Collection[int], sent: list[int]) -> None:
        """Send each tap's slice of fc to the stage that taps that layer.

        In the communication mode `ring`, the neighbouring stage passes the slices on. sent: layers whose
        slices have been delivered; extended here, for progress reports.
        """
        slices = await self._compute.run(self._loader.tap_slices) if taps else {}
        for layer, weight in ((tap, slices[tap]) for tap in taps):
            near = configuration.comm_mode == "ring"
            stage = configuration.drafted_for if near else configuration.tapping(layer)
            link = await self._dialer.dial(stage.address, configuration.epoch)
            await link.send(Tap(configuration.epoch, layer, weight))
            if await link.close() is False:
                raise Unavailable(f"{stage.name} did not take its slice of the head, of layer {layer}")
            sent.append(layer)
            size = memory_in_words(weight.nbytes)
            log.info("a stage has its slice of the head", layer=layer, whom=stage.name, size=size)


def _rows(batches: Sequence[Features]) -> int:
    """Return the number of rows that the time limit of a draft is based on.

    These are the rows of the base model's frames, the tokens of the feature batches, and the forked tokens,
    whose rows the drafter may have to compute before they are shared.
    """
    feature_batches = sum(
        len(feature_batch.tokens) for one in batches for feature_batch in one.feature_batches
    )
    shared = sum(opening.forked for one in batches for opening in one.openings)
    return sum(one.fed for one in batches) + feature_batches + shared


def _observe_and_draft(active: _DrafterEpoch, batches: Sequence[Features]) -> tuple[Drafts, bool, float]:
    """Return the drafts, whether they are to be sent to stage 0, and the seconds that they took."""
    began = time.perf_counter()
    return _finish(active, _begin(active, batches), began)


def _begin(active: _DrafterEpoch, batches: Sequence[Features]) -> int:
    """Observe features and launch the trees. Return the number of rows that the time limit is based on.

    The limit is extended by the rows that must be computed before trees can grow. When a sequence is drafted
    for the first time, these are all of its rows, and a colocated worker on the same thread waits for them.
    """
    rows = _rows(batches)
    allow(active.deadline.seconds(rows))
    for features in batches:
        active.engine.observe(features)
    rows += active.engine.begin()
    allow(active.deadline.seconds(rows))
    return rows


def _finish(active: _DrafterEpoch, rows: int, began: float) -> tuple[Drafts, bool, float]:
    """Take the trees that `_begin` launched; return the same as `_observe_and_draft`.

    rows: what `_begin` returned. began: when it started.
    """
    engine = active.engine
    drafts = Drafts(
        active.configuration.epoch, engine.finish(), engine.paused_trees, active.configuration.you
    )
    seconds = time.perf_counter() - began
    active.deadline.record(rows, seconds)
    return drafts, bool(drafts.drafts or drafts.paused_trees or engine.awake), seconds


class EngineProvider(Protocol):
    """Loads what drafts, and makes the engine of every epoch."""

    @property
    def name(self) -> str:
        """Return the name of the drafter in the ring."""
        ...

    def tap_slices(self) -> Mapping[int, Any]:
        """Return the slice of the head's fc for each tapped layer."""
        ...

    def registration(self) -> Registration:
        """Return what the drafter registers with; loads and measures the model if necessary."""
        ...

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        """Return an engine for one epoch, with empty pages."""
        ...
