"""The turns of a planned request as tokens, and where in a rendering the words of a turn are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specsot.core.skeleton import Point

SAMPLE_POINT = Point(id=1, length=1, title="-")  # stands for any, to see what is around one

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
    answer: that prompt, where a plan that is no good is followed by a plain answer.
    told: what the model is told for a plan in a list, without the question; None for other plans.
    behind: characters that are tokenised for each branch, beside its own words.
    """

    prefix: tuple[int, ...]
    skeleton: PromptTurn
    answer: PromptTurn
    told: tuple[str, ...] | None
    asked: int
    behind: int

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        """The turn that writes `point` in about `length` tokens; `parents` are what it builds on."""
        ...

    def polish(self, text: str) -> PromptTurn:
        """The turn that writes the merged text anew."""
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
class TurnSlots:
    """Where in a rendering the words of some turns are, so that other words can take their places.

    parts: the rendering without these words, one part more than there are places.
    """

    parts: tuple[str, ...]

    @property
    def before(self) -> str:
        """The rendering up to the first place."""
        return self.parts[0]

    def fill(self, *words: str) -> str:
        """Return the rendering with these words in its places, in order."""
        first, *others = self.parts
        return first + "".join(word + part for word, part in zip(words, others))


def find_slots(render: Callable[..., str], mark: Callable[[str], str], count: int = 1) -> TurnSlots | None:
    """Return the places of the `count` texts that `render` takes.

    mark: returns a text as a rendering contains it. None if the rendering repeats or changes a text, so that
    every prompt has to be rendered as a whole.
    """
    probes = [f"{_SLOT_PROBE} {number}." for number in range(count)]
    parts: list[str] = []
    rest = render(*probes)
    for probe in probes:
        before, found, rest = rest.partition(mark(probe))
        if not found:
            return None
        parts.append(before)
    slots = TurnSlots((*parts, rest))
    repeated = any(mark(probe) in part for probe in probes for part in slots.parts)
    plain = [f"Write {number}." for number in range(count)]
    return None if repeated or render(*plain) != slots.fill(*plain) else slots


def shared_text(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:  # a slice is compared at memory's speed, a character at Python's
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
