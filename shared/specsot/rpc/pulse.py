"""How often the two ends of a long-lived stream say that they live, and when silence means the end.

Refuses to know streams. gRPC's own keepalive only proves that the peer's network code lives; a beat
comes from its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pulse:
    """every: seconds between beats when nothing else is said. silence: seconds after which a peer is gone."""

    every: float = 2.0
    silence: float = 20.0


TICKS = 8  # in which a watch counts one silence


class Watch:
    """Calls `on_silence` once when nothing has been heard for `silence` seconds in which this loop ran.

    It counts ticks, each at most its own length: when this process itself was frozen, what the peer has said
    meanwhile is still to be read, and only one tick of all that time counts.
    """

    def __init__(self, silence: float, on_silence: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick, self._on_silence = silence / TICKS, on_silence
        self._heard, self._silent = False, 0  # ticks
        self._timer = self._loop.call_later(self._tick, self._check)

    def heard(self) -> None:
        self._heard = True

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if self._silent >= TICKS:
            self._on_silence()
        else:
            self._timer = self._loop.call_later(self._tick, self._check)
