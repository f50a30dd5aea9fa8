"""One request's prompts: what every turn begins with, and how each turn goes on.

Refuses to know how they are worded and rendered; that is what implementations of Conversation do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specsot.skeleton import Point


@dataclass(frozen=True, slots=True)
class Turn:
    """A whole prompt in tokens, of which the first `shared` are also the prefix's first ones."""

    tokens: tuple[int, ...]
    shared: int

    @property
    def suffix(self) -> tuple[int, ...]:
        return self.tokens[self.shared :]


class Conversation(Protocol):
    """The planned turns of one request. asked: tokens of a direct answer's prompt to the same messages."""

    prefix: tuple[int, ...]
    skeleton: Turn
    asked: int

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> Turn:
        """The turn that writes `point` in about `length` tokens; `parents` are what it builds on."""
        ...


def shared_length(left: Sequence[int], right: Sequence[int], known: int = 0) -> int:
    """How many first tokens are the same. known: so many are, that much is certain."""
    end = min(len(left), len(right))
    for place in range(known, end):
        if left[place] != right[place]:
            return place
    return end


def turn_from(prefix: Sequence[int], tokens: tuple[int, ...]) -> Turn:
    """A turn that shares what it can with the prefix, but keeps a token of its own to answer from."""
    return Turn(tokens, min(shared_length(prefix, tokens), len(tokens) - 1))
