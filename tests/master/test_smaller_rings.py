"""A ring that is formed anew with less room: whom it cannot hold waits for a larger one, nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from specsot.errors import SpecsotError, TimedOut, TooLarge, Unavailable
from specsot.events import Event, Finished, Reason
from specsot.params import Ask, Limits
from specsot_master.core.inputs import MasterLeaving, RingLost, RingReady
from specsot_master.core.ring.fitting import refit
from specsot_master.engine import EngineConfig
from tests.conftest import some
from tests.master.fake_ring import STATE
from tests.master.letters import ANSWER, COUNT, SAYS, SOT, finished, openings
from tests.master.stage import Stage, of, repeat
from tests.master.test_repair import break_and_form

LONG = Ask(prompt="What is it?", mode="direct", seed=5)  # 17 pages
TEXT = repeat("naïve", 100)
LONG_SAYS = {**SAYS, "What is": TEXT}
PAIR = replace(SOT, limits=Limits(max_new_tokens=160, max_skeleton_tokens=64))
SMALL = 10  # pages: enough for COUNT


async def begun(
    *asks: Ask, config: EngineConfig | None = None
) -> tuple[Stage, list[asyncio.Task[list[Event]]]]:
    """They write, and then the ring has fewer pages."""
    stage = Stage(LONG_SAYS, config=config or EngineConfig(model="demo"))
    clients = [stage.listen(ask, f"r{number}") for number, ask in enumerate(asks)]
    for _ in range(8):
        await stage.step()
    await break_and_form(stage, 2, pages=SMALL)
    await stage.settle()
    return stage, clients


def waits(stage: Stage) -> bool:
    return [one.id for one in stage.engine.parked] == ["r0"] and stage.engine.at_work == 0


async def test_it_goes_on_from_its_log_in_a_ring_that_is_large_enough() -> None:
    """Others go on meanwhile; rings that are too small come and go."""
    with capture_logs() as lines:
        stage, (large, small) = await begun(LONG, COUNT)
        (events,) = await stage.play(small)
        assert finished(events).text == SAYS["Count"]
        assert waits(stage)
        await break_and_form(stage, 3, pages=SMALL + 1)
        await stage.settle()
        assert waits(stage)
        before = len(openings(stage))
        await break_and_form(stage, 4)
        await stage.settle()
    again = openings(stage)[before:][-1]
    assert again.generated > 0
    assert not stage.engine.parked
    (events,) = await stage.play(large)
    assert finished(events).text == TEXT
    said = [one for one in lines if one["event"] == "waits for a larger ring"]
    assert [one["request_id"] for one in said] == ["r0"]
    assert said[0]["reason"].startswith("the request needs 17 KV pages of 64 rows, the ring has 10: ")
    counts = stage.engine.requests()
    assert (counts.waiting, counts.running, dict(counts.ended)) == (0, 0, {"stop": 2})
    assert counts.prompt_tokens == sum(one.prompt for one in openings(stage)[:2]), "each is counted once"
    stage.assert_clean()


async def test_a_request_is_refused_as_too_large_once_it_has_waited() -> None:
    stage, (client,) = await begun(LONG)
    assert waits(stage)
    stage.time.advance(25)
    assert not client.done()
    await break_and_form(stage, 3, pages=SMALL)
    stage.time.advance(6)
    with pytest.raises(
        TooLarge, match=r"needs 17 KV pages of 64 rows, the ring has 10: .*; no larger ring came within 30 s$"
    ) as refused:
        await client
    assert refused.value.field == "max_new_tokens"
    stage.assert_clean()


async def test_if_its_ring_broke_again_a_request_receives_what_is_missing() -> None:
    stage, (client,) = await begun(LONG)
    stage.ring.break_off()
    stage.engine.handle(RingLost("worker-1 is gone"))
    stage.time.advance(31)
    with pytest.raises(Unavailable, match="after 30 s the ring is still waiting for 1 of 2 workers"):
        await client
    assert stage.engine.idle


async def test_rings_that_never_get_ready_extend_no_deadline() -> None:
    stage = Stage(SAYS)
    client = stage.listen(COUNT)
    await stage.step()
    stage.ring.break_off()
    for _ in range(4):
        stage.engine.handle(RingLost("worker-1: CUDA out of memory"))
        stage.time.advance(9)
    with pytest.raises(Unavailable, match="after 30 s the ring is still waiting for"):
        await client
    assert stage.engine.idle


async def test_without_time_for_repairs_it_fails_at_once() -> None:
    stage, (client, small) = await begun(LONG, COUNT, config=EngineConfig(model="demo", repair_for=0.0))
    stage.time.advance(0)
    with pytest.raises(TooLarge, match="no larger ring came within 0 s"):
        await client
    (events,) = await stage.play(small)
    assert finished(events).text == SAYS["Count"]
    stage.assert_clean()


async def test_requests_wait_for_a_ring_that_is_re_formed_to_improve_and_none_is_blamed() -> None:
    """This holds for any value of `--repair-for`, and however often the ring is re-formed."""
    stage = Stage(SAYS, config=EngineConfig(model="demo", repair_for=0.0))
    client = stage.listen(COUNT)
    await stage.step()
    for epoch in range(2, 14):
        stage.ring.break_off()
        stage.engine.handle(RingLost("a worker joined", planned=True))
        stage.time.advance(5)
        stage.ring.form(replace(STATE, epoch=epoch))
        stage.engine.handle(RingReady())
        await stage.settle()
    (events,) = await stage.play(client)
    assert finished(events).text == SAYS["Count"]
    stage.assert_clean()


async def test_a_better_ring_is_not_waited_for_for_ever() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", repair_for=0.0))
    client = stage.listen(COUNT)
    await stage.step()
    stage.ring.break_off()
    stage.engine.handle(RingLost("a worker joined", planned=True))
    stage.time.advance(31)
    with pytest.raises(Unavailable, match="a worker joined; after 30 s the ring is still waiting for"):
        await client
    assert stage.engine.idle


def cancel(stage: Stage) -> None:
    assert stage.engine.cancel("r0")


def let_time_pass(stage: Stage) -> None:
    stage.time.advance(29)


def leave(stage: Stage) -> None:
    stage.engine.handle(MasterLeaving("the master is shutting down"))


@pytest.mark.parametrize(
    ("end", "error"),
    [(cancel, None), (let_time_pass, TimedOut), (leave, Unavailable)],
    ids=lambda one: one.__name__ if one else "",
)
async def test_while_it_waits_it_may_end(
    end: Callable[[Stage], None], error: type[SpecsotError] | None
) -> None:
    stage = Stage(LONG_SAYS)
    client = stage.listen(LONG, "r0", timeout=35)
    for _ in range(8):
        await stage.step()
    await break_and_form(stage, 2, pages=SMALL)
    await stage.settle()
    assert waits(stage)
    end(stage)
    if error:
        with pytest.raises(error):
            await client
    else:
        (last,) = of(Finished, await client)
        assert last.reason is Reason.CANCELLED
        assert last.text
        assert TEXT.startswith(last.text)
    stage.assert_clean()


async def test_a_client_that_leaves_takes_it_along() -> None:
    stage, (client,) = await begun(LONG)
    client.cancel()
    await asyncio.wait([client])
    await stage.settle()
    stage.assert_clean()


async def test_a_request_that_has_not_started_also_waits_and_smaller_ones_overtake_it() -> None:
    stage = Stage(LONG_SAYS, config=EngineConfig(model="demo", live=1))
    running = stage.listen(COUNT, "r1")
    await stage.step()
    first, behind = stage.listen(LONG, "r0"), stage.listen(COUNT, "r2")
    await stage.settle()
    await break_and_form(stage, 2, pages=SMALL)
    await stage.play(running, behind)
    assert waits(stage)
    await break_and_form(stage, 3)
    (events,) = await stage.play(first)
    assert finished(events).text == TEXT
    stage.assert_clean()


async def test_a_request_on_trial_that_must_wait_blocks_no_other() -> None:
    """Rings broke under both before they wrote a word; who came last is tried alone, and has no room now."""
    stage = Stage(LONG_SAYS)
    small, large = stage.listen(COUNT), stage.listen(LONG, "r0")
    await stage.step()
    for epoch in (2, 3):
        await break_and_form(stage, epoch)
        await stage.settle()
    assert [player.opening.limit for player in stage.ring.live.values() if player.opening.decodes] == [1024]
    await break_and_form(stage, 4, pages=SMALL)
    (events,) = await stage.play(small)
    assert finished(events).text == SAYS["Count"]
    await break_and_form(stage, 5)
    (events,) = await stage.play(large)
    assert finished(events).text == TEXT
    stage.assert_clean()


async def test_what_it_was_writing_counts_too() -> None:
    """A prompt may have become longer than was thought of when it came."""
    stage = Stage(SAYS)
    client = stage.listen(SOT, "r0")
    await branches_written(stage, 2)
    (request,) = stage.engine.all_requests
    refit(request, replace(STATE, pages=24))
    request.mark_lost()
    log = request.sequences[1].log
    log.reopen(replace(log.opening, limit=1600))
    with pytest.raises(TooLarge, match=r"a branch of this plan needs 16.. positions in 28 KV pages"):
        refit(request, replace(STATE, pages=27))
    refit(request, replace(STATE, pages=28))
    client.cancel()


async def branches_written(stage: Stage, count: int) -> None:
    while sum(player.opening.decodes for player in stage.ring.live.values()) < count:
        await stage.step()


SHORT_PLAN = replace(SOT, limits=Limits(max_new_tokens=700, max_skeleton_tokens=64, max_parallel=2))


@pytest.mark.parametrize("pages", some(range(8, 26), *range(0, 18, 4), 17))
async def test_a_plan_goes_on_or_waits_whatever_the_ring_has_become(pages: int) -> None:
    """It never stands still in a ring that cannot hold what it was writing."""
    stage = Stage(SAYS)
    client, other = stage.listen(SHORT_PLAN, "r0"), stage.listen(replace(COUNT, seed=6), "r1")
    await branches_written(stage, 3)
    await break_and_form(stage, 2, pages=pages)
    await stage.play(other)
    while await stage.step():
        pass
    if not client.done():
        assert waits(stage)
        assert stage.engine.requests().running == 0
        assert stage.engine.free_pages == pages
        await break_and_form(stage, 3)
    (events,) = await stage.play(client)
    assert finished(events).text == ANSWER
    stage.assert_clean()


async def test_branches_that_were_all_open_run_in_turn_while_another_request_waits() -> None:
    """Within the grant, which is needed though the plan opens nothing more."""
    stage = Stage(
        {**SAYS, "Write point 2": repeat("b", 90)}, config=EngineConfig(model="demo", live=1), burst=1
    )
    client = stage.listen(PAIR)
    await branches_written(stage, 1)
    (request,) = stage.engine.all_requests
    while not (request.plan.all_opened and len(request.sequences) == 2):
        await stage.step()
    other = stage.listen(replace(PAIR, seed=6))
    await stage.settle()
    await break_and_form(stage, 2, pages=14, page_rows=16, slots=1, has_drafter=False)
    await stage.settle()
    assert [one.ordinal for one in request.lost] == [2]
    (events, _) = await stage.play(client, other)
    assert finished(events).reason is Reason.LENGTH
    stage.assert_clean()
