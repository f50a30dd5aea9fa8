"""What the ring's newest laps took and brought.

Pure: the time is passed in. Refuses to know requests, text and members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specsot.frames import Result
from specsot.info import LapsInfo

WINDOW_SECONDS = 2.0  # seconds that count as now
MAX_LAPS = 4096  # laps remembered


@dataclass(frozen=True, slots=True)
class _Lap:
    when: float
    tokens: int
    rows: int


class LapMeter:
    """Hears every result. `clock`: seconds that only go forward."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: deque[_Lap] = deque(maxlen=MAX_LAPS)
        self._stages: tuple[float, ...] = ()
        self._laps = self._tokens = 0
        self._listeners: list[Callable[[Result], None]] = []

    def follow(self, listener: Callable[[Result], None]) -> None:
        """From now on `listener` hears of every lap too; what it does must be quick."""
        self._listeners.append(listener)

    def heard(self, result: Result) -> None:
        """One more lap; or what belongs to none, which has the number 0."""
        tokens = sum(len(outcome.tokens) for outcome in result.outcomes)
        if not result.number:
            self._tokens += tokens
            return
        self._newest.append(_Lap(self._clock(), tokens, result.rows))
        self._stages = _smoothed(self._stages, result.seconds)
        self._laps, self._tokens = self._laps + 1, self._tokens + tokens
        for listener in self._listeners:
            listener(result)

    def info(self) -> LapsInfo:
        """As of now. May be asked from another thread, while laps are heard: that looks at a copy."""
        since = self._clock() - WINDOW_SECONDS
        recent = [lap for lap in tuple(self._newest) if lap.when >= since]
        return LapsInfo(
            laps=self._laps,
            tokens=self._tokens,
            per_second=len(recent) / WINDOW_SECONDS,
            tokens_per_lap=_mean(lap.tokens for lap in recent),
            rows_per_lap=_mean(lap.rows for lap in recent),
            stages=self._stages,
        )


def _smoothed(before: tuple[float, ...], now: tuple[float, ...]) -> tuple[float, ...]:
    """So that a figure on a screen can be read; another number of stages begins anew."""
    if len(before) != len(now):
        return now
    return tuple(0.8 * old + 0.2 * new for old, new in zip(before, now))


def _mean(values: Iterable[int]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
