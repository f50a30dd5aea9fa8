"""Runs coroutines from synchronous code: to their end, until a signal, or on a background thread; configures
logs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import structlog
import uvloop

from specsot.service.runtime_env import Terminated

T = TypeVar("T")

# Makes an event loop of uvloop.
new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop


def run_until_signal(
    coroutine: Coroutine[Any, Any, T], make_loop: Callable[[], asyncio.AbstractEventLoop] = new_loop
) -> T:
    """Run the coroutine on a new event loop and return its result.

    The loop is closed afterwards. A coroutine that cancels itself also raises KeyboardInterrupt.

    coroutine: The coroutine to run; Ctrl-C and the first SIGTERM cancel it.
    make_loop: Makes the event loop.
    Raises KeyboardInterrupt if a signal ended the coroutine (Terminated for SIGTERM), and what the coroutine
    raises.
    """
    terminated: list[bool] = []
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            return runner.run(guarded(coroutine, lambda: terminated.append(True)))
    except asyncio.CancelledError:
        raise (Terminated if terminated else KeyboardInterrupt) from None


async def guarded(coroutine: Coroutine[Any, Any, T], on_terminated: Callable[[], None]) -> T:
    """Return the coroutine's result; the first SIGTERM cancels it, and later ones are ignored so that they do
    not interrupt the cleanup.

    The command `timeout` sends the signal twice.

    Raises CancelledError after the SIGTERM, and what the coroutine raises.

    coroutine: The coroutine to run.
    on_terminated: Called at the first SIGTERM.
    """
    task, loop = asyncio.ensure_future(coroutine), asyncio.get_running_loop()

    def cancel_once() -> None:
        """Cancel the coroutine, and ignore every further SIGTERM."""
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        on_terminated()
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel_once)
    return await task


class BackgroundLoop:
    """An event loop on a daemon thread, which starts at once. Call `stop` once, from another thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specsot", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> bool:
        """Return whether the loop's thread does not run.

        This is so after `stop`, and in a process that was forked from the one that started the thread:
        threads are not forked.
        """
        return not self._thread.is_alive()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop without waiting, and return its future; cancelling the future cancels
        the coroutine.

        coroutine: The coroutine to run.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine that runs on the loop, and return its result, for a caller without an event
        loop.

        Ctrl-C, or any other exception in the waiting thread, cancels the coroutine.

        The caller must not be a coroutine on this same loop, which would wait for itself.

        coroutine: The coroutine to run.
        Raises what the coroutine raises.
        """
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def await_(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs on the background loop, for a caller on another loop.
        Cancelling the caller cancels the coroutine.

        coroutine: The coroutine to run.
        Raises what the coroutine raises.
        """
        return await asyncio.wrap_future(self.start(coroutine))

    async def iterate(self, generator: AsyncGenerator[T]) -> AsyncIterator[T]:
        """Yield the items of an async generator that runs on the background loop, one by one, so that a slow
        reader slows the generator down.

        Raises what the generator raises.

        generator: The generator, which runs on the background loop; it is closed when this iterator ends, is
            closed or fails.
        """
        # A cancelled step may still run for a while; the lock lets `_end` wait for it.
        step_lock = asyncio.Lock()
        try:
            while (item := await self.await_(step(generator, step_lock))) is not ENDED:
                yield cast("T", item)
        finally:
            await self.await_(_end(generator, step_lock))

    def stop(self) -> None:
        """Cancel what still runs on the loop, as `asyncio.run` would, then stop the loop and wait for its
        thread.

        Returns once the thread has ended; afterwards `gone` is True and nothing can be started.
        """
        self.run(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all() -> None:
    """Cancel all other tasks of this loop, wait for them, and close its async generators; their errors are
    dropped.

    A live display that is still drawn when the interpreter ends would hold a lock.
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


# Stands for the end of a generator, since a future cannot carry StopAsyncIteration.
ENDED = object()


async def step(generator: AsyncGenerator[T], step_lock: asyncio.Lock) -> object:
    """Return the generator's next item, or ENDED if it has none.

    generator: The generator to advance.
    step_lock: The lock of the generator's steps. It is held during the step, so that `_end` can wait for a
        step that was cancelled but still runs.
    """
    async with step_lock:
        return await anext(generator, ENDED)


async def _end(generator: AsyncGenerator[Any], step_lock: asyncio.Lock) -> None:
    """Close the generator once no `step` holds the lock.

    generator: The generator to close.
    step_lock: The lock that every `step` of the generator holds while it runs.
    """
    async with step_lock:
        await generator.aclose()


def _make_stderr_logger(*names: object) -> structlog.PrintLogger:
    """Return a logger that writes to stderr.

    names: The logger's names, which structlog passes; they are not used.
    """
    return structlog.PrintLogger(sys.stderr)


def log_to_stderr() -> None:
    """Write log lines of level info and above to stderr, since stdout is for answers.

    Does nothing if this process has configured its logs already.
    """
    if not structlog.is_configured():
        _configure_logs(logging.INFO)


def quiet_logs() -> None:
    """Write errors alone, to stderr, unless this process has configured its logs elsewhere.

    A process whose logs were configured by `log_to_stderr` is changed, any other configuration stays.
    """
    if not structlog.is_configured() or structlog.get_config()["logger_factory"] is _make_stderr_logger:
        _configure_logs(logging.ERROR)


def _configure_logs(level: int) -> None:
    """Configure structlog to write lines of at least this level to stderr.

    level: A level of the logging module, such as logging.INFO.
    """
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level), logger_factory=_make_stderr_logger
    )
    # The default formatter shows the local variables of all frames, which contain prompts, and takes seconds.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
