"""Leases follow the writing, and a client that does not read stalls only itself.

Refuses to know models: scripts say what is written.
"""

from __future__ import annotations

import asyncio

import pytest

from specsot.frames import Lease, Open
from specsot_master.conductor import ConductorConfig
from tests.master.letters import COUNT, DIRECT, SAYS, finished
from tests.master.stage import Stage

pytestmark = pytest.mark.slow


async def test_leases_follow_the_writing() -> None:
    stage = Stage(SAYS)
    await stage.answer(COUNT)
    opened = next(order for order in stage.ring.orders if isinstance(order, Open))
    leases = [order.position for order in stage.ring.orders if isinstance(order, Lease)]
    prompt = opened.opening.prompt
    assert opened.lease == prompt + 256
    assert leases == [prompt + 512]


async def test_a_slow_reader_stalls_only_itself() -> None:
    config = ConductorConfig(model="demo", lease=32, unread=10)
    stage = Stage(SAYS, config=config, burst=2)
    slow = stage.conductor.generate(COUNT)
    first = await anext(slow)
    while await stage.lap():
        pass
    (player,) = stage.ring.live.values()
    assert player.committed >= player.lease
    assert player.committed < 32 + 64 + len(player.prompt)
    assert finished(await stage.answer(DIRECT)).text == "It is naïve 你好."

    async def read() -> list[object]:
        return [first.event] + [numbered.event async for numbered in slow]

    (events,) = await stage.play(asyncio.create_task(read()))
    assert finished(events).text == SAYS["Count"]
    stage.assert_clean()
