"""Puts what is free in the ring to use: lets in who waits, opens again what was lost, adds branches.

Refuses to know results, readers and why a request leaves. Whose turn it is says the roster, what is free
say the shared beginnings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from specsot_master.conductor.clock import Clock
from specsot_master.conductor.course import Course
from specsot_master.conductor.live import LiveRequest
from specsot_master.conductor.ring import Ring, RingState
from specsot_master.conductor.roster import Roster
from specsot_master.conductor.sequences import Sequences
from specsot_master.conductor.sharing import Sharing


class Scheduler:
    """epoch: of the ring that was filled last, while that lasts. began: a new one is about to be."""

    def __init__(
        self,
        ring: Ring,
        roster: Roster,
        course: Course,
        sequences: Sequences,
        sharing: Sharing,
        isolate: Callable[[LiveRequest], AbstractContextManager[None]],
        clock: Clock,
        began: Callable[[RingState], None],
    ) -> None:
        self._ring, self._roster, self._course = ring, roster, course
        self._sequences, self._sharing = sequences, sharing
        self._isolate, self._clock, self._began = isolate, clock, began
        self.epoch: int | None = None
        self._over = 0  # the last epoch that is known to have ended

    @property
    def free_pages(self) -> int:
        """KV pages that are promised to nobody; those of prefixes that nobody needs now are among them."""
        state = self._ring.state()
        if state is None:
            return 0
        fresh = state.epoch != self.epoch
        return state.pages if fresh else self._sharing.ledger.free + self._sharing.spare

    def fill(self) -> None:
        """First those who wait, then further branches of those who run."""
        self._sequences.freed = False
        state = self._ring.state()
        if state is None or state.epoch <= self._over:
            return
        if self.epoch != state.epoch:
            self._begin_epoch(state)
        self._admit(state)
        for request in self._roster.interrupted:
            with self._isolate(request):
                self._course.go_on(request, self._roster.crowded)
        self._add_branches()

    def end_epoch(self) -> None:
        """Nothing of this epoch is in the ring any more."""
        self._sequences.clear()
        self._sharing.begin_epoch(0)
        self._over, self.epoch = max(self._over, self.epoch or 0), None

    def _begin_epoch(self, state: RingState) -> None:
        """An empty ring, perhaps of another size."""
        self._sharing.begin_epoch(state.pages)
        self.epoch = state.epoch
        self._began(state)

    def _admit(self, state: RingState) -> None:
        now = self._clock.now()

        def admit(request: LiveRequest) -> bool:
            return self._sharing.admit(request, state)

        while (request := self._roster.admit_next(now, admit)) is not None:
            with self._isolate(request):
                self._course.begin(request, now)

    def _add_branches(self) -> None:
        """One branch at a time for whoever's turn it is, until nobody wants one or nothing fits."""
        stuck: set[str] = set()
        while (request := self._roster.next_to_branch(stuck)) is not None:
            before = len(request.sequences)
            point = request.plan.ready()[0]
            with self._isolate(request):
                self._course.add_branch(request, point, self._roster.crowded, self.fill)
            if len(request.sequences) == before:
                stuck.add(request.id)
