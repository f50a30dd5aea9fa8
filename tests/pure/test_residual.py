"""The residual walk and its warpers: by hand, against counting, and at the edges."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specsot.core.tree import Tree, chain, single
from tests.vectors.residual_walk import leaf_rows, residual_walk, trial_rows, warp

#        0 -> 1, 2;  2 -> 3, 4;  4 -> 5
TREE = Tree((5, 7, 8, 7, 9, 1), (0, 0, 0, 2, 2, 4))


def test_a_rejected_child_leaves_the_residual_renormalised() -> None:
    walk = residual_walk(chain((0, 1)), [[0, 1]], [[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]], [0.31])
    assert walk.accepted == (0,)
    assert walk.drawn == 1
    assert walk.final == pytest.approx((0.5 / 0.7, 0.0, 0.2 / 0.7))


def test_an_accepted_leaf_ends_with_its_own_distribution() -> None:
    walk = residual_walk(chain((0, 1)), [[0, 1]], [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], [0.3])
    assert walk.accepted == (0, 1)
    assert walk.final == pytest.approx((0.1, 0.1, 0.8))


def test_children_are_tried_in_row_order() -> None:
    tree, targets = Tree((0, 1, 2), (0, 0, 0)), [[0.0, 0.4, 0.6]] * 3
    assert residual_walk(tree, [[0, 2], [0, 1]], targets, [0.5]).accepted == (0, 2)
    assert residual_walk(tree, [[0, 1], [0, 2]], targets, [0.5, 0.5]).accepted == (0, 2)
    assert residual_walk(tree, [[0, 1], [0, 2]], targets, [0.4]).accepted == (0, 1)


def test_a_record_with_too_few_uniforms_is_refused() -> None:
    with pytest.raises(ValueError, match="uniforms"):
        residual_walk(Tree((0, 1, 2), (0, 0, 0)), [[0, 1], [0, 2]], [[0.0, 0.1, 0.9]] * 3, [0.5])


def test_the_walk_draws_from_the_target_whatever_the_tree() -> None:
    """First token behind the root: accepted child or draw from what is left.

    Exact, not sampled: uniforms in the middles of 10 x 7 equal cells, whose borders are where children
    begin to be refused (3/10, then 2/7).
    """
    chances = np.array([0.2, 0.5, 0.3])
    tree, rows = Tree((0, 2, 0), (0, 0, 0)), [[0, 1], [0, 2]]
    drawn = np.zeros(3)
    for first, second in product(range(10), range(7)):
        walk = residual_walk(tree, rows, [chances] * 3, [(first + 0.5) / 10, (second + 0.5) / 7])
        kept = tree.tokens[walk.accepted[1]] if len(walk.accepted) > 1 else None
        drawn += walk.final if kept is None else np.eye(3)[kept]
    assert drawn / 70 == pytest.approx(chances)


def test_rows_end_at_leaves() -> None:
    assert leaf_rows(TREE) == [(0, 1), (0, 2, 3), (0, 2, 4, 5)]
    assert leaf_rows(single(3)) == [(0,)]


def test_children_are_tried_as_they_rank_and_ends_come_last() -> None:
    #   0 -> 1, 2;  1 -> 4;  2 -> 3
    tree = Tree((0, 1, 2, 3, 4), (0, 0, 0, 2, 1))
    assert leaf_rows(tree) == [(0, 2, 3), (0, 1, 4)]
    assert trial_rows(tree) == [(0, 1, 4), (0, 2, 3)]
    assert trial_rows(single(3)) == [(0,)]


def test_when_all_that_was_left_is_rejected_nothing_is_left() -> None:
    walk = residual_walk(chain((0, 1)), [[0, 1]], [[0.0, 1.0], [1.0, 0.0]], [1.5])
    assert walk.accepted == (0,)
    assert walk.final.tolist() == [0.0, 0.0]


def test_the_walk_leaves_its_targets_as_they_were() -> None:
    targets = np.array([[0.5, 0.5], [1.0, 0.0]])
    residual_walk(chain((0, 1)), [[0, 1]], targets, [0.9])
    assert targets.tolist() == [[0.5, 0.5], [1.0, 0.0]]


LOGITS = np.log([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ((1.0, 1.0, 0), (0.4, 0.3, 0.2, 0.1)),
        ((0.5, 1.0, 0), (16 / 30, 9 / 30, 4 / 30, 1 / 30)),
        ((1.0, 0.75, 0), (4 / 9, 3 / 9, 2 / 9, 0.0)),
        ((1.0, 0.65, 0), (4 / 7, 3 / 7, 0.0, 0.0)),
        ((1.0, 0.01, 0), (1.0, 0.0, 0.0, 0.0)),
        ((1.0, 1.0, 2), (4 / 7, 3 / 7, 0.0, 0.0)),
        ((1.0, 1.0, 4), (0.4, 0.3, 0.2, 0.1)),
        ((1.0, 1.0, 9), (0.4, 0.3, 0.2, 0.1)),
        ((1.0, 0.75, 2), (4 / 7, 3 / 7, 0.0, 0.0)),
    ],
)
def test_temperature_then_mass_then_count(
    wish: tuple[float, float, int], expected: tuple[float, ...]
) -> None:
    assert warp(LOGITS, *wish) == pytest.approx(expected)
    assert warp(np.stack([LOGITS, LOGITS[::-1]]), *wish)[1] == pytest.approx(expected[::-1])


def test_tokens_that_tie_with_the_last_kept_one_stay() -> None:
    assert warp(np.log([0.4, 0.2, 0.2, 0.2]), 1.0, 1.0, 2) == pytest.approx((0.4, 0.2, 0.2, 0.2))
