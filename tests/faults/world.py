"""A fleet of hosts in virtual time: the product's master and members, on lanes that faults can touch.

Refuses to know which faults come, and what must hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specsot.errors import Hung, Refused, SpecsotError, Unavailable
from specsot.events import Numbered
from specsot.frames import Frame, Result
from specsot.links import Inbox, Link, Lost
from specsot.members import Configuration, Registration
from specsot.membership import take_part
from specsot.model.fingerprint import fingerprint
from specsot.pages import PageTable
from specsot_app.mock.members import Mock, MockWorker, plan_of
from specsot_master.assembly import MasterSettings, assemble
from specsot_master.conductor import Conductor, ConductorConfig, Notes
from specsot_master.desk import Desk
from specsot_master.journal import Journal
from specsot_master.journal.store import Store
from specsot_master.master import Master
from specsot_worker.part import WorkerPart
from specsot_worker.watching import Watch
from tests.faults.history import Formed, Lapped, Recorder, Worked
from tests.faults.net import Host, Net
from tests.faults.parts import GuessingDrafter
from tests.faults.virtual import Labour, Never

BASE = Path(__file__).resolve().parents[2] / "models" / "demo" / "base"
CONDUCT = ConductorConfig(
    live=4, queue=16, lease=64, unread=64, unread_for=10.0, keep_for=20.0, repair_for=40.0
)
PAGES, PAGE_ROWS = 160, 16
DIALING = 5.0  # seconds until a host that does not answer is given up
RESTART = (0.2, 4.0)  # seconds until a process that ended is started again


class Honest:
    """What lies between master, ring and clients: every message once. Planted bugs change it."""

    def upward(self, message: Any) -> list[Any]:
        return [message]

    def downward(self, message: Any) -> list[Any]:
        return [message]

    def told(self, numbered: Numbered) -> list[Numbered]:
        return [numbered]


@dataclass(frozen=True)
class Shape:
    stages: int = 2
    drafter: bool = True
    skill: float = 0.6
    journal: bool = False
    replicas: int = 1


class House:
    """One life of the master."""

    def __init__(self, master: Master, host: Host) -> None:
        self.master, self.host = master, host
        self.desk = Desk(master.leader, master.info)
        self.store: Store | None = None
        self.reviving: asyncio.Task[None] | None = None
        self.dead = asyncio.Event()
        self._tending = [asyncio.create_task(one.fleet.tend(1.0)) for one in master.replicas]

    async def next(self, events: AsyncGenerator[Numbered, None]) -> Numbered | None:
        """A client's next event. Raises Unavailable as soon as the master is dead."""
        coming, dying = asyncio.ensure_future(anext(events, None)), asyncio.ensure_future(self.dead.wait())
        await asyncio.wait((coming, dying), return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self.dead.is_set():
            coming.cancel()
            await asyncio.wait((coming,))
            raise Unavailable("connection reset")
        return coming.result()

    def die(self) -> None:
        for task in self._tending:
            task.cancel()
        self.dead.set()
        if self.store:  # its kernel does
            self.store.close()


class Eyes(Watch):
    """Writes down what a worker does."""

    def __init__(self, note: Callable[[Any], None], member: str) -> None:
        self._note, self._member = note, member
        self.pages = 0

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        self.pages = configuration.pages
        self._note(Formed(self._member, configuration.epoch))

    def worked(self, frame: Frame, seconds: float) -> None:
        self._note(Worked(self._member, frame.epoch, frame.number))


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
        self.host, self.inbox, self.leaving = host, inbox, _ = Host(self.name), Inbox(), asyncio.Event()
        self.eyes = Eyes(world.recorder.note, f"{self.name}#{self._lives}")
        self.part = world.make(self)
        connect = partial(self._connect, self._lives, host, inbox)
        self._task = asyncio.create_task(take_part(self.part, inbox, connect, self.leaving))
        self._task.add_done_callback(lambda task: self._over(task, host))

    def kill(self) -> None:
        self._world.net.kill(self.host)
        self._task.cancel()

    def hang(self) -> None:
        """What it computes from now on never ends; all else goes on."""
        self.host.hung = True

    def vanish(self) -> None:
        """Without a word, as when its machine loses power; the next one is there at once."""
        self._world.net.freeze(self.host)
        self._vanished.append(self._task)
        self._live()

    def _over(self, task: asyncio.Task[None], host: Host) -> None:
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, Refused | Hung):
            self._world.crashed.append(error)
        self._world.net.kill(host)
        if not self._world.closing:
            pause = self._world.rng.uniform(*self._world.restart)
            asyncio.get_running_loop().call_later(pause, self._again)

    def _again(self) -> None:
        if not self._world.closing:
            self._live()

    async def stop(self) -> None:
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
        fleet = house.master.members

        def hear(message: object) -> None:
            if down.closed:
                return
            for one in world.between.upward(message):
                fleet.heard(self.name, one)

        def obey(message: object) -> None:
            for one in world.between.downward(message):
                inbox.put("master", one)

        try:
            up = world.net.open(here, house.host, hear)
            down = world.net.open(house.host, here, obey)
        except Unavailable:
            await asyncio.sleep(DIALING)
            raise
        await fleet.join(replace(registration, began=life), down)

        def gone(reason: str) -> None:
            up.lose(reason)
            down.lose(reason)

        def lost(reason: str) -> None:
            if not down.closed:
                fleet.lost(self.name, reason)

        up.on_lost = [(house.host, lost), (here, gone)]
        down.on_lost = [(here, lambda reason: inbox.put("master", Lost("master", reason))), (here, gone)]
        return up


class World:
    """Everything of one run. `crashed`: what ended a process that should not have ended."""

    def __init__(
        self,
        rng: random.Random,
        shape: Shape,
        between: Honest | None = None,
        place: Path | None = None,
    ) -> None:
        """place: of the journal."""
        self.rng, self.shape, self.between, self._place = rng, shape, between or Honest(), place
        self.recorder, self.net = Recorder(), Net(rng)
        self.crashed: list[BaseException] = []
        self.closing, self.restart = False, RESTART
        self.results: list[Result] = []
        self._busy: Host | None = None  # whose work is done now
        self.members: dict[str, Member] = {}
        self.house = self._build()
        layers = self.house.master.model.layers
        self.mock = Mock(
            BASE,
            plan=plan_of(BASE, 4, 40),
            kv_memory=PAGES * PAGE_ROWS * 256 * layers,
            sleep=self._spend,
        )
        for name in self.names:
            self.members[name] = Member(self, name)

    @property
    def names(self) -> list[str]:
        """Of the first ring first."""
        rings = range(self.shape.replicas)
        workers = [f"worker-{n}" for n in range(self.shape.stages * len(rings))]
        return workers + [f"drafter-{n}" if n else "drafter" for n in rings] * self.shape.drafter

    def make(self, member: Member) -> Any:
        """A member's part, for one life."""
        host = member.host

        def compute(work: Callable[[], None]) -> None:
            seconds = self.rng.uniform(0.002, 0.03)
            asyncio.get_running_loop().call_later(seconds, host.tell, partial(self._compute, host, work))

        labour: Executor = Labour(compute)
        provider = MockWorker(self.mock, member.name, member.name)
        if member.name.startswith("drafter"):
            mine = replace(provider.registration(), kind="drafter", row_bytes=0)
            return GuessingDrafter(mine, member, self.mock.voice, self.rng, self.shape.skill)
        clock = asyncio.get_running_loop().time
        return WorkerPart(provider, member, labour, clock, member.eyes)

    def _compute(self, host: Host, work: Callable[[], None]) -> None:
        self._busy = host
        work()

    def _spend(self, seconds: float) -> None:
        if self._busy and self._busy.hung:
            raise Never

    def restart_master(self) -> None:
        """It dies without a word, and is there again at once."""
        self.house.die()
        self.net.kill(self.house.host)
        self.house = self._build()

    async def complete(self, within: float) -> bool:
        """Whether the ring is complete within so many seconds, all members in it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while True:
                    with suppress(Unavailable):  # somebody cannot take part yet
                        await self.house.master.complete(with_drafter=self.shape.drafter)
                        return True
                    await asyncio.sleep(1.0)
        return False

    def left(self) -> tuple[tuple[str, int], ...]:
        """What is there, with nobody asking."""
        counts: dict[str, int] = {}
        for replica in self.house.master.replicas:
            requests = replica.conductor.requests()
            for what in ("waiting", "running", "writing"):
                counts[f"{what} {replica.number}"] = getattr(requests, what)
            for member in replica.fleet.registrations:
                counts[f"left in {member.name}"] = _left_in(self.members[member.name], replica.conductor)
        return tuple(counts.items())

    async def close(self) -> None:
        self.closing = True
        self.house.die()
        await asyncio.gather(*(member.stop() for member in self.members.values()))

    def _build(self) -> House:
        settings = MasterSettings(
            BASE,
            workers=self.shape.stages,
            drafter=self.shape.drafter,
            page_rows=PAGE_ROWS,
            rows=64,
            draft_timeout=0.2,
            replicas=self.shape.replicas,
            conduct=CONDUCT,
        )
        loop, host = asyncio.get_running_loop(), Host("master")
        store = Store(self._place, fingerprint(BASE)) if self._place else None
        # what is not in the file yet when its master dies is lost
        journal = (
            Journal(store, Labour(lambda work: loop.call_later(0.01, host.tell, work))) if store else None
        )
        master = assemble(settings, int(loop.time() * 1e3), Notes(journal, loop.time))
        for replica in master.replicas:
            replica.laps.follow(self._heard)
        house = House(master, host)
        house.store = store
        if journal:
            house.reviving = asyncio.create_task(master.leader.revive(journal.kept))
        return house

    def _heard(self, result: Result) -> None:
        self.results.append(result)
        self.recorder.note(Lapped(result.epoch, result.number))


def _left_in(member: Member, conductor: Conductor) -> int:
    """Pages, or texts, that are of no beginning that is kept."""
    if isinstance(member.part, GuessingDrafter):
        return len(member.part.texts.keys() - set(conductor.kept))
    free = member.part.free_pages
    return 0 if free is None else max(member.eyes.pages - free - conductor.kept_pages, 0)
