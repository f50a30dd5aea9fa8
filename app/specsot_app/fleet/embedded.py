"""Runs a whole fleet inside this process: the same master, workers and drafter, over in-process links.

This is the embedded default. It uses the same engine as a fleet of processes.
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
from specsot_app.fleet.options import EMBEDDED_KV_MEMORY, OWN_DRAFTER_WAIT
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.master import Master, assemble
from specsot_master.members import Membership

log = structlog.get_logger()

# Makes a member from its name, the dialer that connects it to others, and the thread on which it computes.
MemberMaker = Callable[[str, Dialer, Executor], RingMember]
# Called with a worker's name and the number of layers that it has loaded.
Loaded = Callable[[str, int], None]

# Name of the drafter of an embedded fleet.
DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """Options of an embedded fleet.

    weights: Options of the weights that the members load.
    ring: Options of the master's ring.
    stages: Number of workers that share the layers; None: as many as `layers` has ranges, else one.
    layers: Layer range of each worker; empty: the master decides.
    devices: Torch device of each worker; empty: the device of `weights`. The drafter runs on the last
        worker's device.
    """

    weights: DraftModelOptions
    ring: RingOptions = field(default_factory=RingOptions)
    stages: int | None = None
    layers: tuple[Range, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def drafts(self) -> bool:
        """Return whether the fleet has a drafter: one that needs no model, or one whose model is given."""
        drafter = self.weights.drafts
        return drafter != "none" and (drafter in MODELLESS or self.weights.draft_model is not None)

    @property
    def crosses_gpus(self) -> bool:
        """Return whether hidden states may pass from one GPU to another: some member computes on a GPU, and
        there are several workers.
        """
        on_gpus = any(device.startswith("cuda") for device in self.devices or (self.weights.device,))
        return on_gpus and len(_ranges(self)) > 1

    @property
    def ring_options(self) -> RingOptions:
        """Return the ring's options with the number of workers, the drafter and the wait for it filled in."""
        drafter = self.weights.drafts if self.drafts else "none"
        num_workers = len(_ranges(self))
        return replace(self.ring, workers=num_workers, drafter=drafter, drafter_wait=OWN_DRAFTER_WAIT)

    def member_options(self, member: str) -> DraftModelOptions:
        """Return the options with which one member loads: its device and its KV memory are filled in.

        Without a chosen KV memory it is EMBEDDED_KV_MEMORY bytes. The drafter may have a KV memory of its
        own.

        member: The member's name, "drafter" or "worker-0", "worker-1" and so on.
        """
        weights = self.weights
        memory = EMBEDDED_KV_MEMORY if weights.kv_memory is None else weights.kv_memory
        if member == "drafter" and weights.draft_kv_memory is not None:
            memory = weights.draft_kv_memory
        return replace(weights, device=_device(self, member), kv_memory=memory)


class EmbeddedFleet:
    """A fleet to start, ask and close. Members that share a GPU, or the cores of a CPU, share a thread.

    master: The master of this fleet.
    members: The tasks that run the members, one each.
    leaving: Event that is set when all members have to end.
    """

    def __init__(self, master: Master, members: list[asyncio.Task[None]], leaving: asyncio.Event) -> None:
        self._master = master
        self._members = members
        self._leaving = leaving

    @classmethod
    async def start(
        cls,
        options: EmbeddedOptions,
        member_makers: dict[str, MemberMaker] | None = None,
        on_loaded: Loaded | None = None,
        threads: Threads | None = None,
    ) -> EmbeddedFleet:
        """Load all members and wait until the ring is complete. Raises what loading raises, after closing
        everything.

        Raises Unavailable if a member ended without an error before the ring was complete. If this call is
        cancelled, everything is closed as well.

        options: Options that say what to load, and where.
        member_makers: Makers of the members by name, which replace those that the options describe (tests
            pass fakes); None or empty: those of the options.
        on_loaded: Called on the thread that loads, with a worker's name and its number of loaded layers;
            None: nothing is reported.
        threads: Threads to compute on; fleets of one process that run in turn share them; None makes new
            threads.
        """
        master = assemble(
            options.weights.base, options.ring_options, forecast_directory=cache_folder() / "forecasts"
        )
        member_makers = member_makers or _member_makers(options, on_loaded)
        exchange = Exchange()
        threads = threads or Threads()
        leaving = asyncio.Event()
        fleet = cls(master, [], leaving)
        for name, maker in member_makers.items():
            inbox = exchange.listen(name)
            compute = _executor_for(options, threads, name)
            dialer = LocalDialer(name, exchange, compute, _before_sending(options))
            maker = partial(_made_member, maker, name, dialer, compute, exchange)
            task = asyncio.create_task(
                _run_member(maker, compute, inbox, _connect(master.members, inbox), leaving)
            )
            task.add_done_callback(partial(fleet._on_exit, name))
            fleet._members.append(task)
        try:
            await fleet._complete(options.drafts)
        except BaseException:
            await fleet.close()
            raise
        return fleet

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Yield the events of one request, in order. Closing the iterator cancels the request.

        ask: The request.
        """
        return self._master.requests.generate(ask)

    async def cancel(self, request: str) -> bool:
        """Cancel a request, which then ends with the reason CANCELLED. Return whether the request was known.

        request: The request's id, which its `Started` event has.
        """
        return self._master.requests.cancel(request)

    async def info(self) -> Info:
        """Return the state of the fleet."""
        return self._master.info()

    @property
    def text(self) -> object:
        """Return the master's tokenizer, an object of `specsot_master.text.Text`."""
        return self._master.text

    async def close(self) -> None:
        """Let every member leave, and wait until all have left. Requests that are still waiting end with an
        error.

        Errors of members are dropped.
        """
        self._master.end("the fleet is closed")
        self._leaving.set()
        await asyncio.gather(*self._members, return_exceptions=True)

    def _on_exit(self, name: str, member: asyncio.Task[None]) -> None:
        """Handle the end of a member; an embedded member is never started again.

        If no ring can form any more (no worker is left), every current and later request fails with the
        reason. A member that hangs ends all of them, since other members wait for the same thread. Nothing
        happens if the fleet is being closed, or the member ended without an error.

        A cancelled member is ignored as well. Members other than the ended one continue if a worker is left.

        name: The member's name.
        member: Its task, which is done.
        """
        if self._leaving.is_set() or member.cancelled() or (error := member.exception()) is None:
            return
        reason = f"{name} failed: {error if isinstance(error, SpecsotError) else type(error).__name__}"
        # A SpecsotError reaches the caller who opens or asks the fleet, so that only others are logged.
        if not isinstance(error, SpecsotError):
            log.error("a member died", name=name, exc_info=error)
        self._master.members.on_disconnect(name, reason)
        remaining = self._master.info().members
        if isinstance(error, Hung) or not any(member.kind == "worker" for member in remaining):
            self._master.end(reason)

    async def _complete(self, with_drafter: bool) -> None:
        """Wait for the ring to be complete. If a member fails before that, raise its error.

        If several members have failed, the error of the first in the list is raised.

        with_drafter: True: also wait for a drafter.
        Raises Unavailable if a member ended without an error before the ring was complete.
        """
        ready = asyncio.ensure_future(self._master.complete(with_drafter=with_drafter))
        await asyncio.wait([ready, *self._members], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        ready.cancel()
        for member in self._members:
            if member.done():
                member.result()
        raise Unavailable("a member of the embedded fleet left before the ring was complete")


class MemberUplink:
    """A member's link to the master within one process.

    The master handles a message in a later turn of the event loop, so that the next step starts before the
    master's work.

    membership: The master's side of all members.
    name: The member's name.
    """

    def __init__(self, membership: Membership, name: str) -> None:
        self._membership = membership
        self._name = name

    async def send(self, message: object) -> None:
        """Schedule a message for the master, on the current event loop.

        message: Any message of a member, such as a result.
        """
        asyncio.get_running_loop().call_soon(self._membership.on_message, self._name, message)

    async def close(self) -> None:
        """Schedule the master's notice that the member left."""
        asyncio.get_running_loop().call_soon(self._membership.on_disconnect, self._name, "left")


def _connect(membership: Membership, inbox: Inbox) -> Connect:
    """Return the function with which members of this process register at the master.

    The returned function raises what the master refuses a member with; it returns a link over which the
    member sends to the master.

    membership: The master's side of all members.
    inbox: The member's inbox, which receives the master's messages.
    """

    async def connect(registration: Registration) -> Link:
        """Register a member, and return its link to the master. Raises what the master refuses a member with.

        registration: The member's description of itself: kind, name, address, sizes.
        """
        await membership.join(registration, LocalLink("master", inbox))
        return MemberUplink(membership, registration.name)

    return connect


class Threads:
    """Compute threads, one for each device.

    Every thread that computes on a CPU has an OpenMP team of its own. If all teams together, including those
    of idle fleets, have more threads than the machine has cores, OpenMP lets the threads sleep at every
    barrier.
    """

    def __init__(self) -> None:
        self._by_device: dict[str, Executor] = {}

    def executor_of(self, device: str) -> Executor:
        """Return the device's thread, which is started at its first use.

        device: A torch device, or a member's name if the member has a thread of its own.
        """
        if device not in self._by_device:
            self._by_device[device] = ComputeThread(f"specsot-{device}")
        return self._by_device[device]


def _before_sending(options: EmbeddedOptions) -> Prepare | None:
    """Return a function that prepares a message before it is sent, so that tensors can move to another GPU.
    Return None if tensors never change their GPU.

    Tensors may change their GPU only if several workers compute on GPUs.

    options: Options of the fleet.
    """
    if not options.crosses_gpus:
        return None
    from specsot.transport.pending_rows import let_rows_transfer

    return let_rows_transfer


def _executor_for(options: EmbeddedOptions, threads: Threads, name: str) -> Executor:
    """Return the thread on which a member computes: one for each device.

    If the master chooses among GPUs, it is not known yet which members share one, and each member has its own
    thread.

    Only the device "cuda" without a number leaves the choice to the master.

    options: Options of the fleet.
    threads: The threads of the fleet; a missing one is made.
    name: The member's name.
    """
    device = _device(options, name)
    return threads.executor_of(name if options.crosses_gpus and device == "cuda" else device)


def _made_member(
    maker: MemberMaker, name: str, dialer: Dialer, compute: Executor, exchange: Exchange
) -> RingMember:
    """Make a member and register it with the exchange. Runs on the member's thread, since making it loads the
    model.

    maker: Makes the member from its name, dialer and thread.
    name: The member's name.
    dialer: Connects the member to others.
    compute: The member's thread.
    exchange: Registry in which other members find this one.
    """
    member = maker(name, dialer, compute)
    exchange.introduce(name, member, compute)
    return member


async def _run_member(
    maker: Callable[[], RingMember],
    executor: Executor,
    inbox: Inbox,
    connect: Connect,
    leaving: asyncio.Event,
) -> None:
    """Run one member from loading to leaving. Loading happens on its thread, so that the event loop stays
    free.

    maker: Makes the member; takes no arguments.
    executor: The member's thread.
    inbox: Queue that receives messages for the member.
    connect: Registers the member at the master.
    leaving: Event that is set when the member has to end.
    """
    member = await asyncio.get_running_loop().run_in_executor(executor, maker)
    await run_membership(member, inbox, connect, leaving)


def _ranges(options: EmbeddedOptions) -> tuple[Range | None, ...]:
    """Return the layer range of each worker in ring order; None for ranges that the master decides.

    options: Options of the fleet.
    """
    return options.layers or (None,) * (options.stages or 1)


def _member_makers(options: EmbeddedOptions, on_loaded: Loaded | None) -> dict[str, MemberMaker]:
    """Return the makers of the members by name: workers in ring order, then the drafter, if there is one.

    Making a member imports torch and loads its weights, so call it on the member's thread. If a worker
    computes on a GPU, the processes that compile kernels are started now, see `gpu_compilers`.

    options: Options of the fleet.
    on_loaded: Called with a worker's name and its number of loaded layers; None: nothing is reported.
    """
    from specsot_kernels.gpu_compilers import start_unless_compiled

    ranges = {f"worker-{n}": layers for n, layers in enumerate(_ranges(options))}
    if any(_device(options, name).startswith("cuda") for name in ranges):
        start_unless_compiled(replace(options.weights, kv_memory=None, draft_kv_memory=None))

    def worker(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        """Make a worker, which loads its layers.

        name: The member's name.
        dialer: Connects the worker to other members.
        compute: The worker's thread.
        """
        from specsot_worker.loader import StageLoader
        from specsot_worker.worker import Worker

        callback = partial(on_loaded, name) if on_loaded else None
        loader = StageLoader(options.member_options(name), name, layers=ranges[name], loaded=callback)
        return Worker(loader, dialer, compute)

    def drafter(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        """Make the drafter, which loads its head or model.

        name: The member's name.
        dialer: Connects the drafter to other members.
        compute: The drafter's thread.
        """
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader

        return Drafter(DraftLoader(options.member_options(name), name), dialer, compute)

    member_makers: dict[str, MemberMaker] = dict.fromkeys(ranges, worker)
    return member_makers | ({DRAFTER: drafter} if options.drafts else {})


def _device(options: EmbeddedOptions, name: str) -> str:
    """Return a member's device; the drafter runs on the last worker's.

    Without `devices`, every member has the device of the weights.

    options: Options of the fleet.
    name: The member's name, "drafter" or "worker-0", "worker-1" and so on.
    """
    if not options.devices:
        return options.weights.device
    return options.devices[-1 if name == DRAFTER else int(name.removeprefix("worker-"))]
