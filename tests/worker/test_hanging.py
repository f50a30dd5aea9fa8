"""Compute that does not come back is noticed by how long it may take; who hangs says so and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
from structlog.testing import capture_logs

from specsot.core.deadline import FIRST_RUN_SECONDS, MIN_SECONDS, Deadline
from specsot.errors import Hung, Unavailable
from specsot.members import Broken
from specsot.service.compute import Compute, ComputeThread, allow
from specsot.transport.links import Arrival
from specsot_worker.config import die, hang, read_failpoint
from tests.faults.virtual import Labour, run
from tests.worker.test_membership import EagerPart, live

CURVE = ((1, 0.5), (8, 1.0), (64, 4.0))


def test_new_work_has_long_and_known_work_eight_times_what_it_should_take() -> None:
    deadline = Deadline(CURVE)
    assert deadline.seconds(8) == FIRST_RUN_SECONDS
    deadline.record(8, 1.0)
    assert deadline.seconds(8) == MIN_SECONDS
    deadline.record(64, 4.0)
    assert deadline.seconds(64) == 8 * 4.0
    deadline.record(600, 1.0)
    expected = 4.0 + (640 - 64) * 3.0 / 56
    assert deadline.seconds(640) == pytest.approx(8 * expected), "as steep as between the last two points"


def test_a_slow_machine_has_longer_and_a_hiccup_is_forgotten() -> None:
    deadline = Deadline(CURVE)
    deadline.record(8, 9.0)
    assert deadline.seconds(8) == 72.0
    for _ in range(30):
        deadline.record(8, 1.0)
    assert deadline.seconds(8) == MIN_SECONDS


def test_without_a_curve_there_is_the_least() -> None:
    deadline = Deadline(())
    deadline.record(8, 100.0)
    assert deadline.seconds(8) == MIN_SECONDS


class Never(Executor):
    """Begins, if it may, and never ends."""

    def __init__(self, begins: bool) -> None:
        self.begins = begins

    def submit(self, fn: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        if self.begins:
            fn(*arguments)
        return Future()


@pytest.mark.parametrize(("work", "seconds"), [(lambda: None, 25), (lambda: allow(60.0), 60)])
def test_work_that_began_must_end(work: Callable[[], None], seconds: int) -> None:
    """What goes on to something else has the time for that."""

    async def hangs() -> float:
        with pytest.raises(Hung, match=rf"w hangs: .* longer than {seconds} s"):
            await Compute("w", Never(begins=True)).run(work, timeout_seconds=25.0)
        return asyncio.get_running_loop().time()

    assert run(hangs()) == pytest.approx(seconds)
    allow(1.0)  # nobody's work: nothing comes of it


def test_work_that_is_not_due_yet_may_wait() -> None:
    """Members of one process share a thread, and one of them may load a model meanwhile."""

    async def waits() -> None:
        late = Labour(lambda work: asyncio.get_running_loop().call_later(100.0, work))
        assert await Compute("w", late).run(lambda: 7, timeout_seconds=3.0) == 7

    run(waits())


async def test_where_the_interpreter_ends_work_is_given_up_and_no_bug_is_logged() -> None:
    """A Python fleet that nobody closed has its threads ended first."""
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await Compute("w", ended).run(lambda: 7)
    assert logs == []


class HungPart(EagerPart):
    async def handle(self, arrival: Arrival) -> None:
        raise Hung("w hangs")


async def test_a_hanging_member_reports_to_the_master_and_exits() -> None:
    told = list[object]()
    with pytest.raises(Hung):
        await live(HungPart(asyncio.Event()), "a word", told=told)
    assert told == [Broken(1, "w hangs")]


def test_a_failpoint_names_what_when_and_perhaps_whom() -> None:
    assert (
        read_failpoint("hang@20").cause,
        read_failpoint("hang@20").frame,
        read_failpoint("hang@20").worker_name,
    ) == (hang, 20, None)
    other = read_failpoint("10.0.0.1:50051:die@3")
    assert (other.cause, other.frame, other.worker_name) == (die, 3, "10.0.0.1:50051")
    for wrong in ("hang", "sleep@3", "hang@soon"):
        with pytest.raises(ValueError, match="hang@FRAME or die@FRAME"):
            read_failpoint(wrong)


def test_a_failpoint_strikes_at_its_frame_and_no_other() -> None:
    struck, fault = list[int](), read_failpoint("hang@3")
    fault.cause = lambda: struck.append(1)
    for frame in range(1, 6):
        fault.count()
        assert len(struck) == (frame >= 3)


async def test_a_thread_that_computes_takes_work_in_order_and_what_is_given_up_never_begins() -> None:
    thread, began = ComputeThread("w"), list[int]()
    at_it, go_on = threading.Event(), threading.Event()
    compute = Compute("w", thread)

    def work(number: int) -> int:
        began.append(number)
        at_it.set()
        go_on.wait(10)
        return number

    first, given_up, last = (asyncio.create_task(compute.run(work, number)) for number in range(3))
    assert await asyncio.to_thread(at_it.wait, 10)
    given_up.cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert await first == 0
    assert await last == 2
    assert began == [0, 2]
    with pytest.raises(Unavailable, match="w failed: no memory"):
        await compute.run(fail)
    assert await asyncio.get_running_loop().run_in_executor(thread, work, 3) == 3
    with pytest.raises(RuntimeError, match="no memory"):
        await asyncio.get_running_loop().run_in_executor(thread, fail)
    thread.shutdown()
    with pytest.raises(asyncio.CancelledError):
        await compute.run(work, 4)
    assert began == [0, 2, 3]


def fail() -> None:
    raise RuntimeError("no memory")


def test_what_waits_is_forgotten_and_what_runs_is_waited_for() -> None:
    thread, began, go_on, done = ComputeThread("w"), threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        began.set()
        go_on.wait(10)
        done.append(1)

    thread.post(work)
    thread.post(lambda: done.append(2))
    assert began.wait(10)
    thread.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    thread.shutdown()
    assert done == [1]


def test_a_thread_ends_with_who_had_it() -> None:
    thread = ComputeThread("w")
    computing = thread.submit(threading.current_thread).result()
    del thread
    computing.join(10)
    assert not computing.is_alive()


def test_a_thread_that_could_not_begin_begins_with_the_next_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compute = ComputeThread("compute")
    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            compute.submit(int)
    assert compute.submit(int).result(timeout=10) == 0
    compute.shutdown()
