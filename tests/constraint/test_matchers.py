"""Matchers of one form: worn-out ones are replaced by what was compiled beforehand, once for everybody."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any

import pytest

pytest.importorskip("llguidance")

from specsot.constraint.matchers import Matchers


class Compiled:
    """A matcher that knows its number and copies of itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def deep_copy(self) -> Compiled:
        return Compiled(self.number)


class Later(Executor):
    """Works when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append((Future(), fn))
        return self.waiting[-1][0]

    def work(self) -> None:
        jobs, self.waiting = self.waiting, []
        for future, fn in jobs:
            if future.set_running_or_notify_cancel():
                future.set_result(fn())


class House:
    """compiled: how often, and `here` of those on the thread that asked."""

    def __init__(self) -> None:
        self.compiled = self.here = 0
        self.later = Later()
        self.matchers = Matchers(self.compile_one, self.later)  # type: ignore[arg-type]
        self.here = 0  # but for the first, which is asked for on that thread

    def compile_one(self) -> Compiled:
        self.compiled, self.here = self.compiled + 1, self.here + 1
        return Compiled(self.compiled)

    def work(self) -> None:
        here = self.here
        self.later.work()
        self.here = here


def test_who_wears_one_out_finds_the_next_one_compiled() -> None:
    house = House()
    for batch in range(3):
        house.work()
        assert house.matchers.take()[0] == batch
        assert house.matchers.take(worn=batch)[0] == batch + 1
    assert house.here == 0


def test_one_renewal_is_for_all_whose_copies_are_worn_out() -> None:
    house = House()
    house.work()
    taken = [house.matchers.take(worn=0) for _ in range(8)]
    assert {(batch, matcher.number) for batch, matcher in taken} == {(1, 2)}  # type: ignore[attr-defined]
    assert len({id(matcher) for _, matcher in taken}) == 8
    house.work()
    assert house.compiled == 3


def test_one_that_waits_for_other_forms_is_compiled_by_who_needs_it() -> None:
    house = House()
    assert house.matchers.take(worn=0)[0] == 1
    assert house.here == 1
    house.work()
    assert house.compiled == 3, "what was no longer needed was compiled too"
