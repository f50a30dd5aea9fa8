"""The same lanes with each range in a process of its own, joined by links as between services.

The lanes sit beside stage 0, as its sequencer would.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import uvloop

from specsot.core.frames import Result
from specsot.members import Configuration, Ready, Stage, Transport
from specsot.model.decoder import Decoder
from specsot.service.membership import run_membership
from specsot.service.runtime_env import set_runtime_defaults
from specsot.transport.grpc_links import SERVICE, GrpcDialer, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Dialer, Inbox, LocalLink
from specsot.transport.nccl_links import DirectDialer, DirectHost
from specsot_lab.bench.gpu_lanes import EPOCH, Lanes, LaneWorker, LoadedRange, joining
from specsot_lab.bench.gpu_laps import PAGE

PATIENCE = 10.0  # seconds in which a process may leave

Load = Callable[[int], Decoder]  # the range of that number; must be importable by name, or a partial of such


@dataclass(frozen=True, slots=True)
class Spread:
    """Ranges, one a process. folder: for their sockets."""

    load: Load
    stages: tuple[Stage, ...]
    pages: int
    transport: Transport
    folder: str = ""

    def configuration(self, number: int) -> Configuration:
        return Configuration(EPOCH, self.stages[number].name, self.stages, self.pages, PAGE, slots=1)


class Overheard(Inbox):
    """Tells of every result that comes in."""

    def __init__(self, heard: asyncio.Queue[Any]) -> None:
        super().__init__()
        self._heard = heard

    def put(self, sender: str, message: Any, names: frozenset[str] | None = None) -> None:
        if isinstance(message, Result):  # the next frame is made at once, as a sequencer would
            self._heard.put_nowait(message)
        super().put(sender, message, names)


@asynccontextmanager
async def lanes_apart(spread: Spread) -> AsyncGenerator[Lanes]:
    """Stage 0 here, every other one in a process of its own."""
    set_runtime_defaults()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-"))
        stages = tuple(replace(stage, address=f"unix:{folder}/{stage.name}") for stage in spread.stages)
        spread = replace(spread, folder=folder, stages=stages)
        ways = [_start(spread, number, stack) for number in range(1, len(stages))]
        heard = asyncio.Queue[Any]()  # results that come back to stage 0, and all that it tells the master
        inbox = await stack.enter_async_context(_member(spread, 0, Overheard(heard), heard))
        for way in ways:
            await _said(way, "open")
        for way in ways:
            way.send("go")
        await LocalLink("master", inbox).send(spread.configuration(0))
        assert isinstance(ready := await heard.get(), Ready), ready
        for way in ways:
            await _said(way, "ready")
        try:
            yield Lanes(LocalLink("lanes", inbox), heard)
        finally:
            for way in ways:
                way.send("leave")


def _start(spread: Spread, number: int, stack: AsyncExitStack) -> Connection:
    fresh = multiprocessing.get_context("spawn")
    here, there = fresh.Pipe()
    process = fresh.Process(target=live_apart, args=(spread, number, there), daemon=True)
    process.start()
    stack.callback(_end, process)
    return here


def _end(process: BaseProcess) -> None:
    """It has been told to leave; if it could not, it is none to wait for."""
    process.join(PATIENCE)
    process.kill()


async def _said(way: Connection, what: str) -> None:
    said = await asyncio.to_thread(way.recv)
    assert said == what, said


def live_apart(spread: Spread, number: int, way: Connection) -> None:
    """One range's process."""
    set_runtime_defaults()
    uvloop.run(_live(spread, number, way))


async def _live(spread: Spread, number: int, way: Connection) -> None:
    heard = asyncio.Queue[Any]()
    async with _member(spread, number, Inbox(), heard) as inbox:
        way.send("open")
        await _said(way, "go")
        await LocalLink("master", inbox).send(spread.configuration(number))
        ready = await heard.get()
        way.send("ready" if isinstance(ready, Ready) else str(ready))
        await _said(way, "leave")


@asynccontextmanager
async def _member(
    spread: Spread, number: int, inbox: Inbox, heard: asyncio.Queue[Any]
) -> AsyncGenerator[Inbox]:
    """A worker with its door; heard: what it says to the master."""
    place, rows, leaving = spread.stages[number], DirectHost(), asyncio.Event()
    service = RingService(inbox, place.name, rows=rows)
    door = await open_server(place.address, {SERVICE: service.attach})
    dialer: Dialer = GrpcDialer(place.name, inbox)
    if spread.transport == "direct":
        dialer = DirectDialer(place.name, dialer, rows)
    decoder, thread = spread.load(number), ThreadPoolExecutor(1)
    reading = ThreadPoolExecutor(1) if decoder.device.type == "cuda" else None
    part = LaneWorker(LoadedRange(place.name, decoder), dialer, thread, verify_thread=reading)
    life = asyncio.create_task(run_membership(part, inbox, joining(heard), leaving))
    try:
        yield inbox
    finally:
        leaving.set()
        await life
        rows.close()
        await door.close(0)
        for each in filter(None, (thread, reading)):
            each.shutdown()
