"""How long drafting may take on the thread of a worker, whose own frames may take less."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import pytest

from specsot.core.deadline import MIN_SECONDS
from specsot.core.frames import FeatureBatch, Features
from specsot.errors import Hung
from specsot.members import Configuration, Range, Stage
from specsot.service.compute import Compute
from specsot_drafter.core.tree_budget import FixedBudget
from specsot_drafter.drafter import Drafter
from specsot_drafter.engine import DraftEngine
from tests.drafter.ring import opening
from tests.drafter.test_lanes import SHAPE, Parrot, engine_with
from tests.faults.virtual import Labour, run
from tests.worker.test_postponed import Said

LONG = 51_200  # rows of a text; half of them are shared


class Unread(Parrot):
    """Has read nothing of what it drafts for."""

    def due_rows(self, sequences: Any) -> int:
        return LONG


class NeverEnds(Executor):
    def submit(self, fn: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        fn(*arguments)
        return Future()


@dataclass
class Heads:
    """See `EngineProvider`."""

    engine: DraftEngine
    name: str = "d"

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        return self.engine


async def told(proposer: Parrot, *batches: Features) -> Drafter:
    """A drafter beside a worker that has just known work, and takes a second for 512 rows."""
    engine, stages = engine_with({"model": (proposer, FixedBudget(SHAPE))}), (Stage("w", "w", Range(0, 1)),)
    drafter = Drafter(Heads(engine), Said(), Labour(lambda work: work()))  # type: ignore[arg-type]
    await drafter.configure(Configuration(1, "d", stages, 9, 4, 4, curve=((512, 1.0),)), Said())
    for batch in batches:
        drafter.draft((batch,), lambda: None)
    return drafter


def batch_of(sequence: int, tokens: int, lap: int) -> Features:
    lesson = FeatureBatch(sequence, 0, (1,) * tokens, 1, 1)
    return Features(1, lap, (opening(sequence, tokens, limit=9),), (lesson,))


@pytest.mark.parametrize(
    ("proposer", "seconds"), [(Unread(7), 8 * LONG / 512), (Parrot(7), MIN_SECONDS)], ids=["long", "short"]
)
def test_drafting_on_a_worker_s_thread_has_the_time_that_its_rows_may_take(
    proposer: Parrot, seconds: float
) -> None:
    """What a text lacks is computed when it is drafted for first; who never comes back is noticed, too."""

    async def drafts() -> float:
        drafter = await told(proposer, batch_of(1, 4, 1))
        with pytest.raises(Hung):
            await Compute("w", NeverEnds()).run(
                drafter.draft, (batch_of(2, 4, 2),), lambda: None, within=MIN_SECONDS
            )
        return asyncio.get_running_loop().time()

    assert run(drafts()) == pytest.approx(seconds, abs=2.0)
