"""Acceptance by the one rule, by hand; and shapes of trees, which are kept."""

from __future__ import annotations

import tracemalloc

import pytest

from specsot.core.tree import Tree, accept, shape_of, single

#        0(5) -> 1(7), 2(8);  1 -> 3(7);  2 -> 4(9);  3 -> 5(1)
TREE = Tree((5, 7, 8, 7, 9, 1), (0, 0, 0, 1, 2, 3))


@pytest.mark.parametrize(
    ("targets", "accepted"),
    [
        ([6, 0, 0, 0, 0, 0], (0,)),
        ([7, 0, 0, 0, 0, 0], (0, 1)),
        ([8, 7, 9, 1, 0, 0], (0, 2, 4)),
        ([7, 7, 9, 1, 0, 3], (0, 1, 3, 5)),
        ([7, 9, 9, 1, 0, 3], (0, 1)),
    ],
)
def test_a_child_is_accepted_iff_it_is_the_target_at_its_parent(
    targets: list[int], accepted: tuple[int, ...]
) -> None:
    assert accept(TREE, targets) == accepted


def test_a_root_alone_is_accepted() -> None:
    assert accept(single(3), [9]) == (0,)


def test_shapes_of_very_large_trees_are_not_kept() -> None:
    """Whoever may draft could fill the memory with them."""
    tracemalloc.start()
    for fork in range(8):
        parents = tuple(max(node - 1, 0) if node != 99 else fork for node in range(4096))
        assert shape_of(parents).depths[99] == fork + 1
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20, "one takes more"
