"""One call of an OpenAI client: the requests it stands for, told as chunks or as a whole.

Refuses to know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from specsot.events import Numbered
from specsot.params import Ask
from specsot.view import View, advance
from specsot_master.gateway.openai.choices import ChoiceDelta, ChoiceOptions, UsageCount, delta_of
from specsot_master.gateway.refusals import naming_fields

CallEvents = AsyncGenerator[tuple[int, Numbered], None]


@dataclass(frozen=True, slots=True)
class EndpointObjects:
    """The objects of one endpoint."""

    prefix: str
    whole: str
    chunk: str
    chunk_of: Callable[[int, ChoiceDelta], dict[str, Any]]
    choice_of: Callable[[int, View, ChoiceOptions], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """asks: one an answer, `copies` of them for each prompt. echoes: what each answer begins with.

    words: our fields as the caller knows them. usage: whether a stream ends with what it cost.
    head: what every object of this call begins with.
    """

    asks: tuple[Ask, ...]
    shape: EndpointObjects
    telling: ChoiceOptions
    words: Mapping[str, str]
    copies: int = 1
    echoes: tuple[str, ...] = ()
    usage: bool = False
    head: Mapping[str, Any] | None = None

    async def chunks(self, events: CallEvents) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk for every event that says something, the bill last where it is wanted."""
        usage, bill = UsageCount(), {"usage": None} if self.usage else {}
        head = self._head(self.shape.chunk)
        with naming_fields(self.words):
            async with aclosing(events):
                async for index, numbered in events:
                    usage.count(index // self.copies, numbered.event)
                    if piece := self._piece(index, numbered):
                        yield head | {"choices": [self.shape.chunk_of(index, piece)]} | bill
        if self.usage:
            yield head | {"choices": [], "usage": usage.told()}

    async def gather(self, events: CallEvents) -> dict[str, Any]:
        """The whole answer as one object."""
        usage, views = UsageCount(), [View() for _ in self.asks]
        with naming_fields(self.words):
            async with aclosing(events):
                async for index, numbered in events:
                    usage.count(index // self.copies, numbered.event)
                    views[index] = advance(views[index], numbered.event)
        choices = [
            self.shape.choice_of(index, self._echoed(index, view), self.telling)
            for index, view in enumerate(views)
        ]
        return self._head(self.shape.whole) | {"choices": choices, "usage": usage.told()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {**(self.head or {}), "object": kind}

    def _piece(self, index: int, numbered: Numbered) -> ChoiceDelta | None:
        piece = delta_of(numbered, self.telling)
        if piece is None or not self.echoes:
            return piece
        echo = self.echoes[index]
        return replace(piece, text=echo) if piece.begins else replace(piece, offset=piece.offset + len(echo))

    def _echoed(self, index: int, view: View) -> View:
        finished = view.finished
        if not self.echoes or finished is None:
            return view
        return replace(view, finished=replace(finished, text=self.echoes[index] + finished.text))
