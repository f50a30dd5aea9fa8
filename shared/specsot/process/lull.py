"""Notices when nothing has happened for a while, and calls somebody then, once.

Refuses to know what happens, and what is done meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleTimer:
    """`stir` whenever something happens: cheap enough for every lap. Belongs to one event loop."""

    def __init__(self, pause: float, then: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        """pause: seconds without a stir after which `then` is called."""
        self._pause, self._then, self._loop = pause, then, loop
        self._stirred = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def stir(self) -> None:
        self._stirred = self._loop.time()
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._stirred + self._pause, self._look)

    def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _look(self) -> None:
        due = self._stirred + self._pause
        self._alarm = None
        if self._loop.time() < due:
            self._alarm = self._loop.call_at(due, self._look)
        else:
            self._then()
