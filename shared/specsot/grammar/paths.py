"""Which of a tree's tokens may follow one another from one state of a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")

# Whether these tokens may follow one another; asked about all but the last before. Budgets are not looked at.
PathCheck = Callable[[tuple[int, ...]], bool]


def step_by_step(advance: Callable[[State, int], State | None], state: State) -> PathCheck:
    """By a grammar's states, each of which is made once."""
    behind: dict[tuple[int, ...], State | None] = {(): state}

    def check(path: tuple[int, ...]) -> bool:
        above = behind.get(path[:-1])
        behind[path] = ahead = None if above is None else advance(above, path[-1])
        return ahead is not None

    return check
