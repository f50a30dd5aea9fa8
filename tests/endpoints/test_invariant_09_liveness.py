"""Invariant 9, liveness: a hung engine does not serve, a frozen client is noticed, deadlines are kept.

Leaders that never finish stand behind the endpoint.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from specsot.core.frames import Result
from specsot.events import Numbered
from specsot.members import Configuration, Ready, Registration
from specsot.params import Ask
from specsot.transport.grpc_channel import PUBLIC_BYTES, Keepalive, Terms, probe
from specsot.v1 import master_pb2, master_pb2_grpc
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.core.stats import StallDetector
from specsot_master.grpc_api import MASTER_SERVICE, FleetService, MasterService, open_master_port
from specsot_master.master import Master, RequestCounter, assemble
from specsot_master.service import update_health
from tests.rpc.test_master_service import INFO, FakeConductor
from tests.rpc.test_uplink import FakeFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

CLIENT = """
import grpc, sys
from specsot.v1 import master_pb2, master_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
for event in master_pb2_grpc.MasterStub(channel).Generate(master_pb2.GenerateRequest(prompt="x")):
    print("reading", flush=True)
"""


@pytest.fixture
async def held() -> AsyncIterator[tuple[FakeConductor, str]]:
    """An endpoint whose requests begin and never go on."""
    conductor = FakeConductor()
    conductor.hold.clear()
    terms = Terms(PUBLIC_BYTES, Keepalive(every=1.0, patience=1.0, answer=1.0))
    service = MasterService(RequestCounter(conductor, lambda: INFO), lambda: INFO)
    endpoint = await open_master_port("127.0.0.1:0", service, FleetService(FakeFleet()), terms)
    yield conductor, f"127.0.0.1:{endpoint.port}"
    await endpoint.close(0)


async def test_invariant_9_a_frozen_client_is_noticed(held: tuple[FakeConductor, str]) -> None:
    """Its kernel still answers; only HTTP/2 pings tell. Its request ends with it."""
    conductor, address = held
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert client.stdout is not None
        assert await client.stdout.readline() == b"reading\n"
        assert not conductor.closed.is_set()
        client.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(conductor.closed.wait(), 60)
    finally:
        client.kill()
        await client.wait()


async def test_invariant_9_a_hung_engine_does_not_serve(demo_model: Path) -> None:
    """The event loop answers all the time, so "" is live; work without steps is what tells."""
    master = assemble(demo_model / "base", RingOptions(drafter="none"))
    service, progress = MasterService(master.requests, master.info), [StallDetector(30)]
    endpoint = await open_master_port("127.0.0.1:0", service, FleetService(master.members))
    async with engine(master) as hung:

        async def states(now: float) -> tuple[str, str]:
            await update_health(master, endpoint, progress, now)
            address = f"127.0.0.1:{endpoint.port}"
            return await asyncio.to_thread(probe, address, MASTER_SERVICE), await asyncio.to_thread(
                probe, address
            )

        assert await states(0) == ("SERVING", "SERVING")
        assert await states(1000) == ("SERVING", "SERVING"), "idle is healthy"
        client = asyncio.create_task(read(master.requests.generate(Ask(prompt="Hi", mode="direct"))))
        await hung.ordered.wait()
        assert await states(1029) == ("SERVING", "SERVING")
        assert await states(1030) == ("NOT_SERVING", "SERVING")
        hung.step()
        assert await states(1031) == ("SERVING", "SERVING")
        assert await states(1062) == ("NOT_SERVING", "SERVING")
        client.cancel()
        await asyncio.wait([client])
        assert await states(1063) == ("SERVING", "SERVING")
    await endpoint.close(0)


class HungEngine:
    """Stage 0 of a ring that takes orders and does nothing, but for steps when it is told to."""

    def __init__(self, master: Master) -> None:
        self.ordered = asyncio.Event()
        self._master, self._steps = master, 0

    async def send(self, message: object) -> None:
        match message:
            case Configuration():
                self._master.members.on_message("w", Ready(message.epoch))
            case _:
                self.ordered.set()

    async def close(self) -> None: ...

    def step(self) -> None:
        self._steps += 1
        self._master.members.on_message("w", Result(self._master.info().epoch, self._steps))


@asynccontextmanager
async def engine(master: Master) -> AsyncIterator[HungEngine]:
    """A complete ring of one worker that hangs."""
    hung = HungEngine(master)
    model = master.model
    await master.members.join(
        Registration(
            kind="worker",
            name="w",
            address="here",
            fingerprint=model.fingerprint,
            model_layers=model.layers,
            max_positions=model.max_positions,
            kv_bytes=1 << 30,
            row_bytes=1 << 10,
        ),
        hung,
    )
    await master.complete()
    yield hung
    master.members.on_disconnect("w", "the test is over")


async def read(events: AsyncIterator[Numbered]) -> None:
    async for _ in events:
        pass


async def test_invariant_9_every_call_ends_by_its_deadline(held: tuple[FakeConductor, str]) -> None:
    conductor, address = held
    async with grpc.aio.insecure_channel(address) as channel:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        call = master_pb2_grpc.MasterStub(channel).Generate(master_pb2.GenerateRequest(prompt="x"), timeout=2)
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            async for _ in call:
                pass
        assert loop.time() - begun < 30
    await asyncio.wait_for(conductor.closed.wait(), 60)
