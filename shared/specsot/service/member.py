"""Runs a process of a worker, a drafter, or both: opens servers, builds members, serves until told to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from specsot.checkpoint.borrowed import borrowed_of
from specsot.checkpoint.config import require_torch
from specsot.checkpoint.fingerprint import fingerprint
from specsot.errors import InvalidRequest, ModelError
from specsot.members import Configuration, HandOver, Kind, Registration, StandBy
from specsot.service.compute import ComputeThread
from specsot.service.lifecycle import run_service, write_logs
from specsot.service.membership import InboxWatcher, RingMember, run_membership
from specsot.service.options import MemberOptions, ModelOptions, ServiceOptions, name_of, reachable
from specsot.service.runtime_env import return_freed_memory
from specsot.service.telemetry import Observation, observed
from specsot.tasks import IdleTimer
from specsot.transport.grpc_channel import LINK, Terms
from specsot.transport.grpc_links import ROLE_SERVICES, SERVICE, GrpcDialer, RingService
from specsot.transport.grpc_server import GrpcServer, open_server
from specsot.transport.lending import MODELS_SERVICE, Lenders, LendingService, borrow
from specsot.transport.links import Arrival, Dialer, Dialers, Exchange, Inbox, Link, LocalDialer
from specsot.transport.nccl_links import DirectDialer, DirectHost
from specsot.transport.uplink import join
from specsot.transport.zmq_links import Sockets, ZmqDialer, ZmqHost

log = structlog.get_logger()

# Seconds. How long a member may take to leave after a signal; a running download is abandoned. Untuned.
LEAVING_SECONDS = 5.0
# Seconds without work after which freed memory is returned to the system. Untuned.
IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class MemberProgram:
    """A member as its command line describes it.

    kind: "worker" or "drafter".
    member: options of every member.
    service: options of every service.
    options: options of this kind. If they name no model, the model is fetched from other members.
    make: creates the member from (observation, options, name, address, dialer, compute). Called on the
        compute thread.
    """

    kind: Kind
    member: MemberOptions
    service: ServiceOptions
    options: ModelOptions
    make: Callable[[Observation, Any, str, str, Dialer, Executor], RingMember]


class ReportingMember:
    """Wraps a member and reports its health: SERVING while the member is configured for an epoch.

    The health status is reported for the service "specsot.v1.Ring" and for the service of the member's kind,
    such as "specsot.v1.Worker". The wrapper also selects the transport of each epoch.
    """

    def __init__(
        self, part: RingMember, kind: Kind, endpoint: GrpcServer, dialers: Dialers, idle_timer: IdleTimer
    ) -> None:
        """part: the wrapped member.

        endpoint: the gRPC server that reports the health.
        dialers: the dialers by transport.
        idle_timer: restarted whenever there is work.
        """
        self._part = part
        self._endpoint = endpoint
        self._dialers = dialers
        self._idle = idle_timer
        self._services = (SERVICE, ROLE_SERVICES[kind])

    @property
    def epoch(self) -> int:
        return self._part.epoch

    def watch(self, arrived: Callable[[], bool]) -> None:
        if isinstance(self._part, InboxWatcher):
            self._part.watch(arrived)

    async def registration(self) -> Registration:
        return await self._part.registration()

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        self._dialers.turn_to(configuration.transport)
        await self._part.configure(configuration, uplink)
        await self._report(True)

    async def prepare(self, order: StandBy | HandOver, uplink: Link) -> None:
        await self._part.prepare(order, uplink)

    async def handle(self, arrival: Arrival) -> None:
        await self._part.handle(arrival)

    async def settle(self) -> float | None:
        self._idle.restart()
        return await self._part.settle()

    async def disband(self) -> None:
        await self._report(False)
        await self._part.disband()

    async def _report(self, serving: bool) -> None:
        for service in self._services:
            await self._endpoint.report(service, serving)


def run_members(*programs: MemberProgram) -> int:
    """Run a process of a worker, of a drafter, or of both until a signal; return its exit status."""
    first = programs[0]
    write_logs(first.kind, first.service.log_format, first.service.log_level)

    async def work(leaving: asyncio.Event) -> None:
        require_torch()
        exchange, compute, several = Exchange(), ComputeThread("compute"), len(programs) > 1
        try:
            with ExitStack() as stack:
                seen = [stack.enter_context(observed(one.kind, one.service)) for one in programs]
                shared = leaving, exchange, compute, several
                await _together(_serve(*each, *shared) for each in zip(programs, seen))
        # If one member fails, computations of the other must end before Python exits.
        except (InvalidRequest, ModelError):
            compute.shutdown(wait=several, cancel_futures=True)
            raise
        finally:
            compute.shutdown(wait=False, cancel_futures=True)

    return run_service(f"specsot-{first.kind}", work, within=LEAVING_SECONDS)


async def _together(members: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all members until they end. If one raises, cancel the others, wait for them, and raise the
    error.
    """
    tasks = [asyncio.create_task(one) for one in members]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _serve(
    program: MemberProgram,
    seen: Observation,
    leaving: asyncio.Event,
    exchange: Exchange,
    compute: Executor,
    several: bool,
) -> None:
    """Run one member until `leaving` is set.

    seen: the member's metrics and spans.
    exchange: the members of this process.
    compute: the thread on which all members of this process compute.
    several: True if the process has several members, so that log lines name the member.

    Raises what `MemberProgram.make` raises, Refused, Unavailable.
    """
    options = program.options
    service = program.service
    member = program.member
    if several:
        structlog.contextvars.bind_contextvars(service=program.kind)
    began, inbox, sockets = time.time_ns(), Inbox(), Sockets()
    host = ZmqHost(service.listen, inbox, sockets)
    rows = DirectHost()
    ring = RingService(inbox, host=host, rows=rows, nearby=True)
    lending = LendingService()
    terms = Terms(keepalive=LINK, reflection=service.reflection, channelz=service.channelz, tls=service.tls)
    services = {
        SERVICE: ring.attach,
        ROLE_SERVICES[program.kind]: partial(ring.attach_role, program.kind),
        MODELS_SERVICE: lending.attach,
    }
    endpoint = await open_server(service.listen, services, terms)
    address = reachable(member.advertise, service.listen, endpoint.port)
    ring.name = lending.name = name_of(member.name, address)
    log.info("listening", at=address, name=ring.name)
    idle_timer = IdleTimer(IDLE_SECONDS, return_freed_memory, asyncio.get_running_loop())
    try:
        grpc = GrpcDialer(ring.name, inbox, tls=service.tls)
        zmq = ZmqDialer(ring.name, sockets, inbox, tls=service.tls)
        direct = DirectDialer(ring.name, grpc, rows, service.tls)
        dialers = Dialers({"grpc": grpc, "zmq": zmq, "direct": direct})
        if options.model is None:
            borrowed = await borrow(Lenders(ring.name, member.master, service.tls), leaving)
            if borrowed is None:
                return
            options = replace(options, model=borrowed)
        exchange.inboxes[address] = inbox
        dialer = LocalDialer(ring.name, exchange, compute, others=dialers)
        make = partial(program.make, seen, options, ring.name, address, dialer, compute)
        part = await asyncio.get_running_loop().run_in_executor(compute, make)
        exchange.introduce(address, part, compute)
        if borrowed_of(options.base) is None:
            lending.open(options.base, fingerprint(options.base))
            await endpoint.report(MODELS_SERVICE, True)

        async def connect(registration: Registration) -> Link:
            return await join(member.master, replace(registration, began=began), inbox, tls=service.tls)

        await run_membership(
            ReportingMember(part, program.kind, endpoint, dialers, idle_timer), inbox, connect, leaving
        )
        log.info("left")
    finally:
        idle_timer.stop()
        rows.close()
        await ring.close()
        await host.close()
        sockets.close()
        await endpoint.close(0)
