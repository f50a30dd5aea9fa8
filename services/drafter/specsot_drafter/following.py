"""Follows every open sequence from true features: rows stored as they come, computed when due.

Refuses to know trees, drafts and what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.constraint import grammar_of
from specsot.errors import NotFound, Overloaded, WireError
from specsot.frames import Features, Lesson, Opening
from specsot.vocabulary import Vocabulary
from specsot_drafter.extension import Stretch, extend
from specsot_drafter.growth import Ground
from specsot_drafter.heads import DraftHead
from specsot_drafter.memory import Memory
from specsot_drafter.standing import Standing
from specsot_drafter.streams import Stream


class Following:
    """The streams of one epoch and their memory. A stream that cannot be followed any more is dropped."""

    def __init__(self, head: DraftHead, pages: int, page_rows: int, vocabulary: Vocabulary | None) -> None:
        """vocabulary: to follow grammars with; without it all text counts as free."""
        self._head, self._vocabulary = head, vocabulary
        self.memory = Memory(head, pages, page_rows)
        self.streams: dict[int, Stream] = {}

    @property
    def due(self) -> int:
        """Rows that could be computed and are not yet."""
        return sum(len(stream.waiting) for stream in self.streams.values())

    def open(self, opening: Opening) -> None:
        """Follow a sequence from its start, or from its fork where the source is followed so far."""
        try:
            stream = self._fork(opening) if opening.fork and opening.fork.length else self._begin(opening)
        except (NotFound, Overloaded):
            self.memory.close(opening.sequence)
            return
        grammar = grammar_of(self._vocabulary, opening, led=False) if self._vocabulary else None
        if grammar:
            stream.standing = Standing(grammar, grammar.start())
        self.streams[opening.sequence] = stream

    def close(self, sequence: int) -> None:
        """Give everything back. Sequences that are not followed are ignored."""
        self.streams.pop(sequence, None)
        self.memory.close(sequence)

    def hear(self, batch: Features) -> None:
        """Store the true features of a batch; drop whoever missed something or has no room."""
        if batch.rows is None:  # nothing to learn from: whoever has a lesson here has a hole now
            for lesson in batch.lessons:
                self.close(lesson.sequence)
            return
        heard, rows, slots = list[Lesson](), list[int](), list[int]()
        first = 0
        for lesson in batch.lessons:
            stop = first + len(lesson.tokens)
            if own := self._room_for(lesson):
                heard.append(lesson)
                rows += range(first, stop)
                slots += own
            first = stop
        if heard:
            self._store(batch.rows, first, rows, slots)
        for lesson in heard:
            self.streams[lesson.sequence].hear(lesson)

    def catch_up(self, asked: Sequence[Stream]) -> Tensor:
        """Compute all rows that are due anywhere.

        Returns [asked, hidden]: the head's outputs at the last rows of `asked`, in their order.
        """
        for stream in asked:
            stream.rewind()
        wanted = {stream.sequence for stream in asked}
        others = [s for s in self.streams.values() if s.waiting and s.sequence not in wanted]
        stretches = [_stretch(s, asked=True) for s in asked] + [_stretch(s, asked=False) for s in others]
        if not stretches:
            return torch.empty(0, self._head.hidden, dtype=self._head.dtype, device=self._head.device)
        return extend(self._head, self.memory, stretches)

    def ground(self, stream: Stream, rows: int) -> Ground | None:
        """Room for `rows` grown rows behind a stream's own, or None where there is none."""
        table, base = self.memory.table, stream.length
        try:
            table.reserve(stream.sequence, base + rows)
        except Overloaded:
            return None
        pages = table.pages(stream.sequence)[: table.pages_for(base + rows)]
        return Ground(base, pages, table.slots(stream.sequence, base, base + rows))

    def _begin(self, opening: Opening) -> Stream:
        self.memory.table.open(opening.sequence)
        return Stream(opening)

    def _fork(self, opening: Opening) -> Stream:
        """Shared rows must be computed before they are shared."""
        fork = opening.fork
        source = self.streams.get(fork.sequence) if fork else None
        if fork is None or source is None or source.length < fork.length:
            raise NotFound(f"sequence {opening.sequence} forks what is not followed so far")
        due = fork.length - 1 - source.extended
        if due > 0:
            extend(self._head, self.memory, [_stretch(source, asked=False, rows=due)])
        self.memory.fork(opening.sequence, fork.sequence, fork.length)
        return source.branch(opening, fork.length)

    def _room_for(self, lesson: Lesson) -> list[int] | None:
        """Slots for a lesson's features, or None for a sequence that is not followed (any more)."""
        stream = self.streams.get(lesson.sequence)
        if stream is None:
            return None
        stop = lesson.start + len(lesson.tokens)
        try:
            if stream.follows(lesson):
                self.memory.table.reserve(lesson.sequence, stop)
                return self.memory.table.slots(lesson.sequence, lesson.start, stop)
        except Overloaded:
            pass
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
