"""Tree frames of one sequence in flight: identity, scratch slots, and what a stage of today rejects."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace

import pytest

from specsot.core import tree_frames
from specsot.core.frames import Frame, Opening, ParentNode, PromptChunk, TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot.core.tree_frames import MAX_TREE_FRAMES, TreeFrames
from specsot.errors import WireError
from specsot_model.core.kv_plan import plan_frame


def test_one_tree_frame_of_a_sequence_is_in_flight_from_the_first_scratch_slot_on() -> None:
    frames = TreeFrames()
    assert MAX_TREE_FRAMES == 1
    for draft_round in range(1, 5):
        assert frames.has_room
        assert frames.launch(draft_round, nodes=draft_round) == 0
        assert ([*frames.trees], frames.has_room) == ([draft_round], False)
        frames.finish(draft_round)
        assert not frames.trees


def test_a_result_frees_the_slots_of_its_own_frame_and_of_those_that_it_drops() -> None:
    frames = TreeFrames(limit=4)
    assert [frames.launch(1, 4), frames.launch(2, 3, ParentNode(1, 2)), frames.launch(3, 2)] == [0, 4, 7]
    frames.finish(1, dropped=[3])
    assert [*frames.trees] == [2]
    assert frames.launch(4, 5, ParentNode(2, 0)) == 7, "slots 0 to 3 are too few for five nodes"
    assert frames.launch(5, 4) == 0


def test_slots_of_frames_in_flight_never_overlap() -> None:
    rng = random.Random(7)
    frames = TreeFrames(limit=4)
    slots = dict[int, set[int]]()
    for draft_round in range(1, 400):
        while not frames.has_room or (frames.trees and rng.random() < 0.3):
            frames.finish(gone := rng.choice([*frames.trees]))
            del slots[gone]
        nodes = rng.randint(1, 9)
        first = frames.launch(draft_round, nodes)
        own = set(range(first, first + nodes))
        assert all(own.isdisjoint(other) for other in slots.values())
        slots[draft_round] = own
        assert max(own) < 4 * 9 + 9, "slots that are free are used again"


def test_a_result_of_a_round_that_is_not_in_flight_changes_nothing() -> None:
    """Round 0 is the prompt, which has no tree frame."""
    frames = TreeFrames()
    frames.launch(1, 3)
    frames.finish(0, dropped=[7])
    assert [*frames.trees] == [1]


@pytest.mark.parametrize(
    "identity",
    [{"parent": ParentNode(1, 2)}, {"scratch": 3}, {"freed": (1,)}],
    ids=["parent", "scratch", "freed"],
)
def test_stages_reject_a_second_tree_frame_in_flight(identity: dict[str, object]) -> None:
    """They would write its nodes over those of the frame that it grows from."""
    table = PageTable(4, 4)
    plan_frame(table, Frame(1, 1, (Opening(1, 2, limit=9),), (PromptChunk(1, 0, (5, 6), True),)))
    tree = TreeSegment(1, 2, 2, (), chain((7, 8)))
    with pytest.raises(WireError, match="draft round 2 of sequence 1 is one of several in flight"):
        plan_frame(table, Frame(1, 2, segments=(replace(tree, **identity),)))  # type: ignore[arg-type]
    assert plan_frame(table, Frame(1, 2, segments=(tree,))).positions == (2, 3)


def test_the_examples_of_its_docstrings_hold() -> None:
    assert doctest.testmod(tree_frames).failed == 0
    assert doctest.testmod(tree_frames).attempted
