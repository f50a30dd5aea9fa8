"""How long stage 0 waits for a tree, given what the drafter said and how it has kept its word.

Refuses to know clocks and sequences. A drafter that misses is not waited for again for a while:
one slow drafter costs one timeout, not one per lap. A drafter that rests is not even told anything.
"""

from __future__ import annotations

FIRST_BACKOFF_TREES, MAX_BACKOFF_TREES = 32, 1024  # in trees not waited for
MAX_UNSENT_ROWS = 8192  # rows that the last stage may have to keep through one rest
SLOW_TREE_FACTOR = 4.0  # times the usual wait, after which a tree is one that others do not wait for
WAIT_WEIGHT = 0.2  # of one wait in what is usual


class DraftTimeout:
    """`timeout` seconds while the drafter is timely; none for a doubling number of trees after a miss."""

    def __init__(self, timeout: float, present: bool = True) -> None:
        self._timeout, self._present = timeout, present
        self._backoff = FIRST_BACKOFF_TREES
        self._backoff_left = 0
        self._rest_left = self._unsent_rows = 0
        self._usual_wait: float | None = None

    @property
    def resting(self) -> bool:
        """Whether the drafter need not hear of what is sent now, because it will not answer."""
        return self._present and self._rest_left > 0

    def deadline(self, since: float) -> float:
        """Until when a sequence that waits since `since` shall go on waiting."""
        return (
            since + self._timeout if self._present and not (self._backoff_left or self._rest_left) else since
        )

    def family_deadline(self, since: float) -> float:
        """Until when the rest of its family shall wait for a sequence that waits since `since`."""
        usual = self._timeout if self._usual_wait is None else SLOW_TREE_FACTOR * self._usual_wait
        return min(self.deadline(since), since + usual)

    def record_tree(self, waited: float | None = None) -> None:
        """A tree came in time, after so many seconds."""
        self._backoff, self._backoff_left = FIRST_BACKOFF_TREES, 0
        if waited is not None:
            usual = waited if self._usual_wait is None else self._usual_wait
            self._usual_wait = usual + WAIT_WEIGHT * (waited - usual)

    def record_miss(self) -> None:
        """A sequence went without its tree."""
        if self._rest_left:
            return
        if self._backoff_left:
            self._backoff_left -= 1
            return
        self._backoff_left = self._backoff
        self._backoff = min(self._backoff * 2, MAX_BACKOFF_TREES)

    def start_rest(self, trees: int) -> None:
        """The drafter says that it will draft nothing for so many trees."""
        self._rest_left, self._unsent_rows = trees, 0

    def record_launch(self, trees: int, rows: int) -> None:
        """A frame with so many drafted sequences' trees and so many rows was launched."""
        if self._rest_left:
            self._unsent_rows += rows
            self._rest_left = max(self._rest_left - trees, 0) if self._unsent_rows < MAX_UNSENT_ROWS else 0

    def drafter_left(self) -> None:
        """There is no drafter any more."""
        self._present = False

    def drafter_spoke(self) -> None:
        """The drafter speaks: there is one, which owes nothing if there was none before."""
        if not self._present:
            self._present, self._backoff = True, FIRST_BACKOFF_TREES
            self._backoff_left = self._rest_left = self._unsent_rows = 0
