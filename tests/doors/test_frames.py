"""What travels in the ring, by its frames: what is cancelled is gone, and requests ride together.

Refuses to know models: scripts say what is written, for rows that see the right tokens.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from specsot.errors import TimedOut
from specsot.events import Event, Finished
from specsot.frames import Frame
from specsot.params import Ask, Limits, Message
from specsot_master.conductor import ConductorConfig
from tests.doors.frames import STATE, Framed, free
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PLAN = free(SOT)
RULES = Message("system", "You are a careful teacher. " * 12)


async def test_the_ring_of_frames_answers() -> None:
    ring = Framed()
    answers = await ring.play(ring.listen(PLAN), ring.listen(DIRECT), ring.listen(COUNT))
    assert [finished(events).text for events in answers] == [ANSWER, "It is naïve 你好.", SAYS["Count"]]
    assert finished(answers[2]).statistics.mean_accepted > 1.5
    ring.assert_clean()


@pytest.mark.parametrize("flight", [1, 3])
@pytest.mark.parametrize("laps", [1, 2, 5, 9, 14, 20])
@pytest.mark.parametrize("way", ["cancel", "hang up", "deadline"])
async def test_no_row_of_a_cancelled_request_two_laps_later(way: str, laps: int, flight: int) -> None:
    ring = Framed(flight=flight, seed=laps)
    other = ring.listen(COUNT)
    client = ring.listen(PLAN, "mine", timeout=10_000.0)
    while not any(one.ordinal or one.limit > 400 for one in ring.openings.values()):
        await ring.lap()
    for _ in range(laps):
        await ring.lap()
    theirs = {one.sequence for one in ring.openings.values() if one.decodes and one.seed == PLAN.seed}
    theirs -= {one for one in theirs if ring.openings[one].limit == 400}
    last = ring.frames[-1].number
    match way:
        case "cancel":
            assert ring.conductor.cancel("mine")
        case "hang up":
            client.cancel()
        case _:
            ring.time.advance(10_001)
    await asyncio.wait([client])
    await ring.play(other)
    assert ring.rows_of(theirs, since=0) > 0
    assert ring.rows_of(theirs, since=last + 2) == 0
    closings = {one for frame in ring.frames for one in frame.closings}
    assert theirs <= closings
    if way == "deadline":
        assert isinstance(client.exception(), TimedOut)
    assert finished(other.result()).text == SAYS["Count"]
    ring.assert_clean()


async def test_a_cancelled_request_that_waits_was_never_in_a_frame() -> None:
    ring = Framed(config=ConductorConfig(model="demo", live=1))
    running = ring.listen(COUNT)
    await ring.lap()
    waiting = ring.listen(replace(DIRECT, seed=9), "mine")
    await ring.lap()
    assert ring.conductor.cancel("mine")
    await ring.play(running)
    assert {one.seed for one in ring.openings.values()} == {COUNT.seed}
    assert isinstance(waiting.result()[-1], Finished)
    ring.assert_clean()


@pytest.mark.parametrize("flight", [1, 2])
async def test_frames_carry_several_requests(flight: int) -> None:
    """Branches of all requests share frames: far fewer laps than one after the other."""
    alone = Framed(flight=flight)
    await alone.play(alone.listen(PLAN))
    many = Framed(flight=flight, pages=replace(STATE, pages=400))
    asks = [replace(PLAN, prompt=f"Tell me about letters, part {n}.", seed=n) for n in range(6)]
    answers = await many.play(*[many.listen(ask) for ask in asks])
    assert {finished(events).text for events in answers} == {ANSWER}
    mixed = [seeds for frame in many.frames if len(seeds := seeds_in(many, frame)) > 1]
    full = [frame for frame in many.frames if frame.segments]
    assert len(mixed) > len(full) / 2
    assert max(len(seeds) for seeds in mixed) >= 4
    assert len(full) < 3 * len(alone.frames)
    many.assert_clean()


def seeds_in(ring: Framed, frame: Frame) -> set[int]:
    openings = [ring.openings[one.sequence] for one in frame.segments]
    return {opening.seed for opening in openings if opening.decodes}


async def test_a_newcomer_rides_in_the_next_frame() -> None:
    """Nobody waits for a batch to be over."""
    ring = Framed()
    long = ring.listen(COUNT)
    for _ in range(10):
        await ring.lap()
    last = ring.frames[-1].number
    short = ring.listen(replace(DIRECT, seed=9))
    await ring.lap()
    await ring.lap()
    frame = next(one for one in ring.frames if any(opening.seed == 9 for opening in one.openings))
    assert frame.number <= last + 2
    assert len(frame.segments) > 1
    while not short.done():
        await ring.lap()
    assert not long.done()
    await ring.play(long)
    ring.assert_clean()


@pytest.mark.parametrize("flight", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_beginnings_that_are_shared_hold_the_right_rows(seed: int, flight: int) -> None:
    """Random requests with common beginnings, some given up in the middle, on few pages: every row that
    is ever fed sees exactly its own prompt and what was written.
    """
    chance = random.Random(seed)
    state = replace(STATE, pages=52 + 8 * seed, has_drafter=bool(seed % 2))
    ring = Framed(seed=seed, flight=flight, pages=state)
    clients: list[asyncio.Task[list[Event]]] = []
    for n in range(30):
        clients.append(ring.listen(choose(chance, n), f"r{n}", chance.choice("ab")))
        for _ in range(chance.randint(0, 8)):
            await ring.lap()
        if chance.random() < 0.25:
            ring.conductor.cancel(f"r{chance.randint(0, n)}")
    answers = await ring.play(*clients)
    whole = [finished(events) for events in answers if finished(events).reason.value == "stop"]
    assert len(whole) > 15
    assert {one.text for one in whole} <= {ANSWER, "It is naïve 你好.", SAYS["Count"]}
    assert sum(one.statistics.cached_tokens for one in whole) > 300
    ring.assert_clean()


def choose(chance: random.Random, n: int) -> Ask:
    small = Limits(max_new_tokens=320, max_skeleton_tokens=200)
    match chance.randint(0, 3):
        case 0:
            return replace(PLAN, prompt=chance.choice(["Letters?", "More letters?"]), limits=small)
        case 1:
            return replace(COUNT, limits=small, seed=n)
        case _:
            question = Message("user", chance.choice(["What is it?", "What is that, then?"]))
            return Ask(messages=(RULES, question), mode="direct", limits=Limits(max_new_tokens=30))
