"""Costs of trees that travel in parts, and the order of their nodes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specsot.core.cost_curve import CostCurve
from specsot.core.tree import Tree, depths
from specsot.members import Curve
from specsot_drafter.core.budget import StepSeconds
from specsot_drafter.core.part_costs import MAX_CUT_ROWS, PartCosts
from specsot_drafter.core.selection import likeliest_first
from specsot_drafter.core.step_costs import StepCosts
from tests.conftest import seeds

# Steps of the 1.5B in int8 without VNNI, and steps that take equally long.
DEAR: Curve = ((1, 0.1118), (2, 0.1264), (4, 0.1286), (8, 0.3255), (16, 0.596), (24, 0.9308), (48, 1.8029))
FLAT: Curve = ((1, 0.0017), (16, 0.0021), (64, 0.0024))


def test_a_tree_in_parts_has_the_rows_of_a_whole_tree_that_takes_as_long() -> None:
    costs, step = PartCosts(CostCurve(DEAR), 4), CostCurve(DEAR)
    nodes = np.array([0, 1, 3, 23])
    rows = costs.whole_rows(nodes)
    assert rows[:3].tolist() == [1, 2, 4]
    # Six parts of four nodes: the first passes all stages, each further one takes a stage's time longer.
    assert step.at(rows[3]) == pytest.approx(0.1286 * (1 + 5 / 4), rel=1e-3)


def test_parts_count_as_often_as_they_are_awaited() -> None:
    costs, step = PartCosts(CostCurve(DEAR), 4), CostCurve(DEAR)
    nothing, certain = np.zeros(24), np.arange(24.0)
    half = np.where(np.arange(24) > 3, 0.5, 0.0)
    seconds = [
        step.at(float(costs.whole_rows(np.array(23), worth))) for worth in (nothing, half, certain, None)
    ]
    first = 0.1286
    assert seconds == pytest.approx([first, first * (1 + 0.5 / 4), *[first * (1 + 5 / 4)] * 2], rel=0.02)


def test_nothing_changes_where_parts_gain_nothing() -> None:
    nodes = np.arange(MAX_CUT_ROWS + 20)
    assert PartCosts(CostCurve(FLAT), 4).whole_rows(nodes) == pytest.approx(nodes + 1.0)
    one_stage = StepCosts(DEAR, FLAT, (4,) * 5)
    several = StepCosts(DEAR, FLAT, (4,) * 5, overlapping_stages=4)
    assert several.drafted(2, 2, 1, nodes) == pytest.approx(one_stage.drafted(2, 2, 1, nodes))
    assert float(several.drafted(1, 1, 1, 23)) < 0.4 * float(one_stage.drafted(1, 1, 1, 23))


def test_a_step_in_parts_is_recorded_as_what_it_is_estimated_as() -> None:
    costs = StepCosts(DEAR, FLAT, (4,) * 5, overlapping_stages=4)
    for _ in range(10):
        costs.record_drafted(1, 1, 1, 24, StepSeconds(wall=0.4, growing=0.0017))
    costs.learn()
    assert float(costs.drafted(1, 1, 1, 23)) == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize("seed", seeds(20, quick=6))
def test_likeliest_nodes_first_is_the_same_tree(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randrange(1, 20)
    parents = tuple(rng.randrange(max(node, 1)) for node in range(nodes))
    tree = Tree(tuple(rng.sample(range(100), nodes)), parents)
    worth = [1.0]
    for node in range(1, nodes):
        worth.append(worth[parents[node]] * rng.choice((1.0, 0.5, 0.1)))
    ordered = likeliest_first(tree, np.array(worth[1:]))

    def edges(one: Tree) -> set[tuple[int, int]]:
        return {(one.tokens[parent], token) for token, parent in zip(one.tokens, one.parents)}

    assert edges(ordered) == edges(tree)
    assert sorted(depths(ordered.parents)) == sorted(depths(parents))
    chances = dict(zip(tree.tokens, worth))
    assert [chances[token] for token in ordered.tokens] == sorted(worth, reverse=True)
