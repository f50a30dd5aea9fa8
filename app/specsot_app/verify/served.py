"""What a fleet answers to the questions of a verification: token ids, and how they came.

Refuses to know whether they are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from specsot.errors import Unavailable
from specsot.events import Finished, Numbered, Reason
from specsot.params import DrafterName, Message
from specsot_app.asking import ask_of
from specsot_app.fleets import Fleet
from specsot_master.prompts import Prompts

SIDE_BY_SIDE = 4  # questions under way at once: what a batch does to an answer is part of what is verified


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """One greedy answer.

    prompt, tokens: ids; the end token is in neither. ended: the model ended it by itself.
    per_lap: tokens a lap, 1.0 where nothing is drafted.
    """

    question: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    ended: bool
    per_lap: float


async def ask_all(
    fleet: Fleet,
    prompts: Prompts,
    questions: Sequence[str],
    drafter: DrafterName,
    tokens: int,
    step: Callable[[], None],
) -> list[FleetAnswer]:
    """Every question once, `tokens` tokens at most, in the order of the questions; a step for each."""
    places = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(question: str) -> FleetAnswer:
        async with places:
            served = await _ask(fleet, prompts, question, drafter, tokens)
        step()
        return served

    tasks = [asyncio.ensure_future(one(question)) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _ask(
    fleet: Fleet, prompts: Prompts, question: str, drafter: DrafterName, tokens: int
) -> FleetAnswer:
    ask = ask_of(question, mode="direct", drafter=drafter, temperature=0.0, max_new_tokens=tokens)
    finished: Finished | None = None
    async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(ask))) as events:
        async for numbered in events:
            if isinstance(numbered.event, Finished):
                finished = numbered.event
    if finished is None or finished.reason not in (Reason.STOP, Reason.LENGTH):
        raise Unavailable(f"no whole answer came to {question!r}")
    prompt = prompts.chat((Message("user", question),))
    ended = finished.reason is Reason.STOP
    return FleetAnswer(question, prompt, finished.tokens, ended, finished.statistics.mean_accepted)
