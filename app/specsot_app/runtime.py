"""Runs coroutines from sync code: to their end, until a signal, or in a thread; quiets logs."""

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
    """The coroutine's result. Raises KeyboardInterrupt when a signal ended it. loop: makes one."""
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(guarded(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def guarded(work: Coroutine[Any, Any, T]) -> T:
    """Told once is told: `timeout` sends the signal twice, and cleaning up is not to be cut off by that."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

    def end() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    return await task


class BackgroundLoop:
    """One loop, one daemon thread. Start it once; stop it once."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specsot", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> bool:
        """This process was forked from the one that began it: threads stay behind."""
        return not self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """For a caller that does something else meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result, for a caller without a loop. Ctrl-C cancels the work."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def await_(self, work: Coroutine[Any, Any, T]) -> T:
        """The result, for a caller on another loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self.start(work))

    async def iterate(self, source: AsyncGenerator[T]) -> AsyncIterator[T]:
        """What an async generator yields over there, one by one: a slow reader slows it down."""
        free = asyncio.Lock()  # a step that is cancelled may take its time, and the end comes behind it
        try:
            while (item := await self.await_(step(source, free))) is not ENDED:
                yield cast("T", item)
        finally:
            await self.await_(_end(source, free))

    def stop(self) -> None:
        """End what still runs there, as `asyncio.run` would, then the loop, and wait for its thread."""
        self.run(_end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_all() -> None:
    """A picture that is still drawn must not be, when the interpreter ends: its thread would hold a lock."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


ENDED = object()  # behind the last item: StopAsyncIteration may not travel through a future


async def step(source: AsyncGenerator[T], free: asyncio.Lock) -> object:
    async with free:
        return await anext(source, ENDED)


async def _end(source: AsyncGenerator[Any], free: asyncio.Lock) -> None:
    async with free:
        await source.aclose()


def _make_stderr_logger(*names: object) -> structlog.PrintLogger:
    return structlog.PrintLogger(sys.stderr)


def log_to_stderr() -> None:
    """Write log lines to stderr, where this process has not configured its logs: stdout is for answers."""
    if not structlog.is_configured():
        _configure_logs(logging.INFO)


def quiet_logs() -> None:
    """Write errors alone, to stderr, unless this process has configured its logs elsewhere."""
    if not structlog.is_configured() or structlog.get_config()["logger_factory"] is _make_stderr_logger:
        _configure_logs(logging.ERROR)


def _configure_logs(level: int) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level), logger_factory=_make_stderr_logger
    )
    # The usual formatter shows the values of all frames, which hold prompts, and takes seconds for it.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@contextmanager
def no_import_warnings() -> Generator[None]:
    """While libraries are imported: what they warn of are kernels that nobody calls here."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
