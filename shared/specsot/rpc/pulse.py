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


class Watch:
    """Calls `on_silence` once when nothing has been heard for `silence` seconds."""

    def __init__(self, silence: float, on_silence: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._silence, self._on_silence = silence, on_silence
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(silence, self._check)

    def heard(self) -> None:
        self._heard = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        due = self._heard + self._silence
        if due <= self._loop.time():
            self._on_silence()
        else:
            self._timer = self._loop.call_at(due, self._check)
