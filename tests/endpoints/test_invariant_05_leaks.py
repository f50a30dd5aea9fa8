"""Invariant 5, leaks: after hundreds of requests that ended at random nothing of them is left.

The calls are real ones, cut in every way a client can.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest

from specsot.core.frames import Result
from specsot.core.info import Info, ModelInfo
from specsot.transport.grpc_client import MasterClient
from specsot.v1 import master_pb2
from specsot_master.core.stats import MAX_STEPS
from specsot_master.engine import EngineConfig
from specsot_master.telemetry import Metrics, RequestMetrics
from tests.conftest import REPOSITORY, is_full
from tests.endpoints.front import Front, front, question, stub, told
from tests.forked import ran
from tests.master.letters import DIRECT, TIGHT
from tests.master.stage import turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

CALLS, SHORT, AT_ONCE = 200 if is_full() else 120, 200, 8
MAX_ROUNDS = 4
UNTIL_FULL = 400  # short requests: then what is kept on purpose is
CONFIG = EngineConfig(model="demo", live=3, queue=3, keep_for=5.0, keep=8)
WAYS = ("read", "hang up", "cancel", "deadline", "refused", "left")


async def test_invariant_5_hundreds_of_random_ends() -> None:
    chance = random.Random(5)
    async with front(state=replace(TIGHT, has_drafter=False), config=CONFIG) as one:
        await some_calls(one, chance, 5 * AT_ONCE, WAYS)  # whatever is made once and kept is there now
        before = standing()
        await some_calls(one, chance, CALLS, WAYS)
        await cleaned(one, before)
        found = one.stage.engine.requests()
        assert (found.waiting, found.running, found.writing, found.kept) == (0, 0, 0, 0)
        ended = dict(found.ended)
        assert ended["stop"] > 10, "those that were read, or left to themselves"
        assert ended["cancelled"] > 0, "few where the machine is busy and answers come late"
        assert found.refused > 0, "there was more than fits"


async def cleaned(one: Front, before: Mapping[str, int]) -> None:
    """A call that its client gave up may reach the server after all others are over."""
    async with asyncio.timeout(60):
        while not is_clean(one, before):
            one.stage.time.advance(1000)
            await asyncio.sleep(0.01)


def is_clean(one: Front, before: Mapping[str, int]) -> bool:
    after = standing()
    if after["tasks"] > before["tasks"] + 2 or after["files"] > before["files"] + 2:
        return False
    with suppress(AssertionError):
        one.stage.assert_clean()
        return True
    return False


@pytest.mark.processes
def test_invariant_5_memory_does_not_grow_in_a_process_of_its_own() -> None:
    """Threads and caches of other tests would grow in the same process."""
    test = f"{__file__}::test_invariant_5_memory_does_not_grow_with_requests"
    unused = [word for name in ("cacheprovider", "schemathesis", "anyio") for word in ("-p", f"no:{name}")]
    status, lines = ran("pytest", *unused, f"--rootdir={REPOSITORY}", "--full", test)
    assert status == 0, "\n".join(lines)


@pytest.mark.full
async def test_invariant_5_memory_does_not_grow_with_requests() -> None:
    """Not by one block of Python's memory a request, once what is kept on purpose is full. A full run
    measures it among other tests, too, where one of MAX_ROUNDS rounds must be quiet.
    """
    async with front(config=replace(CONFIG, queue=AT_ONCE)) as one:
        metrics = Metrics(lambda: Info(models=(ModelInfo("demo", "abc", 8, 2048),)))
        one.desk.watch(lambda _: RequestMetrics(lambda _: metrics, one.stage.time.now))
        client = await one.client()
        for number in range(MAX_STEPS):
            one.stage.engine.steps.on_result(Result(1, number + 1, ()))
        await short_requests(one, client, UNTIL_FULL)
        grown = list[int]()
        # What is made once, such as by a thread of another test, does not grow in every round.
        while not grown or (min(grown) >= SHORT and len(grown) < MAX_ROUNDS):
            before = blocks(one)
            await short_requests(one, client, SHORT)
            grown.append(blocks(one) - before)
        assert min(grown) < SHORT, grown
        await client.close()


async def short_requests(one: Front, client: MasterClient, count: int) -> None:
    """Every other one is kept for a while, and read by nobody else."""
    for number in range(0, count, AT_ONCE):
        asks = (replace(DIRECT, resumable=bool(n % 2)) for n in range(AT_ONCE))
        await asyncio.gather(*(told(client, ask, f"r{number + n}") for n, ask in enumerate(asks)))
    one.stage.time.advance(1000)
    await one.quiet()


def blocks(one: Front) -> int:
    """In use, without what the fakes remember of everybody."""
    one.stage.ring.orders.clear()
    one.stage.prompts_seen.clear()
    gc.collect()
    return sys.getallocatedblocks()


def standing() -> dict[str, int]:
    """What a process holds."""
    return {"tasks": len(asyncio.all_tasks()), "files": len(os.listdir("/proc/self/fd"))}


async def some_calls(one: Front, chance: random.Random, count: int, ways: Sequence[str]) -> None:
    """So many calls, eight at a time, over channels that come and go; then time passes."""
    for _ in range(count // AT_ONCE):
        async with one.channel() as channel:
            await asyncio.gather(*(call(channel, chance.choice(ways), chance) for _ in range(AT_ONCE)))
    await one.quiet()
    one.stage.time.advance(1000)
    for _ in range(50):
        await turn()
    await one.quiet()


async def call(channel: grpc.aio.Channel, way: str, chance: random.Random) -> None:
    """One request that ends in one of the ways there are."""
    reads, id = chance.randrange(12), f"{chance.getrandbits(64):x}"
    reading = stub(channel).Generate(asked(way, id, chance), timeout=0.003 if way == "deadline" else None)
    try:
        while (way == "read" or reads) and await reading.read() is not grpc.aio.EOF:
            reads -= 1
        if way == "cancel":
            await stub(channel).Cancel(master_pb2.CancelRequest(request_id=id))
            while await reading.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError:
        pass
    finally:
        reading.cancel()


def asked(way: str, id: str, chance: random.Random) -> master_pb2.GenerateRequest:
    request = question(chance.choice(["What is it?", "Count.", "Letters?"]))
    if "Letters" in request.prompt:
        request.mode = master_pb2.MODE_SOT
        request.limits.max_new_tokens, request.limits.max_skeleton_tokens = 300, 200
    request.request_id, request.resumable = id, way == "left"
    if way == "refused":
        request.sampling.temperature = -1
    return request
