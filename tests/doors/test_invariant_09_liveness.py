"""Invariant 9, liveness: a frozen client is noticed, and every call ends by its deadline.

Refuses to know prompts, plans and rings; a leader that never finishes stands behind the door.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

from specsot.rpc.options import PUBLIC_BYTES, Keepalive, Terms
from specsot.v1 import master_pb2, master_pb2_grpc
from specsot_master.server import FleetService, MasterService, open_master_door
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
    """A door whose requests begin and never go on."""
    conductor = FakeConductor()
    conductor.hold.clear()
    terms = Terms(PUBLIC_BYTES, Keepalive(every=1.0, patience=1.0))
    service = MasterService(conductor, lambda: INFO)
    door = await open_master_door("127.0.0.1:0", service, FleetService(FakeFleet()), terms)
    yield conductor, f"127.0.0.1:{door.port}"
    await door.close(0)


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
        await asyncio.wait_for(conductor.closed.wait(), 20)
    finally:
        client.kill()
        await client.wait()


async def test_invariant_9_every_call_ends_by_its_deadline(held: tuple[FakeConductor, str]) -> None:
    conductor, address = held
    async with grpc.aio.insecure_channel(address) as channel:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        call = master_pb2_grpc.MasterStub(channel).Generate(master_pb2.GenerateRequest(prompt="x"), timeout=1)
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            async for _ in call:
                pass
        assert loop.time() - begun < 2
    await asyncio.wait_for(conductor.closed.wait(), 5)
