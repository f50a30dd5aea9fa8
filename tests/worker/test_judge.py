"""Outcomes of segments: acceptance along the targets, cuts after the first end, and grammars."""

import numpy as np
import pytest

from specsot.core.frames import End, Opening
from specsot.core.tree import Tree, chain, single
from specsot.grammar import SpellingHabits
from specsot_worker.core.accept import DecodeState, accept_prompt, accept_tree, grammar_masks

TREE = Tree((5, 6, 7, 8, 9), (0, 0, 0, 1, 3))  # 5 -> 6 -> 8 -> 9, 5 -> 7


def written(limit=100, stop_ids=(), grammar=None):
    return DecodeState(Opening(3, 4, limit=limit, stop_ids=stop_ids), grammar)


@pytest.mark.parametrize(
    ("targets", "accepted", "tokens"),
    [
        ([1, 0, 0, 0, 0], (0,), (1,)),
        ([7, 0, 2, 0, 0], (0, 2), (7, 2)),
        ([6, 8, 0, 9, 4], (0, 1, 3, 4), (6, 8, 9, 4)),
        ([6, 9, 0, 0, 0], (0, 1), (6, 9)),
    ],
)
def test_a_child_is_accepted_iff_it_is_the_target(targets, accepted, tokens):
    outcome = accept_tree(written(), 2, TREE, targets)
    assert (outcome.accepted, outcome.tokens, outcome.end) == (accepted, tokens, None)


@pytest.mark.parametrize(
    ("more", "tokens", "end"),
    [
        (dict(stop_ids=(8,)), (6, 8), End.STOP),
        (dict(stop_ids=(4,)), (6, 8, 9, 4), End.STOP),
        (dict(limit=3), (6, 8, 9), End.LENGTH),
        (dict(limit=4), (6, 8, 9, 4), End.LENGTH),
        (dict(limit=2, stop_ids=(8,)), (6, 8), End.STOP),
    ],
)
def test_a_sequence_is_cut_after_the_first_token_that_ends_it(more, tokens, end):
    outcome = accept_tree(written(**more), 1, TREE, [6, 8, 0, 9, 4])
    assert (outcome.tokens, outcome.end) == (tokens, end)
    assert len(outcome.accepted) <= len(tokens)


def test_a_row_without_numbers_fails_its_sequence_alone():
    assert accept_prompt(written(), None).end is End.FAILED
    alone = written()
    once_more = accept_tree(alone, 1, TREE, [None] * 5)
    assert (once_more.accepted, once_more.tokens, once_more.end) == ((), (), None), "a draft may have done it"
    assert accept_tree(alone, 2, chain((5,)), [None]).end is End.FAILED
    unreached = accept_tree(written(), 1, TREE, [1, None, None, None, None])
    assert unreached.end is None


def test_a_draft_without_numbers_is_not_accepted_but_decides_as_a_root():
    outcome = accept_tree(written(), 2, TREE, [6, 8, 0, None, 0])
    assert (outcome.accepted, outcome.tokens, outcome.end) == ((0, 1), (6, 8), None)


def test_who_fed_its_root_once_more_may_do_so_again_later():
    one = written()
    for draft_round in (1, 3):
        assert accept_tree(one, draft_round, TREE, [None] * 5).end is None
        assert accept_tree(one, draft_round + 1, chain((5,)), [7]).tokens == (7,)


def test_a_repaired_sequence_recalls_what_it_wrote():
    again = DecodeState(Opening(3, 10, generated=3, limit=5))
    again.read_prompt(0, (1, 2, 3, 4))
    assert again.remaining == 5
    again.read_prompt(4, (5, 6, 7, 8, 9, 10))
    assert again.tokens == [8, 9, 10]
    assert accept_prompt(again, 11).end is None
    assert accept_tree(again, 1, chain([11]), [12]).end is End.LENGTH


class Countdown:
    """A grammar that wants n, n - 1, ..., 0 and is finished then."""

    def __init__(self, first):
        self.first = first

    def start(self):
        return self.first

    def advance(self, state, token):
        return state - 1 if token == state else None

    def finished(self, state):
        return state < 0

    def forced(self, state):
        return (state,)

    def mask(self, state, remaining):
        return np.arange(10) == state


def test_the_grammars_end_ends_the_sequence_and_a_broken_rule_fails_it():
    grammar = written(grammar=Countdown(6))
    assert accept_prompt(grammar, 6).end is None
    outcome = accept_tree(grammar, 1, chain([6, 5, 4, 3]), [5, 4, 3, 2])
    assert (outcome.tokens, outcome.end) == ((5, 4, 3, 2), None)
    outcome = accept_tree(grammar, 2, chain([2, 1, 0]), [1, 0, 9])
    assert (outcome.tokens, outcome.end) == ((1, 0), End.GRAMMAR)
    assert accept_prompt(written(grammar=Countdown(6)), 3).end is End.FAILED


def test_every_node_is_masked_by_its_own_state():
    grammar = written(limit=4, grammar=Countdown(6))
    (first,) = grammar_masks(single(2), grammar)
    assert first.nonzero()[0].tolist() == [6]
    grammar.write((6,))
    tree = Tree((6, 5, 9, 4, 3), (0, 0, 0, 1, 3))
    masks = grammar_masks(tree, grammar)
    allowed = [None if mask is None else mask.nonzero()[0].tolist() for mask in masks]
    assert allowed == [[5], [4], None, [3], None]


def test_forced_tokens_are_reported_up_to_the_last_token_that_may_be_generated():
    """A sequence without a drafter reports them, too: no drafter is needed to know them."""
    for limit, forced in ((100, (5, 4, 3, 2, 1, 0)), (4, (5, 4)), (2, ()), (1, ())):
        assert accept_prompt(written(limit=limit, grammar=Countdown(6)), 6).forced == forced
    undrafted = DecodeState(Opening(3, 4, limit=100, drafted=False), Countdown(6))
    assert accept_prompt(undrafted, 6).forced == (5, 4, 3, 2, 1, 0)
    assert accept_prompt(written(), 6).forced == ()


class Wordy(Countdown):
    """Two tokens may begin the same stretch, n or n + 10; then all is free."""

    def advance(self, state, token):
        return 99

    def finished(self, state):
        return False

    def forced(self, state):
        return () if state == 99 else (state, 1)


def test_forced_tokens_follow_a_token_unless_it_is_forbidden_or_the_last_or_a_choice_is_left():
    """A step that is launched before the results are made feeds the new tokens alone."""
    assert written(grammar=Countdown(6)).will_continue(paused=True)
    assert written(grammar=Countdown(6)).is_forced_after([6])
    assert not written(grammar=Countdown(6)).is_forced_after([3])
    assert not written(grammar=Countdown(6)).is_forced_after([None])
    assert not written(grammar=Countdown(0)).is_forced_after([0])
    assert not written(grammar=Wordy(6)).is_forced_after([6])
    assert not written().is_forced_after([6])


def test_forced_runs_are_tokenised_as_the_base_model_did_before():
    habits, rules = SpellingHabits(), Wordy(6)
    assert habits.forced(rules, 6) == (6,)
    assert accept_prompt(DecodeState(Opening(1, 4, limit=9), rules, habits), 16).end is None
    assert habits.forced(rules, 6) == (16,)


def test_a_grammar_that_comes_late_has_read_what_was_written_in_an_epoch_before() -> None:
    late = DecodeState(Opening(3, 10, generated=3, limit=50))
    late.read_prompt(4, (5, 6, 7, 4, 3, 2))
    late.set_grammar(Countdown(4))
    assert late.state == 1
