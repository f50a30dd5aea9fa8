"""Answers that begin with what the ring kept are those of a ring that kept nothing, token for token.

The whole system in one process, on the demo model in fp32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.events import Finished
from specsot.members import TreeShape
from specsot.params import Ask, Limits, Message, Sampling
from specsot.service.options import DraftModelOptions
from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.engine import EngineConfig
from tests.conftest import some

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

RULES = Message("system", "Answer as a patient teacher would, in plain words. " * 6)
LIMITS = Limits(max_new_tokens=128, max_branch_tokens=8)


def asks(drafter: str) -> list[Ask]:
    """The same beginnings again and again: of plans, of direct answers, of a conversation's next turn."""
    plan = Ask(prompt="Explain Photosynthesis.", mode="sot", limits=LIMITS, seed=3, drafter=drafter)  # type: ignore[arg-type]
    direct = Ask(
        messages=(RULES, Message("user", "Explain Photosynthesis.")),
        mode="direct", limits=Limits(max_new_tokens=16), seed=3, ignore_eos=True, drafter=drafter,  # type: ignore[arg-type]
    )  # fmt: skip
    longer = (*direct.messages, Message("assistant", "It is how plants eat."), Message("user", "How?"))
    warm = Sampling(temperature=0.8, repetition_penalty=1.2)
    return [
        plan,
        plan,
        replace(plan, sampling=warm),
        direct,
        direct,
        replace(direct, messages=(RULES, Message("user", "Explain Stages of Sleep."))),
        replace(direct, messages=longer, sampling=warm),
    ]


@asynccontextmanager
async def fleet(demo: Path, keeps: bool, page_rows: int, **more: object) -> AsyncIterator[EmbeddedFleet]:
    conduct, shape = EngineConfig(prefix_cache=keeps), TreeShape(4, 3, 12, fixed=True)
    weights = DraftModelOptions(demo / "base", dtype="fp32", draft_model=demo / "eagle3")
    ring = RingOptions(page_rows=page_rows, conduct=conduct, shape=shape, draft_timeout=30.0)
    options = EmbeddedOptions(weights, ring, **more)  # type: ignore[arg-type]
    opened = await EmbeddedFleet.start(options)
    try:
        yield opened
    finally:
        await opened.close()


async def answer(opened: EmbeddedFleet, ask: Ask) -> Finished:
    events = [numbered.event async for numbered in opened.generate(ask)]
    assert isinstance(events[-1], Finished)
    return events[-1]


@pytest.mark.parametrize(("drafter", "stages", "page_rows"), some([("eagle", 2, 16), ("none", 1, 256)], 0))
async def test_a_cache_hit_changes_no_token(
    demo_model: Path, drafter: str, stages: int, page_rows: int
) -> None:
    async with fleet(demo_model, keeps=False, stages=stages, page_rows=page_rows) as opened:
        different = list(dict.fromkeys(asks(drafter)))
        once = dict(zip(different, await asyncio.gather(*(answer(opened, ask) for ask in different))))
    async with fleet(demo_model, keeps=True, stages=stages, page_rows=page_rows) as opened:
        kept = [await answer(opened, ask) for ask in asks(drafter)]
        info = await opened.info()
    fresh = [once[ask] for ask in asks(drafter)]
    assert [one.tokens for one in kept] == [one.tokens for one in fresh]
    assert [one.statistics.cached_tokens > 0 for one in kept] == [False, True, True, False, True, True, True]
    assert not any(one.statistics.cached_tokens for one in fresh)
    for with_, without in zip(kept, fresh):  # the drafter goes on from what was kept, too
        assert with_.statistics.mean_accepted == pytest.approx(without.statistics.mean_accepted, rel=0.15)
    assert info.pages is not None
    assert info.pages.free == info.pages.total
