"""What is sent to a device about the trees that it verifies."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specsot.core.frames import TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain
from specsot_drafter.eagle_kv import DraftPages, FrameTrees
from specsot_drafter.overlap import device_growth
from specsot_drafter.overlap.device_growth import verified_numbers, verified_numbers_size
from specsot_model.kv import Numbers
from tests.there import there

ROOM, TREES, PAGE = 6, 4, 4
FORKED = Tree((7, 8, 9, 5), (0, 0, 0, 1))


@pytest.fixture
def table() -> PageTable:
    """Sequences whose pages alternate, so that no slot follows from another sequence's."""
    table = PageTable(32, PAGE)
    for sequence in range(TREES):
        table.open(sequence)
    for rows in (3, 9, 14):
        for sequence in range(TREES):
            table.reserve(sequence, rows + sequence)
    return table


def trees_of(table: PageTable, committed: Sequence[int], tree: Tree) -> FrameTrees:
    """One tree of each sequence, of which so many tokens are committed."""
    segments = [TreeSegment(sequence, 2, many, (0,), tree) for sequence, many in enumerate(committed)]
    placed = [table.cover(one.sequence, one.committed, one.committed + ROOM) for one in segments]
    return FrameTrees(segments, committed, [column for column, _ in placed], [pages for _, pages in placed])


def numbers_of(trees: FrameTrees, rows: int = ROOM) -> list[Numbers]:
    numbers = verified_numbers(trees, ROOM, rows, PAGE)
    assert numbers is not None
    assert sum(one.size for one in numbers) <= verified_numbers_size(ROOM, TREES)
    return numbers


def test_the_device_gets_every_tree_and_the_slots_of_its_rows(table: PageTable) -> None:
    tokens, parents, numbers, slots = numbers_of(trees_of(table, (3, 8, 11), FORKED))
    assert tokens.tolist() == [*FORKED.tokens] * 3
    assert parents.tolist() == [*FORKED.parents] * 3
    assert numbers.tolist() == [[0, 4, 3, 3], [4, 4, 8, 8], [8, 4, 11, 11]]
    assert slots.tolist() == [
        [*table.slots(sequence, many, many + ROOM)] for sequence, many in enumerate((3, 8, 11))
    ]


def test_the_device_gets_the_rows_from_the_first_due_one_on(table: PageTable) -> None:
    """A language model's row of the root is computed already; that of a head with features is not."""
    trees = [TreeSegment(sequence, 2, many, (0,), FORKED) for sequence, many in enumerate((3, 8, 11))]
    pages: Any = SimpleNamespace(table=table)
    for shift in (0, 1):
        covered = there(DraftPages.cover_trees(pages, trees, ROOM, shift))
        assert [*covered.firsts] == [*covered.columns] == [3 + shift, 8 + shift, 11 + shift]
        _, _, numbers, slots = numbers_of(covered)
        assert numbers[:, 2:].tolist() == [[first, first] for first in covered.firsts]
        assert slots.tolist() == [
            [*table.slots(sequence, first, first + ROOM)] for sequence, first in enumerate(covered.firsts)
        ]


def test_only_slots_that_are_read_are_computed(table: PageTable) -> None:
    trees = trees_of(table, (3, 8, 11), FORKED)
    few, every = (numbers_of(trees, rows)[3] for rows in (2, ROOM))
    assert few.shape == every.shape
    assert few[:, :2].tolist() == every[:, :2].tolist()


def test_more_nodes_than_there_is_room_for_are_not_sent(
    table: PageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = trees_of(table, (5, 6), chain((1, 2)))
    monkeypatch.setattr(device_growth, "MAX_VERIFIED_ROWS", 4)
    assert verified_numbers(trees, ROOM, ROOM, PAGE) is not None
    monkeypatch.setattr(device_growth, "MAX_VERIFIED_ROWS", 3)
    assert verified_numbers(trees, ROOM, ROOM, PAGE) is None
