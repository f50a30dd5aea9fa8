"""What is made for many texts at once is what would be made for each: tables of what they read and see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specsot.core.tree import Tree, chain, shape_of
from specsot_kernels.attention_tables import (
    ANCHORED,
    PageRun,
    as_arrays,
    cut_pieces,
    page_runs_of,
    page_runs_unshared,
    sights_of,
    whole_pages,
)
from specsot_kernels.segments import RowSpan

PAGE = 16
TEXTS = ((7, (3, 9)), (1, (4,)), (5, (0, 8, 7)))  # rows and pages of each


def test_sequences_that_share_no_page_are_tabulated_together() -> None:
    spans = [whole_pages(rows, PAGE * (len(pages) - 1), pages, PAGE) for rows, pages in TEXTS]
    found = page_runs_unshared([rows for rows, _ in TEXTS], [pages for _, pages in TEXTS], PAGE)
    assert found is not None
    for mine, theirs in zip(found[:-1], as_arrays(page_runs_of(spans, PAGE))):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("tile_rows", "places"), [(2, 8), (4, 64), (64, 132)])
def test_every_row_reads_each_column_of_its_page_runs_once(tile_rows: int, places: int, times: int) -> None:
    """The slots of a row are those of the pieces that read for it, and a piece masks from its lowest lead."""
    runs = (
        PageRun(0, 5, 0, 20 * PAGE, tuple(range(100, 120))),
        PageRun(0, 2, 20 * PAGE, 3 * PAGE - 5, (7, 8, 9)),
        PageRun(2, 3, 20 * PAGE, 40 * PAGE, tuple(range(40))),
    )
    leads = np.array([300, 310, 320, 330, 340], np.int32).repeat(times)
    pieces, starts, slots, pages = cut_pieces(runs, leads, PAGE, tile_rows, times, places=places)
    seen: dict[int, list[int]] = {}
    row_of_slot: dict[int, int] = {}
    for first, rows, page, columns, at, lead, slot in pieces.tolist():
        assert 0 < rows <= tile_rows
        assert lead == leads[first : first + rows].min()
        for row in range(rows):
            row_of_slot[slot + row] = first + row
            seen.setdefault(first + row, []).extend(
                int(pages[page + column // PAGE]) * 10_000 + at + column for column in range(columns)
            )
    for row in range(5 * times):
        own = [run for run in runs if run.first <= row // times < run.first + run.rows]
        wanted = [run.pages[at // PAGE] * 10_000 + run.at + at for run in own for at in range(run.columns)]
        assert sorted(seen[row]) == sorted(wanted)
        own_slots = slots[starts[row] : starts[row + 1]].tolist()
        assert own_slots == sorted(own_slots), "a row's pieces are merged in order"
        assert {row_of_slot[slot] for slot in own_slots} == {row}
    assert sorted(slots.tolist()) == list(range(len(row_of_slot)))


def test_pieces_of_anchors_have_no_common_columns() -> None:
    runs = (PageRun(0, 1, 0, PAGE, (1,)), PageRun(1, 1, 0, PAGE, (2,)))
    anchored = (PageRun(0, 1, 0, PAGE, (3,)), PageRun(1, 1, 0, PAGE, (4,)))
    leads = np.array([3, 5], np.int32)
    pieces = cut_pieces(runs, leads, PAGE, 4, anchored=anchored).pieces
    assert pieces[:, 5].tolist() == [3, 5, ANCHORED, ANCHORED]


def test_whether_sequences_share_a_page_is_detected() -> None:
    assert page_runs_unshared([1, 1], [(3, 4), (3, 5)], PAGE) is None


def test_trees_of_one_shape_see_what_each_of_them_does() -> None:
    shape = shape_of(chain((5, 6, 7)).parents).ancestry
    alike = [RowSpan(3, base, 3, (0, 1), shape) for base in (4, 11)]
    apart = [replace(span, visible=(*shape[:2], shape[2])) for span in alike]  # no longer the same object
    for mine, theirs in zip(sights_of(alike), sights_of(apart)):
        assert np.array_equal(mine, theirs)


def test_a_value_is_one_to_who_asks() -> None:
    """Compared and hashed by its fields, and checked when it is made, as a frozen dataclass is."""
    tree = Tree((5, 6), (0, 0))
    assert tree == Tree((5, 6), (0, 0)) != replace(tree, tokens=(5, 7))
    assert {tree, Tree((5, 6), (0, 0))} == {tree}
    assert not hasattr(tree, "__dict__")
