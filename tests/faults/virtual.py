"""An event loop whose clock jumps: nobody waits, and a whole hour of a fleet passes in seconds.

Several processes share it: what runs in a process's context waits while that process stands still. Every
clock of the `time` module tells the loop's time, and no thread is ever started, so that a run is the same
each time. Where nothing can ever move again it says so instead of hanging.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

from specsot.grammar import state

T = TypeVar("T")

THREAD = 0.01  # seconds that work in a thread takes
BUILDING = 1.0  # seconds until a grammar is built


class Stuck(Exception):
    """Everybody waits, and nobody will ever be woken."""


class Never(BaseException):
    """Raised by a job that never ends."""


class Process(Protocol):
    """Who may stand still."""

    @property
    def stalled(self) -> bool: ...

    def hold(self, handle: asyncio.Handle) -> None:
        """Its turn came while it stood still."""
        ...


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)


class _Waiting(asyncio.Handle):
    """Waits where its process stands still; may be cancelled until it really runs."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(PROCESS)
        if process is not None and process.stalled:
            process.hold(self)
        else:
            super()._run()


class _Timer(_Waiting, asyncio.TimerHandle):
    """An alarm does so, too."""


class _Jumping(selectors.DefaultSelector):
    """Where a real loop would sleep, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The loop's own socket is always registered. It wakes the loop for threads, of which there are none.
        if len(self.get_map()) > 1 and (ready := super().select(0)):
            return ready
        if timeout is None:
            raise Stuck
        self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """working: seconds that the job which runs now has taken so far."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = 0.0  # an alarm that rings early would find the time unchanged, for ever
        self.working = 0.0
        self._threads = Labour(lambda work: self.call_later(THREAD, work))

    def time(self) -> float:
        return self._jumping.now

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _call_soon(self, callback: Callable[..., Any], args: Any, context: Context | None) -> asyncio.Handle:
        handle = _Waiting(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def resume(self, handle: asyncio.Handle) -> None:
        """What was held runs in the next turn, unless it is cancelled before."""
        if not handle.cancelled():
            self._ready.append(handle)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:
        """Threads of the default executor are none."""
        return super().run_in_executor(executor or self._threads, func, *args)


@contextmanager
def clocks(loop: VirtualLoop) -> Iterator[None]:
    """Whatever measures, measures virtual time: costs that decide something are the same in every run."""
    with (
        patch.object(time, "monotonic", loop.time),
        patch.object(time, "perf_counter", lambda: loop.time() + loop.working),
        patch.object(time, "time", loop.time),
        patch.object(time, "time_ns", lambda: int(loop.time() * 1e9)),
    ):
        yield


@contextmanager
def building(loop: VirtualLoop) -> Iterator[None]:
    """Grammars are built in virtual time, and none that was built before is known."""
    later = Labour(lambda work: loop.call_later(BUILDING, work, context=Context()))
    forget_grammars()
    at_once = patch.object(state, "run_later", lambda seconds, call: call())
    with patch.object(state, "COMPILER", later), at_once:
        yield
    forget_grammars()


def forget_grammars() -> None:
    """As a process that begins."""
    state.prebuild.cache_clear()
    state._tables.cache_clear()
    state._compiling.cache_clear()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time. Raises Stuck."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        with clocks(loop), building(loop):
            return runner.run(work)


class Labour(Executor):
    """An executor whose jobs take virtual seconds: `when` gets each, and runs it later, or never."""

    def __init__(self, when: Callable[[Callable[[], None]], object]) -> None:
        self._when = when

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # as of a thread that has begun: it goes on whoever waits

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Never:
                pass
            except Exception as error:
                future.set_exception(error)

        self._when(work)
        return future
