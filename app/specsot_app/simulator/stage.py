"""A layer range without weights, whose KV rows are checksums of the text before them.

A row that sees a wrong page, move or mask has another checksum: the answer differs then, or the next stage
refuses the frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from specsot.core.frames import Frame, Segment, TreeSegment, tokens_of
from specsot.core.kv_plan import KvPlan, SegmentPlan, plan_frame
from specsot.core.pages import PageTable
from specsot.errors import WireError
from specsot.members import Range
from specsot_app.simulator.fake_lm import EMPTY_STATE, FakeLM, next_state

SpendTime = Callable[[int], None]  # takes as long as so many rows take
LEAST_WIDTH = 3  # a row: the state's high half, its low half, the next token


@dataclass(frozen=True, slots=True)
class StageModel:
    """What all stages of a ring without weights have in common.

    width: of a hidden row. spend: called with the number of rows of every frame.
    plan: what is written instead where a skeleton is asked for, as long as it lasts.
    """

    voice: FakeLM
    spend: SpendTime
    width: int = LEAST_WIDTH
    plan: tuple[int, ...] = ()


class MockStage:
    """See `StageRunner`."""

    def __init__(self, body: StageModel, layers: Range, pages: int, page_rows: int) -> None:
        self.table, self.layers = PageTable(pages, page_rows), layers
        self._body = body
        self._states: dict[int, int] = {}
        self._planning: dict[int, int] = {}  # by sequence: where its plan begins
        self._fused = 0

    def tap(self, layer: int, weight: Any) -> None:
        """Fused rows of the weight's height travel from now on; they say nothing."""
        self._fused = int(weight.shape[0])

    def capture(self) -> None:
        """Nothing would make it quicker."""

    def run(self, frame: Frame) -> Frame:
        """Raises WireError when the stage before saw other texts."""
        begun = time.perf_counter()
        arrangement = plan_frame(self.table, frame)
        self._planning |= {one.sequence: one.prompt - one.generated for one in frame.openings if one.plan}
        self._move(arrangement)
        hidden = self._enter(frame, arrangement) if arrangement.slots else None
        self._wipe(frame, arrangement)
        if hidden is not None:
            self._body.spend(len(hidden))
        fused = torch.zeros(len(hidden), self._fused) if hidden is not None and self._fused else frame.fused
        seconds = (*frame.seconds, time.perf_counter() - begun)
        return replace(frame, hidden=hidden, fused=fused, seconds=seconds)

    def _move(self, arrangement: KvPlan) -> None:
        size, states = self.table.page_rows, self._states
        for copy in arrangement.copies:
            for row in range(copy.rows):
                states[copy.target * size + row] = states[copy.source * size + row]
        moved = [states[source] for source, _ in arrangement.moves]
        states.update(zip((target for _, target in arrangement.moves), moved))

    def _wipe(self, frame: Frame, arrangement: KvPlan) -> None:
        size = self.table.page_rows
        for sequence in frame.closings:
            self._planning.pop(sequence, None)
        for page in arrangement.freed:
            for slot in range(page * size, (page + 1) * size):
                self._states.pop(slot, None)

    def _enter(self, frame: Frame, arrangement: KvPlan) -> torch.Tensor:
        """[rows, width] the rows as they leave; those that came must say the same."""
        found = [
            (segment.sequence, state)
            for segment, place in zip(frame.segments, arrangement.places)
            for state in self._read(segment, place)
        ]
        self._states.update(zip(arrangement.slots, (state for _, state in found)))
        said = [
            (state >> 16, state & 0xFFFF, self._next(sequence, position, state))
            for position, (sequence, state) in zip(arrangement.positions, found)
        ]
        hidden = torch.zeros(len(found), max(self._body.width, LEAST_WIDTH))
        hidden[:, :LEAST_WIDTH] = torch.tensor(said)
        if self.layers.first and not (frame.hidden is not None and torch.equal(hidden, frame.hidden)):
            raise WireError(f"layers {self.layers} saw other texts in frame {frame.number} than came")
        return hidden

    def _next(self, sequence: int, position: int, state: int) -> int:
        """What follows the token at `position`."""
        plan, start = self._body.plan, self._planning.get(sequence)
        if start is not None and 0 <= position + 1 - start < len(plan):
            return plan[position + 1 - start]
        return self._body.voice.next(state)

    def _read(self, segment: Segment, place: SegmentPlan) -> Iterator[int]:
        """The state behind every row: of its parent's text and its own token."""
        tree = segment.tree.parents if isinstance(segment, TreeSegment) else None
        states = list[int]()
        for row, token in enumerate(tokens_of(segment)):
            parent = tree[row] if tree else row - 1
            states.append(next_state(states[parent] if row else self._before(place), token))
            yield states[-1]

    def _before(self, place: SegmentPlan) -> int:
        if not place.base:
            return EMPTY_STATE
        page, row = divmod(place.base - 1, self.table.page_rows)
        return self._states[place.pages[page] * self.table.page_rows + row]
