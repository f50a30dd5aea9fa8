"""Runs one coroutine as a program: Ctrl-C and SIGTERM cancel it, and it may clean up.

Refuses to know what it runs.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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
