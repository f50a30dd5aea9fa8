"""Runs coroutines from synchronous code: to their end, until a signal, or on a background thread; configures
logs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import structlog
import uvloop

T = TypeVar("T")

new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop


def run_until_signal(
    work: Coroutine[Any, Any, T], loop: Callable[[], asyncio.AbstractEventLoop] = new_loop
) -> T:
    """Run the coroutine and return its result. Raises KeyboardInterrupt if a signal ended it. loop: makes the
    event loop.
    """
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(guarded(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def guarded(work: Coroutine[Any, Any, T]) -> T:
    """Run the work; the first SIGTERM cancels it, and later ones are ignored so that they do not interrupt
    the cleanup.

    The command `timeout` sends the signal twice.
    """
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

    def end() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    return await task


class BackgroundLoop:
    """An event loop on a daemon thread, which starts at once. Stop it once."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specsot", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> bool:
        """Return whether this process was forked from the one that started the thread: threads are not
        forked.
        """
        return not self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the work, and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result, for a caller without an event loop. Ctrl-C cancels the work."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def await_(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result, for a caller on another loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self.start(work))

    async def iterate(self, source: AsyncGenerator[T]) -> AsyncIterator[T]:
        """Yield what an async generator yields on the background loop, item by item, so that a slow reader
        slows the source down.
        """
        # A cancelled step may still run for a while; the lock lets `_end` wait for it.
        free = asyncio.Lock()
        try:
            while (item := await self.await_(step(source, free))) is not ENDED:
                yield cast("T", item)
        finally:
            await self.await_(_end(source, free))

    def stop(self) -> None:
        """Cancel what still runs on the loop, as `asyncio.run` would, then stop the loop and wait for its
        thread.
        """
        self.run(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all() -> None:
    """Cancel all other tasks and wait for them.

    A live display that is still drawn when the interpreter ends would hold a lock.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


# Stands for the end of a generator, since a future cannot carry StopAsyncIteration.
ENDED = object()


async def step(source: AsyncGenerator[T], free: asyncio.Lock) -> object:
    """Return the next item, or ENDED."""
    async with free:
        return await anext(source, ENDED)


async def _end(source: AsyncGenerator[Any], free: asyncio.Lock) -> None:
    """Close the generator once no step runs."""
    async with free:
        await source.aclose()


def _make_stderr_logger(*names: object) -> structlog.PrintLogger:
    """Return a logger that writes to stderr."""
    return structlog.PrintLogger(sys.stderr)


def log_to_stderr() -> None:
    """Write log lines to stderr, unless this process has configured its logs: stdout is for answers."""
    if not structlog.is_configured():
        _configure_logs(logging.INFO)


def quiet_logs() -> None:
    """Write errors alone, to stderr, unless this process has configured its logs elsewhere."""
    if not structlog.is_configured() or structlog.get_config()["logger_factory"] is _make_stderr_logger:
        _configure_logs(logging.ERROR)


def _configure_logs(level: int) -> None:
    """Configure logs of at least this level, written to stderr."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level), logger_factory=_make_stderr_logger
    )
    # The default formatter shows the local variables of all frames, which contain prompts, and takes seconds.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@contextmanager
def no_import_warnings() -> Generator[None]:
    """Silence warnings while libraries are imported: they concern kernels that this process does not call."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
