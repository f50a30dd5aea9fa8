"""How long stage 0 waits for a tree, given how the drafter has kept its word.

Refuses to know clocks and sequences. A drafter that misses is not waited for again for a while:
one slow drafter costs one timeout, not one per lap.
"""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 32, 1024  # in trees not waited for


class Patience:
    """`timeout` seconds while the drafter is timely; none for a doubling number of trees after a miss."""

    def __init__(self, timeout: float, present: bool = True) -> None:
        self._timeout, self._present = timeout, present
        self._pause = FIRST_PAUSE
        self._left = 0

    def deadline(self, since: float) -> float:
        """Until when a sequence that waits since `since` shall go on waiting."""
        return since + self._timeout if self._present and not self._left else since

    def kept(self) -> None:
        """A tree came in time."""
        self._pause, self._left = FIRST_PAUSE, 0

    def missed(self) -> None:
        """A sequence went without its tree."""
        if self._left:
            self._left -= 1
            return
        self._left = self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def rest(self, trees: int) -> None:
        """The drafter itself says that the next trees need not be waited for."""
        self._left = max(self._left, trees)

    def end(self) -> None:
        """There is no drafter any more."""
        self._present = False
