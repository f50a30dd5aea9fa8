"""Invariant 6, overload: ten times what fits is refused at once and told when to come back; the rest is done.

The calls are real ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsot.errors import Overloaded
from specsot_master.engine import EngineConfig
from tests.endpoints.front import front, outcome, told
from tests.master.fake_ring import STATE
from tests.master.letters import COUNT, DIRECT, SAYS, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FITS = 4 + 8


async def test_invariant_6_ten_times_what_fits() -> None:
    config = EngineConfig(model="demo", live=4, queue=8)
    async with front(config=config, state=replace(STATE, pages=400)) as one:
        one.going.clear()  # so that nothing leaves meanwhile
        client = await one.client()
        calls = [asyncio.create_task(outcome(client, DIRECT)) for _ in range(10 * FITS)]
        refused = [call.result() for call in await first(calls, 9 * FITS)]
        assert all(isinstance(error, Overloaded) for error in refused), "before anybody was answered"
        hints = sorted(error.retry_after for error in refused if isinstance(error, Overloaded))
        assert 0 < hints[0] < hints[-1] <= 60, "not all at the same time"
        assert one.stage.engine.requests().waiting == 8
        one.going.set()
        answers = [answer for answer in await asyncio.gather(*calls) if not isinstance(answer, Exception)]
        assert [finished(events).text for events in answers] == ["It is naïve 你好."] * FITS
        await one.quiet()
        one.stage.assert_clean()
        await client.close()


async def first(calls: list[asyncio.Task[object]], count: int) -> list[asyncio.Task[object]]:
    """The first `count` of them that are done."""
    waiting, done = set(calls), list[asyncio.Task[object]]()
    while len(done) < count:
        now, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done += now
    return done


async def test_invariant_6_no_admitted_request_starves() -> None:
    """A stream of newcomers does not keep back who is in the ring, or has waited longest."""
    async with front(config=EngineConfig(model="demo", live=2, queue=4)) as one:
        client = await one.client()
        patient = [asyncio.create_task(told(client, COUNT)) for _ in range(3)]
        newcomers = 0
        while not all(task.done() for task in patient):
            await outcome(client, DIRECT)
            newcomers += 1
        assert newcomers > 3
        assert {finished(task.result()).text for task in patient} == {SAYS["Count"]}
        await client.close()
