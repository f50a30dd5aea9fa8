"""Heartbeats of long-lived streams, and the rule by which silence means that a peer is lost.

gRPC's own keepalive only proves that the peer's network code runs; a heartbeat comes from its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from specsot.errors import InvalidRequest
from specsot.service.option_table import ABOVE_ZERO, option

# Factor. How many silence limits members wait for the master, and the master for a member that loads weights
# or computes on a GPU, whose kernels may be compiled in the middle of an answer. Untuned.
BUSY_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Intervals of heartbeats between members and master.

    A peer that is stopped for s seconds is silent for up to `every` + s seconds, and in addition until its
    next message arrives. With 0.1 and 1.3, a peer that is stopped for a second has 0.2 s for that. A lost
    packet costs TCP 0.2 s, two in a row 0.6 s. Heartbeats are sent by the event loop, which computing does
    not block: while weights were loaded, the loop was late by 12 ms (SmolLM2-135M, two cores).

    every: seconds between heartbeats while nothing else is sent.
    silence: seconds without any message after which a peer counts as lost.
    """

    every: float = option(
        0.1,
        "Seconds between heartbeats of members and master while nothing else is sent.",
        flag="heartbeat",
        kind=ABOVE_ZERO,
    )
    silence: float = option(1.3, "Seconds without a heartbeat after which a member is lost.", kind=ABOVE_ZERO)

    def check(self) -> None:
        """Raise InvalidRequest if `silence` is so short that a single late heartbeat would count as a
        loss.

        The silence must be at least twice the interval of heartbeats.
        """
        if self.silence < 2 * self.every:
            raise InvalidRequest(
                f"--silence {self.silence:g} must be at least twice --heartbeat {self.every:g}", "silence"
            )

    @property
    def of_master(self) -> Heartbeat:
        """The intervals with which members watch the master, with a longer silence.

        No other process can replace the master, so noticing its loss early gains nothing, and many clients
        keep its event loop busy.
        """
        return Heartbeat(self.every, BUSY_FACTOR * self.silence)


# Ticks. How many times per silence limit a timer looks; a silence is noticed at most an eighth too late.
TICKS_PER_SILENCE = 8


class SilenceTimer:
    """Calls `on_silence` once if no message arrived for `silence` seconds during which this event loop ran.

    The timer counts ticks, and a tick counts once however long it lasted. If this process was frozen, the
    peer's messages of that time are still unread, and only one tick of that time counts.

    If `busy` returns True when the silence has passed, the timer waits for BUSY_FACTOR times the silence.
    Members that load, allocate or compile hold the interpreter lock now and then, and other members on the
    same machine do so at the same time.
    """

    def __init__(
        self, silence: float, on_silence: Callable[[], object], busy: Callable[[], bool] = lambda: False
    ) -> None:
        """Start the timer, on the running event loop.

        silence: seconds without a message, in ticks of the event loop, after which `on_silence` is called.
        on_silence: called once, on the event loop.
        busy: returns whether the peer may be silent for BUSY_FACTOR times as long. Called when the silence
            has passed.
        """
        self._loop = asyncio.get_running_loop()
        self._tick = silence / TICKS_PER_SILENCE
        self._on_silence = on_silence
        self._busy = busy
        # True if a message arrived since the last tick.
        self._received = False
        # Number of ticks since the last message.
        self._silent_ticks = 0
        self._timer = self._loop.call_later(self._tick, self._check)

    def reset(self) -> None:
        """Record that a message arrived."""
        self._received = True

    def cancel(self) -> None:
        """Cancel the timer, so that `on_silence` is no longer called."""
        self._timer.cancel()

    def _check(self) -> None:
        """Count one tick. Call `on_silence` and stop if no message arrived for `silence` seconds, or for
        BUSY_FACTOR times as long while the peer is busy; otherwise start the next tick.
        """
        self._silent_ticks = 0 if self._received else self._silent_ticks + 1
        self._received = False
        silences, remaining_ticks = divmod(self._silent_ticks, TICKS_PER_SILENCE)
        if silences and not remaining_ticks and silences >= (BUSY_FACTOR if self._busy() else 1):
            self._on_silence()
        else:
            self._timer = self._loop.call_later(self._tick, self._check)
