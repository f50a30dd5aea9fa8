"""A worker that comes back late: who has no room in the ring of those that are left waits for the larger one.

Virtual time: seconds of a fleet cost none.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from specsot.params import Ask, Limits
from tests.conftest import some
from tests.faults.checker import tell
from tests.faults.clients import Client, Habit
from tests.faults.test_coming_back import until
from tests.faults.virtual import run
from tests.faults.world import CONDUCT, Shape, World

pytestmark = pytest.mark.slow

# Of 10 pages of 16 rows that one worker has alone, and 20 that two have, these need 17 and 7.
SHAPE = Shape(2, drafter=False, pages=10)
LARGE = Ask(prompt="What is a ring?", mode="direct", seed=1, limits=Limits(max_new_tokens=236))
SMALL = Ask(prompt="Explain steps.", mode="direct", seed=1, limits=Limits(max_new_tokens=88))


@pytest.mark.parametrize("others", some([0, 2], 1))
def test_a_large_request_goes_on_when_the_worker_is_back(others: int) -> None:
    """others: requests that fit, and go on meanwhile, and that the larger ring is formed amid."""
    plain, _, _ = run(written((), others))
    texts, pages, waited = run(written((6.0,), others))
    assert texts == plain
    assert pages[0] > pages[1] < pages[2] == pages[0]
    assert waited


def test_it_fails_when_the_worker_stays_away() -> None:
    texts, _, waited = run(written((CONDUCT.repair_for + 20.0,), 1))
    assert list(texts) == ["small 0"]
    assert waited


def test_two_in_a_row_go_and_come_back() -> None:
    plain, _, _ = run(written((), 1))
    texts, _, waited = run(written((6.0, 4.0), 1))
    assert texts == plain
    assert waited


async def written(aways: tuple[float, ...], others: int) -> tuple[dict[str, str], list[int], bool]:
    """Texts by request; pages of the rings there were; whether the large one waited for a larger ring.

    aways: seconds for which a worker is away, once in a ring.
    """
    world = World(random.Random(4), SHAPE)
    assert await world.complete(60.0)
    (replica,) = world.house.master.replicas
    asks = {"large": LARGE, **{f"small {n}": SMALL for n in range(others)}}
    clients = [
        asyncio.create_task(Client(world, id, ask, Habit(once=True)).live()) for id, ask in asks.items()
    ]
    pages, waited = [replica.pages], False
    for away in aways:
        world.results.clear()
        await until(lambda: len(world.results) > 15)
        world.restart = away, away
        world.members["worker-1"].kill()
        await until(lambda: replica.pages == 0)
        await until(lambda: replica.pages > 0)
        pages.append(replica.pages)
        waited |= [one.id for one in replica.engine.parked] == ["large"]
        await until(lambda: not replica.engine.parked)
        if replica.engine.has_request("large"):
            await until(lambda: replica.pages > pages[-1])
            pages.append(replica.pages)
    await asyncio.gather(*clients)
    await until(lambda: replica.engine.idle)
    assert await world.complete(60.0)
    await until(lambda: not any(count for _, count in world.left()))
    assert replica.engine.free_pages == replica.pages
    stories = tell(world.recorder.seen)
    await world.close()
    return {id: one.finished.text for id, one in stories.items() if one.finished}, pages, waited
