"""What is sent to a device about the trees that it verifies."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsot.core.frames import TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain
from specsot_drafter.eagle_kv import DraftPages, FrameTrees
from specsot_drafter.overlap import device_growth
from specsot_drafter.overlap.device_growth import page_windows, verified_numbers, verified_numbers_size
from specsot_model.kv import Numbers, views
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


def numbers_of(trees: FrameTrees) -> list[Numbers]:
    """Return what `verified_numbers` gives for trees that it has room for."""
    numbers = verified_numbers(trees)
    assert numbers is not None
    nodes = sum(len(one.tree) for one in trees.segments)
    shapes = (4, len(trees.segments)), (nodes,), (nodes,)
    return [part.numpy() for part in views(torch.from_numpy(numbers), shapes)]


def slots_of(trees: FrameTrees, num_pages: int) -> list[list[int]]:
    """Return the KV slots of ROOM rows of each tree from its first due row on, as the kernel of
    `prepare_accept_rows` computes them from the windows of pages.

    trees: The trees that are verified.
    num_pages: Number of pages of a window.
    """
    starts = [column // PAGE * PAGE for column in trees.columns]
    windows = page_windows(starts, trees.pages, num_pages, PAGE)
    size = windows.size + sum(one.size for one in numbers_of(trees))
    assert size <= verified_numbers_size(num_pages, TREES)
    assert windows[:, 0].tolist() == starts
    return [
        [
            int(own[1 + row // PAGE]) * PAGE + row % PAGE
            for row in range(column - start, column - start + ROOM)
        ]
        for own, column, start in zip(windows, trees.columns, starts)
    ]


def test_the_device_gets_every_tree_and_the_pages_of_its_rows(table: PageTable) -> None:
    trees = trees_of(table, (3, 8, 11), FORKED)
    numbers, tokens, parents = numbers_of(trees)
    assert tokens.tolist() == [*FORKED.tokens] * 3
    assert parents.tolist() == [*FORKED.parents] * 3
    assert numbers.tolist() == [[0, 4, 8], [4, 4, 4], [3, 8, 11], [3, 8, 11]]
    wanted = [[*table.slots(sequence, many, many + ROOM)] for sequence, many in enumerate((3, 8, 11))]
    assert slots_of(trees, 3) == slots_of(trees, 4) == wanted


def test_the_device_gets_the_rows_from_the_first_due_one_on(table: PageTable) -> None:
    """A language model's row of the root is computed already; that of a head with features is not."""
    trees = [TreeSegment(sequence, 2, many, (0,), FORKED) for sequence, many in enumerate((3, 8, 11))]
    pages: Any = SimpleNamespace(table=table)
    for shift in (0, 1):
        covered = there(DraftPages.cover_trees(pages, trees, ROOM, shift))
        assert [*covered.firsts] == [*covered.columns] == [3 + shift, 8 + shift, 11 + shift]
        numbers, _, _ = numbers_of(covered)
        assert numbers[2:].tolist() == [[*covered.firsts]] * 2
        assert slots_of(covered, 3) == [
            [*table.slots(sequence, first, first + ROOM)] for sequence, first in enumerate(covered.firsts)
        ]


def test_pages_stay_the_same_until_a_sequence_needs_more() -> None:
    """A sequence that needs a page causes all to get a page more, as long as half of all pages are free."""
    table = PageTable(64, PAGE)
    pages: Any = SimpleNamespace(table=table)
    for sequence in range(TREES):
        table.open(sequence)

    def covered(*committed: int) -> FrameTrees:
        """Return where the next rows of sequences 0, 1, ... lie, which have so many committed tokens."""
        trees = [TreeSegment(one, 2, many, (0,), FORKED) for one, many in enumerate(committed)]
        return there(DraftPages.cover_trees(pages, trees, ROOM, 0))

    first = covered(3, 8, 11)
    assert [len(own) for own in first.pages] == [4, 5, 6], "a page more than the rows need"
    assert covered(7, 12, 14).pages == first.pages
    further = covered(7, 15, 14)
    assert [len(own) for own in further.pages] == [5, 7, 6], "every sequence has a page more again"
    table.reserve(3, 33 * PAGE)
    assert [len(own) for own in covered(15, 15, 17).pages] == [6, 7, 6], "pages are scarce"


def test_more_nodes_than_there_is_room_for_are_not_sent(
    table: PageTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = trees_of(table, (5, 6), chain((1, 2)))
    monkeypatch.setattr(device_growth, "MAX_VERIFIED_ROWS", 4)
    assert verified_numbers(trees) is not None
    monkeypatch.setattr(device_growth, "MAX_VERIFIED_ROWS", 3)
    assert verified_numbers(trees) is None
