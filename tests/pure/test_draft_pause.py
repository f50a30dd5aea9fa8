"""Pausing, catching up and resuming: one table for stage 0 and the drafter."""

from __future__ import annotations

import doctest
from itertools import product

import pytest

from specsot.core import draft_pause
from specsot.core.draft_pause import TRANSITIONS, DraftPause, PauseEvent, PauseState, next_state


def test_every_state_is_in_the_table_and_every_one_can_be_left_and_reached() -> None:
    assert set(TRANSITIONS) == set(PauseState)
    reached = {after for state, row in TRANSITIONS.items() for after in row.values() if after != state}
    assert reached == set(PauseState)


@pytest.mark.parametrize(("state", "event"), [*product(PauseState, PauseEvent)])
def test_no_event_is_an_error_and_a_drafter_that_left_comes_back_by_joining_alone(
    state: PauseState, event: PauseEvent
) -> None:
    after = next_state(state, event)
    assert after in PauseState
    if state is PauseState.ABSENT and event is not PauseEvent.JOINED:
        assert after is PauseState.ABSENT
    if event is PauseEvent.LEFT:
        assert after is PauseState.ABSENT


def test_a_pause_goes_through_catching_up() -> None:
    pause = DraftPause().begin(3, sequences=1)
    states = list[PauseState]()
    for _ in range(3):
        states.append(pause.state)
        pause = pause.passed(1, sequences=1)
    assert states == [PauseState.PAUSED] * 3
    assert pause.state is PauseState.CATCHING_UP
    assert (pause.trees_left, pause.passed_trees) == (0, 3)
    assert pause.on(PauseEvent.CAUGHT_UP).state is PauseState.DRAFTING


def test_a_pause_of_many_sequences_is_as_many_steps_of_few() -> None:
    """80 trees of eight sequences are ten steps: after four of them and six of four sequences it is over."""
    pause = DraftPause().begin(80, sequences=8)
    for _ in range(4):
        pause = pause.passed(8, sequences=8)
    for _ in range(6):
        assert pause.paused
        pause = pause.passed(4, sequences=4)
    assert pause.state is PauseState.CATCHING_UP


def test_the_steps_that_are_left_are_rounded_up() -> None:
    pause = DraftPause().begin(10, sequences=4)
    assert [pause.max_steps_left, pause.passed(4, sequences=4).max_steps_left] == [3, 2]
    assert pause.end().max_steps_left == DraftPause().max_steps_left == 0


@pytest.mark.parametrize(("left", "paused"), [(63, True), (32, True), (31, False), (1, False)])
def test_a_pause_does_not_outlast_most_of_its_sequences(left: int, paused: bool) -> None:
    """Drafts that lose with 64 clients may gain with the last one, of which 64,000 trees are many steps."""
    assert DraftPause().begin(64_000, sequences=64).passed(left, sequences=left).paused is paused


def test_a_pause_ends_with_the_last_drafted_sequence() -> None:
    pause = DraftPause().begin(80, sequences=2)
    assert pause.passed(0, sequences=1).paused, "a prompt was read beside the sequence that writes"
    assert pause.passed(0, sequences=0).state is PauseState.CATCHING_UP


def test_what_a_sequence_missed_delays_no_pause_and_is_caught_up_with_after_it() -> None:
    assert DraftPause().begin(5, 1).on(PauseEvent.MISSED).paused
    assert DraftPause().on(PauseEvent.MISSED).state is PauseState.CATCHING_UP


def test_a_drafter_that_is_absent_neither_pauses_nor_catches_up() -> None:
    absent = DraftPause(PauseState.ABSENT)
    assert absent.begin(9, 1).state is PauseState.ABSENT
    assert absent.passed(9, 1) == absent
    assert absent.on(PauseEvent.CAUGHT_UP).state is PauseState.ABSENT


def test_the_example_of_its_docstring_holds() -> None:
    assert doctest.testmod(draft_pause).failed == 0
