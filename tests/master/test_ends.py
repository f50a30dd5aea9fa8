"""Requests that end early on a fake ring: cancelled, dropped, broken, failed; nothing is left behind.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio

import pytest

from specsot.core.frames import Close, End, Open, Order, Outcome, Result
from specsot.errors import SpecsotError, Unavailable
from specsot.events import BranchFinished, MergedText, Reason
from specsot_master.core.inputs import RingLost, RingReady
from specsot_master.engine import RingState
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished, openings
from tests.master.stage import Stage, of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("steps", [0, 1, 5, 12, 20, 24])
async def test_cancel_leaves_no_state(steps: int) -> None:
    stage = Stage(SAYS, seed=1)
    client = stage.listen(SOT, "mine")
    await stage.settle()
    for _ in range(steps):
        await stage.step()
    assert stage.engine.cancel("mine")
    await stage.settle()
    events = client.result()
    assert finished(events).reason is Reason.CANCELLED
    assert finished(events).text == "".join(event.text for event in of(MergedText, events))
    assert not stage.engine.cancel("mine")
    stage.assert_clean()


@pytest.mark.parametrize("reads", [0, 1, 4, 12, 20])
async def test_a_dropped_client_cancels_its_request(reads: int) -> None:
    stage = Stage(SAYS, seed=2)
    events = stage.requests.generate(SOT)
    for _ in range(reads):
        reading = asyncio.ensure_future(anext(events))
        while not reading.done():
            await stage.step()
    await events.aclose()
    await stage.settle()
    stage.assert_clean()


async def test_a_dropped_task_cancels_its_request() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    for _ in range(4):
        await stage.step()
    client.cancel()
    await asyncio.wait([client])
    await stage.settle()
    stage.assert_clean()


async def test_a_broken_ring_ends_requests_and_a_new_one_serves_again() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    for _ in range(6):
        await stage.step()
    last = max(stage.ring.live)
    stage.ring.break_off()
    stage.engine.handle(RingLost("worker-2 is gone: connection reset"))
    await stage.settle()
    stage.time.advance(29)
    assert not client.done()
    stage.time.advance(2)
    with pytest.raises(Unavailable, match="reset; after 30 s the ring is still waiting for 1 of 2 workers"):
        await client
    assert stage.engine.idle
    late, later = stage.listen(SOT), stage.listen(DIRECT)
    await stage.settle()
    late.cancel()
    stage.time.advance(29)
    stage.ring.form(RingState(epoch=2, pages=64, page_rows=64, slots=8, max_positions=2048))
    stage.engine.handle(RingReady())
    while not later.done():
        await stage.step()
    assert finished(await later).text == "It is naïve 你好."
    assert openings(stage)[-1].sequence > last


async def test_who_comes_while_there_is_no_ring_waits_as_long_as_anybody() -> None:
    stage = Stage(SAYS)
    assert finished(await stage.answer(DIRECT)).text
    stage.ring.break_off()
    stage.engine.handle(RingLost("worker-2 is gone"))
    client = stage.listen(SOT)
    await stage.settle()
    stage.time.advance(31)
    with pytest.raises(Unavailable, match="after 30 s the ring is still waiting for 1 of 2 workers"):
        await client
    assert stage.engine.idle


async def test_an_order_that_cannot_be_sent_breaks_the_request_off() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    await asyncio.sleep(0)
    stage.ring.break_off()
    await stage.settle()
    stage.time.advance(31)
    with pytest.raises(Unavailable, match="the ring broke; after 30 s"):
        await client
    assert stage.engine.idle


async def test_a_failed_branch_ends_only_its_children() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    while len(openings(stage)) < 4:
        await stage.step()
    alpha = next(one for one in openings(stage) if one.ordinal == 1)
    await stage.settle()
    state = stage.ring.now
    assert state is not None
    await stage.ring.order(Close(alpha.sequence))
    stage.engine.handle(Result(state.epoch, 999, (Outcome(alpha.sequence, 0, (), (), End.FAILED),)))
    (events,) = await stage.play(client)
    assert {event.branch: event.reason for event in of(BranchFinished, events)} == {
        1: Reason.FAILED, 2: Reason.STOP, 3: Reason.PARENT_FAILED,
    }  # fmt: skip
    assert finished(events).reason is Reason.FAILED
    stage.assert_clean()


async def test_results_that_come_twice_or_from_another_epoch_change_nothing() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    while not client.done():
        await stage.settle()
        if (result := stage.ring.step()) is None:
            break
        stale = Result(result.epoch + 1, result.number, result.outcomes)
        for one in (stale, result, result, stale):
            stage.engine.handle(one)
        await stage.settle()
    assert finished(client.result()).text == ANSWER
    stage.assert_clean()


async def test_a_missing_result_ends_only_the_request_it_belongs_to() -> None:
    stage = Stage(SAYS)
    broken, whole = stage.listen(DIRECT), stage.listen(COUNT)
    await stage.settle()
    stage.engine.handle(Result(1, 1, (Outcome(1, 3, (0,), (5,)),)))
    with pytest.raises(Unavailable, match="result of draft round 3 came, 0 is missing"):
        await broken
    (events,) = await stage.play(whole)
    assert finished(events).text == SAYS["Count"]
    stage.assert_clean()


@pytest.mark.parametrize("spoiled", ["prefix", "writer"])
async def test_an_order_that_cannot_be_sent_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    stage = Stage(SAYS)
    other = stage.listen(COUNT)
    await stage.step()
    order, bad = stage.ring.order, list[Order]()

    async def send(one: Order) -> None:
        if isinstance(one, Open) and one.opening.decodes is (spoiled == "writer") and not bad:
            bad.append(one)
            raise ValueError("Value out of range")
        if isinstance(one, Close) and one.sequence not in stage.ring.live:
            return
        if isinstance(one, Open) and one.opening.fork and one.opening.fork.sequence not in stage.ring.live:
            return
        await order(one)

    monkeypatch.setattr(stage.ring, "order", send)
    client = stage.listen(SOT)
    (events,) = await stage.play(other)
    assert bad
    assert finished(events).text == SAYS["Count"]
    with pytest.raises(SpecsotError, match="internal error"):
        await client
    (events,) = await stage.play(stage.listen(SOT))
    assert finished(events).text == ANSWER
    stage.assert_clean()
