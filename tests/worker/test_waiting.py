"""Who waits for a tree, and for how long: drafters that rest, catch up, are silent or gone."""

import random

import pytest

from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.core.frames import Draft, Drafts, Fork, Outcome, Result, TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot_worker.core.pipeline import (
    MAX_CATCH_UP_STEPS,
    MAX_ROWS_PER_STEP,
    DraftTimeout,
    FrameBudget,
)
from specsot_worker.core.sequencer import Sequencer
from tests.there import there
from tests.worker.mock_ring import MockRing, MockStage, write_plainly
from tests.worker.test_sequencer import PAGES, ROWS, first_answer, order_of, run, step


def test_a_silent_drafter_costs_one_timeout_not_one_per_step():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    ring = MockRing(sequencer, [MockStage(PageTable(PAGES, ROWS))], random.Random(1), 0.0)
    ring._draft = lambda outcomes: None
    sequencer.apply_order(order_of(1, [1, 2], 30))
    run(ring)
    assert ring.now == pytest.approx(0.5)
    assert ring.log[1] == write_plainly([1, 2], 30)


def test_without_launch_credits_no_sequence_has_a_deadline():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    first = there(sequencer.compose(0.0))
    sequencer.apply_result(Result(1, first.number, (Outcome(1, 0, (), (3,)),)), 0.0)
    assert sequencer.deadline() == 0.5
    sequencer.apply_order(order_of(2, [1, 2], 30))
    assert sequencer.compose(0.1) is None, "the tree is worth waiting for; what came rides with it"
    assert sequencer.compose(0.6) is not None
    assert sequencer.compose(9.0) is None
    assert sequencer.deadline() is None


def test_no_deadline_is_set_for_a_timeout_that_cannot_help():
    """A branch of a family of which another is under way: only the result helps, looking again does not."""
    sequencer = Sequencer(1, FrameBudget(2, 3, 1), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 9, decodes=False))
    for sequence in (2, 3):
        sequencer.apply_order(order_of(sequence, [4], 9, Fork(1, 2)))
    frames = [sequencer.compose(0.0) for _ in range(2)]
    assert frames[1] is not None
    sequencer.apply_result(Result(1, frames[1].number, (Outcome(2, 0, (), (3,)),)), 0.0)
    assert sequencer.deadline() == 0.5
    sequencer.apply_result(Result(1, frames[1].number, (Outcome(3, 0, (), (3,)),)), 0.2)
    assert sequencer.compose(0.5) is None
    assert sequencer.deadline() == 0.7
    assert sequencer.compose(0.7) is not None


def test_a_drafter_that_has_answered_already_is_not_waited_for():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(40, 8), DraftTimeout(0.5))
    for sequence in (1, 2):
        sequencer.apply_order(order_of(sequence, [1, 2], 30))
    first = there(sequencer.compose(0.0))
    outcomes = tuple(Outcome(one, 0, (), (3,)) for one in (1, 2))
    sequencer.apply_result(Result(1, first.number, outcomes), 0.1, awaits_drafts=False)
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)))
    frame = there(sequencer.compose(0.1))
    trees = {one.sequence: one.tree for one in frame.segments if isinstance(one, TreeSegment)}
    assert trees == {1: chain([3, 4]), 2: chain([3])}


def test_after_a_pause_no_sequence_waits_for_a_tree_that_was_not_requested():
    """Some sequences are reported one step later: the drafter answers only for those that it knows."""
    sequencer = Sequencer(1, FrameBudget(2 * MAX_ROWS_PER_STEP, 1, 9), PageTable(400, 8), DraftTimeout(0.5))
    for sequence in (1, 2):
        sequencer.apply_order(order_of(sequence, [1, 2], 30))
    first = there(sequencer.compose(0.0))
    sequencer.apply_result(Result(1, first.number, tuple(Outcome(one, 0, (), (3,)) for one in (1, 2))), 0.1)
    sequencer.add_drafts(Drafts(1, (Draft(1, 1, chain([3, 4])),)), 0.2)
    assert sequencer.compose(0.2) is None, "the other tree may come yet"
    sequencer.add_drafts(Drafts(1, (), paused_trees=2))
    sequencer.apply_order(
        order_of(3, [1] * (MAX_ROWS_PER_STEP + 9), 9, drafted=False)
    )  # more than a step tells
    for draft_round in (1, 2, 3):
        frame = there(sequencer.compose(0.3))
        assert (frame.paused, frame.catching_up) == (draft_round == 1, draft_round == 2)
        outcomes = tuple(Outcome(one, draft_round, (0,), (3,)) for one in (1, 2))
        sequencer.apply_result(Result(1, frame.number, outcomes), 0.4)
        if draft_round == 2:
            sequencer.add_drafts(Drafts(1))
    assert sequencer.compose(0.4) is None
    sequencer.add_drafts(Drafts(1, (Draft(1, 4, chain([3, 4])),)), 0.5)
    frame = there(sequencer.compose(0.5))
    trees = {one.sequence: one.tree for one in frame.segments if isinstance(one, TreeSegment)}
    assert trees == {1: chain([3, 4]), 2: chain([3])}


def test_a_paused_drafter_receives_nothing_and_is_waited_for_again_once_it_has_caught_up():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 30))
    first_answer(sequencer)
    assert sequencer.compose(0.1) is None
    sequencer.add_drafts(Drafts(1, (), paused_trees=3))
    assert [step(sequencer) for _ in range(5)] == [*[("resting", 1)] * 3, *[("waking", 1)] * 2]
    sequencer.add_drafts(Drafts(1))
    assert step(sequencer) == ("", 1), "its tree is asked for with this one"
    assert step(sequencer) is None, "now it is worth waiting for"
    assert step(sequencer, now=0.6) == ("", 1)


def test_a_drafter_that_never_says_that_it_is_awake_is_asked_all_the_same():
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    sequencer.apply_order(order_of(1, [1, 2], 300))
    first_answer(sequencer)
    sequencer.add_drafts(Drafts(1, (), paused_trees=1))
    steps = [step(sequencer) for _ in range(MAX_CATCH_UP_STEPS + 2)]
    assert steps == [("resting", 1), *[("waking", 1)] * MAX_CATCH_UP_STEPS, ("", 1)]
    assert step(sequencer) is None


def test_a_pause_that_started_with_many_sequences_lasts_as_many_steps_of_few():
    patience = DraftTimeout(0.5)
    patience.start_pause(80, num_drafted=8)
    for _ in range(4):
        patience.record_launch(8, 8, num_drafted=8)
    for _ in range(6):
        assert patience.paused
        patience.record_launch(4, 4, num_drafted=4)
    assert patience.catching_up
    assert not patience.paused


def test_a_pause_counts_drafted_trees_alone():
    patience = DraftTimeout(0.5)
    patience.start_pause(5)
    patience.record_launch(0, 40)
    assert patience.paused
    patience.record_launch(4, 4)
    assert patience.paused
    patience.record_launch(1, 1)
    assert not patience.paused


def test_a_pause_outlasts_the_ring_of_features_and_leaves_no_more_to_send_than_the_ring_holds():
    patience = DraftTimeout(0.5)
    patience.start_pause(2)
    patience.record_launch(1, 9 * FEATURE_RING_ROWS)
    assert patience.paused
    patience.record_launch(1, 1)
    assert patience.catching_up
    patience.record_drafter_message()
    num_backlog_steps = 0
    patience.record_launch(1, 0)
    while patience.sends_backlog:
        num_backlog_steps += 1
        patience.record_launch(1, 0)
    assert num_backlog_steps == FEATURE_RING_ROWS // MAX_ROWS_PER_STEP


def test_a_pause_ends_with_the_last_of_the_sequences_that_it_started_with():
    patience = DraftTimeout(0.5)
    patience.start_pause(80, num_drafted=2)
    patience.record_launch(0, 9, num_drafted=1)
    assert patience.paused, "a prompt beside one that writes"
    patience.record_launch(0, 9, num_drafted=0)
    assert (patience.paused, patience.catching_up) == (False, True)


def test_a_pause_ends_with_the_loss_of_its_drafter():
    patience = DraftTimeout(0.5)
    patience.start_pause(9)
    patience.record_drafter_loss()
    assert not patience.paused
