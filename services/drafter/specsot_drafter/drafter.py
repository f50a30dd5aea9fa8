"""The drafter service in the ring: takes features, drafts trees, sends them to stage 0.

It may be late, wrong or gone: the ring waits for it no longer than the draft timeout.
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
from specsot.core.frames import Drafts, Features, TreeSegment
from specsot.core.info import memory_in_words
from specsot.core.verdict import UnreadTrees, UnreadVerdict
from specsot.errors import SpecsotError, Unavailable
from specsot.members import Configuration, HandOver, Ready, Registration, StandBy, Tap
from specsot.service.compute import Compute, allow, explain_failure
from specsot.service.membership import report_progress
from specsot.transport.links import Arrival, Dialer, Link, Lost, close_in_background
from specsot_drafter.engine import DraftEngine

log = structlog.get_logger()


class DrafterObserver:
    """Looks at nothing; those who do say so for the moments they care about."""

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        """An epoch begins; `free` tells how many pages are, at any moment."""

    def drafting(self, lessons: Sequence[Features]) -> AbstractContextManager[object]:
        """Entered while these are learned and trees are drafted."""
        return nullcontext()

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        """What came of it, and how long that took."""

    def disbanded(self) -> None:
        """The epoch is over."""


@dataclass(slots=True)
class _DrafterEpoch:
    """Everything that lives exactly as long as one epoch."""

    configuration: Configuration
    engine: DraftEngine
    stage: Link
    pending: list[Features]
    deadline: Deadline
    failure: SpecsotError | None = None  # of `draft`


class Drafter:
    """One drafter. `compute` runs tensor work, one job at a time, off the event loop; `observer` is told."""

    def __init__(
        self,
        loader: EngineProvider,
        dialer: Dialer,
        compute: Executor,
        observer: DrafterObserver | None = None,
    ) -> None:
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
        """KV pages that no sequence owns, by the drafter's own table; None outside an epoch."""
        return self._active.engine.free_pages if self._active else None

    async def registration(self) -> Registration:
        return await self._compute.run(self._loader.registration)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Load the head, give the tapping stages their slices of its fc if they want them, then be ready."""
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
        """Only workers load layers."""

    async def handle(self, arrival: Arrival) -> None:
        """Keep features for `settle`; those of another epoch are dropped."""
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
        """Learn everything that has come, then draft once for the newest state."""
        active = self._active
        if active is None or not active.pending:
            return None
        batches = active.pending
        active.pending = []
        with self._observer.drafting(batches):
            drafts, speaks, seconds = await self._compute.run(
                _observe_and_draft, active, batches, within=active.deadline.seconds(_rows(batches))
            )
        self._observer.drafted(drafts, seconds)
        if speaks:
            await active.stage.send(drafts)
        return None

    def begin_early(self, verdict: UnreadVerdict) -> None:
        """See `NearDrafter`."""
        active = self._active
        if active is not None and active.failure is None and verdict.epoch == active.configuration.epoch:
            with self._blamed(active):
                active.engine.begin_early(verdict)

    def choose_early(self, verified: Sequence[TreeSegment]) -> UnreadTrees | None:
        """See `NearDrafter`."""
        active = self._active
        if active is not None and active.failure is None:
            with self._blamed(active):
                return active.engine.choose_early(verified)
        return None

    def draft(self, features: Sequence[Features], meanwhile: Callable[[], None]) -> tuple[Drafts, ...] | None:
        """See `NearDrafter`: called on the thread that computes. What goes wrong is raised by `handle`, so
        that it is nobody else's fault.
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
        try:
            yield
        except Exception as error:
            ours = isinstance(error, SpecsotError)
            active.failure = error if ours else explain_failure(self._loader.name, error)

    async def disband(self) -> None:
        active = self._active
        self._active = None
        if active is not None:
            self._observer.disbanded()
            await close_in_background(active.stage.close())

    def _handle_loss(self, active: _DrafterEpoch, arrival: Arrival, lost: Lost) -> None:
        """Raises Unavailable where it cannot go on, if whoever says so may."""
        needed = {active.configuration.drafted_for.name, active.configuration.stages[-1].name}
        if lost.peer in needed and lost.peer == arrival.sender and arrival.of("worker"):
            raise Unavailable(f"lost {lost.peer}: {lost.reason}")

    async def _send_taps(self, configuration: Configuration, taps: Collection[int], sent: list[int]) -> None:
        """Each tap's slice goes to the stage that taps, or to the neighbour that passes it on. sent: those
        that are there.
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
    """Of the base's laps that brought them, of what is to be learned, and of what is shared, which must be
    there.
    """
    lessons = sum(len(lesson.tokens) for one in batches for lesson in one.lessons)
    shared = sum(opening.forked for one in batches for opening in one.openings)
    return sum(one.fed for one in batches) + lessons + shared


def _observe_and_draft(active: _DrafterEpoch, batches: Sequence[Features]) -> tuple[Drafts, bool, float]:
    """The drafts, whether stage 0 is to hear of them, and how many seconds they took."""
    began = time.perf_counter()
    return _finish(active, _begin(active, batches), began)


def _begin(active: _DrafterEpoch, batches: Sequence[Features]) -> int:
    """Returns for how many rows it may take its time: those of a text that is drafted for the first time are
    computed at once, and whoever asks, a worker on the same thread, waits for them.
    """
    rows = _rows(batches)
    allow(active.deadline.seconds(rows))
    for features in batches:
        active.engine.observe(features)
    rows += active.engine.begin()
    allow(active.deadline.seconds(rows))
    return rows


def _finish(active: _DrafterEpoch, rows: int, began: float) -> tuple[Drafts, bool, float]:
    """The same as `_observe_and_draft`."""
    engine = active.engine
    drafts = Drafts(active.configuration.epoch, engine.finish(), engine.rest, active.configuration.you)
    seconds = time.perf_counter() - began
    active.deadline.took(rows, seconds)
    return drafts, bool(drafts.drafts or drafts.rest or engine.awake), seconds


class EngineProvider(Protocol):
    @property
    def name(self) -> str: ...

    def tap_slices(self) -> Mapping[int, Any]:
        """By layer, the slice of the head's fc for what taps its input."""
        ...

    def registration(self) -> Registration: ...

    def make_engine(self, configuration: Configuration) -> DraftEngine: ...
