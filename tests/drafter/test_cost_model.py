"""What the tuner believes: curves of rows, chances of acceptance, costs of hops, sizes and levels."""

from __future__ import annotations

import numpy as np
import pytest

from specsot.members import Curve
from specsot_drafter.core.acceptance import PRIOR_ACCEPTANCE, AcceptanceRates, TreeWorth
from specsot_drafter.core.cost_model import RowCurve
from specsot_drafter.core.tree_budget import FIRST_REST_LAPS, MeasuredBudget
from tests.drafter.laps import DEMO, FP32, LARGE, QUICK_HEAD, SHAPE, hop, looked, seconds_of

pytestmark = pytest.mark.slow


def test_acceptance_learns_per_depth_and_forgets() -> None:
    acceptance = AcceptanceRates(3)
    for _ in range(200):
        acceptance.record([(3, (0.9, 0.8, 0.7), 1)])
    first, second, _ = acceptance.by_depth()
    assert first > 0.9
    assert second < 0.2
    assert acceptance.trust()[1] < 0.2
    acceptance.discount()
    for _ in range(4):
        acceptance.record([(1, (0.9,), 0)])
    assert acceptance.by_depth()[0] < 0.6


def test_trust_never_rises_with_depth() -> None:
    acceptance = AcceptanceRates(4)
    for _ in range(50):
        acceptance.record([(4, (0.9, 0.01, 0.01, 0.01), 4)])
    assert np.all(np.diff(acceptance.trust()) <= 0)


def test_what_nodes_are_worth_is_known_by_depth_whatever_grew_last() -> None:
    """A third node of trees of two levels is a sibling, and of three levels one more token: mixed up, neither
    a third level nor a third node was worth it.
    """
    worth, depths = TreeWorth(AcceptanceRates(4)), np.array([1, 1, 2, 2, 3, 3])
    values = np.array([[0.8, 0.1, 0.6, 0.05, 0.4, 0.02], [0.8, 0.1, 0.05, 0.6, 0.02, 0.4]])
    worth.record(values, depths)
    for _ in range(20):
        worth.record(values[:, :4] / 2, depths[:4])
    three = worth.best(4, 3)
    assert three[1] == pytest.approx(np.cumsum([0.4, 0.3, 0.05]), rel=0.02)
    assert three[2] == pytest.approx(np.cumsum([0.4, 0.3, 0.2]), rel=0.02)
    assert worth.best(4, 4)[3, 3] - three[2, 2] == pytest.approx(0.2 * PRIOR_ACCEPTANCE, rel=0.02)
    worth.record(np.full((1, 2), -np.inf), depths[:2])
    assert worth.best(2, 5)[1, 4] == worth.best(2, 4)[1, 3], "there are no more"


def test_trees_cut_short_by_their_texts_ends_say_nothing_of_what_others_are_worth() -> None:
    """Else eight texts send fewer nodes whenever one of them ends."""
    alone, beside = TreeWorth(AcceptanceRates(4)), TreeWorth(AcceptanceRates(4))
    value, depths = np.array([0.8, 0.1, 0.6, 0.05]), np.array([1, 1, 2, 2])
    barred = np.full(2, -np.inf)
    alone.record(value[None], depths)
    beside.record(np.array([[*value[:2], *barred], value, [*barred, *barred]]), depths)
    assert beside.best(2, 4) == pytest.approx(alone.best(2, 4))


@pytest.mark.parametrize(
    ("curve", "rows", "seconds"),
    [
        (((1, 1.0), (3, 2.0)), 2, 1.5),
        (((1, 1.0), (3, 2.0)), 5, 3.0),
        (((4, 1.0), (8, 2.0)), 1, 1.0),
        (((1, 2.0), (2, 1.0), (4, 4.0)), 2, 2.0),
        (((2, 1.0),), 4, 2.0),
        ((), 9, 1.0),
    ],
)
def test_time_between_and_beyond_measured_points(curve: Curve, rows: int, seconds: float) -> None:
    assert float(RowCurve(curve).at(rows)) == pytest.approx(seconds)


def test_real_laps_move_the_curve_and_one_wild_one_does_not() -> None:
    timing = RowCurve(((1, 1.0), (10, 2.0)))
    for seconds in (3.0, 1000.0, 3.0, 3.0):
        timing.record(float(timing.at(1)), seconds)
    assert float(timing.at(10)) == pytest.approx(6.0)


def test_an_unmeasured_curve_believes_its_first_observation() -> None:
    timing = RowCurve(())
    timing.record(float(timing.at(4)), 0.003)
    assert float(timing.at(40)) == pytest.approx(0.003)


def test_hops_that_only_drafts_need_are_a_cost_of_drafts() -> None:
    """Where waiting for trees takes as long as a lap, drafting does not pay."""
    near, far = (MeasuredBudget(SHAPE, DEMO, QUICK_HEAD) for _ in range(2))
    for tuner, waiting in ((near, 0.2e-3), (far, 9e-3)):
        for _ in range(30):
            hop(tuner, True, waiting)
            hop(tuner, False, 0.1e-3)
    assert looked(near, 1).plan_levels(1, 6) > 0
    assert looked(far, 1).plan_levels(1, 6) == 0


def test_trees_larger_than_their_curve_says_are_priced_by_their_size_and_make_no_plain_lap_longer() -> None:
    """A base in 4 bits took 41 ms for eight rows where the curve said 16, 8 for one, and no more for two."""
    tuner = MeasuredBudget(SHAPE, DEMO, QUICK_HEAD)
    small, large, plain = (
        *(float(tuner.costs.tree_rows(1, nodes)) for nodes in (1, 8)),
        tuner.costs.plain_lap(1),
    )
    for _ in range(3):
        tuner.costs.record_lap(1, 1, 3.2e-3)
        tuner.costs.record_lap(1, 9, 9e-3)
    assert float(tuner.costs.tree_rows(1, 8)) > large + 3e-3
    assert float(tuner.costs.tree_rows(1, 1)) == pytest.approx(small)
    assert tuner.costs.plain_lap(1) == pytest.approx(plain)


def test_sizes_that_were_never_seen_are_no_cheaper_than_the_next_smaller_one_that_was() -> None:
    """Small trees took twice what the curve says: a large one that nobody saw looked cheaper than they."""
    tuner = MeasuredBudget(SHAPE, FP32, QUICK_HEAD)
    for _ in range(5):
        tuner.costs.record_lap(1, 1, 5.25e-3)
        tuner.costs.record_lap(1, 5, 2 * seconds_of(FP32, 5))
    for rows in (5, 9, 20, 60):
        expected = 2 * seconds_of(FP32, rows) - seconds_of(FP32, 1)
        assert float(tuner.costs.tree_rows(1, rows - 1)) == pytest.approx(expected)
    assert float(tuner.costs.tree_rows(1, 1)) == pytest.approx(seconds_of(FP32, 2) - seconds_of(FP32, 1))


def test_a_plain_lap_is_compared_with_each_size_by_laps_of_that_size() -> None:
    """Three large trees take twice what the curve says, a small one behind them what it says."""
    tuner = MeasuredBudget(SHAPE, FP32, QUICK_HEAD)
    for _ in range(6):
        for rows in (9, 9, 9, 2):
            tuner.costs.record_lap(1, rows, (1 + (rows > 2)) * seconds_of(FP32, rows))
        tuner.costs.record_lap(1, 1, 5.25e-3)
    assert float(tuner.costs.tree_rows(1, 1)) == pytest.approx(seconds_of(FP32, 2) - seconds_of(FP32, 1))
    assert float(tuner.costs.tree_rows(1, 8)) == pytest.approx(2 * seconds_of(FP32, 9) - seconds_of(FP32, 1))


def test_larger_trees_are_compared_with_smaller_ones_whose_cost_is_known() -> None:
    """Where drafts pay there are hardly any plain laps to compare them with."""
    tuner = MeasuredBudget(SHAPE, FP32, QUICK_HEAD)
    for _ in range(3):
        tuner.costs.record_lap(1, 1, 5.25e-3)
        tuner.costs.record_lap(1, 2, seconds_of(FP32, 2))
    for _ in range(5):
        tuner.costs.record_lap(1, 2, seconds_of(FP32, 2))
        tuner.costs.record_lap(1, 9, 2 * seconds_of(FP32, 9))
    assert float(tuner.costs.tree_rows(1, 8)) == pytest.approx(2 * seconds_of(FP32, 9) - seconds_of(FP32, 1))


def test_what_growing_took_while_the_machine_was_slow_is_forgotten_in_a_rest() -> None:
    """The least stays: else no trial was ever cheap enough again."""
    tuner = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD)
    for seconds in (0.4e-3, *[8e-3] * 8):
        tuner.record_growth(1, 1, 2, seconds)
    assert float(tuner.costs.draft_seconds(1, 1)) > 7e-3
    tuner.costs.skip_laps(FIRST_REST_LAPS)
    assert float(tuner.costs.draft_seconds(1, 1)) == pytest.approx(0.4e-3 + tuner.costs.handover())


def test_a_plain_lap_of_a_busy_moment_is_no_longer_than_drafted_ones_since_allow() -> None:
    """SmolLM2 in 4 bits: 8 ms that were seen once made laps of 5.5 ms count as 12.6 for hundreds of tokens,
    and drafts that lost a third as a gain."""
    costs = MeasuredBudget(SHAPE, FP32, QUICK_HEAD).costs
    computed = seconds_of(FP32, 1)
    costs.record_plain(1, computed + 8e-3, computed)
    for _ in range(4):
        costs.record_hop(True, 2.6e-3, computed, 3, 1)
    assert costs.plain_lap(1) == pytest.approx(computed + 2.6e-3)


def test_what_laps_took_beside_computing_is_forgotten_with_the_speed_of_the_machine() -> None:
    costs = MeasuredBudget(SHAPE, FP32, QUICK_HEAD).costs
    computed = seconds_of(FP32, 1)
    for speed, beside in ((1.0, 0.5e-3), (3.0, 8e-3)):
        for _ in range(9):
            costs.record_lap(1, 1, speed * computed)
        assert costs.plain_is_old == (speed > 1)
        costs.record_plain(1, speed * computed + beside, speed * computed)
        assert costs.plain_lap(1) == pytest.approx(speed * computed + beside)
        for _ in range(9):  # the first of all tells nothing
            costs.record_hop(True, 2 * beside, speed * computed, 3, 1)
    assert not costs.plain_is_old
