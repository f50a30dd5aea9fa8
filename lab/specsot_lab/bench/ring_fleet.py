"""A fleet in this process whose members are connected over TCP, every hop through a proxy that delays.

Master and stage 0 share a host, and so do the last stage and the drafter; all other messages pass a proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from specsot.events import Finished
from specsot.members import HopDtype, Registration
from specsot.params import Ask
from specsot.service.compute import ComputeThread
from specsot.service.membership import RingMember, run_membership
from specsot.service.options import DraftModelOptions
from specsot.transport.grpc_links import GrpcDialer, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Dialer, Inbox, Link, LocalLink
from specsot_app.fleet.embedded import MemberUplink
from specsot_lab.bench.delay_proxy import DelayProxy
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.master import assemble
from specsot_master.members import Membership


@dataclass(frozen=True, slots=True)
class Line:
    """The line between two hosts.

    delay: Seconds in each direction.
    rate: Bytes per second in each direction; None: no limit.
    """

    delay: float = 0.0
    rate: float | None = None


# Sends a request to the fleet, and returns its last event.
Answer = Callable[[Ask], Coroutine[Any, Any, Finished]]


@asynccontextmanager
async def answers_of(
    weights: DraftModelOptions, stages: int, line: Line, hop: HopDtype = "auto"
) -> AsyncGenerator[Answer]:
    """Yield a function that sends requests to a fleet with these models.

    weights: The base model, its EAGLE head and their precision.
    stages: Number of workers.
    line: The line before each worker.
    hop: The type in which hidden rows travel.

    The function waits for the request's end and returns its last event; it raises whatever error ends the
    request. All members have joined before the function is yielded; they leave at the end of the context.
    Raises whatever error forming the ring or loading a model raises.
    """
    master = assemble(weights.base, RingOptions(workers=stages, drafter="eagle", hop_dtype=hop))

    async def answer(ask: Ask) -> Finished:
        """Return the last event of a request.

        ask: The request.

        Raises whatever error ends the request.
        """
        events = [numbered.event async for numbered in master.requests.generate(ask)]
        assert isinstance(events[-1], Finished)
        return events[-1]

    leaving = asyncio.Event()
    async with AsyncExitStack() as stack:
        members = [
            await _start_member(name, weights, line, master.members, leaving, stack)
            for name in (*(f"worker-{number}" for number in range(stages)), "drafter")
        ]
        try:
            await master.complete(with_drafter=True)
            yield answer
        finally:
            leaving.set()
            await asyncio.gather(*members, return_exceptions=True)


async def _start_member(
    name: str,
    weights: DraftModelOptions,
    line: Line,
    membership: Membership,
    leaving: asyncio.Event,
    stack: AsyncExitStack,
) -> asyncio.Task[None]:
    """Start a member with an endpoint and a thread and, if it is a worker, a proxy of its own. Return its
    task, which returns None when the member has left.

    name: Name of the member; "drafter" for the drafter, any other name for a worker.
    weights: What the member loads.
    line: The line before a worker.
    membership: Where the member registers.
    leaving: Set when the member has to end.
    stack: Closes what was opened for the member.

    The member is created on its own thread, so that loading a model does not block the event loop; what
    loading raises is raised here.
    """
    inbox, compute = Inbox(), ComputeThread(name)
    stack.callback(compute.shutdown)
    endpoint = await open_server("127.0.0.1:0", {"specsot.v1.Ring": RingService(inbox, name).attach})
    stack.push_async_callback(endpoint.close, 0)
    address = f"127.0.0.1:{endpoint.port}"
    if name != "drafter":
        proxy = DelayProxy(endpoint.port, line.delay, line.rate)
        await proxy.open()
        stack.push_async_callback(proxy.close)
        address = proxy.address
    member = await asyncio.get_running_loop().run_in_executor(
        compute, _load_member, name, weights, GrpcDialer(name, inbox), compute
    )

    async def connect(registration: Registration) -> Link:
        """Register the member at the address of its proxy, and return its link to the master.

        registration: What the member registers with.
        """
        await membership.join(replace(registration, address=address), LocalLink("master", inbox))
        return MemberUplink(membership, name)

    return asyncio.create_task(run_membership(member, inbox, connect, leaving))


def _load_member(name: str, weights: DraftModelOptions, dialer: Dialer, compute: Executor) -> RingMember:
    """Return a worker or the drafter.

    name: Name of the member; "drafter" for the drafter.
    weights: What it loads.
    dialer: Connects it to other members.
    compute: The executor of its stage or engine.
    """
    if name == "drafter":
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader

        return Drafter(DraftLoader(weights, name), dialer, compute)
    from specsot_worker.loader import StageLoader
    from specsot_worker.worker import Worker

    return Worker(StageLoader(weights, name), dialer, compute)
