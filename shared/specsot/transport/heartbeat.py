"""Heartbeats of long-lived streams, and when silence means that a peer is gone.

gRPC's own keepalive only proves that the peer's network code lives; a beat comes from its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from specsot.errors import InvalidRequest
from specsot.service.option_table import ABOVE_ZERO, option

# Times the silence limit: for so long members wait for the master, and it for one that loads, or that
# computes on a GPU, whose kernels may be compiled in the middle of an answer (a guess: not measured there).
BUSY_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """every: seconds between beats when nothing else is said. silence: seconds after which a peer is gone.

    A peer that is stopped for s seconds is silent for up to `every` + s, and as long as it takes to be
    heard again: 0.1 and 1.3 leave one that is stopped for a second 0.2 s for that. One packet that is lost
    and sent again costs TCP 0.2 s, two in a row 0.6. Beats come from the event loop, which computing does not
    hold up: while weights were loaded it was late by 12 ms (SmolLM2-135M, two cores).
    """

    every: float = option(
        0.1,
        "Seconds between heartbeats of members and master while nothing else is sent.",
        flag="heartbeat",
        kind=ABOVE_ZERO,
    )
    silence: float = option(1.3, "Seconds without a heartbeat after which a member is lost.", kind=ABOVE_ZERO)

    def check(self) -> None:
        """Raises InvalidRequest where one late heartbeat would be a loss."""
        if self.silence < 2 * self.every:
            raise InvalidRequest(
                f"--silence {self.silence:g} must be at least twice --heartbeat {self.every:g}", "silence"
            )

    @property
    def of_master(self) -> Heartbeat:
        """As members watch it: nobody takes its place, so there is nothing to win by haste, and its loop is
        the one that many strangers keep busy.
        """
        return Heartbeat(self.every, BUSY_FACTOR * self.silence)


TICKS_PER_SILENCE = 8  # ticks in which a watch counts one silence: it is noticed at most an eighth late


class SilenceTimer:
    """Calls `on_silence` once when nothing has been heard for `silence` seconds in which this loop ran.

    It counts ticks, each at most its own length: when this process itself was frozen, what the peer has said
    meanwhile is still to be read, and only one tick of all that time counts.

    Who is `busy` when a silence has passed may go on for BUSY_FACTOR of them. Members that load, allocate or
    compile hold their interpreter's lock now and then, however short the parts are in which they do it, and
    others on the same machine do the same at the same time.
    """

    def __init__(
        self, silence: float, on_silence: Callable[[], None], busy: Callable[[], bool] = lambda: False
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick = silence / TICKS_PER_SILENCE
        self._on_silence = on_silence
        self._busy = busy
        # ticks
        self._heard = False
        self._silent = 0
        self._timer = self._loop.call_later(self._tick, self._check)

    def reset(self) -> None:
        self._heard = True

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        silences, rest = divmod(self._silent, TICKS_PER_SILENCE)
        if silences and not rest and silences >= (BUSY_FACTOR if self._busy() else 1):
            self._on_silence()
        else:
            self._timer = self._loop.call_later(self._tick, self._check)
