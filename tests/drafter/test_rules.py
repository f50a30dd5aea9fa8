"""Rules that look at no clock: all of it always, and the seed's running mean."""

from __future__ import annotations

import numpy as np
import pytest

from specsot.members import TreeShape
from specsot_drafter.core.budget import FixedBudget, SeedBudget, TreeOutcome
from specsot_drafter.core.control import DraftPolicy, make_budget
from specsot_drafter.core.selection import Candidates

SHAPE = TreeShape(depth=11, top_k=1, nodes=13)
STEP = ((1, 1e-3), (64, 2e-3))


def returned(grown: int, accepted: int) -> TreeOutcome:
    return TreeOutcome(grown, grown + 1, (0.5,) * grown, accepted)


@pytest.mark.parametrize(
    ("outcomes", "depth"),
    [
        ([], 5),
        ([(5, 5)], 5),
        ([(5, 5)] * 2, 5),
        ([(5, 5)] * 3, 6),
        ([(5, 5)] * 60, 10),
        ([(5, 0)] * 4, 5),
        ([(5, 0)] * 5, 4),
        ([(5, 0)] * 60, 2),
        ([(5, 3)] * 60, 5),
        ([(0, 0)] * 60, 5),
    ],
)
def test_the_seeds_rule(outcomes: list[tuple[int, int]], depth: int) -> None:
    """mean = 0.9 mean + 0.1 accepted / drafted from 0.8 on; above 0.85 deeper, below 0.5 less; 2 .. 10."""
    rule = SeedBudget(SHAPE)
    for grown, accepted in outcomes:
        rule.record_step([returned(grown, accepted)])
    assert rule.plan_levels(3, 12) == depth
    assert rule.plan_levels(1, 1) == 1


def test_always_sends_the_best_nodes_of_every_tree() -> None:
    scores = np.log(np.array([[0.5, 0.3, 0.4, 0.1], [0.9, 0.1, 0.05, 0.01]]))
    offer = Candidates(np.zeros((2, 4), int), scores, np.array([[0, 0, 1, 1]] * 2), np.array([1, 1, 2, 2]))
    rule = FixedBudget(TreeShape(1, 2, 3))
    assert rule.select(rule.score(offer), 2, max_nodes=100).tolist() == [
        [True, False, True, False],
        [True, True, False, False],
    ]
    assert rule.select(rule.score(offer), 2, 3).sum(1).tolist() == [1, 1], "a frame's rows are shared"
    assert not rule.select(rule.score(offer), 2, max_nodes=1).any()
    assert not rule.adaptive


@pytest.mark.parametrize(
    ("name", "fixed", "kind"),
    [
        ("measured", False, DraftPolicy),
        ("measured", True, FixedBudget),
        ("seed", False, SeedBudget),
        ("fixed", False, FixedBudget),
    ],
)
def test_who_decides(name: str, fixed: bool, kind: type) -> None:
    shape = TreeShape(fixed=fixed)
    assert type(make_budget(name, shape, STEP, STEP, (4,) * 5)) is kind  # type: ignore[arg-type]


def test_who_always_sends_all_foresees_it() -> None:
    rule = FixedBudget(TreeShape(1, 2, 3))
    assert [rule.predict_nodes(2, 2, most) for most in (100, 3, 1)] == [2, 1, 0]
    assert rule.log_trust().tolist() == [0.0, 0.0]


def test_a_tuner_foresees_as_many_nodes_of_each_tree_as_bring_most() -> None:
    """As levels and nodes were chosen together, by what nodes of all texts were worth lately."""
    rule, few = DraftPolicy(TreeShape(3, 2, 12), STEP, ((1, 1e-6), (64, 1e-6)), (2, 2, 2), stepwise=False), 4
    worth = np.array([[0.9, 0.5, 0.8, 0.02, 0.2, 0.01, -np.inf]] * few)
    depths = np.array([1, 1, 2, 2, 3, 3, 4])
    assert (rule.plan_levels(few, 4), rule.paused_trees > 0) == (0, True), "a look at plain steps"
    none = np.zeros(worth.shape, np.int64)
    rule.keep_sample(Candidates(none, np.log(worth.clip(1e-9)), none, depths))
    levels = rule.plan_levels(few, 3)
    assert levels == 3
    foreseen = rule.predict_nodes(few, levels, 100)
    assert foreseen == rule.select(worth, levels, 100).sum(1).max() > 2
    assert rule.predict_nodes(few, levels, 9) == 2, "a frame's rows are shared"
