"""Requests as streams of events: what an engine, and a router of several engines, offer their callers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from specsot.events import Numbered
from specsot.params import Ask
from specsot_master.conductor.ring import ANYBODY, Caller


class EventStream(Protocol):
    """A request's events as they come. Whoever opened it closes it."""

    def __aiter__(self) -> AsyncIterator[Numbered]: ...

    def __anext__(self) -> Awaitable[Numbered]: ...

    async def aclose(self) -> None: ...


class RequestStreams(ABC):
    """`open` and `reopen` raise what is wrong with a call; the streams, what ends the request."""

    @abstractmethod
    async def open(self, ask: Ask, caller: Caller) -> EventStream:
        """A new request, or a resumable one of this id that is known."""

    @abstractmethod
    async def reopen(self, request_id: str, offset: int, ask: Ask | None, caller: Caller) -> EventStream:
        """The rest of a resumable request."""

    def generate(self, ask: Ask, caller: Caller = ANYBODY) -> AsyncGenerator[Numbered, None]:
        """As `open`, from the first event on."""
        return _read(lambda: self.open(ask, caller))

    def resume(
        self, request_id: str, offset: int = 0, ask: Ask | None = None, caller: Caller = ANYBODY
    ) -> AsyncGenerator[Numbered, None]:
        """As `reopen`, from the first event on."""
        return _read(lambda: self.reopen(request_id, offset, ask, caller))


async def _read(opening: Callable[[], Awaitable[EventStream]]) -> AsyncGenerator[Numbered, None]:
    async with aclosing(await opening()) as events:
        async for numbered in events:
            yield numbered
