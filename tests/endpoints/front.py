"""A conductor behind a real gRPC endpoint, on a fake ring whose steps a task plays.

Time stands still: alarms ring when a test passes time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

from specsot.core.info import Info
from specsot.errors import SpecsotError
from specsot.events import Event, Numbered
from specsot.params import Ask
from specsot.transport.grpc_client import MasterClient, connect
from specsot.v1 import master_pb2, master_pb2_grpc
from specsot_master.grpc_api import FleetService, MasterService, open_master_port
from specsot_master.master import RequestCounter
from tests.master.letters import SAYS
from tests.master.stage import PlayedStage, Stage
from tests.rpc.test_uplink import FakeFleet


class Front(PlayedStage):
    def __init__(self, stage: Stage, desk: RequestCounter, service: MasterService, address: str) -> None:
        self.stage, self.desk, self.service, self.address = stage, desk, service, address
        self.going = asyncio.Event()
        self.going.set()

    async def client(self) -> MasterClient:
        return await connect(self.address)

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)


@asynccontextmanager
async def front(says: Mapping[str, str] = SAYS, patience: float = 60.0, **more: Any) -> AsyncIterator[Front]:
    """`more` goes to the Stage."""
    stage = Stage(says, **more)
    desk = RequestCounter(stage.engine, lambda: Info(ready=True, requests=stage.engine.requests()))
    service = MasterService(desk, desk.info, patience)
    endpoint = await open_master_port("127.0.0.1:0", service, FleetService(FakeFleet()))
    one = Front(stage, desk, service, f"127.0.0.1:{endpoint.port}")
    playing = asyncio.create_task(one.play())
    try:
        yield one
    finally:
        playing.cancel()
        await endpoint.close(0)


async def read(events: AsyncIterator[Numbered]) -> list[Numbered]:
    return [numbered async for numbered in events]


async def told(client: MasterClient, ask: Ask, id: str = "") -> list[Event]:
    """All events of one request; its numbering is checked."""
    got = await read(client.generate(ask, id))
    assert [numbered.number for numbered in got] == list(range(len(got)))
    return [numbered.event for numbered in got]


async def outcome(client: MasterClient, ask: Ask) -> list[Event] | SpecsotError:
    """Its events, or what it was refused with."""
    try:
        return await told(client, ask)
    except SpecsotError as error:
        return error


def stub(channel: grpc.aio.Channel) -> Any:
    return master_pb2_grpc.MasterStub(channel)


def question(prompt: str = "What is it?") -> master_pb2.GenerateRequest:
    return master_pb2.GenerateRequest(prompt=prompt, mode=master_pb2.MODE_DIRECT, seed=5)
