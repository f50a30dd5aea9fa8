"""Checks which paths of a draft tree a grammar allows from one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")

# Returns whether the grammar allows these tokens in this order. The path without its last token must have
# been checked before. Budgets are ignored.
PathCheck = Callable[[tuple[int, ...]], bool]


def step_by_step(advance: Callable[[State, int], State | None], state: State) -> PathCheck:
    """Return a check that advances the grammar's state once per path, from the state of the path's parent.

    advance: returns the state after a token, or None if the grammar forbids the token, see `Grammar.advance`.
    state: the state of the grammar before the first token of all paths.

    The check returns False for a path whose parent was forbidden or not checked before, without asking the
    grammar. Checked paths are remembered as long as the check exists.
    """
    states: dict[tuple[int, ...], State | None] = {(): state}

    def check(path: tuple[int, ...]) -> bool:
        """Return whether the grammar allows a path, and remember the state after it. False if its parent was
        forbidden.

        path: token ids from `state` on, at least one. The path without its last token must have been checked
            before; otherwise False is returned.
        """
        parent_state = states.get(path[:-1])
        states[path] = next_state = None if parent_state is None else advance(parent_state, path[-1])
        return next_state is not None

    return check
