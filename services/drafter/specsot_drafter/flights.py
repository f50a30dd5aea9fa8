"""Trees on their way, until the ring tells what became of them.

Refuses to know drafters, costs and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.frames import Lesson
from specsot.tree import Tree, children
from specsot_drafter.tuning import Returned

ALONE = Returned(0, 1, (), 0)  # a root without anything below


@dataclass(frozen=True, slots=True)
class Flight:
    """A tree that was sent.

    committed: tokens in front of its root. grown: levels that were grown for it.
    masses:    the drafter's probability of its nodes, summed per depth.
    own:       its first nodes, which are the drafter's; the others came from elsewhere.
    forced:    what would have been fed without any drafter.
    """

    committed: int
    tree: Tree
    grown: int
    masses: tuple[float, ...]
    own: int
    forced: tuple[int, ...] = ()


class Flights:
    """By sequence the tree that was sent last."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}

    def send(self, sequence: int, flight: Flight) -> None:
        self._flights[sequence] = flight

    def forget(self, sequence: int) -> None:
        self._flights.pop(sequence, None)

    def land(self, lesson: Lesson) -> Returned:
        """What became of the sequence's tree, when this lesson tells it."""
        flight = self._flights.pop(lesson.sequence, None)
        if flight is None or flight.committed != lesson.start or lesson.bonus is None:
            return ALONE
        written = lesson.tokens[1:]
        own = len(written) if flight.own == len(flight.tree) else _own_depth(flight, written)
        free = agreeing(flight.forced, written)
        return Returned(flight.grown, len(flight.tree), flight.masses, len(written) - free, own)


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts have in common, from their beginning on."""
    for place, (one, other) in enumerate(zip(ours, theirs)):
        if one != other:
            return place
    return min(len(ours), len(theirs))


def _own_depth(flight: Flight, written: Sequence[int]) -> int:
    """How deep the drafter's own nodes go along what was written."""
    below, tokens, node = children(flight.tree.parents), flight.tree.tokens, 0
    for depth, token in enumerate(written):
        found = [child for child in below[node] if child < flight.own and tokens[child] == token]
        if not found:
            return depth
        node = found[0]
    return len(written)
