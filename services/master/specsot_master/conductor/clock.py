"""Time as the conductor knows it: what time it is, and being called later.

Refuses to know what for. Tests put a clock of their own here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float: ...

    def later(self, seconds: float, act: Callable[[], object], /) -> Timer:
        """Call `act` on the event loop after so many seconds, unless cancelled."""
        ...


class LoopClock:
    """The event loop's own time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def later(self, seconds: float, act: Callable[[], object], /) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, act)


class Timers:
    """Alarms of one request by name."""

    def __init__(self) -> None:
        self._set: dict[str, Timer] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._set

    def set(self, name: str, clock: Clock, seconds: float, act: Callable[[], object]) -> None:
        """Replaces the one of that name."""
        self.clear(name)

        def ring() -> None:
            del self._set[name]
            act()

        self._set[name] = clock.later(seconds, ring)

    def clear(self, *names: str) -> None:
        """Those of these names, or all."""
        for name in names or tuple(self._set):
            if alarm := self._set.pop(name, None):
                alarm.cancel()
