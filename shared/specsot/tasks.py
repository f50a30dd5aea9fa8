"""Starts background tasks whose failures are logged and handled; timers for idle periods and for waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
Failed = Callable[[BaseException], object]


def start(work: Coroutine[Any, Any, T], failed: Failed | None = None) -> asyncio.Task[T]:
    """Start `work` as a task of the running event loop that no other code awaits.

    If the work raises an error, the error is logged with its traceback as soon as the task ends, and `failed`
    is called with it, to end whatever depends on the task. Cancelling the task is not a failure.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(partial(_tell, work.__qualname__, failed))
    return task


def _tell(name: str, failed: Failed | None, task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    log.error("a background task failed", task=name, exc_info=error)
    if failed is not None:
        failed(error)


class IdleTimer:
    """Calls a function once a number of seconds has passed without a call of `restart`.

    `restart` only stores a time, so that it is cheap enough for every step. Belongs to one event loop.
    """

    def __init__(self, pause: float, then: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        """pause: seconds without a restart after which `then` is called."""
        self._pause = pause
        self._then = then
        self._loop = loop
        self._restarted = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Begin the idle period anew. The first call starts the timer."""
        self._restarted = self._loop.time()
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._restarted + self._pause, self._look)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _look(self) -> None:
        due = self._restarted + self._pause
        self._alarm = None
        if self._loop.time() < due:
            self._alarm = self._loop.call_at(due, self._look)
        else:
            self._then()


class WaitLimit:
    """An async context manager in which no single `wait` may last longer than a number of seconds.

    A single timer serves all calls of `wait`, because a timeout for each call costs as much as a small write.
    If a call lasts longer, the task is interrupted, and leaving the context raises TimeoutError.
    """

    def __init__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = IdleTimer(seconds, self._look, loop)
        self._time = loop.time
        self._limit = asyncio.timeout(None)
        self._waiting = False

    @property
    def passed(self) -> bool:
        """True if a call of `wait` lasted too long."""
        return self._limit.expired()

    async def wait(self, work: Awaitable[object]) -> None:
        """Await `work` within the limit."""
        self._timer.restart()
        self._waiting = True
        await work
        self._waiting = False

    async def __aenter__(self) -> WaitLimit:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.stop()
        await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        if self._waiting:
            self._limit.reschedule(self._time())
