"""Leases follow the writing, and a client that does not read stalls only itself.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsot.core.frames import Lease, Open
from specsot.errors import Cancelled
from specsot.events import Event, MergedText
from specsot_master.engine import Caller, EngineConfig
from tests.master.letters import COUNT, DIRECT, SAYS, finished
from tests.master.stage import Stage, of

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
    config = EngineConfig(model="demo", lease=32, unread=10)
    stage = Stage(SAYS, config=config, burst=2)
    slow = stage.requests.generate(COUNT)
    first = await anext(slow)
    while await stage.step():
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


async def test_a_client_that_reads_nothing_is_dropped() -> None:
    """While it reads now and then, it is not."""
    config = EngineConfig(model="demo", lease=32, unread=10, unread_for=100.0)
    stage = Stage(SAYS, config=config, burst=2)
    slow, other = stage.requests.generate(COUNT), stage.listen(COUNT)
    await anext(slow)
    for _ in range(5):
        for _ in range(4):
            await stage.step()
        stage.time.advance(60)
        await anext(slow)
    stage.time.advance(201)
    await stage.settle()
    assert len(stage.ring.live) == 1, "its pages are free before it even notices"
    with pytest.raises(Cancelled, match="nothing was read for 100 s"):
        await anext(slow)
    assert finished((await stage.play(other))[0]).text == SAYS["Count"]
    stage.assert_clean()


async def test_a_client_without_events_to_read_is_not_dropped() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", unread_for=20.0))
    client = stage.listen(COUNT)
    for _ in range(5):
        await stage.step()
        stage.time.advance(1000)
    await stage.play(client)
    stage.assert_clean()


async def test_the_last_events_do_not_wait_for_ever() -> None:
    """The ring is done with it; only what is unread would stay in memory."""
    stage = Stage(SAYS, config=EngineConfig(model="demo", unread_for=20.0))
    slow = stage.requests.generate(DIRECT)
    await anext(slow)
    while await stage.step():
        pass
    assert stage.engine.idle
    stage.time.advance(21)
    with pytest.raises(Cancelled):
        await anext(slow)
    stage.assert_clean()


async def test_text_that_waits_for_a_client_is_joined_into_one_event() -> None:
    stage = Stage(SAYS, burst=1)
    behind = stage.requests.generate(COUNT, join_text=True)
    first = await anext(behind)
    for _ in range(20):
        await stage.step()
    joined = await anext(behind)
    assert isinstance(joined.event, MergedText)
    assert joined.event.step_tokens == 20
    assert joined.event.text == SAYS["Count"][: len(joined.event.text)]
    assert joined.number == 20

    async def read() -> list[Event]:
        return [first.event, joined.event] + [numbered.event async for numbered in behind]

    (events,) = await stage.play(asyncio.create_task(read()))
    assert finished(events).text == SAYS["Count"] == "".join(one.text for one in of(MergedText, events))
    stage.assert_clean()


async def test_events_of_a_resumable_request_are_never_joined() -> None:
    stage = Stage(SAYS, burst=1)
    behind = stage.requests.generate(replace(COUNT, resumable=True), Caller("kept"), join_text=True)
    await anext(behind)
    for _ in range(5):
        await stage.step()
    assert (await anext(behind)).number == 1
    assert (await anext(behind)).number == 2
    await behind.aclose()
