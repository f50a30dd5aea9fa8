"""Invariant 10, shutdown: SIGTERM lets running requests finish, refuses new ones, says so; exit status 0.

A whole fleet as processes, on the demo model.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specsot.errors import Unavailable
from specsot.events import Finished, Numbered
from specsot.params import Ask, Limits
from specsot.transport.grpc_channel import probe
from specsot.transport.grpc_client import MasterClient, connect
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_app.fleet.processes import ProcessFleet

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.timeout(300)]

MASTER = "specsot.v1.Master"


def long(tokens: int) -> Ask:
    """It takes as many steps as tokens, so that a signal meets it in the middle."""
    limits = Limits(max_new_tokens=tokens)
    return Ask(prompt="Explain it.", mode="direct", drafter="none", limits=limits, ignore_eos=True)


@asynccontextmanager
async def fleet(monkeypatch: pytest.MonkeyPatch, grace: str) -> AsyncIterator[ProcessFleet]:
    monkeypatch.setenv("SPECSOT_GRACE", grace)
    wanted = FleetOptions(kind="processes", stages=1, drafter="none", dtype="fp32")
    opened = await ProcessFleet.start(wanted, models_of(wanted))
    try:
        yield opened
    finally:
        await opened.close()


async def under_way(client: MasterClient, ask: Ask) -> tuple[AsyncIterator[Numbered], list[Numbered]]:
    """A request that has written something."""
    events = client.generate(ask)
    return events, [await anext(events) for _ in range(4)]


async def ask_again(client: MasterClient) -> None:
    """Until it is refused: a signal takes its time to arrive."""
    while True:
        async for _ in client.generate(long(1)):
            pass


async def test_invariant_10_running_requests_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(monkeypatch, "200") as opened:
        master = opened.children[0]
        client, other = await connect(master.service.address), await connect(master.service.address)
        events, got = await under_way(client, long(200))
        os.kill(master.pid, signal.SIGTERM)
        with pytest.raises(Unavailable, match="shutting down"):
            await ask_again(other)
        assert await asyncio.to_thread(probe, master.service.address, MASTER) == "NOT_SERVING"
        got += [event async for event in events]
        last = got[-1].event
        assert isinstance(last, Finished)
        assert len(last.tokens) == 200
        assert [event.number for event in got] == list(range(len(got)))
        await client.close()
        await other.close()
        await master.wait_ended()
        assert master.status == 0


async def test_invariant_10_an_unfinished_request_receives_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(monkeypatch, "0.2") as opened:
        master = opened.children[0]
        client = await connect(master.service.address)
        events, _ = await under_way(client, long(1900))
        os.kill(master.pid, signal.SIGTERM)
        with pytest.raises(Unavailable, match="the master is shutting down"):
            async for _ in events:
                pass
        await client.close()
        await master.wait_ended()
        assert master.status == 0
