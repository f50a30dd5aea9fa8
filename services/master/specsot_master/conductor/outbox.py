"""Orders on their way to stage 0, in the order in which they were decided.

Refuses to know what they order. The task that sends them lives only while there is something to send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from specsot.errors import SpecsotError
from specsot.frames import Order
from specsot.tasks import start

log = structlog.get_logger()


class OrderQueue:
    """`send` delivers one order; `broken` hears why the ring takes no more, and the rest is dropped. An order
    that cannot be sent for any other reason is told to `spoiled`, and the rest goes on.
    """

    def __init__(
        self,
        send: Callable[[Order], Awaitable[None]],
        broken: Callable[[str], None],
        spoiled: Callable[[Order], None],
    ) -> None:
        self._send, self._broken, self._spoiled = send, broken, spoiled
        self._orders: deque[Order] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, order: Order) -> None:
        self._orders.append(order)
        if self._task is None:
            self._task = start(self._drain())

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
                await self._deliver(self._orders.popleft())
        except SpecsotError as error:
            self._orders.clear()
            self._task = None  # what `broken` may put is sent by a task of its own
            self._broken(str(error))
        else:
            self._task = None

    async def _deliver(self, order: Order) -> None:
        try:
            await self._send(order)
        except SpecsotError:
            raise
        except Exception:
            log.exception("an order could not be sent", order=type(order).__name__)
            self._spoiled(order)
