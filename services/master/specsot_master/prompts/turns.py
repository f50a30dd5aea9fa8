"""One request's prompts: what every turn begins with, and how each turn goes on.

Refuses to know how they are worded and rendered; that is what implementations of Conversation do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specsot.skeleton import Point

# What a template might change, or look for, in words that it should leave alone.
_SLOT_PROBE = (
    "Words <a> & \"b\" 'c' \\n {d} {{ e }} {% f %} \u4f60\n\n  <think> </think> <tool_call> [INST] #1\n- ok."
)


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """A whole prompt in tokens, of which the first `shared` are also the prefix's first ones."""

    tokens: tuple[int, ...]
    shared: int

    @property
    def suffix(self) -> tuple[int, ...]:
        return self.tokens[self.shared :]


class Conversation(Protocol):
    """The planned turns of one request.

    asked: tokens of a direct answer's prompt to the same messages.
    behind: characters that are tokenised for each branch, beside its own words.
    """

    prefix: tuple[int, ...]
    skeleton: PromptTurn
    asked: int
    behind: int

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        """The turn that writes `point` in about `length` tokens; `parents` are what it builds on."""
        ...


def shared_length(left: Sequence[int], right: Sequence[int], known: int = 0) -> int:
    """How many first tokens are the same. known: so many are, that much is certain."""
    end = min(len(left), len(right))
    for place in range(known, end):
        if left[place] != right[place]:
            return place
    return end


def turn_from(prefix: Sequence[int], tokens: tuple[int, ...], known: int = 0) -> PromptTurn:
    """A turn that shares what it can with the prefix, but keeps a token of its own to answer from."""
    return PromptTurn(tokens, min(shared_length(prefix, tokens, known), len(tokens) - 1))


@dataclass(frozen=True, slots=True)
class TurnSlot:
    """Where in a rendering the words of its last turn stand, so that others can be put there: before, words,
    after.
    """

    before: str
    after: str

    def fill(self, words: str) -> str:
        return self.before + words + self.after


def find_slot(render: Callable[[str], str], mark: Callable[[str], str]) -> TurnSlot | None:
    """mark: words as they stand in a rendering. None where they stand there twice, or in other words."""
    odd, plain = mark(_SLOT_PROBE), "Write."
    before, found, after = render(_SLOT_PROBE).partition(odd)
    place = TurnSlot(before, after)
    return place if found and odd not in after and render(plain) == place.fill(plain) else None


def shared_text(left: str, right: str) -> int:
    """How many first characters are the same."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # a slice is compared at memory's speed, a character at Python's
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
