"""How requests ended and what they found in the ring, counted since the master began.

Pure. Refuses to know queues and pages.
"""

from __future__ import annotations

from collections import Counter

from specsot.errors import SpecsotError


class RequestCounts:
    """refused: for lack of room. asked, found: prompt tokens of requests that entered the ring, and those
    of them that it had already.
    """

    def __init__(self) -> None:
        self.refused = self.asked = self.found = 0
        self._ended: Counter[str] = Counter()

    @property
    def ended(self) -> tuple[tuple[str, int], ...]:
        """(why, how many), by name."""
        return tuple(sorted(self._ended.items()))

    def enter(self, prompt: int, found: int) -> None:
        self.asked += prompt
        self.found += found

    def end(self, why: str | SpecsotError) -> None:
        """A request is over: by a reason of its own, or by an error."""
        self._ended[why if isinstance(why, str) else error_label(why)] += 1


def error_label(error: SpecsotError) -> str:
    """TimedOut -> timed_out."""
    name = type(error).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")
