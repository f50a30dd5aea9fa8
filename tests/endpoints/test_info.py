"""What GetInfo tells of requests, over the wire: how they stand, how they ended, what of them was cached.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsot.core.info import RequestsInfo
from specsot.transport.grpc_client import MasterClient
from specsot_master.engine import EngineConfig
from tests.endpoints.front import front, outcome, told
from tests.master.letters import DIRECT, SOT, finished, openings

pytestmark = pytest.mark.timeout(30)


async def requests(client: MasterClient) -> RequestsInfo:
    found = (await client.info()).requests
    assert found is not None
    return found


async def test_prefix_hits_show() -> None:
    """The second time a question's beginning is there already, and only then."""
    async with front() as one:
        client = await one.client()
        found: list[int] = []
        for _ in range(2):
            figures_of = finished(await told(client, SOT)).statistics
            found.append((await requests(client)).cached_tokens)
            assert figures_of.cached_tokens == min(found[-1], figures_of.prompt_tokens)
        prefix, skeleton = openings(one.stage)[:2]
        assert found == [0, prefix.prompt]
        assert (await requests(client)).prompt_tokens == 2 * skeleton.prompt
        await client.close()


async def test_a_crowd_shows() -> None:
    async with front(config=EngineConfig(model="demo", live=2, queue=3)) as one:
        one.going.clear()
        client = await one.client()
        calls = [asyncio.create_task(outcome(client, replace(DIRECT, seed=n))) for n in range(7)]
        while (found := await requests(client)).refused < 2:
            pass
        assert (found.running, found.writing, found.waiting, found.ended) == (2, 2, 3, ())
        one.going.set()
        await asyncio.gather(*calls)
        found = await requests(client)
        assert (found.running, found.writing, found.waiting, found.ended) == (0, 0, 0, (("stop", 5),))
        assert found.refused == 2
        await client.close()
