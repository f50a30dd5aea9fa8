"""Runs a master as a process: opens its ports, reports its health, shuts down gracefully."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from specsot.checkpoint.cache import cache_folder
from specsot.checkpoint.config import read_config as read_model_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.errors import InvalidRequest
from specsot.service.lifecycle import run_service, write_logs
from specsot.service.options import reachable
from specsot.service.runtime_env import return_freed_memory, spare_collector
from specsot.service.telemetry import Observation, observed
from specsot.transport.grpc_channel import CLIENT_STREAMS, HELD_BYTES, PUBLIC_BYTES, Terms
from specsot.transport.grpc_server import GrpcServer
from specsot.transport.security import PLAIN, Tls, Tokens, secured_context
from specsot_master.config import MasterConfig, read_config
from specsot_master.core.stats import StallDetector
from specsot_master.engine import RequestJournal
from specsot_master.grpc_api import (
    MASTER_SERVICE,
    FleetService,
    MasterService,
    open_fleet_port,
    open_master_port,
)
from specsot_master.journal import open_journal
from specsot_master.master import Master, assemble
from specsot_master.telemetry import RequestSpans

if TYPE_CHECKING:
    from specsot_master.http.processes.supervisor import ApiProcesses
    from specsot_master.http.server import HttpServer
    from specsot_master.telemetry import Metrics


log = structlog.get_logger()

# Seconds between two checks of the master's health, and of members that joined while a ring was busy.
# Untuned.
TEND_SECONDS = 1.0


def run() -> int:
    """Read the options, write logs, and serve until SIGINT or SIGTERM arrives. Return the process's exit
    status: 0 after a shutdown, 2 for wrong options, a model that cannot be used or any other error that
    another start would meet again, and another number for all other errors, which are written to stderr in
    one line. Wrong options on the command line end the process themselves.
    """
    config = read_config()
    write_logs("master", config.service.log_format, config.service.log_level)
    return run_service("specsot-master", lambda leaving: serve(config, leaving), prepare=lambda: config.base)


async def serve(config: MasterConfig, stop_event: asyncio.Event) -> None:
    """Run a master, with the telemetry that the options ask for, until it is ordered to stop.

    config: the options of the process.
    stop_event: set when the process shall shut down, for example by SIGTERM.

    Raises ModelError, InvalidRequest, and Unavailable if a port is taken.
    """
    with observed("master", config.service) as observation:
        await run_master(config, observation, stop_event)


async def run_master(config: MasterConfig, observation: Observation, stop_event: asyncio.Event) -> None:
    """Restore the journal's requests, open the ports, and serve until the master is ordered to stop; then
    shut down. The journal, if there is one, is closed at the end, after the requests have ended.

    config: the options of the process.
    observation: the process's tracer and registry of metrics.
    stop_event: set when the process shall shut down.

    Raises the errors of `serve`: ModelError, InvalidRequest if the journal cannot be opened or an option is
    wrong, and Unavailable if a port is taken; and the error of a background task that failed.
    """
    base = config.base
    journal = open_journal(config.journal, fingerprint(base)) if config.journal else None
    # Milliseconds since 1970. An epoch lasts longer than a millisecond, so these epoch numbers exceed all
    # numbers that an earlier master on this clock has used.
    after = time.time_ns() // 1_000_000
    master = assemble(base, config.ring, after, RequestJournal(journal), cache_folder() / "forecasts")
    await master.leader.revive(journal.kept if journal else ())
    members = FleetService(master.members, config.pulse, master.refused_members, with_unix_socket=True)
    metrics = start_telemetry(master, observation, config)
    detectors = [StallDetector(config.stuck_after) for _ in master.replicas]
    async with open_endpoints(config, master, members, metrics) as endpoint:
        return_freed_memory()
        spare_collector()
        log.info("waiting for the ring", missing=master.waiting_for())
        tending = [one.fleet.reform_regularly(TEND_SECONDS) for one in master.replicas]
        async with running_alongside(*tending, watch_health(master, endpoint, detectors)):
            await stop_event.wait()
            log.info("leaving", grace=config.service.grace)
            await shut_down(master, members, endpoint, config.service.grace)
            if journal:
                await journal.close()


def start_telemetry(master: Master, observation: Observation, config: MasterConfig) -> Metrics | None:
    """Record spans and metrics of every request, as far as the options ask for them. Return the metrics, or
    None if the options ask for none. Spans are recorded if the tracer is on, and metrics if there is a
    registry.

    master: the master whose requests and steps are recorded.
    observation: the process's tracer and registry of metrics; the registry is None without metrics.
    config: the options of the process.
    """
    if observation.tracer.on:
        master.requests.watch(lambda ask: RequestSpans(observation.tracer, ask, master.model.name))
    if observation.registry is None:
        return None
    from specsot_master.telemetry import observe_master

    return observe_master(master, observation.registry, config.metrics_prefix)


async def watch_health(master: Master, endpoint: GrpcServer, detectors: Sequence[StallDetector]) -> None:
    """Keep the reported health of `specsot.v1.Master` up to date. Runs until cancelled. The health is checked
    every TEND_SECONDS, and whenever a ring becomes complete or breaks. An exception of a check is raised.

    master: the master whose health is reported.
    endpoint: the gRPC server whose health service reports it.
    detectors: one detector per ring, in the order of the rings.
    """
    while True:
        await update_health(master, endpoint, detectors, asyncio.get_running_loop().time())
        master.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(TEND_SECONDS):
                await master.changed.wait()


async def update_health(
    master: Master, endpoint: GrpcServer, detectors: Sequence[StallDetector], now: float
) -> None:
    """Report whether the master serves: some ring is complete and makes steps if it has work. A master that
    shuts down does not serve. `Master.serving` is set, and a ring that has just stalled is logged.

    master: the master whose health is reported.
    endpoint: the gRPC server whose health service reports it.
    detectors: one detector per ring, in the order of the rings.
    now: the event loop's time, in seconds.
    """
    serving = False
    for one, watched in zip(master.replicas, detectors):
        moves = watched.is_moving(one.engine.steps.info().steps, one.engine.has_work, now)
        serving |= one.fleet.ready and moves
        if not moves and master.serving:
            log.error("ring stalled", epoch=one.fleet.epoch)
    master.serving = serving and not master.leaving
    await endpoint.report(MASTER_SERVICE, master.serving)


async def shut_down(
    master: Master, members: FleetService, endpoint: GrpcServer, grace_seconds: float
) -> None:
    """Refuse new requests, wait for running ones, fail those that are left, then dismiss the members. The
    requests that are left after the grace time fail, and get one more second to end.

    master: the master that shuts down.
    members: the gRPC service by which members are connected.
    endpoint: the gRPC server whose health service reports that the master does not serve any more.
    grace_seconds: seconds for which running requests may continue.
    """
    master.leaving = True
    master.serving = False
    await endpoint.report(MASTER_SERVICE, False)
    if not await master.requests.drain(grace_seconds):
        master.end("the master is shutting down")
        await master.requests.drain(1.0)
    await members.close()


@asynccontextmanager
async def running_alongside(*coroutines: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run coroutines during the block, and cancel them at its end. The context yields None. Errors of the
    block itself are raised as they are; of a group of errors only the first is raised.

    If one of the coroutines fails, the block is cancelled at once and its error is raised: a master that no
    longer follows its own state must not report that it is healthy.

    coroutines: what runs alongside the block; each runs until it is cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        log.error("master failed", exc_info=errors)
        raise errors.exceptions[0] from None


# Seconds for which a port waits for calls under way when it closes. Untuned.
CLOSE_SECONDS = 1.0


@asynccontextmanager
async def open_endpoints(
    config: MasterConfig, master: Master, members: FleetService, metrics: Metrics | None = None
) -> AsyncGenerator[GrpcServer]:
    """Open the ports for clients, members and HTTP during the block; yield the gRPC server for clients. The
    ports are closed at the end of the block, each within CLOSE_SECONDS. Members use the port of the clients
    unless the options name one of their own.

    config: the options of the process, with the addresses.
    master: what serves the clients' requests.
    members: the gRPC service for members.
    metrics: the metrics that are recorded already; None to create them for HTTP if they are needed.

    Raises Unavailable if an address cannot be used, and InvalidRequest for bad certificates or if the extra
    `http` is missing.
    """
    patience = config.ring.conduct.unread_for
    clients = MasterService(master.requests, master.info, patience, master.rebalance, config.tokens())
    listen = config.service.listen
    apart = config.fleet_listen
    # Checked first, because a missing extra would otherwise close ports that have admitted clients already.
    if config.http is not None:
        check_extra()
    async with AsyncExitStack() as endpoints:
        endpoint = await open_master_port(
            listen, clients, members if apart is None else None, _public(config)
        )
        endpoints.push_async_callback(endpoint.close, CLOSE_SECONDS)
        log.info("listening", at=reachable(None, listen, endpoint.port), model=master.model.name)
        if apart is not None:
            fleet = await open_fleet_port(apart, members, _terms(config, config.service.tls))
            endpoints.push_async_callback(fleet.close, CLOSE_SECONDS)
            log.info("listening", at=reachable(None, apart, fleet.port), clients="members")
        if config.http is not None:
            http = await open_http(config.http, config, master, metrics)
            endpoints.push_async_callback(http.close, CLOSE_SECONDS)
        yield endpoint


def check_extra() -> None:
    """Return nothing if the extra `http` is installed.

    Raises InvalidRequest if a module is missing, with the command that installs it.
    """
    try:
        import specsot_master.http.app  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"--http needs {error.name}: pip install 'specsot[http]'", field="http"
        ) from None


async def open_http(
    address: str, config: MasterConfig, master: Master, metrics: Metrics | None
) -> HttpServer | ApiProcesses:
    """Open the HTTP server, and return it. The HTTP server is logged with its address, "https" if it has a
    certificate. Its connections are served by API processes if the options ask for some.

    address: host:port on which it listens; port 0 stands for any free port.
    config: the options of the process.
    master: what serves the clients' requests.
    metrics: the metrics that are recorded already; None to create them.

    Raises Unavailable if the address cannot be used or if the API processes cannot be started, and
    InvalidRequest for bad certificates.
    """
    from specsot_master.telemetry import observe_master

    terms = _public(config)
    metrics = metrics or observe_master(master, prefix=config.metrics_prefix)
    if config.num_api_processes:
        endpoint = await open_http_in_processes(address, config, master, metrics, terms.tls)
    else:
        from specsot_master.http.app import open_http

        names = config.http_names
        origins = config.allowed_origins
        answers = config.default_mode, config.sse_ping_interval
        endpoint = await open_http(address, master, terms, metrics, *answers, names, origins)
    scheme = "http" if terms.tls.cert is None else "https"
    log.info("listening", at=f"{scheme}://{reachable(None, address, endpoint.port)}/")
    return endpoint


async def open_http_in_processes(
    address: str, config: MasterConfig, master: Master, metrics: Metrics, tls: Tls
) -> ApiProcesses:
    """Open the HTTP server whose connections API processes serve, and return it once one of them serves.

    address: host:port on which it listens; port 0 stands for any free port.
    config: the options of the process.
    master: what serves the clients' requests.
    metrics: the metrics that GET /metrics returns.
    tls: the certificate of the port.

    Raises Unavailable if the address cannot be used or if the processes cannot be started, and InvalidRequest
    for bad certificates.
    """
    from specsot_master.http.processes.messages import Welcome
    from specsot_master.http.processes.request_host import RequestHost
    from specsot_master.http.processes.supervisor import open_api_processes

    secured_context(tls)  # Each process reads the certificate; an error is raised here, in one line.
    base = config.base
    count = config.num_api_processes
    welcome = Welcome(
        base=str(base),
        vocabulary=read_model_config(base).vocab,
        model=master.model,
        plan_style=config.ring.conduct.plan_style,
        began=int(time.time()),
        mode=config.default_mode,
        ping_every=config.sse_ping_interval,
        names=config.http_names,
        origins=config.allowed_origins,
        certificate=None if tls.cert is None else str(tls.cert),
        key=None if tls.key is None else str(tls.key),
        token_file=None if config.token_file is None else str(config.token_file),
        token=config.token,
        num_processes=count,
        log_format=config.service.log_format,
        log_level=config.service.log_level,
    )

    def make_host() -> RequestHost:
        """Return what runs the requests of one process."""
        return RequestHost(master.requests, master.state, metrics.written)

    return await open_api_processes(address, count, welcome, make_host)


def _public(config: MasterConfig) -> Terms:
    """Return the terms for the ports of clients: they authenticate by tokens, and need no certificate. TLS is
    off if the option `client_tls` is. A connection may have CLIENT_STREAMS concurrent calls, and the messages
    of all running calls may have HELD_BYTES bytes.

    config: the options of the process.
    """
    certificates = config.service.tls if config.client_tls else PLAIN
    terms = _terms(config, Tls(cert=certificates.cert, key=certificates.key), config.tokens())
    return replace(terms, streams=CLIENT_STREAMS, held=HELD_BYTES)


def _terms(config: MasterConfig, tls: Tls, tokens: Tokens | None = None) -> Terms:
    """Return the terms of a port: sizes, reflection, TLS and tokens.

    config: the options of the process.
    tls: the certificate of the port, and the CA of its clients.
    tokens: the valid client tokens, or None if clients need none.
    """
    service = config.service
    return Terms(
        PUBLIC_BYTES, reflection=service.reflection, channelz=service.channelz, tls=tls, tokens=tokens
    )
