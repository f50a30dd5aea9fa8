"""A master's process: puts its rooms together, opens the doors, and leaves in order.

Refuses to know how requests are led and rings are formed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import structlog

from specsot.model.fingerprint import fingerprint
from specsot.process.life import live
from specsot.process.logs import write_logs
from specsot.process.observing import Observation, observed
from specsot.rpc.serve import Door
from specsot_master.assembly import assemble
from specsot_master.conductor import Notes
from specsot_master.config import MasterConfig, read_config
from specsot_master.desk import Desk
from specsot_master.doors import open_doors
from specsot_master.journal import open_journal
from specsot_master.master import Master
from specsot_master.progress import Progress
from specsot_master.server import FleetService
from specsot_master.server.door import MASTER
from specsot_master.spans import RequestSpans

if TYPE_CHECKING:
    from specsot_master.gateway.metrics import Metrics

log = structlog.get_logger()

TENDING = 1.0  # seconds between looks whether a latecomer can be taken in, and whether the ring moves


def run() -> int:
    config = read_config()
    write_logs("master", config.service.log_format, config.service.log_level)
    return live("specsot-master", lambda leaving: serve(config, leaving))


async def serve(config: MasterConfig, leaving: asyncio.Event) -> None:
    """Raises ModelError, InvalidRequest, Unavailable (a port is taken)."""
    with observed("master", config.service) as seen:
        await lead(config, seen, leaving)


async def lead(config: MasterConfig, seen: Observation, leaving: asyncio.Event) -> None:
    journal = open_journal(config.journal, fingerprint(config.model)) if config.journal else None
    after = time.time_ns() // 1_000_000  # a restarted master's epochs are new ones: none takes less than this
    master = assemble(config.model, config.ring, after, Notes(journal))
    await master.leader.revive(journal.kept if journal else ())
    desk, members = Desk(master.leader, master.info), FleetService(master.members, config.pulse)
    metrics = follow(master, desk, seen)
    async with open_doors(config, master, desk, members, metrics) as door:
        log.info("waiting for the ring", missing=master.waiting_for())
        tending = [one.fleet.tend(TENDING) for one in master.replicas]
        async with beside(*tending, report(master, door, progress_of(master, config.stuck_after))):
            await leaving.wait()
            log.info("leaving", grace=config.service.grace)
            await leave(master, desk, members, door, config.service.grace)
            if journal:
                await journal.close()


def follow(master: Master, desk: Desk, seen: Observation) -> Metrics | None:
    """Spans and figures of every request, as far as they were asked for; the figures, if so."""
    if seen.tracer.on:
        desk.watch(lambda ask: RequestSpans(seen.tracer, ask, master.model.name))
    if seen.registry is None:
        return None
    from specsot_master.gateway.counting import count

    return count(master, desk, seen.registry)


def progress_of(master: Master, stuck_after: float) -> list[Progress]:
    """Of each ring."""
    return [Progress(stuck_after) for _ in master.replicas]


async def report(master: Master, door: Door, progress: Sequence[Progress]) -> None:
    """Keep the health of `specsot.v1.Master` true, by looks in time and at every change of the ring."""
    while True:
        await look(master, door, progress, asyncio.get_running_loop().time())
        master.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(TENDING):
                await master.changed.wait()


async def look(master: Master, door: Door, progress: Sequence[Progress], now: float) -> None:
    """It serves while a ring is complete and moves when there is work, unless it is told to leave."""
    serving = False
    for one, watched in zip(master.replicas, progress):
        moves = watched.moves(one.laps.info().laps, one.conductor.owed, now)
        serving |= one.fleet.ready and moves
        if not moves and master.serving:
            log.error("no lap comes, though there is work", epoch=one.fleet.epoch)
    master.serving = serving and not master.leaving
    await door.report(MASTER, master.serving)


async def leave(master: Master, desk: Desk, members: FleetService, door: Door, grace: float) -> None:
    """No new requests; those that run may finish; the rest hear why they do not; members go last."""
    master.leaving = True
    master.serving = False
    await door.report(MASTER, False)
    if not await desk.drain(grace):
        master.end("the master is shutting down")
        await desk.drain(1.0)
    await members.close()


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run these meanwhile, and end them. Raises what one of them ends with, at once: a master that does not
    know any more how it stands must not look alive.
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
