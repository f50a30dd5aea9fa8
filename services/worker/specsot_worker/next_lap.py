"""A stage's next plain lap: arranged while a device computes this one, begun once its tokens are known.

Where each sequence of a frame writes one token, and nobody comes or goes, the next frame feeds each of them
one row more. That is a guess: a table keeps nothing of it, nothing is sent because of it, and what a device
wrote is written over, unless exactly that frame comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

from torch import Tensor

from specsot.core.frames import Frame, Segment, TreeSegment
from specsot.core.pages import PageTable
from specsot.core.segments import RowSpan
from specsot.errors import Overloaded
from specsot.model.kv import KVPages
from specsot.model.lap_rows import FilledLap, LapRows, Outputs


class Laps(Protocol):
    """What runs frames for a range; see `CapturedLaps`."""

    def run(self, rows: LapRows) -> Outputs | None: ...

    def fill(self, rows: LapRows) -> FilledLap | None: ...

    def launch(self, filled: FilledLap, entry: Sequence[int] | Tensor) -> Outputs: ...


@dataclass(slots=True)
class GuessedLap:
    """One more row of each sequence.

    rows: sequences with the row that is fed. reserved: sequences with pages that they took for that.
    tokens, outputs: of the lap, once it is launched.
    """

    rows: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    reserved: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    filled: FilledLap | None = None
    tokens: list[int] = field(default_factory=list[int])
    outputs: Outputs | None = None

    def is_for(self, frame: Frame) -> bool:
        """Nothing else comes with this frame, and no other tokens."""
        if self.filled is None or frame.openings or frame.closings or len(frame.segments) != len(self.rows):
            return False
        fed = [
            segment.tree.tokens[0]
            for segment, row in zip(frame.segments, self.rows)
            if _is_plain(segment) and segment.keep == (0,) and (segment.sequence, segment.committed) == row
        ]
        return len(fed) == len(self.rows) if self.outputs is None else fed == self.tokens


class NextLap:
    """At most one guess at a time; asked by the thread that runs frames."""

    def __init__(self, table: PageTable, kv: KVPages, laps: Laps) -> None:
        self._table, self._kv, self._laps = table, kv, laps
        self._guess: GuessedLap | None = None
        self._plain = False  # the newest frame was

    def take(self, frame: Frame) -> GuessedLap | None:
        """What was guessed, if it is for this frame; else it has never been."""
        guess, self._guess = self._guess, None
        if guess is None or guess.is_for(frame):
            return guess
        for sequence, pages in reversed(guess.reserved):
            for page in self._table.unreserve(sequence, pages):
                if guess.outputs:
                    self._kv.clear_page(page)
        return None

    def guess(self, frame: Frame) -> None:
        """Arrange what comes behind this frame, which runs, if that was no other than the one before it."""
        before, self._plain = self._plain, bool(frame.segments) and all(map(self._goes_on, frame.segments))
        if not (before and self._plain):
            return
        self._guess = guess = GuessedLap()
        try:
            spans = [self._next_row(segment, guess) for segment in frame.segments]
        except Overloaded:
            return
        size = self._table.page_rows
        slots = [span.pages[-1] * size + span.base % size for span in spans]
        guess.filled = self._laps.fill(LapRows((), [row for _, row in guess.rows], slots, spans))

    def start(self, tokens: list[int]) -> bool:
        """Launch what was guessed, with a token for each sequence; whether there was such a guess."""
        guess = self._guess
        if guess is None or guess.filled is None or len(tokens) != len(guess.rows):
            return False
        guess.tokens, guess.outputs = tokens, self.launch(guess, tokens)
        return True

    def launch(self, guess: GuessedLap, entry: Sequence[int] | Tensor) -> Outputs:
        """See `CapturedLaps.launch`."""
        assert guess.filled is not None
        return self._laps.launch(guess.filled, entry)

    def _goes_on(self, segment: Segment) -> bool:
        """One row at a time; and no policy has a say in what it sees."""
        return _is_plain(segment) and self._table.policy(segment.sequence) is None

    def _next_row(self, segment: Segment, guess: GuessedLap) -> RowSpan:
        """As `plan_frame` would arrange it. Raises Overloaded."""
        assert isinstance(segment, TreeSegment)
        table, sequence, row = self._table, segment.sequence, segment.committed + 1
        if wanted := table.wanted(sequence, row + 1):
            table.reserve(sequence, row + 1)
            guess.reserved.append((sequence, wanted))
        guess.rows.append((sequence, row))
        return RowSpan(1, row, 1, table.pages(sequence)[: row // table.page_rows + 1], (1,))


def _is_plain(segment: Segment) -> TypeGuard[TreeSegment]:
    return isinstance(segment, TreeSegment) and len(segment.tree.tokens) == 1
