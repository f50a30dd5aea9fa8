"""States of overlapped work: one table for next steps, for next draft trees and for selections of nodes."""

from __future__ import annotations

import doctest
from itertools import pairwise, product

import pytest

from specsot.core import overlap
from specsot.core.overlap import TRANSITIONS, OverlapEvent, OverlappedWork, OverlapState, next_state

IDLE, PREPARED, LAUNCHED, CONFIRMED, DISCARDED = OverlapState
WRITTEN, LAUNCH, MATCHED, DIFFERED, RELEASED = OverlapEvent
# Every transition that exists: (state, event, state after it).
TABLE = [
    (IDLE, WRITTEN, PREPARED),
    (PREPARED, LAUNCH, LAUNCHED),
    (PREPARED, DIFFERED, DISCARDED),
    (LAUNCHED, MATCHED, CONFIRMED),
    (LAUNCHED, DIFFERED, DISCARDED),
    (CONFIRMED, DIFFERED, DISCARDED),
    (CONFIRMED, RELEASED, IDLE),
    (DISCARDED, DIFFERED, DISCARDED),
    (DISCARDED, RELEASED, IDLE),
]


def test_the_table_has_these_transitions_and_no_others() -> None:
    assert set(TRANSITIONS) == set(OverlapState)
    assert [(state, event, to) for state, row in TRANSITIONS.items() for event, to in row.items()] == TABLE


@pytest.mark.parametrize(("state", "event"), [*product(OverlapState, OverlapEvent)])
def test_an_event_that_is_not_in_the_table_is_an_error(state: OverlapState, event: OverlapEvent) -> None:
    after = {(before, what): to for before, what, to in TABLE}.get((state, event))
    if after:
        assert next_state(state, event) is after
    else:
        with pytest.raises(KeyError):
            next_state(state, event)


def test_discarded_work_is_never_confirmed_and_what_was_not_launched_is_not_either() -> None:
    """Whatever happens in between: from DISCARDED the way leads through IDLE."""
    into_confirmed = {(state, event) for state, event, to in TABLE if to is CONFIRMED}
    assert into_confirmed == {(LAUNCHED, MATCHED)}
    assert {to for state, _, to in TABLE if state is DISCARDED} == {DISCARDED, IDLE}
    assert {to for state, _, to in TABLE if state is IDLE} == {PREPARED}


def test_work_is_on_the_device_from_its_launch_until_it_ends() -> None:
    work = OverlappedWork()
    seen = [work.on_device]
    for event in (WRITTEN, LAUNCH, MATCHED, RELEASED):
        work.apply(event)
        seen.append(work.on_device)
    assert seen == [False, False, True, True, False]
    assert [before is not after for before, after in pairwise(seen)].count(True) == 2


def test_every_state_can_be_discarded_once_something_is_reserved() -> None:
    for events in ((WRITTEN,), (WRITTEN, LAUNCH), (WRITTEN, LAUNCH, MATCHED)):
        work = OverlappedWork()
        work.apply(*events, DIFFERED, DIFFERED)
        assert (work.state, work.on_device, work.confirmed) == (DISCARDED, False, False)


def test_the_examples_of_its_docstrings_hold() -> None:
    assert doctest.testmod(overlap).failed == 0
    assert doctest.testmod(overlap).attempted
