"""An event loop whose clock jumps: nobody waits, and a whole hour of a fleet passes in seconds.

Refuses to know what runs on it. Where nothing can ever move again it says so instead of hanging.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(Exception):
    """Everybody waits, and nobody will ever be woken."""


class Never(BaseException):
    """Raised by a job that never ends."""


class _Jumping(selectors.DefaultSelector):
    """Where a real loop would sleep, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise Stuck
        self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = 0.0  # an alarm that rings early would find the time unchanged, for ever

    def time(self) -> float:
        return self._jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time. Raises Stuck."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Labour(Executor):
    """An executor whose jobs take virtual seconds: `when` gets each, and runs it later, or never."""

    def __init__(self, when: Callable[[Callable[[], None]], None]) -> None:
        self._when = when

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Never:
                pass
            except Exception as error:
                future.set_exception(error)

        self._when(work)
        return future
