"""Follows texts from the base's true features: rows stored as they come, computed when due.

Refuses to know trees, drafts and what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.core.frames import FeatureBatch, Features
from specsot.core.kv_plan import window_of
from specsot.errors import NotFound, Overloaded, WireError
from specsot_drafter.extension import DueRows, compute_rows
from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.memory import DraftPages
from specsot_drafter.streams import FollowedSequence
from specsot_drafter.texts import DraftSequence


class EagleKv:
    """The streams of one epoch and their memory. A stream that cannot be followed any more is dropped."""

    def __init__(self, head: DraftHead, pages: int, page_rows: int) -> None:
        self._head = head
        self.pages = DraftPages(head, pages, page_rows)
        self.sequences: dict[int, FollowedSequence] = {}

    @property
    def due(self) -> int:
        """Rows that could be computed and are not yet."""
        return sum(stream.due for stream in self.sequences.values())

    def open(self, sequence: DraftSequence) -> None:
        """Follow a text from its start, or from its fork where the source is followed so far."""
        try:
            self.sequences[sequence.id] = (
                self._fork(sequence) if sequence.committed else self._start(sequence)
            )
        except (NotFound, Overloaded):
            self.pages.close(sequence.id)

    def close(self, sequence: int) -> None:
        """Give everything back. Sequences that are not followed are ignored."""
        self.sequences.pop(sequence, None)
        self.pages.close(sequence)

    def store_batch(self, batch: Features) -> None:
        """Store the true features of a batch; drop whoever got none or has no room for them."""
        if batch.rows is None:  # nothing to learn from: whoever has a lesson here has a hole now
            for lesson in batch.lessons:
                self.close(lesson.sequence)
            return
        rows, slots = list[int](), list[int]()
        first = 0
        for lesson in batch.lessons:
            stop = first + len(lesson.tokens)
            if own := self._room_for(lesson):
                rows += range(first, stop)
                slots += own
            first = stop
        if rows:
            self._store(batch.rows, first, rows, slots)

    def catch_up(self, asked: Sequence[FollowedSequence]) -> Tensor:
        """Compute all rows that are due anywhere.

        Returns [asked, hidden]: the head's outputs at the last rows of `asked`, in their order.
        """
        wanted = {stream.id for stream in asked}
        others = [s for s in self.sequences.values() if s.due and s.id not in wanted]
        due = self.take_due(asked) + [_due_rows(s, asked=False) for s in others]
        if not due:
            return torch.empty(0, self._head.hidden, dtype=self._head.dtype, device=self._head.device)
        return compute_rows(self._head, self.pages, due)

    def take_due(self, asked: Sequence[FollowedSequence]) -> list[DueRows]:
        """The rows of these that are due, at least the last of each, now the caller's to compute."""
        for stream in asked:
            stream.rewind()
        return [_due_rows(stream, asked=True) for stream in asked]

    def reserve_tree(self, followed: FollowedSequence, rows: int) -> TreeRoom | None:
        """Room for `rows` grown rows behind a stream's own, or None where there is none."""
        self.pages.trim(followed.id, followed.extended)
        return self.pages.reserve_tree(followed.id, followed.length, rows)

    def _start(self, sequence: DraftSequence) -> FollowedSequence:
        self.pages.table.open(sequence.id, window_of(sequence.opening))
        return FollowedSequence(sequence)

    def _fork(self, sequence: DraftSequence) -> FollowedSequence:
        """Shared rows must be computed before they are shared."""
        fork = sequence.opening.fork
        source = self.sequences.get(fork.sequence) if fork else None
        if fork is None or source is None or source.length < fork.length:
            raise NotFound(f"sequence {sequence.id} forks what is not followed so far")
        due = fork.length - 1 - source.extended
        if due > 0:
            compute_rows(self._head, self.pages, [_due_rows(source, asked=False, rows=due)])
        self.pages.fork(sequence.id, fork.sequence, fork.length)
        return FollowedSequence(sequence, extended=fork.length - 1)

    def _room_for(self, lesson: FeatureBatch) -> list[int] | None:
        """Slots for a lesson's features, or None for a sequence that is not followed (any more)."""
        if lesson.sequence not in self.sequences:
            return None
        stop = lesson.start + len(lesson.tokens)
        try:
            self.pages.table.reserve(lesson.sequence, stop)
            return self.pages.table.slots(lesson.sequence, lesson.start, stop)
        except Overloaded:
            self.close(lesson.sequence)
            return None

    def _store(self, payload: Tensor, count: int, rows: Sequence[int], slots: Sequence[int]) -> None:
        if tuple(payload.shape) != (count, self._head.width):
            raise WireError(
                f"features are {tuple(payload.shape)}, their lessons say {(count, self._head.width)}"
            )
        head = self._head
        picked = payload if len(rows) == count else payload[torch.tensor(rows, device=payload.device)]
        self.pages.store_features(slots, head.features(picked.to(device=head.device, dtype=head.dtype)))


def _due_rows(followed: FollowedSequence, asked: bool, rows: int | None = None) -> DueRows:
    first = followed.extended
    return DueRows(followed.id, first, followed.take(rows), asked)
