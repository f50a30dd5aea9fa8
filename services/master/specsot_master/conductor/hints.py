"""When a refused caller may come back, from how fast requests have been leaving.

Pure: the time is passed in, in seconds. Refuses to know requests and queues.
"""

from __future__ import annotations

from collections import deque

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 60.0  # seconds
MAX_DEPARTURES = 32  # departures


class RetryHints:
    """The n-th caller refused since a request left is sent to the n-th place that will become free.

    usual: seconds to hint before anything is known.
    """

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._left: deque[float] = deque(maxlen=MAX_DEPARTURES)
        self._refused = 0

    def left(self, now: float) -> None:
        """A request is over, so that another can be taken."""
        self._left.append(now)
        self._refused = 0

    def refuse(self, now: float) -> float:
        """Seconds after which this caller may try again."""
        self._refused += 1
        return min(max(self._interval(now) * self._refused, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _interval(self, now: float) -> float:
        """Seconds between departures; what has passed since the last one counts too, once it is longer."""
        if len(self._left) < 2:
            return self._usual
        mean = (self._left[-1] - self._left[0]) / (len(self._left) - 1)
        return max(mean, now - self._left[-1])
