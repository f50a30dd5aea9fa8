"""For how long those whom the ring lost may come back, before the others share what they ran.

Refuses to know who that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class RejoinGrace:
    """`over` is called once it has run out."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def lasts(self) -> bool:
        return self._alarm is not None

    def begin(self, seconds: float) -> None:
        """From now on, however long it was to last before."""
        self.end()
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._run_out)

    def end(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None

    def _run_out(self) -> None:
        self._alarm = None
        self._over()
