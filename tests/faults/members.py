"""Members of a fleet in virtual time: processes that are started again when they end, and what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from specsot.core.frames import Close, Frame, Lease, Open, PromptChunk
from specsot.errors import Hung, Refused, SpecsotError, Unavailable
from specsot.members import Configuration, Registration
from specsot.service.membership import run_membership
from specsot.transport.links import Inbox, Link, Lost
from specsot_worker.observer import WorkerObserver
from specsot_worker.stage_provider import StageRunner
from tests.faults.history import Closed, Composed, Formed, Hurt, Limited, Missed, Opened, Worked
from tests.faults.net import Host
from tests.faults.streams import Stream, join
from tests.faults.virtual import forget_grammars

if TYPE_CHECKING:
    from tests.faults.world import World

DIALING = 5.0  # seconds until a host that does not answer is given up


class Eyes(WorkerObserver):
    """Writes down what a worker does."""

    def __init__(self, note: Callable[[Any], None], member: str) -> None:
        self._note, self._member = note, member
        self.pages = self.epoch = self._rows = 0

    def formed(self, configuration: Configuration, stage: StageRunner) -> None:
        self.pages, self.epoch, self._rows = configuration.pages, configuration.epoch, configuration.rows
        self._note(Formed(self._member, configuration.epoch))

    def launched(self, frame: Frame, now: float) -> Frame:
        begun = tuple(one.sequence for one in frame.segments if isinstance(one, PromptChunk) and one.final)
        self._note(Composed(frame.epoch, frame.number, self._rows, begun))
        return frame

    def computed(self, frame: Frame, seconds: float) -> None:
        self._note(Worked(self._member, frame.epoch, frame.number, frame.part))


class Ear(Inbox):
    """A member's inbox; what the master says is written down."""

    def __init__(self, world: World, host: Host) -> None:
        super().__init__()
        self._world, self._host, self._member = world, host, host.name
        self.eyes: Eyes | None = None
        # The length of each prefix that this process was told to open, by epoch and sequence.
        self._prefixes: dict[tuple[int, int], int] = {}

    def put(self, sender: str, message: Any) -> None:
        if sender != "master":
            super().put(sender, message)
            return
        for one in self._world.between.downward(message):
            self._note(one)
            super().put(sender, one)

    def _note(self, message: Any) -> None:
        note = self._world.recorder.note
        if not self._host.alive:
            return
        match message:
            case Lost(_, reason):
                note(Missed("master", self._member, reason))
            case Open(opening, tokens) if self.eyes:
                note(Opened(self.eyes.epoch, opening.sequence, len(tokens)))
                if not opening.decodes:
                    self._prefixes[self.eyes.epoch, opening.sequence] = opening.prompt
            case Close(sequence) if self.eyes:
                note(Closed(self.eyes.epoch, sequence))
            case Lease(sequence, position) if self.eyes:
                prompt = self._prefixes.get((self.eyes.epoch, sequence))
                if prompt is not None:
                    note(Limited(self.eyes.epoch, sequence, position < prompt))
            case _:
                pass


class Member:
    """A process that is started again whenever it ends, as by any supervisor."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name
        self._lives = 0
        self._vanished: list[asyncio.Task[None]] = []
        self._live()

    def _live(self) -> None:
        world = self._world
        self._lives += 1
        forget_grammars()
        self.host = host = Host(self.name)
        self.inbox = inbox = Ear(world, host)
        self.leaving = asyncio.Event()
        self.eyes = inbox.eyes = Eyes(world.recorder.note, f"{self.name}#{self._lives}")
        self.part = world.make(self)
        connect = partial(self._connect, self._lives, host, inbox)
        work = run_membership(self.part, inbox, connect, self.leaving)
        self._task = asyncio.create_task(work, context=host.context)
        self._task.add_done_callback(lambda task: self._over(task, host), context=world.net.context)

    def kill(self) -> None:
        self._world.net.kill(self.host)
        self._task.cancel()

    def die_of(self, poison: str) -> None:
        """In the middle of its work."""
        self._world.recorder.note(Hurt(poison, self.name))
        self.kill()

    def hang(self) -> None:
        """What it computes from now on never ends; all else goes on."""
        self.host.hung = True

    def vanish(self) -> None:
        """Without a word, as when its machine loses power; the next one is there at once."""
        self._world.net.freeze(self.host)
        self._world.gone.append(self.host)
        self._vanished.append(self._task)
        self._live()

    def _over(self, task: asyncio.Task[None], host: Host) -> None:
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Refused | Hung):
            self._world.crashed.append(error)
        self._world.net.kill(host)
        if not self._world.closing:
            net = self._world.net
            net.at(net.now + self._world.rng.uniform(*self._world.restart), self._again)

    def _again(self) -> None:
        if not self._world.closing:
            self._live()

    async def stop(self) -> None:
        self.host.release()
        for task in (self._task, *self._vanished):
            task.cancel()
            with suppress(asyncio.CancelledError, SpecsotError):
                await task

    async def dial(self, address: str, epoch: int, kind: str = "worker") -> Link:
        """A Dialer: this member's own."""
        net, peer = self._world.net, self._world.members[address]
        here, there, mine, theirs = self.host, peer.host, self.inbox, peer.inbox
        await asyncio.sleep(net.delay())
        try:
            lane = net.open(here, there, lambda message: theirs.put(here.name, message))
        except Unavailable:
            await asyncio.sleep(DIALING)
            raise
        lane.on_lost = [
            (here, lambda reason: mine.put(address, Lost(address, reason, epoch))),
            (there, lambda reason: theirs.put(here.name, Lost(here.name, reason, epoch))),
        ]
        return lane

    async def _connect(self, life: int, here: Host, inbox: Inbox, registration: Registration) -> Link:
        world, house = self._world, self._world.house
        await asyncio.sleep(world.net.delay())
        if here.frozen:
            raise Unavailable("nothing moves here")
        try:
            stream = Stream(world.net, world.rng, here, house.host, house.service)
        except Unavailable:
            await asyncio.sleep(DIALING)
            raise
        house.streams.append(stream)
        return await join(world.net, stream, replace(registration, began=life), inbox)
