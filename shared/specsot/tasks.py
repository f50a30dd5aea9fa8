"""Starts background tasks whose failure is logged and handled, never lost; a timer for idle moments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
Failed = Callable[[BaseException], object]


def start(work: Coroutine[Any, Any, T], failed: Failed | None = None) -> asyncio.Task[T]:
    """A task on the running loop, for work that nobody awaits. What it raises is logged with its traceback as
    soon as it ends, and told to `failed`, which ends whatever depends on it.
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
    """`restart` whenever there is work: cheap enough for every lap. Belongs to one event loop."""

    def __init__(self, pause: float, then: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        """pause: seconds without a restart after which `then` is called."""
        self._pause, self._then, self._loop = pause, then, loop
        self._restarted = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        self._restarted = self._loop.time()
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._restarted + self._pause, self._look)

    def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _look(self) -> None:
        due = self._restarted + self._pause
        self._alarm = None
        if self._loop.time() < due:
            self._alarm = self._loop.call_at(due, self._look)
        else:
            self._then()
