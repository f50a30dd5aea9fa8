"""What a policy keeps and where it ends trees, by hand."""

from __future__ import annotations

import random

import pytest

from specsot.core.frames import Opening
from specsot.core.pages import PageTable, RowPruning, max_held_pages
from specsot.core.tree import Tree, chain, shallow
from specsot.params import HeadWindows, Pruning, Window
from specsot_kernels.segments import RowSpan, VisibleColumns
from specsot_model.core.kv_plan import hide_outside_window, tree_depth_limit, window_of
from tests.conftest import seeds


def test_a_tree_ends_at_the_next_pruning_and_is_no_deeper_than_a_window():
    pruned = Pruning(0.8, 20)
    assert [tree_depth_limit(pruned, position) for position in (0, 1, 19, 20, 39)] == [20, 19, 1, 20, 1]
    assert tree_depth_limit(Window(4, 16), 1000) == 16
    assert tree_depth_limit(None, 5) is None
    assert tree_depth_limit(HeadWindows((((0, 1),),)), 5) is None


def test_the_first_levels_of_a_tree():
    tree = Tree((9, 8, 7, 6, 5), (0, 0, 1, 0, 3))
    assert shallow(tree, 3) is tree
    assert shallow(tree, 2) == Tree((9, 8, 6), (0, 0, 0))
    assert shallow(chain((4, 3, 2)), 1) == Tree((4,), (0,))
    assert shallow(Tree((1, 2, 3, 4), (0, 0, 1, 0)), 2) == Tree((1, 2, 4), (0, 0, 0))


def test_who_keeps_rows_by_position_keeps_as_many_where_stages_give_pages_back():
    assert window_of(Opening(1, 9, pruning=Pruning(0.5, 64, 0))) == Window(0, 66)
    assert window_of(Opening(1, 9, pruning=Pruning(0.5, 64, 1))) is None
    assert window_of(Opening(1, 9, pruning=Pruning(1, 64, 0))) is None
    assert window_of(Opening(1, 9, pruning=Pruning(0.01, 16, 0))) == Window(0, 16)


def test_a_window_that_hides_nothing_yet_is_none():
    span = RowSpan(3, 19, 3, (0,), (1, 3, 5))
    assert hide_outside_window(Window(4, 16), span, (19, 20, 20)) is span
    one_more = hide_outside_window(Window(4, 16), span, (20, 21, 21))
    assert isinstance(one_more.sight, VisibleColumns)
    assert one_more.sight.turns == (0, 1, 1)


def test_pruning_moves_what_is_left_to_the_first_columns():
    table = PageTable(8, 4)
    table.open(1, Pruning(0.5, 16, 0))
    table.reserve(1, 16)
    assert table.prune(1, 12) is None
    assert table.prune(1, 16) == RowPruning(tuple(range(16)), tuple(range(8)), 0)
    assert table.prune(1, 16) is None
    assert (table.pruned_columns(1), table.free) == ((8, 16), 4)
    assert table.trim(1, 17) == (2, 3)  # with the next frame: what is in them has been read by now
    table.reserve(1, 32)
    assert (table.pruned_columns(1), list(table.slots(1, 16, 18))) == ((8, 8), [8, 9])
    assert table.prune(1, 32) == RowPruning(tuple(table.slots(1, 8, 32)), tuple(range(12)), 0)


@pytest.mark.parametrize("seed", seeds(10, quick=4))
def test_no_more_pages_are_held_than_were_promised(seed: int):
    rng = random.Random(seed)
    pruning = Pruning(rng.uniform(0.05, 0.95), rng.randrange(16, 90), 0)
    table, row = PageTable(400, rng.choice((4, 16, 256))), 0
    table.open(1, pruning)
    most = max_held_pages(pruning, 12, table.page_rows)
    assert most is not None
    while row < 3000:
        table.trim(1, row)
        table.prune(1, row)
        table.reserve(1, row + 12)
        assert len(table.pages(1)) <= most
        row += rng.randrange(1, min(12, pruning.due(row) + pruning.prune_every - row) + 1)
