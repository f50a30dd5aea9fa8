"""Acceptance by the one rule and the residual walk, by hand and against counting."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from specsot.tree import Tree, chain, single
from specsot.verify import accept, residual_walk

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


def test_a_rejected_child_leaves_the_rest_renormalised() -> None:
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
    """First token behind the root: accepted child or draw from what is left; chi-square, 2 df."""
    chances, rng, rounds = (0.2, 0.5, 0.3), random.Random(7), 20_000
    tree, rows = Tree((0, 2, 0), (0, 0, 0)), [[0, 1], [0, 2]]
    seen: Counter[int] = Counter()
    for _ in range(rounds):
        walk = residual_walk(tree, rows, [chances] * 3, [rng.random(), rng.random()])
        kept = tree.tokens[walk.accepted[1]] if len(walk.accepted) > 1 else None
        seen[kept if kept is not None else rng.choices(range(3), walk.final)[0]] += 1
    distance = sum((seen[token] - rounds * p) ** 2 / (rounds * p) for token, p in enumerate(chances))
    assert distance < 23.0  # p = 1e-5
