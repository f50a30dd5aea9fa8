"""How long a process has computed nothing, and the work that waits for that."""

from __future__ import annotations

import math
from threading import Event
from unittest.mock import patch

from specsot.core.vocabulary import describe
from specsot.grammar import prebuild, state
from specsot.grammar.state import BEGIN_SECONDS, BUSY_REST_SECONDS, IDLE_REST_SECONDS
from specsot.service import compute
from specsot.service.compute import ComputeThread
from tests.constraint.vocabularies import SINGLE


def test_a_process_is_idle_while_no_compute_thread_runs_a_call() -> None:
    activity = compute._Activity()
    assert activity.idle_seconds() == math.inf
    started, may_end = Event(), Event()

    def call() -> None:
        started.set()
        may_end.wait(10)

    with patch.object(compute, "_activity", activity):
        thread = ComputeThread("test")
        running = thread.submit(call)
        assert started.wait(10)
        assert compute.idle_seconds() == 0.0
        may_end.set()
        running.result()
        thread.shutdown()
        assert 0.0 <= compute.idle_seconds() < math.inf


def test_places_are_explored_slowly_while_sequences_are_written() -> None:
    rests = list[float]()
    idle = iter([0.0] * 3)

    def now(seconds: float, call: object) -> None:
        rests.append(seconds)
        assert callable(call)
        call()

    with patch.object(state, "run_later", now):
        prebuild(describe([*SINGLE.bytes, b"for this test"]), lambda: next(idle, math.inf)).result(60)
    assert rests[0] == BEGIN_SECONDS
    assert rests[1:4] == [BUSY_REST_SECONDS] * 3
    assert set(rests[4:]) == {IDLE_REST_SECONDS}
