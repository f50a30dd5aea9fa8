"""A fleet of hosts in virtual time: the product's master and members, on lanes that faults can touch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specsot.checkpoint.fingerprint import fingerprint
from specsot.core.frames import Result
from specsot.errors import Unavailable
from specsot.events import Numbered
from specsot.members import Broken
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.engine import Engine, EngineConfig, RequestJournal
from specsot_master.grpc_api import FleetService
from specsot_master.journal import Journal, JournalFile
from specsot_master.master import Master, assemble
from specsot_worker.worker import Worker, depth_of
from tests.cut_trees import cut_into
from tests.faults.history import Complained, Doubled, Lapped, Missed, Recorder, Strayed
from tests.faults.members import Member
from tests.faults.net import Host, Net
from tests.faults.parts import Drafting, GuessingSource, Lie, PoisonableWorker
from tests.faults.streams import Stream, reaching
from tests.faults.virtual import Labour, Never, VirtualLoop
from tests.simulator import Simulator, plan_of

BASE = Path(__file__).resolve().parents[2] / "models" / "demo" / "base"
CONDUCT = EngineConfig(live=4, queue=16, lease=64, unread=64, unread_for=10.0, keep_for=20.0, repair_for=40.0)
PAGES, PAGE_ROWS = 160, 16
ROWS = 64  # of a frame
GLANCE = 0.1  # seconds between two looks at what must hold all the time
ASTRAY = 5.0  # seconds for which a stream may live without a member
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
    """rows: of a frame. nodes: of a tree at most. taps: the drafter's head wants features, so that slices of
    it travel to the stages. lie: what the drafter does instead of its best. losses: how many messages come
    late, as lost packets do.
    poisoned: the stage that dies of poison. pages: that one worker alone has for all layers. parts: in how
    many a tree travels that is alone.
    """

    stages: int = 2
    drafter: bool = True
    skill: float = 0.6
    journal: bool = False
    replicas: int = 1
    rows: int = ROWS
    nodes: int = 6
    taps: bool = False
    lie: Lie = ""
    losses: float = 0.0
    poisoned: int = 0
    pages: int = PAGES
    parts: int = 1


class Ears:
    """What FleetService tells of members, on its way to the fleet."""

    def __init__(self, world: World, master: Master) -> None:
        self._world, self._master = world, master

    def knows(self, name: str) -> bool:
        """It is in the roll."""
        return any(one.name == name for each in self._master.replicas for one in each.fleet.registrations)

    async def join(self, *what: Any) -> Any:
        return await self._master.members.join(*what)

    def on_message(self, name: str, message: object, *more: Any) -> None:
        for one in self._world.between.upward(message):
            if isinstance(one, Broken):
                self._world.recorder.note(Complained(name, one.reason))
            self._master.members.on_message(name, one, *more)

    def on_disconnect(self, name: str, *more: Any) -> None:
        known = self.knows(name)
        self._master.members.on_disconnect(name, *more)
        if known and not self.knows(name):
            reason = next((one for one in more if isinstance(one, str)), "")
            self._world.recorder.note(Missed(name, "master", reason))


class House:
    """One life of the master. Whatever it does, it does in its own process."""

    def __init__(self, world: World, master: Master, host: Host, store: JournalFile | None) -> None:
        self.master, self.host, self.store = master, host, store
        self.desk = master.requests
        self.ears = Ears(world, master)
        self.service = FleetService(self.ears)
        self.streams: list[Stream] = []
        self.reviving: asyncio.Task[None] | None = None
        self.dead = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._tending = [self.do(one.fleet.reform_regularly(1.0)) for one in master.replicas]

    def do(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(work, context=self.host.context.copy())

    async def next(self, events: AsyncGenerator[Numbered, None]) -> Numbered | None:
        """A client's next event. Raises Unavailable as soon as the master is dead."""
        coming = self.do(_first(events))
        dying = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait((coming, dying), return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self.dead.is_set():
            coming.cancel()
            await asyncio.wait((coming,))
            raise Unavailable("connection reset")
        return coming.result()

    def cancel(self, id: str) -> None:
        """As soon as it hears it."""
        self.host.tell(partial(self.desk.cancel, id))

    def close(self, events: AsyncGenerator[Numbered, None]) -> None:
        """A client hangs up; it does not wait."""
        task = self.do(events.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def die(self) -> None:
        for task in self._tending:
            task.cancel()
        self.dead.set()
        if self.store:  # its kernel does
            self.store.close()


async def _first(events: AsyncGenerator[Numbered, None]) -> Numbered | None:
    return await anext(events, None)


class World:
    """Everything of one run. `crashed`: what ended a process that should not have ended."""

    def __init__(
        self, rng: random.Random, shape: Shape, between: Honest | None = None, place: Path | None = None
    ) -> None:
        """place: of the journal."""
        self.rng, self.shape, self.between, self._place = rng, shape, between or Honest(), place
        self.recorder, self.net = Recorder(), Net(rng, losses=shape.losses)
        self.crashed: list[BaseException] = []
        self.gone: list[Host] = []  # those that never come back
        self._past: list[House] = []  # what waits in them ends with the run, not whenever memory is tidied
        self.closing, self.restart = False, RESTART
        self.results: list[Result] = []
        self._astray_since = dict[Stream, float]()
        self._seconds = 0.0  # that the work takes which is done now
        self._busy: Host | None = None  # whose it is
        self.members: dict[str, Member] = {}
        self.house = self._build()
        layers = self.house.master.model.layers
        self.mock = Simulator(
            BASE,
            plan=plan_of(BASE, 4, 40),
            kv_memory=shape.pages * PAGE_ROWS * 256 * layers,
            sleep=self._spend,
        )
        for name in self.names:
            self.members[name] = Member(self, name)
        self._reaching = ExitStack()
        self._reaching.enter_context(reaching())
        self._watching = asyncio.create_task(self._watch())

    @property
    def names(self) -> list[str]:
        """Of the first ring first."""
        rings = range(self.shape.replicas)
        workers = [f"worker-{n}" for n in range(self.shape.stages * len(rings))]
        return workers + [f"drafter-{n}" if n else "drafter" for n in rings] * self.shape.drafter

    def make(self, member: Member) -> Any:
        """A member's part, for one life."""
        host, net, shape = member.host, self.net, self.shape

        def compute(work: Callable[[], None]) -> None:
            seconds = self.rng.uniform(0.002, 0.03) * host.slow
            net.at(net.now + seconds, self._compute, host, work, seconds)

        def die() -> None:
            if member.host is host:
                member.die_of("poison")
            raise Never

        labour: Executor = Labour(compute)
        if member.name.startswith("drafter"):
            tells = shape.skill, shape.nodes, shape.taps, shape.lie
            source = GuessingSource(self.mock, member.name, self.rng, *tells)
            return Drafting(source, member, labour)
        clock = asyncio.get_running_loop().time
        dies = member.name == f"worker-{shape.poisoned}"
        provider = PoisonableWorker(self.mock, member.name, die if dies else None)
        make_depth = cut_into(self.shape.parts) if self.shape.parts > 1 else depth_of
        return Worker(provider, member, labour, clock, member.eyes, make_depth=make_depth)

    def _compute(self, host: Host, work: Callable[[], None], seconds: float) -> None:
        """Threads go on while a loop stands still, but not while the whole process does."""
        if host.frozen:
            host.tell(partial(self._compute, host, work, seconds))
            return
        if not host.alive:
            return
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._busy, self._seconds, loop.working = host, seconds, 0.0
        work()
        loop.working = 0.0

    def _spend(self, seconds: float) -> None:
        if self._busy and self._busy.hung:
            raise Never
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.working += self._seconds

    def restart_master(self) -> None:
        """It dies without a word, and is there again at once."""
        self.house.die()
        self.net.kill(self.house.host)
        self._past.append(self.house)
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
            requests = replica.engine.requests()
            for what in ("waiting", "running", "writing"):
                counts[f"{what} {replica.number}"] = getattr(requests, what)
            for member in replica.fleet.registrations:
                counts[f"left in {member.name}"] = _left_in(self.members[member.name], replica.engine)
        return tuple(counts.items())

    def lacking(self) -> str:
        """What the master waits for."""
        return self.house.master.waiting_for()

    @property
    def hosts(self) -> list[Host]:
        """The master's first."""
        return [self.house.host, *(member.host for member in self.members.values())]

    async def _watch(self) -> None:
        """What must hold at every moment."""
        told = set[object]()
        while not self.closing:
            await asyncio.sleep(GLANCE)
            for found in (*self._astray(), *self._doubled()):
                if found not in told:
                    told.add(found)
                    self.recorder.note(found)

    def _astray(self) -> list[Strayed]:
        house = self.house
        if house.host.stalled:
            self._astray_since = {}
            return []
        house.streams = [one for one in house.streams if one.alive or not one.name]
        astray = [one for one in house.streams if one.name and not house.ears.knows(one.name)]
        # A member that leaves is out of the roll a moment before its stream ends.
        self._astray_since = {one: self._astray_since.get(one, self.net.now) for one in astray}
        return [
            Strayed(one.name) for one, since in self._astray_since.items() if since < self.net.now - ASTRAY
        ]

    def _doubled(self) -> list[Doubled]:
        rings: dict[str, list[int]] = {}
        for replica in self.house.master.replicas:
            for request in replica.engine.all_requests:
                rings.setdefault(request.id, []).append(replica.number)
        return [Doubled(id, tuple(numbers)) for id, numbers in rings.items() if len(numbers) > 1]

    async def close(self) -> None:
        self.closing = self.recorder.over = True
        for host in (*self.hosts, *self.gone):
            host.release()
        self._reaching.close()
        self.house.die()
        await asyncio.gather(*(member.stop() for member in self.members.values()))

    def _build(self) -> House:
        host = Host("master")
        return host.context.copy().run(self._build_in, host)

    def _build_in(self, host: Host) -> House:
        shape, loop = self.shape, asyncio.get_running_loop()
        ring = RingOptions(
            workers=shape.stages,
            drafter="eagle" if shape.drafter else "none",
            page_rows=PAGE_ROWS,
            rows=shape.rows,
            draft_timeout=0.2,
            replicas=shape.replicas,
            conduct=CONDUCT,
        )
        store = JournalFile(self._place, fingerprint(BASE)) if self._place else None
        # what is not in the file yet when its master dies is lost
        journal = Journal(store, Labour(lambda work: self._write(host, work))) if store else None
        master = assemble(BASE, ring, int(loop.time() * 1e3), RequestJournal(journal, loop.time))
        for replica in master.replicas:
            replica.engine.steps.follow(self._heard)
        house = House(self, master, host, store)
        if journal:
            house.reviving = house.do(master.leader.revive(journal.kept))
        return house

    def _write(self, host: Host, work: Callable[[], None]) -> None:
        self.net.at(self.net.now + 0.01, host.tell, work)

    def _heard(self, result: Result) -> None:
        self.results.append(result)
        self.recorder.note(Lapped(result.epoch, result.number))


def _left_in(member: Member, conductor: Engine) -> int:
    """Pages, or texts, that are of no beginning that is kept."""
    if isinstance(member.part, Drafting):
        texts = member.part.guesser.texts if member.part.guesser and member.part.epoch else {}
        return len(texts.keys() - set(conductor.kept))
    free = member.part.free_pages
    return 0 if free is None else max(member.eyes.pages - free - conductor.prefix_pages, 0)
