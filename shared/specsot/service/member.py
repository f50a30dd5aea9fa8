"""Runs a process of a worker, a drafter, or both: opens servers, builds members, serves until its end."""

from __future__ import annotations

import asyncio
import gc
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
from specsot.members import Configuration, Kind, Registration, Tap
from specsot.service.compute import ComputeThread
from specsot.service.lifecycle import run_service, write_logs
from specsot.service.membership import InboxWatcher, RingMember, run_membership
from specsot.service.options import MemberOptions, ModelOptions, ServiceOptions, name_of, reachable
from specsot.service.runtime_env import return_freed_memory, spare_collector
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
    """A worker or drafter as its command line describes it.

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
    """A member that reports its health: SERVING while it is configured for an epoch. Wraps a worker or
    drafter.

    The health status is reported for the service "specsot.v1.Ring" and for the service of the member's kind,
    such as "specsot.v1.Worker". The wrapper also selects the transport of each epoch.
    """

    def __init__(
        self, member: RingMember, kind: Kind, endpoint: GrpcServer, dialers: Dialers, idle_timer: IdleTimer
    ) -> None:
        """Wrap a member. Nothing is reported before its first epoch.

        member: the wrapped member.
        kind: "worker" or "drafter".
        endpoint: the gRPC server that reports the health.
        dialers: opens links to other members, with the transport that the epoch's configuration names.
        idle_timer: restarted whenever there is work. Returns freed memory to the system once the member is
            idle.
        """
        self._member = member
        self._endpoint = endpoint
        self._dialers = dialers
        self._idle = idle_timer
        self._services = (SERVICE, ROLE_SERVICES[kind])
        self.registration = member.registration
        self.prepare = member.prepare

    @property
    def epoch(self) -> int:
        """Number of the epoch for which the member is configured; 0 if there is none."""
        return self._member.epoch

    def watch(self, arrived: Callable[[], bool]) -> None:
        """Let the member check during its work whether messages are waiting. Does nothing if it does not do
        that.

        arrived: returns whether a message waits; may be called from any thread.
        """
        if isinstance(self._member, InboxWatcher):
            self._member.watch(arrived)

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        """Select the epoch's transport, prepare the member for the epoch, and report SERVING.

        configuration: the epoch that the master forms.
        uplink: the link to the master.

        Raises what the member's `configure` raises; the health then stays NOT_SERVING.
        """
        self._dialers.turn_to(configuration.transport)
        await self._member.configure(configuration, uplink)
        spare_collector()
        await self._report(True)

    async def handle(self, arrival: Arrival) -> None:
        """Let the member handle one message. Raises what the member raises.

        arrival: the message with its sender.
        """
        await self._member.handle(arrival)
        if isinstance(arrival.message, Tap):
            # With the last of the head's slices, a stage has captured its graphs.
            spare_collector()

    async def run_due(self) -> float | None:
        """Do what is due after all waiting messages were handled, and restart the idle timer.

        Returns after how many seconds to call this again if no message arrives; None means not at all.
        """
        self._idle.restart()
        return await self._member.run_due()

    async def disband(self) -> None:
        """Report NOT_SERVING and drop the state of the epoch."""
        await self._report(False)
        await self._member.disband()
        # What the epoch has loaded may be part of cycles, which the collector must find.
        gc.unfreeze()

    async def _report(self, serving: bool) -> None:
        """Report the health of the member's services.

        serving: True for SERVING, False for NOT_SERVING.
        """
        for service in self._services:
            await self._endpoint.report(service, serving)


def run_members(*programs: MemberProgram) -> int:
    """Run a process of a worker, of a drafter, or of both until a signal; return its exit status.

    The status is 0 after a signal, 2 for invalid options, a missing or broken model, missing torch, or a
    member that the master rejects, and 1 for any other error.

    programs: the members of the process, one or two. The first one's service options set up the process's
        log.

    The members share one compute thread and reach each other without a network connection. If one fails, the
    others are cancelled.
    """
    first = programs[0]
    write_logs(first.kind, first.service.log_format, first.service.log_level)

    async def work(leaving: asyncio.Event) -> None:
        """Run all members until `leaving` is set. Raises what a member raises.

        leaving: set by a signal.
        """
        require_torch()
        exchange, compute, has_several = Exchange(), ComputeThread("compute"), len(programs) > 1
        try:
            with ExitStack() as stack:
                observations = [
                    stack.enter_context(observed(program.kind, program.service)) for program in programs
                ]
                shared = leaving, exchange, compute, has_several
                await _run_together(_serve(*each, *shared) for each in zip(programs, observations))
        # If one member fails, computations of the other must end before Python exits.
        except (InvalidRequest, ModelError):
            compute.shutdown(wait=has_several, cancel_futures=True)
            raise
        finally:
            compute.shutdown(wait=False, cancel_futures=True)

    return run_service(f"specsot-{first.kind}", work, leave_seconds=LEAVING_SECONDS)


async def _run_together(members: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all members until they end. If one raises, cancel the others, wait for them, and raise the error.

    members: the coroutines that run the members.

    Returns once all members have ended, whether or not they raised. If the caller is cancelled, all members
    are.
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
    observation: Observation,
    leaving: asyncio.Event,
    exchange: Exchange,
    compute: Executor,
    name_in_log: bool,
) -> None:
    """Run one member until `leaving` is set.

    program: the member as its command line describes it.
    observation: the member's metrics and spans.
    leaving: set once the process must end.
    exchange: the members of this process.
    compute: the thread on which all members of this process compute.
    name_in_log: True if the process has several members, so that log lines name the member.

    Raises what `MemberProgram.make` raises, Refused if the master rejects the member, and Unavailable if its
    address is not available.

    Without a model among the options, the base model is borrowed from other members; the function returns
    without joining if `leaving` is set during that time. A member whose model is from files of its own lends
    them to others. On return and on an error, all servers and links are closed.
    """
    options = program.options
    service = program.service
    member = program.member
    if name_in_log:
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
        dialer = LocalDialer(ring.name, exchange, compute, fallback=dialers)
        make = partial(program.make, observation, options, ring.name, address, dialer, compute)
        part = await asyncio.get_running_loop().run_in_executor(compute, make)
        exchange.introduce(address, part, compute)
        if borrowed_of(options.base) is None:
            lending.open(options.base, fingerprint(options.base))
            await endpoint.report(MODELS_SERVICE, True)

        async def connect(registration: Registration) -> Link:
            """Join the master, and return the link to it.

            registration: what the member is; the start of its process is added here.
            """
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
