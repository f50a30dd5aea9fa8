"""Where every door brings its requests: counted, watched, and at the end refused, so that a master can close.

Refuses to know transports, and how an answer comes about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import Protocol

from specsot.errors import Unavailable
from specsot.events import Event, Numbered
from specsot.info import Info
from specsot.params import Ask
from specsot_master.conductor import ANYBODY, Caller
from specsot_master.conductor.streams import EventStream


class Leader(Protocol):
    """What the desk needs of the conductor."""

    async def open(self, ask: Ask, caller: Caller) -> EventStream: ...

    async def reopen(self, request_id: str, offset: int, ask: Ask | None, caller: Caller) -> EventStream: ...

    def cancel(self, request_id: str, owner: str = "") -> bool: ...


class Watch(Protocol):
    """Follows one request; what it does must be quick."""

    def told(self, event: Event) -> None: ...

    def ended(self) -> None:
        """No more events, for whatever reason."""
        ...


class Desk:
    """`info` tells how the ring stands at the moment it is called."""

    def __init__(self, leader: Leader, info: Callable[[], Info]) -> None:
        self._leader, self.info = leader, info
        self._running, self.closing = 0, False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._watches: list[Callable[[Ask], Watch]] = []

    def watch(self, begin: Callable[[Ask], Watch]) -> None:
        """From now on every request is watched by what `begin` makes for it."""
        self._watches.append(begin)

    async def generate(self, ask: Ask, caller: Caller = ANYBODY) -> AsyncGenerator[Numbered, None]:
        """As the conductor's. Raises Unavailable once the desk is closing."""
        if self.closing:
            raise Unavailable("the master is shutting down")
        with self._counted(), self._watched(ask) as watches:
            async with aclosing(await self._leader.open(ask, caller)) as events:
                async for numbered in events:
                    for watch in watches:
                        watch.told(numbered.event)
                    yield numbered

    async def resume(
        self, request_id: str, offset: int = 0, ask: Ask | None = None, caller: Caller = ANYBODY
    ) -> AsyncGenerator[Numbered, None]:
        """As the conductor's; also once the desk is closing, for what still runs."""
        with self._counted():
            async with aclosing(await self._leader.reopen(request_id, offset, ask, caller)) as events:
                async for numbered in events:
                    yield numbered

    def cancel(self, request_id: str, owner: str = "") -> bool:
        return self._leader.cancel(request_id, owner)

    async def drain(self, grace: float) -> bool:
        """Refuse new requests; whether those that run ended by themselves within `grace` seconds."""
        self.closing = True
        try:
            async with asyncio.timeout(grace):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def _counted(self) -> Generator[None]:
        self._running += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._quiet.set()

    @contextmanager
    def _watched(self, ask: Ask) -> Generator[list[Watch]]:
        watches = [begin(ask) for begin in self._watches]
        try:
            yield watches
        finally:
            for watch in watches:
                watch.ended()
