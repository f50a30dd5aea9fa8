"""A whole fleet inside this process: the same master, workers and drafter, over in-process links.

It is the embedded default, not a second engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from specsot.checkpoint.cache import cache_folder
from specsot.core.info import Info
from specsot.errors import Hung, SpecsotError, Unavailable
from specsot.events import Numbered
from specsot.members import Range, Registration
from specsot.params import MODELLESS, Ask
from specsot.service.compute import ComputeThread
from specsot.service.membership import Connect, RingMember, run_membership
from specsot.service.options import DraftModelOptions
from specsot.transport.links import Dialer, Exchange, Inbox, Link, LocalDialer, LocalLink, Prepare
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.master import Master, assemble
from specsot_master.members import Membership

log = structlog.get_logger()

MemberMaker = Callable[[str, Dialer, Executor], RingMember]
Loaded = Callable[[str, int], None]  # hears how many layers a worker has

DRAFTER = "drafter"
# Bytes of each member by default: half a service's, as all share one process; not measured.
KV_MEMORY = 1 << 29


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """An embedded fleet. weights: what its members load. ring: what its master makes of them.

    stages: how many workers share the layers. layers, devices: of each of them, if chosen; the drafter is
    beside the last one.
    """

    weights: DraftModelOptions
    ring: RingOptions = field(default_factory=RingOptions)
    stages: int | None = None
    layers: tuple[Range, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def drafts(self) -> bool:
        drafter = self.weights.drafts
        return drafter != "none" and (drafter in MODELLESS or self.weights.draft_model is not None)

    @property
    def crosses(self) -> bool:
        """Rows may pass from one GPU to another."""
        on_gpus = any(device.startswith("cuda") for device in self.devices or (self.weights.device,))
        return on_gpus and len(_ranges(self)) > 1

    @property
    def led(self) -> RingOptions:
        drafter = self.weights.drafts if self.drafts else "none"
        return replace(self.ring, workers=len(_ranges(self)), drafter=drafter)

    def of(self, member: str) -> DraftModelOptions:
        weights = self.weights
        memory = KV_MEMORY if weights.kv_memory is None else weights.kv_memory
        return replace(weights, device=_device(self, member), kv_memory=memory)


class EmbeddedFleet:
    """Start it, ask it, close it. Members that share a GPU, or the cores of a CPU, share a thread."""

    def __init__(self, master: Master, members: list[asyncio.Task[None]], leaving: asyncio.Event) -> None:
        self._master = master
        self._members = members
        self._leaving = leaving

    @classmethod
    async def start(
        cls,
        options: EmbeddedOptions,
        parts: dict[str, MemberMaker] | None = None,
        loaded: Loaded | None = None,
        threads: Threads | None = None,
    ) -> EmbeddedFleet:
        """Load everything and wait until the ring is complete. Raises what loading raises.

        parts: members by name, instead of those the options describe (tests put fakes here).
        loaded: called on the thread that loads.
        threads: to compute on; fleets of one process that take turns share them.
        """
        master = assemble(options.weights.base, options.led, forecasts=cache_folder() / "forecasts")
        parts = parts or _parts(options, loaded)
        exchange = Exchange()
        threads = threads or Threads()
        leaving = asyncio.Event()
        fleet = cls(master, [], leaving)
        for name, make in parts.items():
            inbox = exchange.listen(name)
            compute = _thread(options, threads, name)
            dialer = LocalDialer(name, exchange, compute, _crossing(options))
            make = partial(_make, make, name, dialer, compute, exchange)
            life = asyncio.create_task(_live(make, compute, inbox, _connect(master.members, inbox), leaving))
            life.add_done_callback(partial(fleet._bury, name))
            fleet._members.append(life)
        try:
            await fleet._complete(options.drafts)
        except BaseException:
            await fleet.close()
            raise
        return fleet

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Events of one request, in order. Closing the iterator cancels it."""
        return self._master.requests.generate(ask)

    async def cancel(self, request: str) -> bool:
        return self._master.requests.cancel(request)

    async def info(self) -> Info:
        return self._master.info()

    @property
    def text(self) -> object:
        return self._master.text

    async def close(self) -> None:
        """Let every member leave, and wait until they have. Who still waits for an answer hears of it."""
        self._master.end("the fleet is closed")
        self._leaving.set()
        await asyncio.gather(*self._members, return_exceptions=True)

    def _bury(self, name: str, member: asyncio.Task[None]) -> None:
        """A member has ended, and nobody here starts it again: where no ring can come any more, every request
        hears why, now and later. One that hangs ends them all: others wait for the same thread.
        """
        if self._leaving.is_set() or member.cancelled() or (error := member.exception()) is None:
            return
        reason = f"{name} died: {error if isinstance(error, SpecsotError) else type(error).__name__}"
        if not isinstance(error, SpecsotError):  # one of ours is told, to who opens the fleet or asks it
            log.error("a member died", name=name, exc_info=error)
        self._master.members.on_disconnect(name, reason)
        left = self._master.info().members
        if isinstance(error, Hung) or not any(one.kind == "worker" for one in left):
            self._master.end(reason)

    async def _complete(self, drafts: bool) -> None:
        """Wait for the ring; a member that dies on the way is why it will never come."""
        ready = asyncio.ensure_future(self._master.complete(with_drafter=drafts))
        await asyncio.wait([ready, *self._members], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        ready.cancel()
        for member in self._members:
            if member.done():
                member.result()
        raise Unavailable("a member of the embedded fleet left before the ring was complete")


class MemberUplink:
    """A member's way to the master within one process.

    The master listens in a turn of its own, so that the next lap is under way before it thinks.
    """

    def __init__(self, fleet: Membership, name: str) -> None:
        self._fleet = fleet
        self._name = name

    async def send(self, message: object) -> None:
        asyncio.get_running_loop().call_soon(self._fleet.on_message, self._name, message)

    async def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._fleet.on_disconnect, self._name, "left")


def _connect(fleet: Membership, inbox: Inbox) -> Connect:
    async def connect(registration: Registration) -> Link:
        await fleet.join(registration, LocalLink("master", inbox))
        return MemberUplink(fleet, registration.name)

    return connect


class Threads:
    """To compute on, one for each device.

    Every thread that computes on a CPU has an OpenMP team of its own, and where all teams together have
    more threads than the machine has cores, OpenMP lets them sleep at every turn, idle fleets' counted in.
    """

    def __init__(self) -> None:
        self._of: dict[str, Executor] = {}

    def of(self, device: str) -> Executor:
        if device not in self._of:
            self._of[device] = ComputeThread(f"specsot-{device}")
        return self._of[device]


def _crossing(options: EmbeddedOptions) -> Prepare | None:
    """What becomes of a message before it is sent."""
    if not options.crosses:
        return None
    from specsot.transport.pending_rows import let_rows_cross

    return let_rows_cross


def _thread(options: EmbeddedOptions, threads: Threads, name: str) -> Executor:
    """One for each device. Where the master chooses among GPUs nobody knows yet who shares one, and each
    member has its own.
    """
    device = _device(options, name)
    return threads.of(name if options.crosses and device == "cuda" else device)


def _make(make: MemberMaker, name: str, dialer: Dialer, compute: Executor, exchange: Exchange) -> RingMember:
    part = make(name, dialer, compute)
    exchange.introduce(name, part, compute)
    return part


async def _live(
    make: Callable[[], RingMember], compute: Executor, inbox: Inbox, connect: Connect, leaving: asyncio.Event
) -> None:
    """One member's life. Loading happens on the compute thread, so that the loop stays free."""
    part = await asyncio.get_running_loop().run_in_executor(compute, make)
    await run_membership(part, inbox, connect, leaving)


def _ranges(options: EmbeddedOptions) -> tuple[Range | None, ...]:
    """Of each worker, in ring order; None where the master decides."""
    return options.layers or (None,) * (options.stages or 1)


def _parts(options: EmbeddedOptions, loaded: Loaded | None) -> dict[str, MemberMaker]:
    """Workers in ring order, and the drafter."""
    ranges = {f"worker-{n}": layers for n, layers in enumerate(_ranges(options))}

    def worker(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        from specsot_worker.loader import StageLoader
        from specsot_worker.worker import Worker

        told = partial(loaded, name) if loaded else None
        loader = StageLoader(options.of(name), name, layers=ranges[name], loaded=told)
        return Worker(loader, dialer, compute)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader

        return Drafter(DraftLoader(options.of(name), name), dialer, compute)

    parts: dict[str, MemberMaker] = dict.fromkeys(ranges, worker)
    return parts | ({DRAFTER: drafter} if options.drafts else {})


def _device(options: EmbeddedOptions, name: str) -> str:
    """The drafter is beside the last worker."""
    if not options.devices:
        return options.weights.device
    return options.devices[-1 if name == DRAFTER else int(name.removeprefix("worker-"))]
