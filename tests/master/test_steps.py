"""The figures of the newest steps, with a clock in the test's hands."""

from __future__ import annotations

from specsot.core.frames import Outcome, Result
from specsot.core.info import StepsInfo
from specsot_master.core.stats import WINDOW_SECONDS, StepMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(tokens: int, rows: int = 8, seconds: tuple[float, ...] = (0.01, 0.02)) -> Result:
    return Result(1, 1, (Outcome(1, 1, (), tuple(range(tokens))),), seconds, rows)


def test_nothing_yet() -> None:
    assert StepMeter(Clock()).info() == StepsInfo()


def test_the_newest_steps_count_and_old_ones_are_forgotten() -> None:
    clock = Clock()
    steps = StepMeter(clock)
    steps.on_result(step(1, rows=2))
    clock.now += WINDOW_SECONDS + 0.1
    for _ in range(4):
        steps.on_result(step(3, rows=8))
        clock.now += 0.1
    found = steps.info()
    assert (found.steps, found.tokens) == (5, 13)
    assert (found.per_second, found.tokens_per_step, found.rows_per_step) == (4 / WINDOW_SECONDS, 3, 8)
    clock.now += WINDOW_SECONDS
    quiet = steps.info()
    assert (quiet.steps, quiet.per_second, quiet.tokens_per_step) == (5, 0, 0)
    assert quiet.stages == found.stages


def test_stage_times_are_smoothed_and_another_ring_begins_anew() -> None:
    steps = StepMeter(Clock())
    steps.on_result(step(1, seconds=(0.01, 0.02)))
    steps.on_result(step(1, seconds=(0.02, 0.02)))
    first, second = steps.info().stages
    assert 0.01 < first < 0.02
    assert second == 0.02
    steps.on_result(step(1, seconds=(0.05,)))
    assert steps.info().stages == (0.05,)


def test_many_steps_take_bounded_room() -> None:
    steps = StepMeter(Clock())
    for _ in range(10_000):
        steps.on_result(step(1))
    assert steps.info().steps == 10_000
    assert steps.info().per_second < 10_000 / WINDOW_SECONDS
