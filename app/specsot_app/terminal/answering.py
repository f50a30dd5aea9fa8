"""One question of a conversation on its way: what fits is asked, shown, and stopped when told to.

Refuses to know keyboards and fleets of any kind. Lives on the loop of the fleet it asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from specsot.errors import ContextLengthExceeded, InvalidRequest
from specsot.events import Numbered, Started
from specsot.params import Ask
from specsot.view import View
from specsot_app.fleets import Fleet
from specsot_app.terminal.talk import Conversation

Asker = Callable[[Conversation, str], Ask]
Show = Callable[[AsyncGenerator[Numbered], int], Any]  # (events, how many exchanges were left out) -> View
TOO_LARGE = "max_new_tokens"  # the field of a refusal because of the ring's memory


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """talk: what was asked, and so without the oldest exchanges where they did not fit any more."""

    talk: Conversation
    view: View


class RunningAnswer:
    """`show` it once; `stop` it at any time."""

    def __init__(self, fleet: Fleet, asker: Asker, show: Show) -> None:
        self._fleet, self._asker, self._show = fleet, asker, show
        self._task: asyncio.Task[Any] | None = None
        self._request: str | None = None
        self._stopping = False

    async def show(self, talk: Conversation, question: str) -> AnsweredQuestion:
        """Raises what asking raises; CancelledError when it was stopped before it began."""
        self._task = asyncio.current_task()
        fitting, first, rest = await self._begin(talk, question)
        async with aclosing(rest):
            left_out = (len(talk.turns) - len(fitting.turns)) // 2
            return AnsweredQuestion(fitting, await self._show(self._noted(first, rest), left_out))

    async def stop(self) -> None:
        """What is written already still comes. Told twice, or before it began: at once."""
        if self._request is not None and not self._stopping:
            self._stopping = True
            await self._fleet.cancel(self._request)
        elif self._task is not None:
            self._task.cancel()

    async def _begin(
        self, talk: Conversation, question: str
    ) -> tuple[Conversation, Numbered, AsyncGenerator[Numbered]]:
        """Leave the oldest exchanges out, one by one, while the model's context is too short for all."""
        while True:
            events = cast("AsyncGenerator[Numbered]", self._fleet.generate(self._asker(talk, question)))
            try:
                return talk, await anext(events), events
            except InvalidRequest as error:
                shorter = isinstance(error, ContextLengthExceeded) or error.field == TOO_LARGE
                if not (shorter and talk.turns):
                    raise
                talk = talk.without_oldest()

    async def _noted(self, first: Numbered, rest: AsyncGenerator[Numbered]) -> AsyncGenerator[Numbered]:
        if isinstance(first.event, Started):
            self._request = first.event.request
        yield first
        async for numbered in rest:
            yield numbered
