"""Checks which paths of a draft tree a grammar allows from one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")

# Returns whether the grammar allows these tokens in this order. The path without its last token must have
# been checked before. Budgets are ignored.
PathCheck = Callable[[tuple[int, ...]], bool]


def step_by_step(advance: Callable[[State, int], State | None], state: State) -> PathCheck:
    """Return a check that advances the grammar's state once per path, from the state of the path's parent."""
    behind: dict[tuple[int, ...], State | None] = {(): state}

    def check(path: tuple[int, ...]) -> bool:
        above = behind.get(path[:-1])
        behind[path] = ahead = None if above is None else advance(above, path[-1])
        return ahead is not None

    return check
