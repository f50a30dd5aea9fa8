"""Starts background tasks whose failures are logged and handled; timers for idle periods and for waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

# Seconds between attempts to reach another member. The interval doubles from the first to the second value.
# Untuned.
FIRST_RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 5.0

T = TypeVar("T")
Failed = Callable[[BaseException], object]


def start(coroutine: Coroutine[Any, Any, T], on_failure: Failed | None = None) -> asyncio.Task[T]:
    """Start a coroutine as a task of the running event loop that no other code awaits, and return the task.

    If the coroutine raises an error, the error is logged with its traceback as soon as the task ends.
    Cancelling the task is not a failure.

    coroutine: the coroutine to run.
    on_failure: called with the error after it was logged, to end whatever depends on the task; None for
        nothing.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(partial(_log_failure, coroutine.__qualname__, on_failure))
    return task


async def wait_until(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, or for a number of seconds if it is not. Returns at once if it is set.

    event: the event.
    seconds: how long to wait at most.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _log_failure(name: str, on_failure: Failed | None, task: asyncio.Task[Any]) -> None:
    """Log the error of a finished task and report it; do nothing if the task succeeded or was cancelled.

    name: name of the coroutine function, for the log line.
    on_failure: called with the error after it was logged. None: nothing is called.
    task: the finished task.
    """
    if task.cancelled() or (error := task.exception()) is None:
        return
    log.error("background task failed", task=name, exc_info=error)
    if on_failure is not None:
        on_failure(error)


class LoopTurns:
    """Lets one coroutine at a time continue, each in an iteration of the event loop of its own, so that a
    burst of coroutines leaves the loop time for other work between them.
    """

    def __init__(self) -> None:
        """Create turns for which nothing waits."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def wait(self) -> None:
        """Return at once if no other coroutine has had its turn in this iteration of the event loop, else in
        a later iteration, after those that waited before.
        """
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        """Give the next turn to the coroutine that has waited longest; one that was cancelled is skipped."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                turn.get_loop().call_soon(self._pass_on)
                return
        self._is_taken = False


class IdleTimer:
    """Calls a function once a number of seconds has passed without a call of `restart`.

    `restart` only stores a time, so that it is cheap enough for every step. Belongs to one event loop.
    """

    def __init__(
        self, idle_seconds: float, on_idle: Callable[[], object], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Create the timer, which does not run before the first call of `restart`.

        idle_seconds: seconds without a call of `restart` after which `on_idle` is called.
        on_idle: called on the event loop, once per idle period.
        loop: the event loop of the timer.
        """
        self._idle_seconds = idle_seconds
        self._on_idle = on_idle
        self._loop = loop
        self._restarted = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Begin the idle period anew. The first call starts the timer.

        After `stop`, and after `on_idle` was called, the timer starts again.
        """
        self._restarted = self._loop.time()
        if self._alarm is None:
            self._alarm = self._loop.call_at(self._restarted + self._idle_seconds, self._check)

    def stop(self) -> None:
        """Cancel the timer. Does nothing if it does not run."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _check(self) -> None:
        """Call `on_idle` if the idle period is over, otherwise look again at the time when it would end.

        The timer then does not run any more until `restart` is called.
        """
        due = self._restarted + self._idle_seconds
        self._alarm = None
        if self._loop.time() < due:
            self._alarm = self._loop.call_at(due, self._check)
        else:
            self._on_idle()


class WaitLimit:
    """An async context manager in which no single `wait` may last longer than a number of seconds.

    A single timer serves all calls of `wait`, because a timeout for each call costs as much as a small write.
    If a call lasts longer, the task is interrupted, and leaving the context raises TimeoutError.
    """

    def __init__(self, seconds: float) -> None:
        """Create the limit, on the running event loop. It applies once the context is entered.

        seconds: how long one call of `wait` may last.
        """
        loop = asyncio.get_running_loop()
        self._timer = IdleTimer(seconds, self._check, loop)
        self._time = loop.time
        self._limit = asyncio.timeout(None)
        self._waiting = False

    @property
    def passed(self) -> bool:
        """True if a call of `wait` lasted too long."""
        return self._limit.expired()

    async def wait(self, awaitable: Awaitable[object]) -> None:
        """Await something within the limit. If it lasts longer, the task is interrupted.

        awaitable: what to await. Its result is dropped.

        Raises what the awaitable raises. Only one call at a time is watched.
        """
        self._timer.restart()
        self._waiting = True
        await awaitable
        self._waiting = False

    async def __aenter__(self) -> WaitLimit:
        """Enter the context, which applies to the current task, and return this object."""
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the timer. Raises TimeoutError if a call of `wait` lasted too long.

        kind, error, trace: the error that was raised within the context, or None.
        """
        self._timer.stop()
        await self._limit.__aexit__(kind, error, trace)

    def _check(self) -> None:
        """Interrupt the task if it has been waiting in one call of `wait` for too long."""
        if self._waiting:
            self._limit.reschedule(self._time())
