"""The grammar's places as numbers and rows of 256, filled in only where somebody comes by.

Refuses to know tokens. Knows how many bytes a title has left only where a token crossed into it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specsot.constraint import grammar
from specsot.constraint.grammar import Place, Title
from specsot.skeleton import PlanRules

DEAD = 0  # the number of no place; every byte leads from there to itself


class ByteTable:
    """A byte-level automaton that grows. Not thread-safe: the owner holds a lock while it grows.

    next: [places or more, 256] the place behind each byte; DEAD rows are right, others only when filled.
    """

    def __init__(self, rules: PlanRules) -> None:
        self.rules = rules
        self.next: NDArray[np.int32] = np.zeros((64, 256), dtype=np.int32)
        self.places: list[Place | None] = [None]
        self.owed: list[int] = [0]  # grammar.owed of each place
        self.open: list[bool] = [False]  # titles without a count of their own
        self.filled: list[bool] = [True]
        self._numbers: dict[Place, int] = {}

    def number(self, place: Place) -> int:
        """The number of `place`, a new one if need be."""
        found = self._numbers.get(place)
        return self._add(place) if found is None else found

    def place(self, number: int) -> Place:
        """The place of a number that is not DEAD."""
        found = self.places[number]
        assert found is not None
        return found

    def fill(self, number: int) -> None:
        """Make the row of `number` right."""
        if self.filled[number]:
            return
        leads = [(low, high, self.number(to) if to else DEAD) for low, high, to in self._edges(number)]
        row = self.next[number]  # numbering may have moved the table, so only now
        for low, high, to in reversed(leads):  # the first edge has precedence
            row[low : high + 1] = to
        self.filled[number] = True

    def fill_all(self, numbers: NDArray[np.int32]) -> None:
        """Make the rows of all these numbers right."""
        present = np.zeros(len(self.places), dtype=np.bool_)
        present[numbers] = True
        for number in np.flatnonzero(present).tolist():
            self.fill(number)

    def _edges(self, number: int) -> tuple[grammar.Edge, ...]:
        return grammar.edges(self.rules, self.place(number))

    def _add(self, place: Place) -> int:
        number = len(self.places)
        if number == len(self.next):
            self.next = np.concatenate([self.next, np.zeros_like(self.next)])
        self.places.append(place)
        self.owed.append(grammar.owed(place))
        self.open.append(isinstance(place, Title) and place.left is None)
        self.filled.append(False)
        self._numbers[place] = number
        return number


def uncount(place: Place) -> tuple[Place, int]:
    """A title without its count, and the count; any other place with 0."""
    if isinstance(place, Title) and place.left is not None:
        return replace(place, left=None), place.left
    return place, 0


def recount(place: Place, left: int) -> Place:
    """The inverse of `uncount`."""
    return replace(place, left=left) if isinstance(place, Title) and place.left is None else place
