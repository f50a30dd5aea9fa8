"""One request's events on their way to the client that reads them.

Refuses to know what events mean. It holds what is unread; how much that may be is up to the leases.
"""

from __future__ import annotations

import asyncio
from collections import deque

from specsot.errors import SpecsotError
from specsot.events import Numbered


class Feed:
    """Many pushes, one reader."""

    def __init__(self) -> None:
        self._events: deque[Numbered] = deque()
        self._news = asyncio.Event()
        self._over = False
        self._error: SpecsotError | None = None

    @property
    def unread(self) -> int:
        return len(self._events)

    def push(self, event: Numbered) -> None:
        self._events.append(event)
        self._news.set()

    def end(self, error: SpecsotError | None = None) -> None:
        """Nothing follows; the reader gets what is unread first, then `error` if there is one."""
        if not self._over:
            self._over, self._error = True, error
            self._news.set()

    async def next(self) -> Numbered | None:
        """The next event, None at the end. Raises the error it was ended with."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()
