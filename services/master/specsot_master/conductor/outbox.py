"""Orders on their way to stage 0, in the order in which they were decided.

Refuses to know what they order. The task that sends them lives only while there is something to send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from specsot.errors import SpecsotError
from specsot.frames import Order


class Outbox:
    """`send` delivers one order; `broken` hears why it could not, and the rest is dropped."""

    def __init__(self, send: Callable[[Order], Awaitable[None]], broken: Callable[[str], None]) -> None:
        self._send, self._broken = send, broken
        self._orders: deque[Order] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, order: Order) -> None:
        self._orders.append(order)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    def clear(self) -> None:
        """Forget what was not sent yet."""
        self._orders.clear()

    async def settled(self) -> None:
        """Return once everything put so far is sent or dropped."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        try:
            while self._orders:
                await self._send(self._orders.popleft())
        except SpecsotError as error:
            self._orders.clear()
            self._task = None  # what `broken` may put is sent by a task of its own
            self._broken(str(error))
        else:
            self._task = None
