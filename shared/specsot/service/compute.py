"""Runs a member's tensor work off the event loop, one job at a time, with a deadline; a bug ends the
epoch.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet, finalize

import structlog

from specsot.errors import Hung, SpecsotError, Unavailable

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

# Seconds between checks of a computation's deadline, which is at least ten times as long.
TICK_SECONDS = 1.0
# The beginning of the RuntimeError of an executor that was shut down. The error has no type of its own.
THREADS_ENDED = "cannot schedule new futures after"
# The type of a panic in a Rust library. It is no subclass of Exception, and cannot be imported.
RUST_PANIC = "PanicException"


@dataclass(slots=True)
class _Job:
    """One call on the compute thread.

    name: name of the member whose work the call is, for error messages.
    work: the function to call.
    started: True once the call has started.
    allowed: seconds that the call has requested for its remaining work, see `allow`.
    """

    name: str
    work: Callable[..., Any]
    started: bool = False
    allowed: deque[float] = field(default_factory=deque[float])

    def __call__(self, *arguments: Any) -> Any:
        """Call the function and return its result.

        arguments: the arguments of the function.

        Raises SpecsotError as raised by the function. Any other error is logged and raised as Unavailable; an
        interrupt or an exit is raised unchanged.

        A panic of a Rust library counts as an error, although it is no `Exception`. While the function runs,
        `started` is True and the job is that of the current thread, so that `allow` finds it.
        """
        self.started, _thread.job = True, self
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
    """The state of the current thread, as far as it executes calls of a `Compute`.

    job: the call that the thread executes, or None.
    """

    job: _Job | None = None


_thread = _Thread()


def allow(seconds: float) -> None:
    """Restart the deadline of the current call. Does nothing outside a call on a compute thread.

    seconds: how long the rest of the call may take, from now on.
    """
    if _thread.job:
        _thread.job.allowed.append(seconds)


def explain_failure(name: str, error: BaseException) -> Unavailable:
    """Log an unexpected error and return it as Unavailable, with one line that may be shown to every client.

    The line contains the message of a RuntimeError, which torch raises, or of a MemoryError: its first line.
    Of any other error it contains only the type, because the message might contain a prompt.

    name: name of the member that failed.
    error: the error, which is no SpecsotError.

    If such an error has an empty message, the line contains its type as well.
    """
    log.error("unexpected error", name=name, exc_info=error)
    if isinstance(error, RuntimeError | MemoryError) and str(error):
        return Unavailable(f"{name} failed: {str(error).splitlines()[0]}")
    return Unavailable(f"{name} failed: {type(error).__name__} (its log says where)")


@dataclass(slots=True)
class _Watched:
    """A call on the compute thread with a deadline.

    job: the call.
    done: gets the call's result.
    within: seconds that the call may take once it has started.
    left: seconds that are left of `within`.
    hung: True once no time is left.
    """

    job: _Job
    done: asyncio.Future[Any]
    within: float
    left: float
    hung: bool = False


def _submit(
    executor: Executor, loop: asyncio.AbstractEventLoop, job: _Job, *arguments: Any
) -> asyncio.Future[Any]:
    """Run a call like `loop.run_in_executor`, with less overhead on a `ComputeThread`; return its result as a
    future.

    A call that is cancelled before it starts is never executed.

    executor: where the call runs.
    loop: the running event loop.
    job: the call.
    arguments: the arguments of the call.

    If the call raises, the future raises the same error. The result of a call that was cancelled while it ran
    is dropped. Raises RuntimeError if the executor was shut down.
    """
    if not isinstance(executor, ComputeThread):
        return asyncio.wrap_future(executor.submit(job, *arguments))
    done: asyncio.Future[Any] = loop.create_future()

    def set_outcome(result: Any, error: BaseException | None) -> None:
        """Give the future its result, on the event loop. Does nothing if the call was cancelled.

        result: the result of the call.
        error: what the call raised, or None.
        """
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def report_to_loop(result: Any, error: BaseException | None = None) -> None:
        """Let the event loop set the result, from the compute thread.

        result: the result of the call.
        error: what the call raised, or None.
        """
        # If the event loop is closed, no coroutine waits for the result.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(set_outcome, result, error)

    def call() -> None:
        """Run the call on the compute thread, unless it was cancelled."""
        if done.cancelled():
            return
        try:
            result = job(*arguments)
        except BaseException as error:
            report_to_loop(None, error)
        else:
            report_to_loop(result)

    executor.post(call)
    return done


class ComputeThread(Executor):
    """An executor with one thread and a method `post` that has less overhead than `submit`.

    `submit` creates a future with a lock and callbacks. Directly after a step, whose weights have replaced
    everything in the processor's caches, a call starts 25 microseconds after `post` instead of 50 to 60, and
    its result is received after 100 instead of 150.

    Like the thread of a pool, the thread starts with the first call and ends when the executor is deleted,
    and Python waits at exit for a call that is running.
    """

    def __init__(self, name: str) -> None:
        """Create the executor. Its thread starts with the first call.

        name: name of the thread, for debuggers.
        """
        self._name = name
        self._calls = SimpleQueue[Callable[[], object] | None]()
        self._lock = threading.Lock()
        self._ended = False
        self._thread: threading.Thread | None = None
        _live_threads.add(self)
        finalize(self, self._calls.put, None)

    @property
    def has_waiting(self) -> bool:
        """True if a call is queued that has not started."""
        return not self._calls.empty()

    def post(self, call: Callable[[], object]) -> None:
        """Queue a call. The first one starts the thread.

        call: a function that must not raise; its result is dropped.

        Raises RuntimeError after `shutdown`.

        Raises RuntimeError too if the system cannot start another thread; a later call then tries again.
        """
        with self._lock:
            if self._ended:
                raise RuntimeError(f"{THREADS_ENDED} shutdown")
            if self._thread is None:
                thread = threading.Thread(
                    target=_run_calls, args=(self._calls,), name=self._name, daemon=True
                )
                # Starting may fail if the system has no room for another thread; `_thread` then stays None.
                thread.start()
                self._thread = thread
            self._calls.put(call)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call and return its future, as `Executor.submit` does.

        fn: the function to call. If it raises, the future raises the same error.
        args, kwargs: its arguments.

        Raises RuntimeError after `shutdown`.

        A future that is cancelled before its call starts prevents the call.
        """
        future = Future[T]()

        def call() -> None:
            """Run the function and give its result to the future, unless the future was cancelled."""
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self.post(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls. The thread ends once the queued calls have run.

        wait: True to return only when the thread has ended.
        cancel_futures: True to drop the calls that have not started. Their futures never get a result.

        May be called more than once. Returns at once, even with `wait`, if no call was ever queued.
        """
        with self._lock:
            self._ended = True
            with suppress(Empty):
                while cancel_futures:
                    self._calls.get_nowait()
            self._calls.put(None)
        if wait and self._thread:
            self._thread.join()


class _Activity:
    """Counts the calls that the compute threads of this process are running."""

    def __init__(self) -> None:
        """Start without calls."""
        self._lock = threading.Lock()
        self._num_running = 0
        # When the last call ended, by `time.monotonic`.
        self._ended_at = -math.inf

    @contextmanager
    def running(self) -> Generator[None]:
        """Return a context that counts as a running call."""
        with self._lock:
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                self._ended_at = time.monotonic()

    def idle_seconds(self) -> float:
        """Return the seconds since the last call ended: 0 while a call runs, infinity before the first
        call.
        """
        with self._lock:
            return 0.0 if self._num_running else time.monotonic() - self._ended_at


_activity = _Activity()


def idle_seconds() -> float:
    """Return for how many seconds no compute thread of this process has run a call: 0 while one runs a call,
    and infinity before the first call. Other executors than `ComputeThread` do not count.
    """
    return _activity.idle_seconds()


def _run_calls(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    """Run queued calls one after another, until None is taken from the queue.

    calls: the queue, which may be filled from any thread.

    Returns after None, without running later calls. A call must not raise; an error would end the thread.
    """
    while call := calls.get():
        with _activity.running():
            call()
        # While the thread waits for the next call, it must not keep the tensors of this one alive.
        del call


# The executors of this process that were not deleted yet.
_live_threads = WeakSet[ComputeThread]()


@atexit.register
def _end_threads() -> None:
    """End all compute threads when Python exits, and wait for the calls that are running.

    Calls that are queued still run.
    """
    for thread in list(_live_threads):
        thread.shutdown()


class Compute:
    """Runs calls on an executor, with deadlines.

    One timer checks the deadlines of all calls while there are any. A timer for each frame took a quarter of
    the time in which a call is passed to the thread (48 instead of 36 microseconds).
    """

    def __init__(self, name: str, executor: Executor) -> None:
        """Create the runner, without any call.

        name: name of the member whose work the calls are, for error messages.
        executor: where the calls run.
        """
        self._name = name
        self._executor = executor
        self._watched: list[_Watched] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_waiting(self) -> bool:
        """True if another call waits for the thread, so that a long call had better end. False for an
        executor that does not tell.
        """
        return isinstance(self._executor, ComputeThread) and self._executor.has_waiting

    async def run(
        self, work: Callable[..., Any], *arguments: Any, timeout_seconds: float | None = None
    ) -> Any:
        """Call `work` with the arguments on the executor and return its result.

        work: the function to call.
        arguments: its arguments.
        timeout_seconds: seconds that the call may take once it has started. None: no deadline.

        Raises Hung if the deadline has passed, SpecsotError as raised by the work, Unavailable for any other
        error of the work, and CancelledError if the executor was shut down because the interpreter ends.

        An error is logged before it is raised as Unavailable. After Hung, the call still runs on its thread.
        """
        job = _Job(self._name, work)
        loop = asyncio.get_running_loop()
        try:
            done = _submit(self._executor, loop, job, *arguments)
            return await (done if timeout_seconds is None else self._watch(job, done, timeout_seconds))
        except RuntimeError as error:
            if str(error).startswith(THREADS_ENDED):
                raise asyncio.CancelledError from error
            raise explain_failure(self._name, error) from error

    async def _watch(self, job: _Job, done: asyncio.Future[Any], seconds: float) -> Any:
        """Wait for a call and return its result. Raises Hung if its deadline has passed.

        job: the call.
        done: gets the result of the call.
        seconds: seconds that the call may take once it has started.

        If the caller is cancelled before the deadline, CancelledError is raised. An error of the call is
        raised unchanged. Seconds are counted in ticks of TICK_SECONDS, and only once the call has started;
        `allow` replaces the seconds that are left.
        """
        watched = _Watched(job, done, seconds, seconds)
        self._watched.append(watched)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        try:
            return await done
        except asyncio.CancelledError:
            if not watched.hung:
                raise
            limit = f"{watched.within:.0f} s"
            raise Hung(f"{self._name} hangs: a computation took longer than {limit}") from None
        finally:
            self._watched.remove(watched)

    def _tick(self) -> None:
        """Subtract one tick from the time of every call that has started, and cancel each call without time
        left, which makes `_watch` raise Hung. If the whole process was frozen, only one tick of that time
        counts.

        Seconds that a call requested with `allow` replace those that it has left. The next tick is scheduled
        in TICK_SECONDS if any call is watched; otherwise the timer stops.
        """
        self._timer = None
        for watched in self._watched:
            while watched.job.allowed:
                watched.within = watched.left = watched.job.allowed.popleft()
            watched.left -= TICK_SECONDS * watched.job.started
            if watched.left <= 0:
                watched.hung = True
                watched.done.cancel()
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
