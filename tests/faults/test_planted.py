"""The checker is proved by bugs: planted in what lies between members, master and clients, and caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specsot.core.frames import Close, Result
from specsot.events import MergedText, Numbered
from tests.faults.campaign import ASKS, Campaign, Fault, judge
from tests.faults.checker import begins_each_point
from tests.faults.clients import Habit
from tests.faults.history import Composed, Limited, Opened
from tests.faults.rules import check_ring
from tests.faults.world import Honest, Shape

pytestmark = pytest.mark.slow

LEAVES = Habit(leave=12)
PLAIN = next(ask for ask in ASKS if ask.mode == "direct" and not ask.resumable)
PLANNED = next(ask for ask in ASKS if ask.mode == "sot" and not ask.resumable)
TWO = ((0.0, PLANNED, Habit()), (0.1, PLAIN, LEAVES))


class Dropping(Honest):
    """The seventh piece of text gets lost."""

    def __init__(self) -> None:
        self.count = 0

    def told(self, numbered: Numbered) -> list[Numbered]:
        self.count += isinstance(numbered.event, MergedText)
        return [] if self.count == 7 and isinstance(numbered.event, MergedText) else [numbered]


class Doubling(Honest):
    """One comes twice."""

    def told(self, numbered: Numbered) -> list[Numbered]:
        return [numbered] * (2 if numbered.number == 9 else 1)


class Reordering(Honest):
    """One is overtaken by the next."""

    def __init__(self) -> None:
        self.held: list[Numbered] = []

    def told(self, numbered: Numbered) -> list[Numbered]:
        if numbered.number == 9 and not self.held:
            self.held.append(numbered)
            return []
        return [numbered, self.held.pop()] if numbered.number == 10 and self.held else [numbered]


class Leaking(Honest):
    """No stage hears that somebody left."""

    def downward(self, message: Any) -> list[Any]:
        return [] if isinstance(message, Close) else [message]


class Staling(Honest):
    """A result of an epoch that is over comes once more, under the number of the next."""

    def __init__(self) -> None:
        self.old: Result | None = None

    def upward(self, message: Any) -> list[Any]:
        if not isinstance(message, Result):
            return [message]
        old, self.old = self.old, message
        stale = old is not None and old.epoch < message.epoch
        return [message, replace(old, epoch=message.epoch)] if stale and old else [message]


class Renumbering(Honest):
    """A piece of text is lost, and nobody can tell from the numbers."""

    def told(self, numbered: Numbered) -> list[Numbered]:
        event = numbered.event
        if isinstance(event, MergedText) and event.offset:
            return [replace(numbered, event=replace(event, text=event.text[1:]))]
        return [numbered]


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        (Dropping(), "1 event"),
        (Doubling(), "1 event 9 came in the place of 10"),
        (Reordering(), "1 event 10 came in the place of 9"),
        (Renumbering(), "2 the text is not that of the undisturbed fleet"),
        (Leaking(), "5 "),
        (Staling(), "11 the master took"),
    ],
)
def test_a_planted_bug_is_caught(bug: Honest, rule: str) -> None:
    faults = (Fault("kill", "worker-1", 1.0),) if isinstance(bug, Staling) else ()
    found = judge(Campaign(Shape(2, False), TWO, faults), between=bug)
    assert any(line.startswith(rule) for line in found), found


def test_without_a_bug_nothing_is_caught() -> None:
    assert judge(Campaign(Shape(2, False), TWO, (Fault("kill", "worker-1", 1.0),))) == []


WHOLE = "## 1. One\nab\n\n## 2. Two\ncd\n\n## 3. Three\nef"


@pytest.mark.parametrize(
    ("cut", "right"),
    [
        ("", True),
        ("## 1. One\na\n\n## 2. Two\nc", True),
        ("## 1. One\na\n\n## 2. Three\ne", True),
        ("## 1. One\na\n\n## 3. Three\ne", False),
        ("## 1. One\nb", False),
        ("## 1. One\na\n\n## 2. Two\nd", False),
        ("## 1. Two\nc\n\n## 2. One\na", False),
        ("## 1. One\na\n\n## 2. One\na", False),
        ("## 1. One\nab\n\n## 2. Two\ncdx", False),
    ],
)
def test_an_answer_that_is_cut_short_begins_each_point(cut: str, right: bool) -> None:
    assert begins_each_point(WHOLE, cut) is right


@pytest.mark.parametrize(
    ("limits", "found"), [((), True), ((True,), False), ((True, False), True), ((True, False, True), False)]
)
def test_a_prefix_is_waited_for_as_long_as_a_request_needs_it(limits: tuple[bool, ...], found: bool) -> None:
    orders = (Opened(1, 3, 25), *(Limited(1, 3, interrupted) for interrupted in limits))
    frames = (Composed(1, number, 16, ()) for number in range(1, 100))
    history = [(0.0, entry) for entry in (*orders, *frames)]
    assert any(line.startswith("3 sequence 3") for line in check_ring(history)) is found
