"""The turns of a planned request as tokens, and the places of a turn's words in a rendered prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specsot.core.skeleton import Point

# A point that stands for any other, to measure the prompt around a point.
SAMPLE_POINT = Point(id=1, length=1, title="-")
# Two points without anything in common, to find where the prompts of branches begin to differ.
PROBE_POINTS = (Point(id=1, length=1, title="Apples"), Point(id=2, length=1, title="又"))

# Characters that a chat template might change or interpret, although it should leave the words of a turn
# alone.
_SLOT_PROBE = (
    "Words <a> & \"b\" 'c' \\n {d} {{ e }} {% f %} \u4f60\n\n  <think> </think> <tool_call> [INST] #1\n- ok."
)


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """One whole prompt of a request in tokens, with the part that it shares with the others.

    tokens: all tokens of the prompt.
    shared: how many first tokens are also the first ones of the request's common prefix; 0 if it shares none.
    """

    tokens: tuple[int, ...]
    shared: int

    @property
    def suffix(self) -> tuple[int, ...]:
        """The token ids after the shared ones, at least one."""
        return self.tokens[self.shared :]


class Conversation(Protocol):
    """The prompts of one planned request, which all begin with the same tokens.

    prefix: the token ids that all turns begin with.
    skeleton: the prompt of the turn that asks for the plan.
    answer: the prompt of a direct answer, which follows an unusable plan.
    sample: the prompt of a branch for SAMPLE_POINT, to measure the prompts of branches.
    instructions: the words that ask for a plan in a list, without the question; None for plans in other
        forms.
    asked: number of tokens of the prompt that a direct answer to the same messages has.
    unwanted: ids of tokens that no branch may write, because they announce a list where prose is asked for.
    """

    prefix: tuple[int, ...]
    skeleton: PromptTurn
    answer: PromptTurn
    sample: PromptTurn
    instructions: tuple[str, ...] | None
    asked: int
    unwanted: tuple[int, ...]

    @property
    def num_branch_characters(self) -> int:
        """Number of characters that must be tokenised for each branch, in addition to its own words."""
        ...

    def branch(
        self,
        point: Point,
        points: Sequence[Point],
        parents: Sequence[tuple[Point, str]],
        length: int,
        introduction: str = "",
    ) -> PromptTurn:
        """Return the prompt of the turn that writes one point. A point without a title stands for the closing
        of the answer.

        point: the point that the turn writes.
        points: all points of the plan, and the closing if it has one.
        parents: the points that `point` needs, each with its finished text; empty if it needs none.
        length: about how many tokens the text shall have.
        introduction: the text before the first point; "" for none.
        """
        ...

    def polish(self, text: str) -> PromptTurn:
        """Return the prompt of the turn that rewrites the merged text.

        text: the texts of all branches, joined.
        """
        ...


def shared_length(left: Sequence[int], right: Sequence[int], known: int = 0) -> int:
    """Return how many first tokens of two sequences are the same; 0 if one is empty. `known` is returned if
    it is the length of the shorter sequence or the next tokens differ.

    left: the token ids of one sequence.
    right: those of the other one.
    known: so many first tokens are known to be the same and are not compared.
    """
    end = min(len(left), len(right))
    for place in range(known, end):
        if left[place] != right[place]:
            return place
    return end


def turn_from(prefix: Sequence[int], tokens: tuple[int, ...], known: int = 0) -> PromptTurn:
    """Return a turn that shares as many first tokens with the prefix as possible, but not its last token:
    that one must be computed to get logits.

        prefix [1 2 3], tokens [1 2 3 4] -> shared 3;   tokens [1 2 3] -> shared 2

    prefix: token ids with which the prompts of a request begin.
    tokens: all token ids of the prompt.
    known: so many first tokens are known to be the same and are not compared.
    """
    return PromptTurn(tokens, min(shared_length(prefix, tokens, known), len(tokens) - 1))


@dataclass(frozen=True, slots=True)
class TurnSlots:
    """A rendered prompt with places for the words of some turns, so that other words can be filled in.

    parts: the rendering without those words: one part more than there are places.
    """

    parts: tuple[str, ...]

    @property
    def before(self) -> str:
        """The rendered text before the first place."""
        return self.parts[0]

    def fill(self, *words: str) -> str:
        """Return the rendering with these words in its places, in order.

        words: one text per place, as a rendering contains it.
        """
        first, *others = self.parts
        return first + "".join(word + part for word, part in zip(words, others))


def find_slots(render: Callable[..., str], mark: Callable[[str], str], count: int = 1) -> TurnSlots | None:
    """Return a prompt with places for texts. Return None if the rendering repeats or changes a text, so that
    every prompt has to be rendered as a whole. The places are tried with other texts before they are
    returned.

    render: returns the rendered prompt with `count` texts in it.
    mark: returns a text as a rendering contains it.
    count: how many texts `render` takes.

    Raises what `render` raises.
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
    """Return how many first characters of two texts are the same, by binary search; 0 if one is empty.

    left: one text.
    right: the other text.
    """
    low, high = 0, min(len(left), len(right))
    # Comparing slices is much faster than comparing single characters in Python.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
