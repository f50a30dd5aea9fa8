"""Runs a member's tensor work off the event loop, one job at a time, with a deadline; a bug ends an epoch."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet, finalize

import structlog

from specsot.errors import Hung, SpecsotError, Unavailable

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

TICK_SECONDS = 1.0  # seconds between checks of a computation's deadline, which is at least ten of them
THREADS_ENDED = "cannot schedule new futures after"  # what executors say then; it has no type of its own
RUST_PANIC = "PanicException"  # of Rust's: no Exception, and of no module one could import it from


@dataclass(slots=True)
class _Job:
    """begun: its turn has come. allowed: seconds that it said its rest may take."""

    name: str
    work: Callable[..., Any]
    begun: bool = False
    allowed: deque[float] = field(default_factory=deque[float])

    def __call__(self, *arguments: Any) -> Any:
        """Raises SpecsotError, whatever the work raises."""
        self.begun, _thread.job = True, self
        try:
            return self.work(*arguments)
        except SpecsotError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
                raise
            raise explain_failure(self.name, error) from error
        finally:
            _thread.job = None


class _Thread(threading.local):
    """job: what this thread is at."""

    job: _Job | None = None


_thread = _Thread()


def allow(seconds: float) -> None:
    """The rest of what this thread is at may take so long from now on, however long it took so far."""
    if _thread.job:
        _thread.job.allowed.append(seconds)


def explain_failure(name: str, error: BaseException) -> Unavailable:
    """What went wrong in this member, as one line for everybody; its log has the rest.

    torch's RuntimeError and a MemoryError say in words what is missing. Anything else is a bug of ours, whose
    words might show a prompt.
    """
    log.error("a bug", name=name, exc_info=error)
    if isinstance(error, RuntimeError | MemoryError) and str(error):
        return Unavailable(f"{name} failed: {str(error).splitlines()[0]}")
    return Unavailable(f"{name} failed: {type(error).__name__} (its log says where)")


@dataclass(slots=True)
class _Watched:
    """Work with so many seconds left of `within`."""

    job: _Job
    done: asyncio.Future[Any]
    within: float
    left: float
    hung: bool = False


def _submit(
    executor: Executor, loop: asyncio.AbstractEventLoop, job: _Job, *arguments: Any
) -> asyncio.Future[Any]:
    """As `loop.run_in_executor`, in fewer steps on a `ComputeThread`. What is cancelled before its turn never
    begins.
    """
    if not isinstance(executor, ComputeThread):
        return asyncio.wrap_future(executor.submit(job, *arguments))
    done: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def tell_loop(result: Any, error: BaseException | None = None) -> None:
        with suppress(RuntimeError):  # it has ended, and nobody waits
            loop.call_soon_threadsafe(tell, result, error)

    def call() -> None:
        if done.cancelled():
            return
        try:
            result = job(*arguments)
        except BaseException as error:
            tell_loop(None, error)
        else:
            tell_loop(result)

    executor.post(call)
    return done


class ComputeThread(Executor):
    """One thread. A pool's `submit` makes a future with a lock and callbacks of its own, which `post` does
    without: behind a lap, whose weights leave nothing in the processor's caches, work begins after 25
    microseconds instead of 50 to 60, and its end is heard after 100 instead of 150.

    As a pool's, its thread begins with the first work, ends with this, and Python waits for what it is at.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls = SimpleQueue[Callable[[], object] | None]()
        self._lock = threading.Lock()
        self._ended = False
        self._thread: threading.Thread | None = None
        _living.add(self)
        finalize(self, self._calls.put, None)

    def post(self, call: Callable[[], object]) -> None:
        """call: raises nothing. Raises RuntimeError once there is no thread any more."""
        with self._lock:
            if self._ended:
                raise RuntimeError(f"{THREADS_ENDED} shutdown")
            if self._thread is None:
                thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
                thread.start()  # the system may have no room for one more
                self._thread = thread
            self._calls.put(call)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self.post(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """cancel_futures: what waits is forgotten, and so is whoever waits for it."""
        with self._lock:
            self._ended = True
            with suppress(Empty):
                while cancel_futures:
                    self._calls.get_nowait()
            self._calls.put(None)
        if wait and self._thread:
            self._thread.join()


def _work(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while call := calls.get():
        call()
        del call  # while it waits for the next one, nothing of this one is kept


_living = WeakSet[ComputeThread]()


@atexit.register
def _end_threads() -> None:
    for thread in list(_living):
        thread.shutdown()


class Compute:
    """name: whose work it is, for the one clear line about what goes wrong.

    One timer watches over all work, for as long as there is any: one for each frame took a quarter of what
    handing work to the thread takes (48 and 36 microseconds).
    """

    def __init__(self, name: str, executor: Executor) -> None:
        self._name = name
        self._executor = executor
        self._watched: list[_Watched] = []
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[..., Any], *arguments: Any, within: float | None = None) -> Any:
        """within: seconds it may take once its turn has come. Raises Hung, Unavailable; and CancelledError
        where the interpreter ends, whose threads take no more work.
        """
        job = _Job(self._name, work)
        loop = asyncio.get_running_loop()
        try:
            done = _submit(self._executor, loop, job, *arguments)
            return await (done if within is None else self._watch(job, done, within))
        except RuntimeError as error:
            if str(error).startswith(THREADS_ENDED):
                raise asyncio.CancelledError from error
            raise explain_failure(self._name, error) from error

    async def _watch(self, job: _Job, done: asyncio.Future[Any], seconds: float) -> Any:
        watched = _Watched(job, done, seconds, seconds)
        self._watched.append(watched)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        try:
            return await done
        except asyncio.CancelledError:
            if not watched.hung:
                raise
            late = f"should have been done after {watched.within:.0f} s"
            raise Hung(f"{self._name} hangs: what it computes {late}") from None
        finally:
            self._watched.remove(watched)

    def _tick(self) -> None:
        """Of the time for which a whole process is frozen one tick counts."""
        self._timer = None
        for one in self._watched:
            while one.job.allowed:
                one.within = one.left = one.job.allowed.popleft()
            one.left -= TICK_SECONDS * one.job.begun
            if one.left <= 0:
                one.hung = True
                one.done.cancel()
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
