"""Which tokens can follow a place of the grammar, what each then costs: one numpy pass per place.

Refuses to know how many tokens or title bytes are left; a Reach holds what decides that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specsot.constraint import grammar
from specsot.constraint.grammar import Place, Title
from specsot.constraint.spelling import Spelling
from specsot.constraint.table import DEAD, ByteTable
from specsot.constraint.trie import Ints, Trie, TrieLevel, build_tries
from specsot.skeleton import MAX_TITLE_BYTES
from specsot.vocabulary import Vocabulary

Mask = NDArray[np.bool_]

UNREACHABLE_TOKENS = 1 << 14  # tokens of an ending that this vocabulary cannot write; no budget reaches it


@dataclass(frozen=True, slots=True)
class ReachPart:
    """Tokens that can follow a place.

    tokens:  their ids.                                                      [k]
    costs:   tokens from behind each to the end, the shortest way.           [k]
    needs:   bytes that the title at this place must have left for each.     [k]
    planned: whether the output is a plan for sure behind each.              [k]
    """

    tokens: Ints
    costs: NDArray[np.int16]
    needs: NDArray[np.int16]
    planned: Mask


@dataclass(frozen=True, slots=True)
class TokenReach:
    """All tokens that can follow one place.

    planned: whether the output is a plan for sure, already here.
    least:   tokens from here to the end, the shortest way.
    roomy:   the least budget that bars no token.
    steps:   for each number of bytes left, the least number that allows the same tokens.
    """

    parts: tuple[ReachPart, ReachPart]
    planned: bool
    least: int
    roomy: int
    steps: tuple[int, ...]

    def fitting(self, left: int, room: int, room_planned: int) -> list[Ints]:
        """Tokens for a title of `left` bytes and budgets of free texts and of plans, in tokens."""
        found: list[Ints] = []
        for part in self.parts:
            rooms = np.where(part.planned, np.int16(room_planned), np.int16(room))
            found.append(part.tokens[(part.costs < rooms) & (part.needs <= left)])
        return found


class Survey:
    """Explores places over a byte table. Not thread-safe: the owner holds a lock."""

    def __init__(self, vocabulary: Vocabulary, table: ByteTable, spelling: Spelling) -> None:
        self._within, self._across = build_tries(vocabulary)
        self._table = table
        self._spelling = spelling
        self._endings: dict[int, int] = {}
        self._ways: dict[Place, bytes] = {}
        self._titles: dict[Place, ReachPart] = {}

    def explore(self, number: int) -> TokenReach:
        """One walk over all tokens."""
        place = self._table.place(number)
        parts = self._inner(place), self._walk(self._across, number)
        return TokenReach(
            parts=parts,
            planned=grammar.planned(place),
            least=self.ending(number),
            roomy=max(int(part.costs.max(initial=0)) for part in parts) + 1,
            steps=_steps(np.concatenate([part.needs for part in parts])),
        )

    def ending(self, number: int) -> int:
        """Tokens of the shortest way to the end, ENDLESS when the vocabulary cannot write it."""
        if number not in self._endings:
            self._endings[number] = self._spelling.count(
                self._way(self._table.place(number)), UNREACHABLE_TOKENS
            )
        return self._endings[number]

    def _way(self, place: Place) -> bytes:
        """The bytes of the way along first edges to the end."""
        if isinstance(place, grammar.Done):
            return b""
        if place not in self._ways:
            byte, to = grammar.onward(self._table.rules, place)
            self._ways[place] = bytes([byte]) + self._way(to)
        return self._ways[place]

    def _inner(self, place: Place) -> ReachPart:
        """Tokens without a line feed; within a title they don't know which line it is."""
        if not isinstance(place, Title):
            return self._walk(self._within, self._table.number(place))
        alike = replace(place, line=1)
        if alike not in self._titles:
            self._titles[alike] = self._walk(self._within, self._table.number(alike))
        return self._titles[alike]

    def _walk(self, trie: Trie, number: int) -> ReachPart:
        """All tokens of `trie` from one place at once, level by level, leaving what has died."""
        table = self._table
        found: list[tuple[Ints, Ints, Ints]] = []
        nodes = np.arange(len(trie[0].byte) if trie else 0, dtype=np.int32)
        at = np.full(len(nodes), number, dtype=np.int32)
        for level in trie:
            table.fill_all(at)
            at = table.next[at, level.byte[nodes]]
            alive = at != DEAD
            nodes, at = nodes[alive], at[alive]
            if not len(nodes):
                break
            found.append(_whole(level, nodes, at))
            first, counts = level.children[nodes], level.children[nodes + 1] - level.children[nodes]
            nodes, at = _ranges(first, counts), np.repeat(at, counts)
        return self._weigh(number, *(np.concatenate([_NONE, *column]) for column in _columns(found)))

    def _weigh(self, number: int, tokens: Ints, ends: Ints, lines: Ints) -> ReachPart:
        """What the tokens that end at the places `ends` cost; those that lead to no end are left out."""
        size = len(self._table.places)
        costs, planned = np.full(size, UNREACHABLE_TOKENS, dtype=np.int16), np.zeros(size, dtype=np.bool_)
        owed = np.zeros(size, dtype=np.int32)
        for end in np.flatnonzero(np.bincount(ends, minlength=1)).tolist():
            costs[end] = self.ending(end)
            planned[end] = grammar.planned(self._table.place(end))
            owed[end] = self._table.owed[end] if self._table.open[end] else 0
        possible = costs[ends] < UNREACHABLE_TOKENS
        tokens, ends, lines = tokens[possible], ends[possible], lines[possible]
        needs = lines + owed[ends] if self._table.open[number] else np.zeros_like(lines)
        return ReachPart(tokens, costs[ends], needs.astype(np.int16), planned[ends])


_NONE = np.zeros(0, dtype=np.int32)


def _whole(level: TrieLevel, nodes: Ints, at: Ints) -> tuple[Ints, Ints, Ints]:
    """Tokens that are whole at the live `nodes`, the places `at` where they end, bytes to a line feed."""
    place_of = np.full(len(level.byte), DEAD, dtype=np.int32)
    place_of[nodes] = at
    ends = place_of[level.ends]
    alive = ends != DEAD
    return level.tokens[alive], ends[alive], level.lines[alive]


def _columns(rows: list[tuple[Ints, Ints, Ints]]) -> tuple[list[Ints], list[Ints], list[Ints]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _ranges(first: Ints, counts: Ints) -> Ints:
    """first[0], first[0] + 1, ... (counts[0] of them), first[1], ... in one array."""
    stops = np.cumsum(counts, dtype=np.int32)
    return np.arange(stops[-1], dtype=np.int32) + np.repeat(first - (stops - counts), counts)


def _steps(needs: NDArray[np.int16]) -> tuple[int, ...]:
    """For each number of bytes left, the largest need it covers (0 when it covers none)."""
    distinct = np.unique(np.append(needs, 0))
    lefts = np.arange(MAX_TITLE_BYTES + 1)
    return tuple(distinct[np.searchsorted(distinct, lefts, side="right") - 1].tolist())
