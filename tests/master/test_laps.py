"""The figures of the newest laps, with a clock in the test's hands."""

from __future__ import annotations

from specsot.core.frames import Outcome, Result
from specsot.core.info import LapsInfo
from specsot_master.core.stats import WINDOW_SECONDS, LapMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lap(tokens: int, rows: int = 8, seconds: tuple[float, ...] = (0.01, 0.02)) -> Result:
    return Result(1, 1, (Outcome(1, 1, (), tuple(range(tokens))),), seconds, rows)


def test_nothing_yet() -> None:
    assert LapMeter(Clock()).info() == LapsInfo()


def test_the_newest_laps_count_and_old_ones_are_forgotten() -> None:
    clock = Clock()
    laps = LapMeter(clock)
    laps.on_result(lap(1, rows=2))
    clock.now += WINDOW_SECONDS + 0.1
    for _ in range(4):
        laps.on_result(lap(3, rows=8))
        clock.now += 0.1
    found = laps.info()
    assert (found.laps, found.tokens) == (5, 13)
    assert (found.per_second, found.tokens_per_lap, found.rows_per_lap) == (4 / WINDOW_SECONDS, 3, 8)
    clock.now += WINDOW_SECONDS
    quiet = laps.info()
    assert (quiet.laps, quiet.per_second, quiet.tokens_per_lap) == (5, 0, 0)
    assert quiet.stages == found.stages


def test_stage_times_are_smoothed_and_another_ring_begins_anew() -> None:
    laps = LapMeter(Clock())
    laps.on_result(lap(1, seconds=(0.01, 0.02)))
    laps.on_result(lap(1, seconds=(0.02, 0.02)))
    first, second = laps.info().stages
    assert 0.01 < first < 0.02
    assert second == 0.02
    laps.on_result(lap(1, seconds=(0.05,)))
    assert laps.info().stages == (0.05,)


def test_many_laps_take_bounded_room() -> None:
    laps = LapMeter(Clock())
    for _ in range(10_000):
        laps.on_result(lap(1))
    assert laps.info().laps == 10_000
    assert laps.info().per_second < 10_000 / WINDOW_SECONDS
