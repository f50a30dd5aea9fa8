"""Invariant 7, isolation: a client that stops reading, and a request that breaks, harm nobody else.

The calls are real ones.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import grpc
import pytest

from specsot.core.frames import Close, End, Outcome, Result
from specsot_master.grpc_api import FleetService, MasterService, open_master_port
from specsot_master.master import RequestCounter
from tests.endpoints.front import Front, front, question, stub, told
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished, openings
from tests.master.stage import turn
from tests.rpc.test_master_service import INFO, FakeConductor
from tests.rpc.test_uplink import FakeFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def test_invariant_7_a_client_that_does_not_read_stalls_only_itself() -> None:
    """gRPC takes in some megabytes for it; then its handler waits, and the others do not."""
    async with front() as one:
        async with one.channel() as channel:
            silent = stub(channel).Generate(question("Count."))
            await silent.read()
            client = await one.client()
            answers = await asyncio.gather(*(told(client, ask) for ask in (SOT, DIRECT, COUNT)))
            assert [finished(events).text for events in answers] == [
                ANSWER,
                "It is naïve 你好.",
                SAYS["Count"],
            ]
            await client.close()
            silent.cancel()
        await one.quiet()
        while one.stage.time.alarms:
            await turn()
        one.stage.assert_clean()


async def test_invariant_7_a_client_that_does_not_read_is_dropped() -> None:
    """Once gRPC takes in no more, an event waits so long and no longer; its request ends at once."""
    conductor = FakeConductor()
    conductor.endless = True
    service = MasterService(RequestCounter(conductor, lambda: INFO), lambda: INFO, write_seconds=0.3)
    endpoint = await open_master_port("127.0.0.1:0", service, FleetService(FakeFleet()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
        silent = stub(channel).Generate(question())
        await silent.read()
        await asyncio.wait_for(conductor.closed.wait(), 60)
        events, failure = 0, None
        while failure is None:
            try:
                await silent.read()
                events += 1
            except grpc.aio.AioRpcError as error:
                failure = error
    await endpoint.close(0)
    assert failure.code() is grpc.StatusCode.CANCELLED
    assert failure.details() == "nothing was read for 0.3 s"
    assert events > 100, "what was sent before is not lost"


@pytest.mark.parametrize("ordinal", [0, 1])
async def test_invariant_7_a_request_that_breaks_breaks_alone(ordinal: int) -> None:
    """Numbers that are none, in one sequence."""
    async with front() as one:
        client = await one.client()
        others = [asyncio.create_task(told(client, ask)) for ask in (DIRECT, COUNT, replace(SOT, seed=9))]
        broken = asyncio.create_task(told(client, replace(SOT, seed=77)))
        while not (found := poisoned(one, ordinal)):
            await turn()
        await one.stage.settle()
        await one.stage.ring.order(Close(found[0]))
        one.stage.engine.handle(Result(1, 999, (Outcome(found[0], 0, (), (), End.FAILED),)))
        assert finished(await broken).reason.value == "failed"
        answers = await asyncio.gather(*others)
        assert [finished(events).text for events in answers] == ["It is naïve 你好.", SAYS["Count"], ANSWER]
        await one.quiet()
        one.stage.assert_clean()
        await client.close()


def poisoned(one: Front, ordinal: int) -> list[int]:
    """The sequence of request 77 that is to break, once it lives."""
    asked = (opening for opening in openings(one.stage) if opening.decodes and opening.seed == 77)
    return [o.sequence for o in asked if o.ordinal == ordinal and o.sequence in one.stage.ring.live]


async def test_invariant_7_a_silent_connection_harms_no_other_client() -> None:
    async with front() as one:
        host, port = one.address.split(":")
        mute = [socket.create_connection((host, int(port))) for _ in range(20)]
        for connection in mute[::2]:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client = await one.client()
        assert finished(await told(client, DIRECT)).text == "It is naïve 你好."
        await client.close()
        for connection in mute:
            connection.close()
