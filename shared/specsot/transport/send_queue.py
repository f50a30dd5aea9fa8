"""A bounded send queue: `put` never waits, one task writes in order.

A peer that does not read stops nobody: past the limit the link is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from specsot.errors import Unavailable

MAX_QUEUED_BYTES = 512 << 20  # waiting at once


T = TypeVar("T")


class SendQueue(Generic[T]):
    """Messages go in by `put` and out by `write_all`, until `finish` or `lose`."""

    def __init__(self, most: int = MAX_QUEUED_BYTES) -> None:
        self._queue: asyncio.Queue[tuple[T, int] | None] = asyncio.Queue()
        self.waiting, self._most = 0, most  # bytes
        self.lost: str | None = None  # why, once it is

    def put(self, message: T, size: int) -> None:
        """size: in bytes. Raises Unavailable once the link is lost, or when its peer is too far behind."""
        self.check()
        self.waiting += size
        if self.waiting > self._most:
            self.lose(f"the peer does not read: {self.waiting} bytes wait")
        self.check()
        self._queue.put_nowait((message, size))

    def check(self) -> None:
        if self.lost is not None:
            raise Unavailable(self.lost)

    def finish(self) -> None:
        """Nothing more comes; `write_all` returns when all is written."""
        self._queue.put_nowait(None)

    def lose(self, reason: str) -> None:
        """The first reason counts."""
        if self.lost is None:
            self.lost = reason
            self._queue.put_nowait(None)

    async def write_all(
        self, write: Callable[[T], Awaitable[object]], beat: T | None = None, every: float | None = None
    ) -> None:
        """Write until finished or lost; `beat` goes out after `every` seconds without anything else.

        Raises what `write` raises.
        """
        while (message := await self._next(beat, every)) is not None and self.lost is None:
            await write(message)

    async def _next(self, beat: T | None, every: float | None) -> T | None:
        try:
            taken = self._queue.get_nowait()
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(every):
                    taken = await self._queue.get()
            except TimeoutError:
                return beat
        if taken is None:
            return None
        message, size = taken
        self.waiting -= size
        return message
