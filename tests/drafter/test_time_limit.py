"""How long drafting may take on the thread of a worker, whose own frames may take less."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import pytest

from specsot.core.deadline import MIN_SECONDS
from specsot.core.frames import FeatureBatch, Features, Open, Opening
from specsot.errors import Hung
from specsot.transport.links import Arrival, Inbox, LocalLink
from specsot_drafter.core.budget import FixedBudget
from specsot_drafter.drafter import Drafter
from specsot_worker.worker import Worker
from tests.drafter.ring import opening
from tests.drafter.test_lanes import SHAPE, Parrot, engine_with
from tests.faults.virtual import run
from tests.worker.one_thread import AnswerMessage, Heads, Here
from tests.worker.test_postponed import CONFIGURATION, Provider

LONG = 51_200  # rows that a text lacks


class Unread(Parrot):
    """Has read nothing of what it drafts for."""

    def due_rows(self, sequences: Any) -> int:
        return LONG


class Until(Executor):
    """Does it at once, until somebody has drafted: that never ends."""

    def __init__(self, proposer: Parrot) -> None:
        self._asked = proposer.asked

    def submit(self, fn: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        done, before = Future[Any](), len(self._asked)
        result = fn(*arguments)
        if len(self._asked) == before:
            done.set_result(result)
        return done


async def beside(proposer: Parrot) -> Worker:
    """A worker that takes a second for 512 rows, with a drafter in its process that knows short texts."""
    engine, said = engine_with({"model": (proposer, FixedBudget(SHAPE))}), AnswerMessage()
    drafter = Drafter(Heads(engine), said, Here())  # type: ignore[arg-type]
    said.drafter = LocalLink("w", Inbox(), drafter=drafter)  # type: ignore[assignment]
    worker = Worker(Provider(None), said, Until(proposer), clock=lambda: 0.0)  # type: ignore[arg-type]
    told = replace(CONFIGURATION, curve=((512, 1.0),), draft_timeout=0.0)
    await drafter.configure(replace(told, you="d"), said)
    await worker.configure(told, said)
    feature_batch = FeatureBatch(9, 0, (1,) * 4, 1, 1)
    handle = drafter.start_drafts()
    assert handle
    handle.result((Features(1, 0, (opening(9, 4, limit=9),), (feature_batch,)),), lambda: None)
    return worker


@pytest.mark.parametrize(
    ("proposer", "seconds"), [(Unread(7), 8 * LONG / 512), (Parrot(7), MIN_SECONDS)], ids=["long", "short"]
)
def test_drafting_on_a_worker_s_thread_has_the_time_that_its_rows_may_take(
    proposer: Parrot, seconds: float
) -> None:
    """What a text lacks is computed when it is drafted for first; who never comes back is noticed, too."""

    async def writes() -> float:
        worker = await beside(proposer)
        text = Open(Opening(1, 3, limit=9), (1, 2, 3), 99)
        await worker.handle(Arrival("master", text))
        with pytest.raises(Hung, match="w hangs"):
            await worker.run_due()
        return asyncio.get_running_loop().time()

    assert run(writes()) == pytest.approx(seconds, abs=2.0)
