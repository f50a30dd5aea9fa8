"""Who hangs is noticed; who is back has its place at once, also a drafter, for what is being written.

Virtual time: seconds of a fleet cost none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from specsot.core.frames import Result
from specsot.params import Ask, Limits
from tests.faults.campaign import ASKS, Campaign, Fault, answers, play
from tests.faults.checker import check, tell
from tests.faults.clients import Client, Habit
from tests.faults.history import Ended, Formed, Hurt
from tests.faults.virtual import run
from tests.faults.world import Shape, World

pytestmark = pytest.mark.slow

LONG = Ask(prompt="What is a ring?", mode="direct", seed=1, limits=Limits(max_new_tokens=600))


@pytest.mark.parametrize(("kind", "within"), [("hang", 16.0), ("vanish", 2.0)])
def test_a_worker_is_noticed_and_replaced_while_its_old_link_still_beats(kind: str, within: float) -> None:
    """Hung: 10 seconds, and at most 4 until a supervisor has started it again. Vanished: at once, long before
    anybody could hear that its link is dead."""
    clients = tuple((0.1 * n, ask, Habit(pause=0.4)) for n, ask in enumerate(ASKS[:3]))
    history = play(Campaign(Shape(2, False), clients, (Fault(kind, "worker-1", 2.0),)), 3)
    assert check(history, answers()) == []
    assert not [entry for _, entry in history if isinstance(entry, Ended) and entry.error]
    hurt = next(at for at, entry in history if isinstance(entry, Hurt))
    formed = next(at for at, entry in history if isinstance(entry, Formed) and at > hurt)
    assert formed - hurt < within


def test_a_drafter_that_is_back_drafts_what_is_being_written() -> None:
    """In the same epoch, and the answer is the one of a fleet without any drafter."""
    plain, _, _ = run(written(drafter=False))
    text, epochs, steps = run(written(drafter=True))
    assert text == plain
    assert epochs == {steps[0][0].epoch}
    before, away, back = (tokens_per_step(part) for part in steps)
    assert before > 1.0
    assert away == 1.0
    assert back > 1.0


async def written(drafter: bool) -> tuple[str, set[int], list[list[Result]]]:
    """The text, the epochs of its steps, and its steps: with the drafter, without, and with it again."""
    world = World(random.Random(4), Shape(2, drafter, skill=0.9))
    world.restart = 2.0, 2.0  # long enough for steps without it
    assert await world.complete(60.0)
    client = asyncio.create_task(Client(world, "r", LONG, Habit()).live())
    parts = [world.results]
    if drafter:
        await until(lambda: len(world.results) > 30)
        world.members["drafter"].kill()
        await until(lambda: not drafts(world))
        count = len(world.results) + 6  # those under way
        await until(lambda: len(world.results) > count)
        parts.append(begin_anew(world))
        await until(lambda: drafts(world))
        parts.append(begin_anew(world))
    await client
    (end,) = (story.finished for story in tell(world.recorder.seen).values())
    assert end is not None
    await world.close()
    return end.text, {one.epoch for part in parts for one in part}, parts


def begin_anew(world: World) -> list[Result]:
    """The steps from now on."""
    world.results = list[Result]()
    return world.results


def drafts(world: World) -> bool:
    return all(replica.drafts for replica in world.house.master.replicas)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110 - in virtual time to look again costs nothing
            await asyncio.sleep(0.01)


def tokens_per_step(steps: list[Result]) -> float:
    outcomes = [outcome for step in steps for outcome in step.outcomes if outcome.draft_round]
    return sum(len(one.tokens) for one in outcomes) / len(outcomes)
