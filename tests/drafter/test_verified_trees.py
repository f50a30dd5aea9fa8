"""What is sent to a device about the trees that it verifies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specsot.core.frames import TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain
from specsot_drafter.eagle_kv import FrameTrees
from specsot_drafter.overlap.device_growth import VerifiedTreeSender
from specsot_kernels.growing import VerifiedTrees

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


@pytest.fixture
def sender() -> VerifiedTreeSender:
    return VerifiedTreeSender(ROOM, TREES, PAGE, torch.device("cpu"))


def trees_of(table: PageTable, committed: Sequence[int], tree: Tree) -> FrameTrees:
    """One tree of each sequence, of which so many tokens are committed."""
    segments = [TreeSegment(sequence, 2, many, (0,), tree) for sequence, many in enumerate(committed)]
    columns, pages = zip(*[table.cover(one.sequence, one.committed, one.committed + ROOM) for one in segments])
    return FrameTrees(segments, columns, pages)


def send(sender: VerifiedTreeSender, trees: FrameTrees, rows: int = ROOM) -> VerifiedTrees:
    sent = sender.send(trees, sender.targets, rows)
    assert sent is not None
    return sent


def test_the_device_gets_every_tree_and_the_slots_of_its_rows(
    table: PageTable, sender: VerifiedTreeSender
) -> None:
    sent = send(sender, trees_of(table, (3, 8, 11), FORKED))
    assert sent.tokens.tolist() == [*FORKED.tokens] * 3
    assert sent.parents.tolist() == [*FORKED.parents] * 3
    assert sent.trees.tolist() == [[0, 4, 3, 3], [4, 4, 8, 8], [8, 4, 11, 11]]
    assert sent.slots.tolist() == [
        [*table.slots(sequence, many, many + ROOM)] for sequence, many in enumerate((3, 8, 11))
    ]


def test_trees_of_another_number_and_size_are_sent_as_well(
    table: PageTable, sender: VerifiedTreeSender
) -> None:
    """Every frame has views of its own of the same buffer."""
    few = trees_of(table, (5, 6), chain((1, 2)))
    first, last = trees_of(table, (3, 8, 11), FORKED), trees_of(table, (4, 9, 12), FORKED)
    for trees in (first, few, first, last):
        sent = send(sender, trees)
        assert sent.tokens.tolist() == [token for one in trees.segments for token in one.tree.tokens]
        assert [committed for _, _, committed, _ in sent.trees.tolist()] == [
            one.committed for one in trees.segments
        ]
        assert len(sent.slots) == len(trees.segments)


def test_slots_that_nobody_reads_are_not_computed(table: PageTable, sender: VerifiedTreeSender) -> None:
    trees = trees_of(table, (3, 8, 11), FORKED)
    few, all_rows = (send(sender, trees, rows).slots.clone() for rows in (2, ROOM))
    assert few.shape == all_rows.shape
    assert few[:, :2].tolist() == all_rows[:, :2].tolist()


def test_more_trees_than_there_is_room_for_are_not_sent(table: PageTable, sender: VerifiedTreeSender) -> None:
    trees = FrameTrees(*[one * (TREES + 1) for one in trees_of(table, (3,), FORKED)])
    assert sender.send(trees, sender.targets, ROOM) is None
