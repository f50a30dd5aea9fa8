"""What travels in the ring, by its frames: what is cancelled is gone, and requests ride together.

Scripts say what is written, for rows that see the right tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

import grpc
import pytest

from specsot.core.frames import Frame, Opening
from specsot.core.info import Info
from specsot.errors import TimedOut
from specsot.events import Event, Finished
from specsot.params import Ask, Limits, Message
from specsot.transport.wire.events import encode_ask
from specsot.v1 import master_pb2
from specsot_master.engine import EngineConfig
from specsot_master.grpc_api import FleetService, MasterService, open_master_port
from specsot_master.master import RequestCounter
from tests.conftest import some
from tests.endpoints.frames import STATE, Framed, free
from tests.endpoints.front import stub
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished
from tests.master.stage import turn
from tests.rpc.test_uplink import FakeFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PLAN = free(SOT)
RULES = Message("system", "You are a careful teacher. " * 12)


async def test_the_ring_of_frames_answers() -> None:
    ring = Framed()
    answers = await ring.play(ring.listen(PLAN), ring.listen(DIRECT), ring.listen(COUNT))
    assert [finished(events).text for events in answers] == [ANSWER, "It is naïve 你好.", SAYS["Count"]]
    assert finished(answers[2]).statistics.mean_accepted > 1.5
    ring.assert_clean()


LEFT = [*product(("cancel", "hang up", "deadline"), (1, 2, 5, 9, 14, 20), (1, 3))]
MET = [n for n in range(len(LEFT)) if (n + n // 2 + n // 12) % 2 == 0]  # every two of them


@pytest.mark.parametrize(("way", "steps", "flight"), some(LEFT, *MET))
async def test_no_row_of_a_cancelled_request_two_steps_later(way: str, steps: int, flight: int) -> None:
    ring = Framed(flight=flight, seed=steps)
    other = ring.listen(COUNT)
    client = ring.listen(PLAN, "mine", timeout=10_000.0)
    while not writing(ring, PLAN):
        await ring.step()
    for _ in range(steps):
        await ring.step()
    theirs, last = writing(ring, PLAN), ring.frames[-1].number
    match way:
        case "cancel":
            assert ring.conductor.cancel("mine")
        case "hang up":
            client.cancel()
        case _:
            ring.time.advance(10_001)
    await asyncio.wait([client])
    await ring.play(other)
    assert_gone(ring, theirs, last)
    if way == "deadline":
        assert isinstance(client.exception(), TimedOut)
    assert finished(other.result()).text == SAYS["Count"]
    ring.assert_clean()


@pytest.mark.parametrize("flight", [1, 3])
@pytest.mark.parametrize("way", ["cancel", "drop the call", "drop the connection"])
async def test_no_row_two_steps_after_it_ended_at_the_endpoint(way: str, flight: int) -> None:
    """The same, by a call over the network: only what the master hears of it may take time."""
    ring = Framed(flight=flight)
    async with opened(ring) as channel:
        other = ring.listen(COUNT)
        beside = replace(PLAN, limits=Limits(max_new_tokens=200))  # so that there is room for both
        call = stub(channel).Generate(encode_ask(beside, "mine"))
        await call.read()
        while len(writing(ring, PLAN)) < 3:  # the plan, and two of its branches
            await ring.step()
        theirs = writing(ring, PLAN)
        match way:
            case "cancel":
                response = await stub(channel).Cancel(master_pb2.CancelRequest(request_id="mine"))
                assert response.cancelled
            case "drop the call":
                call.cancel()
            case _:
                await channel.close()
        while ("cancelled", 1) not in ring.conductor.requests().ended:
            await turn()
        last = ring.frames[-1].number
        await ring.play(other)
        assert_gone(ring, theirs, last)
        ring.assert_clean()


@asynccontextmanager
async def opened(ring: Framed) -> AsyncIterator[grpc.aio.Channel]:
    """A gRPC endpoint before the ring's conductor, and a channel to it."""
    desk = RequestCounter(ring.conductor, Info)
    endpoint = await open_master_port("127.0.0.1:0", MasterService(desk, Info), FleetService(FakeFleet()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
        yield channel
    await endpoint.close(0)


def writing(ring: Framed, ask: Ask) -> set[int]:
    """The writing sequences that were opened for it."""
    return {one.sequence for one in ring.openings.values() if one.decodes and is_for(one, ask)}


def is_for(opening: Opening, ask: Ask) -> bool:
    """Its seed is that of COUNT, whose limit is 400."""
    return opening.seed == ask.seed and opening.limit != 400


def assert_gone(ring: Framed, theirs: set[int], last: int) -> None:
    """They were in frames, but in none two steps after frame `last`, and all of them are closed."""
    assert ring.rows_of(theirs, since=0) > 0
    assert ring.rows_of(theirs, since=last + 2) == 0
    assert theirs <= {one for frame in ring.frames for one in frame.closings}


async def test_a_cancelled_request_that_waits_was_never_in_a_frame() -> None:
    ring = Framed(config=EngineConfig(model="demo", live=1))
    running = ring.listen(COUNT)
    await ring.step()
    waiting = ring.listen(replace(DIRECT, seed=9), "mine")
    await ring.step()
    assert ring.conductor.cancel("mine")
    await ring.play(running)
    assert {one.seed for one in ring.openings.values()} == {COUNT.seed}
    assert isinstance(waiting.result()[-1], Finished)
    ring.assert_clean()


@pytest.mark.parametrize("flight", [1, 2])
async def test_frames_carry_several_requests(flight: int) -> None:
    """Branches of all requests share frames: far fewer steps than one after the other."""
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
        await ring.step()
    last = ring.frames[-1].number
    short = ring.listen(replace(DIRECT, seed=9))
    await ring.step()
    await ring.step()
    frame = next(one for one in ring.frames if any(opening.seed == 9 for opening in one.openings))
    assert frame.number <= last + 2
    assert len(frame.segments) > 1
    while not short.done():
        await ring.step()
    assert not long.done()
    await ring.play(long)
    ring.assert_clean()


@pytest.mark.parametrize(("seed", "flight"), some(product(range(4), (1, 3)), 0, 3))
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
            await ring.step()
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
