"""What the master tells of its requests: of this moment, and how they ended.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from specsot.errors import SpecsotError
from specsot.params import Ask, Limits
from specsot_master.core.inputs import MasterLeaving
from specsot_master.core.stats import error_label
from specsot_master.engine import EngineConfig
from tests.master.letters import COUNT, DIRECT, SAYS, SOT, openings
from tests.master.stage import Stage

pytestmark = pytest.mark.slow


async def test_how_requests_ended() -> None:
    config = EngineConfig(model="demo", live=1, queue=2)
    stage = Stage({**SAYS, "Write the plan.": "[PLAN]\nno idea\n[END]"}, config=config)
    await stage.answer(DIRECT)
    await stage.answer(replace(COUNT, limits=Limits(max_new_tokens=5)))
    with suppress(SpecsotError):
        await stage.answer(replace(SOT, constraint=False))
    running = stage.listen(COUNT, "mine")
    late = stage.listen(DIRECT, timeout=50)
    gone = stage.listen(DIRECT)
    await stage.settle()
    for _ in range(2):
        with pytest.raises(SpecsotError):
            await stage.listen(DIRECT)
    stage.time.advance(60)
    gone.cancel()
    await asyncio.wait([late, gone])
    stage.engine.cancel("mine")
    await stage.play(running)
    found = stage.engine.requests()
    assert dict(found.ended) == {"stop": 1, "length": 1, "plan_error": 1, "timed_out": 1, "cancelled": 2}
    assert found.refused == 2
    assert (found.waiting, found.running, found.writing) == (0, 0, 0)
    await stage.settle()
    stage.assert_clean()


async def test_how_requests_stand() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=2, keep_for=10.0))
    await stage.play(stage.listen(replace(DIRECT, resumable=True)))
    clients = [stage.listen(SOT) for _ in range(5)]
    while stage.engine.requests().writing < 4:
        await stage.step()
    found = stage.engine.requests()
    assert (found.waiting, found.running, found.kept) == (3, 2, 1)
    stage.engine.handle(MasterLeaving("a worker is gone"))
    await asyncio.wait(clients)
    assert dict(stage.engine.requests().ended) == {"stop": 1, "unavailable": 5}


async def test_what_prompts_found() -> None:
    stage = Stage(SAYS)
    for _ in range(3):
        await stage.answer(Ask(prompt="Letters?", mode="sot"))
    found = stage.engine.requests()
    prefix = openings(stage)[0].prompt
    assert found.cached_tokens == 2 * prefix
    assert found.prompt_tokens == 3 * openings(stage)[1].prompt


def test_names_of_errors() -> None:
    names = {error_label(kind("?")) for kind in SpecsotError.__subclasses__() if kind.__name__ != "PlanError"}
    assert {"timed_out", "unavailable", "overloaded", "invalid_request"} <= names
