"""The byte automaton of the skeleton language as a table that grows, whose titles have no counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specsot.core.skeleton import MAX_TITLE_WORDS, PlanRules
from specsot.grammar import language
from specsot.grammar.language import ListTitle, Place, Title

# The number of the dead place, which no valid output reaches. Every byte leads from it to itself.
DEAD = 0

Number = TypeVar("Number", bound=np.generic)


class ByteTable:
    """The byte automaton of a grammar as a table that grows. Not thread-safe: its owner holds a lock.

    next: [places or more, 256], the number of the place after each byte. A row is valid once `filled` is
        True.
    places: the place of each number; None for DEAD.
    owed: by number, how many bytes a title still needs before it may end, see `language.owed`.
    open: by number, True for titles without a count of their bytes.
    rank: [places or more], 0 outside of lists' titles without a count. Within them a byte that leads to a
        higher rank uses up a word, see `language.word_rank`.
    planned: by number, whether the output is certainly a plan.
    filled: by number, whether the row of `next` is valid.
    """

    def __init__(self, rules: PlanRules) -> None:
        """Create a table with the place DEAD alone, from which no byte leads anywhere else.

        rules: the rules of the grammar. Only the tool names are read here; the largest number of points is
            part of every place.
        """
        self.rules = rules
        self.next: NDArray[np.int32] = np.zeros((64, 256), dtype=np.int32)
        self.places: list[Place | None] = [None]
        self.owed: list[int] = [0]
        self.open: list[bool] = [False]
        self.rank: NDArray[np.uint8] = np.zeros(64, dtype=np.uint8)
        self.planned: list[bool] = [False]
        self.filled: list[bool] = [True]
        self._numbers: dict[Place, int] = {}

    def number(self, place: Place) -> int:
        """Return the number of a place, which is added if it is new.

        place: any place of the automaton.
        """
        found = self._numbers.get(place)
        return self._add(place) if found is None else found

    def place(self, number: int) -> Place:
        """Return the place of a number.

        number: number of a place in this table, other than DEAD.
        """
        found = self.places[number]
        assert found is not None
        return found

    def uncounted(self, number: int) -> int:
        """Return the number of the same place without counts, which is added if it is new.

        A place that has no counts keeps its number.

        number: number of a place in this table, other than DEAD.
        """
        return self.number(uncount(self.place(number))[0])

    def fill(self, number: int) -> None:
        """Compute the row of `next` for a place, unless it is valid already. The places after each byte are
        added.

        number: number of the place.

        Bytes that no edge contains lead to DEAD. `next` may be replaced by a larger array.
        """
        if self.filled[number]:
            return
        numbered_edges = [
            (low, high, self.number(target) if target else DEAD)
            for low, high, target in language.edges(self.rules, self.place(number))
        ]
        # `number` may have replaced the array, so the row is taken only now. The first edge has precedence,
        # so it is written last.
        row = self.next[number]
        for low, high, target in reversed(numbered_edges):
            row[low : high + 1] = target
        self.filled[number] = True

    def fill_all(self, numbers: NDArray[np.int32]) -> None:
        """Compute the rows of `next` for several places. Rows that are valid already do not change.

        numbers: numbers of places, which may repeat.

        DEAD among the numbers changes nothing. `next` may be replaced by a larger array.
        """
        present = np.zeros(len(self.places), dtype=np.bool_)
        present[numbers] = True
        for number in np.flatnonzero(present).tolist():
            self.fill(number)

    def _add(self, place: Place) -> int:
        """Add a place to all columns of the table, and return its number. If the arrays are full, they are
        replaced by arrays of twice the size.

        place: a place that the table does not contain yet.

        The number is the number of places so far. The row of `next` is not valid yet.
        """
        number = len(self.places)
        if number == len(self.next):
            self.next = _doubled(self.next)
            self.rank = _doubled(self.rank)
        self.places.append(place)
        self.owed.append(language.owed(place))
        self.open.append(isinstance(place, Title | ListTitle) and place.bytes_left is None)
        self.rank[number] = language.word_rank(place) if self.open[-1] else 0
        self.planned.append(language.planned(place))
        self.filled.append(False)
        self._numbers[place] = number
        return number


def _doubled(array: NDArray[Number]) -> NDArray[Number]:
    """Return an array with twice the rows: those of the old one, then zeros. The zeros are not written, so
    that the operating system gives them memory only when they are used.

    array: [rows, ...].
    """
    grown = np.zeros((2 * len(array), *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def uncount(place: Place) -> tuple[Place, int, int]:
    """Return a place without the counts of its title, the bytes that are left, and the words that are left.

    Places outside of titles, and titles without counts, are returned unchanged, with 0 bytes and
    MAX_TITLE_WORDS words left. A title of a plan has MAX_TITLE_WORDS words left, because its words are not
    bounded.

    place: any place of the automaton.

    The inverse is `recount`. In a list's title without counts, `words` is 0 or 1: whether a word was begun.
    """
    if isinstance(place, Title) and place.bytes_left is not None:
        return replace(place, bytes_left=None), place.bytes_left, MAX_TITLE_WORDS
    if isinstance(place, ListTitle) and place.bytes_left is not None:
        words = MAX_TITLE_WORDS - language.words_used(place)
        return replace(place, bytes_left=None, words=min(place.words, 1)), place.bytes_left, words
    return place, 0, MAX_TITLE_WORDS


def recount(place: Place, bytes_left: int, words: int) -> Place:
    """Return a place with the counts of its title: the inverse of `uncount`. A place outside of titles, or
    with counts, is returned unchanged.

    place: a place without counts.
    bytes_left: number of bytes that the title may still have.
    words: number of words that the title of a list may still begin.

    Both counts are ignored for a place that is returned unchanged, and `words` for a title of a plan.
    """
    if isinstance(place, Title) and place.bytes_left is None:
        return replace(place, bytes_left=bytes_left)
    if isinstance(place, ListTitle) and place.bytes_left is None:
        gap = language.words_used(place) - place.words
        return replace(place, bytes_left=bytes_left, words=MAX_TITLE_WORDS - words - gap)
    return place
