"""Many requests at once on few pages: all get on, fair between clients, nothing is left.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from specsot.errors import NotFound, Overloaded
from specsot.events import Event
from specsot.params import Ask, Limits
from specsot_master.engine import EngineConfig, RingState
from tests.conftest import seeds
from tests.master.letters import ANSWER, DIRECT, SAYS, SMALL, SOT, TIGHT, finished, openings
from tests.master.stage import Stage, repeat

pytestmark = pytest.mark.slow

Client = asyncio.Task[list[Event]]


@pytest.mark.parametrize("seed", seeds(6, quick=2))
async def test_many_requests_on_few_pages_all_get_on(seed: int) -> None:
    stage = Stage(SAYS, seed, state=TIGHT)
    asks = [Ask(prompt="Letters?", mode="sot", limits=SMALL), DIRECT]
    clients = [stage.listen(asks[n % 2], client=f"c{n % 3}") for n in range(14)]
    answers = await stage.play(*clients)
    assert [finished(events).text for events in answers] == [ANSWER, "It is naïve 你好."] * 7
    stage.assert_clean()


async def test_a_client_with_many_requests_does_not_keep_others_out() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=2))
    greedy = [stage.listen(DIRECT, f"g{n}", "greedy") for n in range(8)]
    await stage.settle()
    modest = stage.listen(DIRECT, "m", "modest")
    await stage.play(modest)
    assert sum(task.done() for task in greedy) <= 3
    await stage.play(*greedy)
    stage.assert_clean()


async def test_places_are_shared_between_requests() -> None:
    plan = "[PLAN]\n" + "".join(f"{n}.<20><None>[-]P{n}\n" for n in range(1, 9)) + "[END]"
    state = RingState(epoch=1, pages=32, page_rows=64, slots=8, max_positions=2048)
    stage = Stage({"Write the plan.": plan, "Write point": repeat("text", 100)}, state=state, burst=1)
    ask = Ask(prompt="Many?", mode="sot", limits=Limits(max_new_tokens=512, max_branch_tokens=60))
    clients = [stage.listen(ask, client=name) for name in ("a", "b")]
    compared = 0
    while sum(one.ordinal > 0 for one in openings(stage)) < 16:
        await stage.step()
        held = Counter(one.opening.family for one in stage.ring.live.values() if one.opening.ordinal)
        if len(held) == 2:
            compared += 1
            assert max(held.values()) - min(held.values()) <= 2
    assert compared > 50
    await stage.play(*clients)
    stage.assert_clean()


@pytest.mark.parametrize("seed", seeds(4, quick=2))
async def test_after_random_ends_nothing_is_left(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage(SAYS, seed, state=TIGHT)
    running: dict[str, asyncio.Task[list[object]]] = {}
    for n in range(60):
        ask = chance.choice([SOT, DIRECT, Ask(prompt="Letters?", mode="sot", limits=SMALL)])
        running[f"r{n}"] = stage.listen(ask, f"r{n}", client=chance.choice("ab"))  # type: ignore[assignment]
        for _ in range(chance.randint(0, 4)):
            await stage.step()
        name = chance.choice(sorted(running))
        match chance.randint(0, 2):
            case 0:
                stage.engine.cancel(name)
            case 1:
                running.pop(name).cancel()
            case _:
                pass
    await stage.play(*running.values())
    await stage.settle()
    stage.assert_clean()
    assert len(asyncio.all_tasks()) == 1


async def test_higher_priorities_go_first() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=1, aging=1e6))
    first = stage.listen(DIRECT)
    await stage.settle()
    late = [stage.listen(replace(DIRECT, priority=level, seed=level + 10)) for level in (-1, 0, 5, 2)]
    await stage.play(first, *late)
    assert [opening.seed - 10 for opening in openings(stage)[1:]] == [5, 2, 0, -1]
    stage.assert_clean()


async def test_a_greedy_client_makes_room_in_the_queue() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=1, queue=4))
    greedy = [stage.listen(DIRECT, f"g{n}", "greedy") for n in range(5)]
    await stage.settle()
    modest = stage.listen(DIRECT, "m", "modest")
    await stage.settle()
    with pytest.raises(Overloaded, match="4 requests are waiting already"):
        await greedy[4]
    with pytest.raises(Overloaded):
        await stage.listen(DIRECT, "g5", "greedy")
    await stage.play(*greedy[:4], modest)
    stage.assert_clean()


async def test_a_refused_request_displaces_no_other() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=1, queue=4))
    greedy = [stage.listen(DIRECT, f"g{n}", "greedy") for n in range(5)]
    await stage.settle()
    with pytest.raises(NotFound):
        await stage.listen(replace(DIRECT, model="another"), "m", "modest")
    assert len(await stage.play(*greedy)) == 5
    stage.assert_clean()


async def test_how_long_to_wait_is_learnt() -> None:
    """Requests leave one after the other; whoever is refused hears when the next places will be free."""
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=1, queue=3, retry_after=7.0))
    clients = [stage.listen(DIRECT) for _ in range(4)]
    await stage.settle()
    assert await refusal(stage) == 7.0
    clients += await leave_after(stage, 20.0, clients)
    clients += await leave_after(stage, 20.0, clients)
    first, second = await refusal(stage), await refusal(stage)
    assert 20 <= first <= 40
    assert second == pytest.approx(2 * first, rel=0.2)
    await stage.play(*clients)
    stage.assert_clean()


async def refusal(stage: Stage) -> float:
    with pytest.raises(Overloaded) as caught:
        await stage.listen(DIRECT)
    return caught.value.retry_after


async def leave_after(stage: Stage, seconds: float, clients: list[Client]) -> list[Client]:
    """Time passes, one request is done, and another takes its place in the queue."""
    stage.time.advance(seconds)
    while not any(client.done() for client in clients):
        await stage.step()
    clients[:] = [client for client in clients if not client.done()]
    client = stage.listen(DIRECT)
    await stage.settle()
    return [client]
