"""Laws 4 and 5: whatever ends, when and how, nobody else is disturbed and nothing is left behind."""

import asyncio
import os
import random

import pytest

from specsot.core.frames import Close, End, Fork
from specsot.params import Sampling
from tests.conftest import some
from tests.laws.plain import Excuses, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.models import SHALLOW, write_base, write_head

pytestmark = pytest.mark.torch

PROMPT = (5, 9, 14, 3, 77, 21, 8, 8, 30, 2, 150, 44, 61, 7, 7, 19, 120, 3)


async def end_somehow(ring, rng, prefix):
    """One sequence that ends in one of the ways sequences end."""
    fork = Fork(prefix, len(PROMPT)) if rng.random() < 0.7 else None
    tokens = [rng.randrange(2, 200) for _ in range(rng.randrange(1, 30))]
    limit = rng.randrange(1, 25)
    way = rng.choice(["limit", "stop", "close at once", "close mid-way", "close twice"])
    stops = tuple(range(100)) if way == "stop" else ()
    one = await ring.open(tokens, fork, limit=limit, stop_ids=stops, drafted=rng.random() < 0.8)
    if way.startswith("close"):
        if way != "close at once":
            await ring.heard(one, tokens=1)
        await ring.fleet.order(Close(one))
        if way == "close twice":
            await ring.fleet.order(Close(one))
    else:
        await ring.written(one)
        assert ring.texts[one].end in (End.LENGTH, End.STOP)


async def settle(ring, pages):
    """Wait until the last closing has passed every member."""
    while any(part.free_pages != pages for part in ring.parts.values()):
        await ring.let_others_run()


@pytest.mark.parametrize("links", some(["local", "grpc"], 1))
async def test_law_5_random_ends_leave_no_state(models, links, ends):
    base, head = models
    rng = random.Random(17)
    async with ring_of(Setup(base, head, 2, links=links)) as ring:
        pages = ring.fleet.ring.pages
        await asyncio.wait_for(settle(ring, pages), 100)
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        prefix = await ring.prefix(list(PROMPT))
        waiting = [asyncio.create_task(end_somehow(ring, rng, prefix)) for _ in range(ends)]
        await asyncio.gather(*waiting)
        await ring.close(prefix)
        await asyncio.wait_for(settle(ring, pages), 100)
        assert len(asyncio.all_tasks()) <= tasks
        assert len(os.listdir("/proc/self/fd")) <= files
        assert not ring.broken


async def test_law_4_what_others_do_changes_no_token(models, ends):
    base, head = models
    rng, excuses = random.Random(23), Excuses()
    sampling = Sampling(temperature=0.8)
    async with ring_of(Setup(base, head, 3)) as ring:
        prefix = await ring.prefix(list(PROMPT))
        noise = [asyncio.create_task(end_somehow(ring, rng, prefix)) for _ in range(ends)]
        fork = Fork(prefix, len(PROMPT))
        ids = [
            await ring.open([n + 2], fork, limit=20, sampling=sampling, seed=7, ordinal=n) for n in range(8)
        ]
        texts = [await ring.written(one) for one in ids]
        await asyncio.gather(*noise)
    for n, text in enumerate(texts):
        excuses.compare(text, write_plainly(base, (*PROMPT, n + 2), 20, sampling, 7, n, text))
    excuses.settle()


async def test_law_4_a_stage_that_goes_ends_the_epoch_with_a_reason_and_no_hang(models):
    base, head = models
    async with ring_of(Setup(base, head, 2, links="grpc")) as ring:
        one = await ring.open(list(PROMPT), limit=400)
        await ring.heard(one, tokens=5)
        ring.leaving["worker-1"].set()
        await asyncio.wait_for(ring.texts[one].over.wait(), 100)
        assert "worker-1" in ring.broken[0]
        assert ring.fleet.waiting_for() == "1 of 2 workers"


@pytest.mark.parametrize("layout", ["packed", "batched"])
async def test_law_6_a_sequence_with_non_finite_logits_fails_alone(tmp_path, layout):
    poison = 199
    base = write_base(tmp_path / "base", SHALLOW, poison=poison)
    head = write_head(tmp_path / "head", SHALLOW)
    prompts = [tuple(range(3, 5 + 2 * n)) for n in range(6)]  # of many lengths, read side by side
    async with ring_of(Setup(base, head, 2, layout, page_rows=64)) as ring:
        for _ in range(2):  # the pages of those that broke are used again
            doomed = [await ring.open([poison] + [5] * 40, limit=20) for _ in range(6)]
            broken = [await ring.written(one) for one in doomed]
            assert broken == [[]] * 6
            assert {ring.texts[one].end for one in doomed} == {End.FAILED}
            for written, prompt in zip(await ring.write_all([list(p) for p in prompts], 12), prompts):
                ordinal = prompts.index(prompt)
                assert (
                    tuple(written) == write_plainly(base, prompt, 12, Sampling(), 7, ordinal, written).tokens
                )
