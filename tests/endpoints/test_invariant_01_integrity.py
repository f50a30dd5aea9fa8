"""Invariant 1, stream integrity: offsets from 0 without a gap, each event once, one last one; over any cuts.

The calls are real ones, their client hangs up at random.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import pytest

from specsot.errors import NotFound
from specsot.events import BranchText, Finished, MergedText, Numbered
from specsot.transport.grpc_client import MasterClient
from specsot.v1 import master_pb2
from tests.conftest import seeds
from tests.endpoints.front import Front, front, read
from tests.master.letters import ANSWER, SOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

KEPT = replace(SOT, resumable=True)


@pytest.mark.parametrize("seed", seeds(4, quick=2))
async def test_invariant_1_over_lost_connections(seed: int) -> None:
    """Every part is read over a connection of its own, which is then cut."""
    chance = random.Random(seed)
    async with front(seed=seed) as one:
        streams = await asyncio.gather(*(read_in_parts(one, f"r{n}", chance) for n in range(6)))
        await one.quiet()
    for events in streams:
        assert [event.number for event in events] == list(range(len(events)))
        assert [isinstance(event.event, Finished) for event in events[-2:]] == [False, True]
        assert "".join(e.event.text for e in events if isinstance(e.event, MergedText)) == ANSWER
        written: dict[int, int] = {}
        for text in (e.event for e in events if isinstance(e.event, BranchText)):
            assert text.offset == written.get(text.branch, 0), "characters of a branch follow each other"
            written[text.branch] = text.offset + len(text.text)


async def read_in_parts(one: Front, id: str, chance: random.Random) -> list[Numbered]:
    got: list[Numbered] = []
    while not got or not isinstance(got[-1].event, Finished):
        client = await one.client()
        got += await read_some(client, id, len(got), chance.randrange(8))
        await client.close()
    return got


def resume(client: MasterClient, id: str, offset: int) -> AsyncIterator[Numbered]:
    """The events from `offset` on of a resumable request."""
    return client._read(master_pb2.GenerateRequest(request_id=id, resume_from=offset), None)


async def read_some(client: MasterClient, id: str, offset: int, most: int) -> list[Numbered]:
    """Up to `most` events, or what there is till the end."""
    got: list[Numbered] = []
    events = resume(client, id, offset) if offset else client.generate(KEPT, id)
    async with aclosing(cast("object", events)) as reading:  # type: ignore[type-var]
        while len(got) < most and (event := await anext(reading, None)) is not None:  # type: ignore[call-overload]
            got.append(event)
    return got


async def test_invariant_1_nothing_after_the_end() -> None:
    async with front() as one:
        client = await one.client()
        events = await read(client.generate(KEPT, "mine"))
        assert await read(resume(client, "mine", len(events) - 1)) == events[-1:]
        with pytest.raises(NotFound, match="no request 'other' is kept here"):
            await read(resume(client, "other", 1))
        await client.close()
