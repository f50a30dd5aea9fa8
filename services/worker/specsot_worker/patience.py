"""How long stage 0 waits for a tree, given what the drafter said and how it has kept its word.

Refuses to know clocks and sequences. A drafter that misses is not waited for again for a while:
one slow drafter costs one timeout, not one per lap. A drafter that rests is not even told anything.
"""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 32, 1024  # in trees not waited for
MOST_KEPT = 8192  # rows that the last stage may have to keep through one rest
SLOW = 4.0  # times the usual wait, after which a tree is one that others do not wait for
WEIGHT = 0.2  # of one wait in what is usual


class Patience:
    """`timeout` seconds while the drafter is timely; none for a doubling number of trees after a miss."""

    def __init__(self, timeout: float, present: bool = True) -> None:
        self._timeout, self._present = timeout, present
        self._pause = FIRST_PAUSE
        self._left = 0
        self._rest = self._kept = 0
        self._usual: float | None = None

    @property
    def resting(self) -> bool:
        """Whether the drafter need not hear of what is sent now, because it will not answer."""
        return self._present and self._rest > 0

    def deadline(self, since: float) -> float:
        """Until when a sequence that waits since `since` shall go on waiting."""
        return since + self._timeout if self._present and not (self._left or self._rest) else since

    def others(self, since: float) -> float:
        """Until when the rest of its family shall wait for a sequence that waits since `since`."""
        usual = self._timeout if self._usual is None else SLOW * self._usual
        return min(self.deadline(since), since + usual)

    def kept(self, waited: float | None = None) -> None:
        """A tree came in time, after so many seconds."""
        self._pause, self._left = FIRST_PAUSE, 0
        if waited is not None:
            usual = waited if self._usual is None else self._usual
            self._usual = usual + WEIGHT * (waited - usual)

    def missed(self) -> None:
        """A sequence went without its tree."""
        if self._rest:
            return
        if self._left:
            self._left -= 1
            return
        self._left = self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def rest(self, trees: int) -> None:
        """The drafter says that it will draft nothing for so many trees."""
        self._rest, self._kept = trees, 0

    def spend(self, trees: int, rows: int) -> None:
        """A frame with so many drafted sequences' trees and so many rows was launched."""
        if self._rest:
            self._kept += rows
            self._rest = max(self._rest - trees, 0) if self._kept < MOST_KEPT else 0

    def end(self) -> None:
        """There is no drafter any more."""
        self._present = False

    def begin(self) -> None:
        """The drafter speaks: there is one, which owes nothing if there was none before."""
        if not self._present:
            self._present, self._pause = True, FIRST_PAUSE
            self._left = self._rest = self._kept = 0
