"""A master that dies silently and begins anew on its journal: every stream goes on at its next event."""

from __future__ import annotations

import pytest

from tests.faults.campaign import ASKS, Campaign, Fault, answers, play
from tests.faults.checker import check, tell
from tests.faults.clients import Habit
from tests.faults.history import Resumed
from tests.faults.world import Shape

pytestmark = pytest.mark.slow

KEPT = [ask for ask in ASKS if ask.resumable]


def test_a_restarted_master_is_indistinguishable_from_the_previous_one() -> None:
    """Some are away when it dies, some have everything, some have only been told that they began."""
    habits = (Habit(), Habit(pause=0.2), Habit(leave=15, back=4.0), Habit())
    clients = tuple((0.6 * n, KEPT[n % len(KEPT)], habit) for n, habit in enumerate(habits))
    deaths = tuple(Fault("revive", "master", at) for at in (1.5, 3.0, 9.0))
    history = play(Campaign(Shape(2, True, journal=True), clients, deaths), 5)
    assert check(history, answers()) == []
    assert all(story.finished for story in tell(history).values())
    resumed = [entry.offset for _, entry in history if isinstance(entry, Resumed)]
    assert len(resumed) > 3


def test_without_a_journal_it_says_so() -> None:
    clients = ((0.0, KEPT[0], Habit()),)
    history = play(Campaign(Shape(1, False), clients, (Fault("restart", "master", 1.0),)), 5)
    (story,) = tell(history).values()
    assert story.ended is not None
    assert story.ended.error == "NotFound"
