"""The drafter in the ring: takes features, drafts trees, sends them to the ring.

Refuses to know transports, text and the base's layers. Thin: the engine does the work. It may be
late, wrong or gone, and nobody waits long for it.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor
from dataclasses import dataclass

from specsot.compute import Compute
from specsot.deadline import Deadline
from specsot.errors import Unavailable
from specsot.frames import Drafts, Features
from specsot.links import Arrival, Dialer, Link, Lost, part_with
from specsot.members import Configuration, Ready, Registration, Tap
from specsot.membership import telling
from specsot_drafter.engine import DraftEngine
from specsot_drafter.provider import Provider
from specsot_drafter.watching import Watch


@dataclass(slots=True)
class _Epoch:
    """Everything that lives exactly as long as one epoch."""

    configuration: Configuration
    engine: DraftEngine
    stage: Link
    untaught: list[Features]
    deadline: Deadline


class DrafterPart:
    """One drafter. `compute` runs tensor work, one job at a time, off the event loop; `watch` follows it."""

    def __init__(
        self, source: Provider, dialer: Dialer, compute: Executor, watch: Watch | None = None
    ) -> None:
        self._source, self._dialer, self._compute = source, dialer, Compute(source.name, compute)
        self._watch = watch or Watch()
        self._now: _Epoch | None = None

    @property
    def epoch(self) -> int:
        return self._now.configuration.epoch if self._now else 0

    @property
    def free_pages(self) -> int | None:
        """KV pages that no sequence owns, by the drafter's own table; None outside an epoch."""
        return self._now.engine.free_pages if self._now else None

    async def registration(self) -> Registration:
        return await self._compute.run(self._source.registration)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Load the head, give the tapping stages their slices of its fc if they want them, then be ready."""
        async with telling(uplink, configuration.epoch, lambda: 0, 1):
            engine = await self._compute.run(self._source.engine, configuration)
            if configuration.head:
                await self._send_taps(configuration)
            stage = await self._dialer.dial(configuration.drafted_for.address, configuration.epoch)
        self._now = _Epoch(configuration, engine, stage, [], Deadline(configuration.curve))
        self._watch.formed(configuration, lambda: engine.free_pages)
        await uplink.send(Ready(configuration.epoch))

    async def handle(self, arrival: Arrival) -> None:
        """Keep features for `settle`; those of another epoch are dropped."""
        now, message = self._now, arrival.message
        if now is None:
            return
        last = now.configuration.stages[-1].name
        if isinstance(message, Features) and message.epoch == self.epoch and arrival.sender == last:
            now.untaught.append(message)
        if isinstance(message, Lost) and message.epoch == self.epoch:
            self._lose(now, arrival, message)

    async def settle(self) -> float | None:
        """Learn everything that has come, then draft once for the newest state."""
        now = self._now
        if now is None or not now.untaught:
            return None
        lessons, now.untaught = now.untaught, []
        with self._watch.drafting(lessons):
            drafts, seconds = await self._compute.run(
                _learn_and_draft, now.engine, lessons, self.epoch, within=now.deadline.seconds(_rows(lessons))
            )
        now.deadline.took(_rows(lessons), seconds)
        self._watch.drafted(drafts, seconds)
        if drafts.drafts or drafts.rest:
            await now.stage.send(drafts)
        return None

    async def disband(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            self._watch.disbanded()
            await part_with(now.stage.close())

    def _lose(self, now: _Epoch, arrival: Arrival, lost: Lost) -> None:
        """Raises Unavailable where it cannot go on, if whoever says so may."""
        needed = {now.configuration.drafted_for.name, now.configuration.stages[-1].name}
        if lost.peer in needed and lost.peer == arrival.sender and arrival.of("worker"):
            raise Unavailable(f"lost {lost.peer}: {lost.reason}")

    async def _send_taps(self, configuration: Configuration) -> None:
        """Each tap's slice goes to the stage that taps, or to the neighbour that passes it on."""
        for layer, weight in (await self._compute.run(self._source.tap_slices)).items():
            near = configuration.comm_mode == "ring"
            stage = configuration.drafted_for if near else configuration.tapping(layer)
            link = await self._dialer.dial(stage.address, configuration.epoch)
            await link.send(Tap(configuration.epoch, layer, weight))
            await link.close()


def _rows(lessons: list[Features]) -> int:
    """Of the base's laps that brought them, and of what is to be learned."""
    return sum(one.fed + sum(len(lesson.tokens) for lesson in one.lessons) for one in lessons)


def _learn_and_draft(engine: DraftEngine, lessons: list[Features], epoch: int) -> tuple[Drafts, float]:
    """The drafts, and how many seconds they took."""
    begun = time.perf_counter()
    for features in lessons:
        engine.learn(features)
    drafts = Drafts(epoch, engine.draft(), engine.rest)
    return drafts, time.perf_counter() - begun
