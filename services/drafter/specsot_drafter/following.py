"""Follows texts from the base's true features: rows stored as they come, computed when due.

Refuses to know trees, drafts and what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.arrange import window_of
from specsot.errors import NotFound, Overloaded, WireError
from specsot.frames import Features, Lesson
from specsot_drafter.extension import Stretch, extend
from specsot_drafter.growth import Ground
from specsot_drafter.heads import DraftHead
from specsot_drafter.memory import Memory
from specsot_drafter.streams import Stream
from specsot_drafter.texts import Text


class Following:
    """The streams of one epoch and their memory. A stream that cannot be followed any more is dropped."""

    def __init__(self, head: DraftHead, pages: int, page_rows: int) -> None:
        self._head = head
        self.memory = Memory(head, pages, page_rows)
        self.streams: dict[int, Stream] = {}

    @property
    def due(self) -> int:
        """Rows that could be computed and are not yet."""
        return sum(stream.due for stream in self.streams.values())

    def open(self, text: Text) -> None:
        """Follow a text from its start, or from its fork where the source is followed so far."""
        try:
            self.streams[text.sequence] = self._fork(text) if text.committed else self._begin(text)
        except (NotFound, Overloaded):
            self.memory.close(text.sequence)

    def close(self, sequence: int) -> None:
        """Give everything back. Sequences that are not followed are ignored."""
        self.streams.pop(sequence, None)
        self.memory.close(sequence)

    def hear(self, batch: Features) -> None:
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

    def catch_up(self, asked: Sequence[Stream]) -> Tensor:
        """Compute all rows that are due anywhere.

        Returns [asked, hidden]: the head's outputs at the last rows of `asked`, in their order.
        """
        wanted = {stream.sequence for stream in asked}
        others = [s for s in self.streams.values() if s.due and s.sequence not in wanted]
        stretches = self.take(asked) + [_stretch(s, asked=False) for s in others]
        if not stretches:
            return torch.empty(0, self._head.hidden, dtype=self._head.dtype, device=self._head.device)
        return extend(self._head, self.memory, stretches)

    def take(self, asked: Sequence[Stream]) -> list[Stretch]:
        """The rows of these that are due, at least the last of each, now the caller's to compute."""
        for stream in asked:
            stream.rewind()
        return [_stretch(stream, asked=True) for stream in asked]

    def ground(self, stream: Stream, rows: int) -> Ground | None:
        """Room for `rows` grown rows behind a stream's own, or None where there is none."""
        self.memory.trim(stream.sequence, stream.extended)
        return self.memory.ground(stream.sequence, stream.length, rows)

    def _begin(self, text: Text) -> Stream:
        self.memory.table.open(text.sequence, window_of(text.opening))
        return Stream(text)

    def _fork(self, text: Text) -> Stream:
        """Shared rows must be computed before they are shared."""
        fork = text.opening.fork
        source = self.streams.get(fork.sequence) if fork else None
        if fork is None or source is None or source.length < fork.length:
            raise NotFound(f"sequence {text.sequence} forks what is not followed so far")
        due = fork.length - 1 - source.extended
        if due > 0:
            extend(self._head, self.memory, [_stretch(source, asked=False, rows=due)])
        self.memory.fork(text.sequence, fork.sequence, fork.length)
        return Stream(text, extended=fork.length - 1)

    def _room_for(self, lesson: Lesson) -> list[int] | None:
        """Slots for a lesson's features, or None for a sequence that is not followed (any more)."""
        if lesson.sequence not in self.streams:
            return None
        stop = lesson.start + len(lesson.tokens)
        try:
            self.memory.table.reserve(lesson.sequence, stop)
            return self.memory.table.slots(lesson.sequence, lesson.start, stop)
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
        self.memory.remember(slots, head.features(picked.to(device=head.device, dtype=head.dtype)))


def _stretch(stream: Stream, asked: bool, rows: int | None = None) -> Stretch:
    first = stream.extended
    return Stretch(stream.sequence, first, stream.take(rows), asked)
