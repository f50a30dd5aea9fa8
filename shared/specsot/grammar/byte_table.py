"""The byte automaton of the skeleton language as a table, to which places are added when they are needed.

Places have numbers, and the table has the number of the place after each byte. A place in a title may count
the bytes and words that the title may still have. Its caller can count them itself, and use the place without
counts (`uncount`): then all titles of a line share their places, whatever their length.

    # Title(line 1, bytes_left=80): "a" leads to Title(line 1, bytes_left=79, solid=True), "b" on to 78, ...
    # Title(line 1, bytes_left=None): "a" leads to Title(line 1, bytes_left=None, solid=True), "b" to itself
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from specsot.core.skeleton import MAX_TITLE_WORDS, PlanRules
from specsot.grammar import language
from specsot.grammar.language import ListTitle, Place, Title

# The number of the dead place, which no valid output reaches. Every byte leads from it to itself.
DEAD = 0
# The entry in `ByteTable.row` of a place that has no row in `ByteTable.next`.
NO_ROW: Final = -1

Number = TypeVar("Number", bound=np.generic)


class ByteTable:
    """The byte automaton of a grammar as a table that grows. Methods that may add places or rows are not
    thread-safe: the table's owner holds a lock. Present entries may be read without the lock, `row` before
    `next`.

    next: [rows or more, 256], the number of the place after each byte, for the places that have a row. Most
        places have none: they follow a byte of another place, but no byte after them was ever looked up.
    row: by number, the row of `next`, or NO_ROW.
    places: the place of each number; None for DEAD.
    owed: by number, how many bytes a title still needs before it may end, see `language.owed`. 0 outside of
        titles.
    open: by number, True for places in titles without counts, see `uncount`.
    rank: [places or more], `language.word_rank` of places in lists' titles without counts, and 0 for all
        other places. A byte that leads to a place of a higher rank uses up a word.
    planned: by number, whether the output is certainly a plan, see `language.planned`.
    """

    def __init__(self, rules: PlanRules) -> None:
        """Create a table with the place DEAD alone, from which no byte leads anywhere else.

        rules: the rules of the grammar. Only the tool names are read; the largest number of points is part of
            the places.
        """
        self.rules = rules
        self.next: NDArray[np.int32] = np.zeros((64, 256), dtype=np.int32)
        self.places: list[Place | None] = [None]
        self.owed: list[int] = [0]
        self.open: list[bool] = [False]
        self.rank: NDArray[np.uint8] = np.zeros(64, dtype=np.uint8)
        self.planned: list[bool] = [False]
        self.row: list[int] = [0]
        self._num_rows = 1
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

    def fill(self, number: int) -> int:
        """Return the row of `next` for a place. If the place has none, the row is computed, and the places
        after each byte are added.

        number: number of the place.

        Bytes that the grammar forbids lead to DEAD. `next` may be replaced by a larger array.
        """
        if self.row[number] != NO_ROW:
            return self.row[number]
        numbered_edges = [
            (low, high, self.number(target) if target else DEAD)
            for low, high, target in language.edges(self.rules, self.place(number))
        ]
        row = self._num_rows
        if row == len(self.next):
            self.next = _doubled(self.next)
        # The first edge has precedence, so it is written last.
        for low, high, target in reversed(numbered_edges):
            self.next[row, low : high + 1] = target
        self._num_rows += 1
        # Threads that do not hold the lock read the row as soon as the place has one.
        self.row[number] = row
        return row

    def after(self, numbers: NDArray[np.int32], values: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Return the number of the place after one byte from each of several places: [n].

        numbers: [n], numbers of places, which may repeat.
        values: [n], the byte that follows each place.

        Rows of `next` that are missing are computed, so `next` may be replaced by a larger array.
        """
        present = np.zeros(len(self.places), dtype=np.bool_)
        present[numbers] = True
        rows = np.zeros(len(present), dtype=np.int32)
        for number in np.flatnonzero(present).tolist():
            rows[number] = self.fill(number)
        return self.next[rows[numbers], values]

    def _add(self, place: Place) -> int:
        """Add a place to all columns of the table, and return its number. If `rank` is full, it is replaced
        by an array of twice the size.

        place: a place that the table does not contain yet.

        The number is the number of places so far. The place has no row of `next` yet.
        """
        number = len(self.places)
        if number == len(self.rank):
            self.rank = _doubled(self.rank)
        self.places.append(place)
        self.owed.append(language.owed(place))
        self.open.append(isinstance(place, Title | ListTitle) and place.bytes_left is None)
        self.rank[number] = language.word_rank(place) if self.open[-1] else 0
        self.planned.append(language.planned(place))
        self.row.append(NO_ROW)
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
    """Return a place without the counts of its title, then the number of bytes and the number of words that
    the title may still have.

    Places outside of titles, and places without counts, are returned unchanged, with 0 bytes and
    MAX_TITLE_WORDS words left. A title of a plan has MAX_TITLE_WORDS words left, because its words are not
    bounded.

    place: any place of the automaton.

    The inverse is `recount`. A list's title without counts keeps whether a word has started: its `words` is 0
    or 1.

        # Title(line, bytes_left=70, solid=True)
        # -> Title(line, bytes_left=None, solid=True), 70, MAX_TITLE_WORDS
        # ListTitle(line, bytes_left=70, words=2, last="solid")
        # -> ListTitle(line, bytes_left=None, words=1, last="solid"), 70, MAX_TITLE_WORDS - 2
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
    words: number of words that the title of a list may still have.

    Both counts are ignored for a place that is returned unchanged, and `words` for a title of a plan.
    """
    if isinstance(place, Title) and place.bytes_left is None:
        return replace(place, bytes_left=bytes_left)
    if isinstance(place, ListTitle) and place.bytes_left is None:
        # After a space, the word that follows the space is used up already, but has not started yet.
        gap = language.words_used(place) - place.words
        return replace(place, bytes_left=bytes_left, words=MAX_TITLE_WORDS - words - gap)
    return place
