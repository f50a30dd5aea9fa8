"""What is made for many texts at once is what would be made for each: tables of what they read and see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specsot.core.tree import Tree, chain, shape_of
from specsot_kernels.attention_tables import (
    as_arrays,
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
    for mine, theirs in zip(found, as_arrays(page_runs_of(spans, PAGE))):
        assert mine.tolist() == theirs.tolist()


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
