"""What stage 0 does not wait for: another family's trees, a slow branch, a long prompt's end."""

from __future__ import annotations

import pytest

from specsot.core.frames import (
    Draft,
    Drafts,
    Fork,
    Frame,
    Open,
    Opening,
    Outcome,
    PromptChunk,
    Result,
    TreeSegment,
)
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot_worker.core.pipeline import SLOW_TREE_FACTOR, DraftTimeout, FrameBudget, PipelineDepth
from specsot_worker.core.sequencer import Sequencer
from tests.there import there

FLAT = ((1, 0.010), (512, 0.010))
STEEP = ((1, 0.001), (512, 0.512))
TIMEOUT = 5.0  # seconds for a tree, at most
USUAL = 0.1  # seconds that trees take here


def stage_0(rows: int = 64, flow: PipelineDepth | None = None) -> Sequencer:
    return Sequencer(1, FrameBudget(rows, 3, 9), PageTable(96, 64), DraftTimeout(TIMEOUT), flow)


def begin(sequencer: Sequencer, families: dict[int, int]) -> None:
    """By sequence its family: all have answered their prompts at 0.0."""
    sequencer.apply_order(Open(Opening(1, 3, decodes=False), (1, 2, 3), 9999))
    for sequence, family in families.items():
        opening = Opening(sequence, 4, fork=Fork(1, 3), limit=99, family=family)
        sequencer.apply_order(Open(opening, (4,), 9999))
    assert sequencer.compose(0.0) is not None
    prompts = there(sequencer.compose(0.0))
    outcomes = tuple(Outcome(sequence, 0, (), (5,)) for sequence in families)
    sequencer.apply_result(Result(1, prompts.number, outcomes), 0.0)


def offer(sequencer: Sequencer, draft_round: int, now: float, *sequences: int) -> None:
    sequencer.add_drafts(Drafts(1, tuple(Draft(one, draft_round, chain([5, 5])) for one in sequences)), now)


def answer(sequencer: Sequencer, frame: Frame, now: float) -> None:
    grown = [one for one in frame.segments if isinstance(one, TreeSegment)]
    outcomes = tuple(Outcome(one.sequence, one.draft_round, (0,), (5,)) for one in grown)
    sequencer.apply_result(Result(1, frame.number, outcomes), now)


def next_of(sequencer: Sequencer, now: float) -> list[int] | None:
    """Whose trees go now."""
    frame = sequencer.compose(now)
    return frame and [segment.sequence for segment in frame.segments]


def test_while_one_frame_is_verified_the_trees_of_another_are_drafted():
    sequencer = stage_0()
    begin(sequencer, {2: 2, 3: 3})
    offer(sequencer, 1, 0.1, 2)
    first = there(sequencer.compose(0.1))
    assert [segment.sequence for segment in first.segments] == [2], "whose tree is still grown may wait"
    offer(sequencer, 1, 0.2, 3)
    assert next_of(sequencer, 0.2) == [3], "while the first one flies"
    answer(sequencer, first, 0.3)
    assert next_of(sequencer, 0.3) is None, "its next tree is grown while the second flies"
    offer(sequencer, 2, 0.4, 2)
    assert next_of(sequencer, 0.4) == [2]


def test_no_sequence_waits_for_a_slow_branch_of_another():
    """Trees come after 0.1 s; then one of a family of three does not."""
    sequencer = stage_0()
    begin(sequencer, {2: 1, 3: 1, 4: 1})
    now = 0.0
    for draft_round in range(1, 9):
        offer(sequencer, draft_round, now + USUAL, 2, 3, 4)
        frame = there(sequencer.compose(now + USUAL))
        assert len(frame.segments) == 3
        now += 1.0
        answer(sequencer, frame, now)
    offer(sequencer, 9, now + USUAL, 2, 3)
    assert next_of(sequencer, now + USUAL) is None, "it may come yet"
    late = now + 1.01 * SLOW_TREE_FACTOR * USUAL
    assert sequencer.deadline() == pytest.approx(now + SLOW_TREE_FACTOR * USUAL)
    assert next_of(sequencer, late) == [2, 3]
    assert next_of(sequencer, late) is None, "the slow one waits for its own tree"
    offer(sequencer, 9, late + 1.0, 4)
    assert next_of(sequencer, late + 1.0) is None, "its family has one frame at a time"


@pytest.mark.parametrize(("curve", "least", "most"), [(FLAT, 512, 512), (STEEP, 1, 128)])
def test_how_long_chunks_are_comes_from_measured_times(curve, least, most):
    sequencer = stage_0(512, PipelineDepth(4, curve))
    sequencer.apply_order(Open(Opening(1, 512), tuple(range(512)), 9999))
    frame = there(sequencer.compose(0.0))
    (chunk,) = frame.segments
    assert isinstance(chunk, PromptChunk)
    assert least <= len(chunk.tokens) <= most
    following = sequencer.compose(0.0)
    assert (following is not None) == (most < 512), "chunks follow each other through the stages"
