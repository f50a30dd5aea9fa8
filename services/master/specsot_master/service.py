"""A master's process: puts its rooms together, opens the door, and closes it in order.

Refuses to know how requests are led and rings are formed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import structlog

from specsot.errors import InvalidRequest
from specsot.process.life import live
from specsot.process.logs import write_logs
from specsot.process.setting import reachable
from specsot.rpc.options import PUBLIC_BYTES, Terms
from specsot.rpc.serve import Door
from specsot_master.assembly import Master, assemble
from specsot_master.config import MasterConfig, read_config
from specsot_master.desk import Desk
from specsot_master.progress import Progress
from specsot_master.server import FleetService, MasterService, open_master_door
from specsot_master.server.door import MASTER

if TYPE_CHECKING:
    from specsot_master.gateway.door import HttpDoor

log = structlog.get_logger()

TENDING = 1.0  # seconds between looks whether a latecomer can be taken in, and whether the ring moves


def run() -> int:
    config = read_config()
    write_logs("master", config.setting.log_format, config.setting.log_level)
    return live("specsot-master", lambda leaving: serve(config, leaving))


async def serve(config: MasterConfig, leaving: asyncio.Event) -> None:
    """Raises ModelError, Unavailable (the port is taken)."""
    master = assemble(config.ring)
    desk, setting = Desk(master.conductor, master.info), config.setting
    clients = MasterService(desk, master.info, config.ring.conduct.unread_for)
    members = FleetService(master.fleet)
    terms = Terms(PUBLIC_BYTES, reflection=setting.reflection, channelz=setting.channelz)
    door = await open_master_door(setting.listen, clients, members, terms)
    log.info("listening", at=reachable(None, setting.listen, door.port), model=master.model.name)
    try:
        http = await open_http(config.http, master, desk)
    except BaseException:
        await door.close(0)
        raise
    log.info("waiting for the ring", missing=master.fleet.waiting_for())
    async with beside(master.fleet.tend(TENDING), report(master, door, Progress(config.stuck_after))):
        await leaving.wait()
        log.info("leaving", grace=setting.grace)
        await leave(master, desk, members, door, http, setting.grace)


async def open_http(listen: str | None, master: Master, desk: Desk) -> HttpDoor | None:
    """The HTTP door, if one is wanted. Raises InvalidRequest without the extra, Unavailable."""
    if listen is None:
        return None
    try:
        from specsot_master.gateway.opening import open_gateway
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"--http needs {error.name}: pip install 'specsot[http]'", field="http"
        ) from None
    door = await open_gateway(listen, master, desk)
    log.info("listening", at=f"http://{reachable(None, listen, door.port)}/")
    return door


async def report(master: Master, door: Door, progress: Progress) -> None:
    """Keep the health of `specsot.v1.Master` true, by looks in time and at every change of the ring."""
    while True:
        await look(master, door, progress, asyncio.get_running_loop().time())
        master.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(TENDING):
                await master.changed.wait()


async def look(master: Master, door: Door, progress: Progress, now: float) -> None:
    """It serves while the ring is complete, moves when there is work, and is not told to leave."""
    moves = progress.moves(master.laps.info().laps, master.conductor.owed, now)
    serving = master.fleet.ready and moves and not master.leaving
    if not moves and master.serving:
        log.error("no lap comes, though there is work", epoch=master.fleet.epoch)
    master.serving = serving
    await door.report(MASTER, serving)


async def leave(
    master: Master, desk: Desk, members: FleetService, door: Door, http: HttpDoor | None, grace: float
) -> None:
    """No new requests; those that run may finish; the rest hear why they do not; members go last."""
    master.leaving = True
    master.serving = False
    await door.report(MASTER, False)
    if not await desk.drain(grace):
        master.conductor.epoch_ended("the master is shutting down")
        await desk.drain(1.0)
    await members.close()
    if http is not None:
        await http.close(1.0)
    await door.close(1.0)


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run these meanwhile, and end them."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
