"""Runs a master as a process: opens its ports, reports its health, shuts down gracefully."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from specsot.checkpoint.cache import cache_folder
from specsot.checkpoint.fingerprint import fingerprint
from specsot.errors import InvalidRequest
from specsot.service.lifecycle import run_service, write_logs
from specsot.service.options import reachable
from specsot.service.telemetry import Observation, observed
from specsot.transport.grpc_channel import CLIENT_STREAMS, HELD_BYTES, PUBLIC_BYTES, Terms
from specsot.transport.grpc_server import GrpcServer
from specsot.transport.security import PLAIN, Tls, Tokens
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
    from specsot_master.http.server import HttpDoor
    from specsot_master.telemetry import Metrics


log = structlog.get_logger()

TEND_SECONDS = 1.0  # seconds between checks for late workers and a moved ring; not measured


def run() -> int:
    config = read_config()
    write_logs("master", config.service.log_format, config.service.log_level)
    return run_service("specsot-master", lambda leaving: serve(config, leaving), first=lambda: config.base)


async def serve(config: MasterConfig, leaving: asyncio.Event) -> None:
    """Raises ModelError, InvalidRequest, Unavailable (a port is taken)."""
    with observed("master", config.service) as seen:
        await run_master(config, seen, leaving)


async def run_master(config: MasterConfig, seen: Observation, leaving: asyncio.Event) -> None:
    base = config.base
    journal = open_journal(config.journal, fingerprint(base)) if config.journal else None
    after = time.time_ns() // 1_000_000  # a restarted master's epochs are new ones: none takes less than this
    master = assemble(base, config.ring, after, RequestJournal(journal), cache_folder() / "forecasts")
    await master.leader.revive(journal.kept if journal else ())
    members = FleetService(master.members, config.pulse, master.turned_away, nearby=True)
    metrics = start_telemetry(master, seen, config)
    async with open_doors(config, master, members, metrics) as door:
        spare_collector()
        log.info("waiting for the ring", missing=master.waiting_for())
        tending = [one.fleet.tend(TEND_SECONDS) for one in master.replicas]
        async with running_beside(
            *tending, watch_health(master, door, stall_detectors(master, config.stuck_after))
        ):
            await leaving.wait()
            log.info("leaving", grace=config.service.grace)
            await shut_down(master, members, door, config.service.grace)
            if journal:
                await journal.close()


# Objects. The garbage collector looks for cycles after so many new ones. Values of JSON have no cycles: with
# the 700 of CPython, a body with 2.7 million lists took 1.9 s, with these 0.5 s, as with no collector at all.
YOUNG_OBJECTS: Final = 50_000


def spare_collector() -> None:
    """Let the garbage collector stop the event loop less often, and not for what was loaded at the start.

    To look through all that is loaded takes 0.1 s, in which no request continues.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def start_telemetry(master: Master, seen: Observation, config: MasterConfig) -> Metrics | None:
    """Spans and figures of every request, as far as they were asked for; the figures, if so."""
    if seen.tracer.on:
        master.requests.watch(lambda ask: RequestSpans(seen.tracer, ask, master.model.name))
    if seen.registry is None:
        return None
    from specsot_master.telemetry import observe_master

    return observe_master(master, seen.registry, config.metrics_prefix)


def stall_detectors(master: Master, stuck_after: float) -> list[StallDetector]:
    return [StallDetector(stuck_after) for _ in master.replicas]


async def watch_health(master: Master, door: GrpcServer, progress: Sequence[StallDetector]) -> None:
    """Keep the health of `specsot.v1.Master` true, by looks in time and at every change of the ring."""
    while True:
        await update_health(master, door, progress, asyncio.get_running_loop().time())
        master.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(TEND_SECONDS):
                await master.changed.wait()


async def update_health(
    master: Master, door: GrpcServer, progress: Sequence[StallDetector], now: float
) -> None:
    """It serves while a ring is complete and moves when there is work, unless it is told to leave."""
    serving = False
    for one, watched in zip(master.replicas, progress):
        moves = watched.is_moving(one.engine.laps.info().laps, one.engine.has_work, now)
        serving |= one.fleet.ready and moves
        if not moves and master.serving:
            log.error("no lap comes, though there is work", epoch=one.fleet.epoch)
    master.serving = serving and not master.leaving
    await door.report(MASTER_SERVICE, master.serving)


async def shut_down(master: Master, members: FleetService, door: GrpcServer, grace: float) -> None:
    """No new requests; those that run may finish; the rest hear why they do not; members go last."""
    master.leaving = True
    master.serving = False
    await door.report(MASTER_SERVICE, False)
    if not await master.requests.drain(grace):
        master.end("the master is shutting down")
        await master.requests.drain(1.0)
    await members.close()


@asynccontextmanager
async def running_beside(*works: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run these meanwhile, and end them. Raises what one of them ends with, at once: a master that does not
    know any more its state must not look alive.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        log.error("the master cannot go on", exc_info=errors)
        raise errors.exceptions[0] from None


CLOSE_SECONDS = 1.0  # seconds to tell members that are still connected; not measured


@asynccontextmanager
async def open_doors(
    config: MasterConfig, master: Master, members: FleetService, metrics: Metrics | None = None
) -> AsyncGenerator[GrpcServer]:
    """The clients' gRPC door, while all are open. metrics: those that are counted already.

    Raises Unavailable (an address cannot be had), InvalidRequest (certificates, a missing extra).
    """
    patience = config.ring.conduct.unread_for
    clients = MasterService(master.requests, master.info, patience, master.rebalance, config.tokens())
    listen = config.service.listen
    apart = config.fleet_listen
    if config.http is not None:  # else clients would be let in, and thrown out again, while it is imported
        check_extra()
    async with AsyncExitStack() as doors:
        door = await open_master_port(listen, clients, members if apart is None else None, _public(config))
        doors.push_async_callback(door.close, CLOSE_SECONDS)
        log.info("listening", at=reachable(None, listen, door.port), model=master.model.name)
        if apart is not None:
            fleet = await open_fleet_port(apart, members, _terms(config, config.service.tls))
            doors.push_async_callback(fleet.close, CLOSE_SECONDS)
            log.info("listening", at=reachable(None, apart, fleet.port), whom="members")
        if config.http is not None:
            http = await open_http(config.http, config, master, metrics)
            doors.push_async_callback(http.close, CLOSE_SECONDS)
        yield door


def check_extra() -> None:
    """Raises InvalidRequest without the extra `http`."""
    try:
        import specsot_master.http.app  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"--http needs {error.name}: pip install 'specsot[http]'", field="http"
        ) from None


async def open_http(listen: str, config: MasterConfig, master: Master, metrics: Metrics | None) -> HttpDoor:
    """Raises Unavailable."""
    from specsot_master.http.app import open_http
    from specsot_master.telemetry import observe_master

    terms = _public(config)
    metrics = metrics or observe_master(master, prefix=config.metrics_prefix)
    names = config.http_names
    origins = config.allowed_origins
    answers = config.default_mode, config.sse_ping_interval
    door = await open_http(listen, master, terms, metrics, *answers, names, origins)
    scheme = "http" if terms.tls.cert is None else "https"
    log.info("listening", at=f"{scheme}://{reachable(None, listen, door.port)}/")
    return door


def _public(config: MasterConfig) -> Terms:
    """Clients show tokens, and are asked for no certificate."""
    own = config.service.tls if config.client_tls else PLAIN
    terms = _terms(config, Tls(cert=own.cert, key=own.key), config.tokens())
    return replace(terms, streams=CLIENT_STREAMS, held=HELD_BYTES)


def _terms(config: MasterConfig, tls: Tls, tokens: Tokens | None = None) -> Terms:
    service = config.service
    return Terms(
        PUBLIC_BYTES, reflection=service.reflection, channelz=service.channelz, tls=tls, tokens=tokens
    )
