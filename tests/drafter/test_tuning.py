"""The tuner on recorded cost curves: never far below plain, well above it where drafting pays."""

from __future__ import annotations

import numpy as np
import pytest

from specsot.members import Curve
from specsot_drafter.acceptance import Acceptance
from specsot_drafter.timing import Timing
from specsot_drafter.tuning import Returned, Tuner
from tests.drafter.laps import DEMO, LARGE, QUICK_HEAD, SHAPE, SLOW_HEAD, STEEP, World, run

pytestmark = pytest.mark.slow

LAPS = {"demo": DEMO, "large": LARGE, "steep": STEEP}
HEADS = {"quick": QUICK_HEAD, "slow": SLOW_HEAD}


@pytest.mark.parametrize("live", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lap", LAPS)
def test_never_below_097_of_plain(lap: str, head: str, live: int) -> None:
    for truth in (0.0, 0.2, 0.5, 1.0):
        ratio = run(World(LAPS[lap], HEADS[head], live, truth), laps=120, seed=live).ratio
        assert ratio >= 0.97, f"true acceptance {truth} of the claimed"


@pytest.mark.parametrize("live", [1, 4, 8])
@pytest.mark.parametrize("strain", [1.3, 1.8])
def test_not_even_where_laps_with_trees_take_longer_than_measured(strain: float, live: int) -> None:
    for truth in (0.0, 0.5, 1.0):
        assert run(World(DEMO, QUICK_HEAD, live, truth, strain), laps=200, seed=live).ratio >= 0.97


def test_a_text_that_turns_against_the_head_costs_little() -> None:
    """Drafting pays, then nothing is ever accepted again; counted from the turn on."""
    tuner = Tuner(SHAPE, DEMO, QUICK_HEAD)
    assert run(World(DEMO, QUICK_HEAD, 1, truth=1.0), laps=100, tuner=tuner).ratio > 1.3
    assert run(World(DEMO, QUICK_HEAD, 1, truth=0.0), laps=400, tuner=tuner).ratio > 0.9


def test_hope_returns_when_the_text_turns_friendly() -> None:
    tuner = Tuner(SHAPE, DEMO, QUICK_HEAD)
    run(World(DEMO, QUICK_HEAD, 1, truth=0.0), laps=200, tuner=tuner)
    assert run(World(DEMO, QUICK_HEAD, 1, truth=1.0), laps=200, tuner=tuner).ratio > 1.3


@pytest.mark.parametrize(
    ("lap", "live", "least"), [("demo", 1, 1.5), ("demo", 4, 1.25), ("large", 1, 2.0), ("large", 16, 1.4)]
)
def test_where_drafting_pays_it_is_done(lap: str, live: int, least: float) -> None:
    assert run(World(LAPS[lap], QUICK_HEAD, live, truth=1.0), laps=200).ratio > least


def test_a_drafter_that_cannot_pay_is_hardly_ever_asked() -> None:
    """Even perfect guesses would lose. What trials there are come from the allowance."""
    tried = run(World(STEEP, SLOW_HEAD, 4, truth=1.0), laps=2000)
    assert tried.drafted <= 20
    assert tried.ratio >= 0.97


def test_a_wrong_measurement_is_found_out() -> None:
    """The head was measured forty times too slow; trials from the allowance show what it really takes."""
    slow = tuple((rows, seconds * 40) for rows, seconds in QUICK_HEAD)
    tuner = Tuner(SHAPE, LARGE, slow)
    world = World(LARGE, QUICK_HEAD, 1, truth=1.0)
    assert run(world, laps=100, tuner=tuner).drafted == 0
    run(world, laps=2000, tuner=tuner, measured=True)
    assert run(world, laps=100, tuner=tuner, measured=True).ratio > 1.4


def test_trials_are_few_where_nothing_is_accepted() -> None:
    assert run(World(DEMO, QUICK_HEAD, 8, truth=0.0), laps=400).drafted < 20


def test_more_rows_are_sent_where_rows_are_cheap() -> None:
    worth = np.linspace(0.8, 0.05, 40)
    counts = [Tuner(SHAPE, lap, QUICK_HEAD).choose_rows(worth, 4, 1) for lap in (STEEP, DEMO, LARGE)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_no_rows_are_chosen_that_are_worth_nothing() -> None:
    assert Tuner(SHAPE, DEMO, QUICK_HEAD).choose_rows(np.zeros(20), 1, 1) == 0


def test_rest_ends_early_when_the_number_of_trees_changes_much() -> None:
    tuner = Tuner(SHAPE, STEEP, SLOW_HEAD)
    assert tuner.plan_levels(16, 6) == 0
    assert tuner.rest > 1
    tuner.plan_levels(16, 6)
    resting = tuner.rest
    tuner.plan_levels(2, 6)
    assert tuner.rest > resting  # it looked again, and began a new rest


def test_nothing_is_planned_for_nobody() -> None:
    tuner = Tuner(SHAPE, LARGE, QUICK_HEAD)
    assert tuner.plan_levels(0, 6) == 0
    assert tuner.plan_levels(3, 0) == 0
    assert tuner.rest == 0


def test_a_tuner_without_curves_drafts() -> None:
    """Nothing measured: a lap costs the same whatever its rows."""
    assert Tuner(SHAPE, (), ((1, 0.01), (64, 0.02))).plan_levels(2, 6) == 6


def test_acceptance_learns_per_depth_and_forgets() -> None:
    acceptance = Acceptance(3)
    for _ in range(200):
        acceptance.note(3, (0.9, 0.8, 0.7), accepted=1)
    first, second, _ = acceptance.chances()
    assert first > 0.9
    assert second < 0.2
    assert acceptance.trust()[1] < 0.2
    for _ in range(1000):
        acceptance.fade()
    assert acceptance.chances()[1] > 0.6


def test_trust_never_rises_with_depth() -> None:
    acceptance = Acceptance(4)
    for _ in range(50):
        acceptance.note(4, (0.9, 0.01, 0.01, 0.01), accepted=4)
    assert np.all(np.diff(acceptance.trust()) <= 0)


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
    assert float(Timing(curve).at(rows)) == pytest.approx(seconds)


def test_real_laps_move_the_curve_and_one_wild_one_does_not() -> None:
    timing = Timing(((1, 1.0), (10, 2.0)))
    timing.note(1.0, 1000.0)
    assert float(timing.at(1)) < 1.5
    for _ in range(100):
        timing.note(float(timing.at(1)), 3.0)
    assert float(timing.at(10)) == pytest.approx(6.0, rel=0.01)


def test_an_unmeasured_curve_believes_its_first_observation() -> None:
    timing = Timing(())
    timing.note(float(timing.at(4)), 0.003)
    assert float(timing.at(40)) == pytest.approx(0.003)


def test_hops_that_only_drafts_need_are_a_cost_of_drafts() -> None:
    """Where waiting for trees takes as long as a lap, drafting does not pay."""
    near, far = (Tuner(SHAPE, DEMO, QUICK_HEAD) for _ in range(2))
    for tuner, waiting in ((near, 0.2e-3), (far, 9e-3)):
        for _ in range(30):
            tuner.note_hop(True, waiting, 3e-3)
            tuner.note_hop(False, 0.1e-3, 3e-3)
    assert near.plan_levels(1, 6) > 0
    assert far.plan_levels(1, 6) == 0


def test_a_client_that_dawdles_is_no_hop() -> None:
    """One lap that waited for its reader for ten seconds."""
    tuner = Tuner(SHAPE, DEMO, QUICK_HEAD)
    for _ in range(20):
        tuner.note_hop(True, 0.3e-3, 3e-3)
        tuner.note_hop(False, 0.1e-3, 3e-3)
    tuner.note_hop(True, 10.0, 3e-3)
    for _ in range(10):
        tuner.note_hop(True, 0.3e-3, 3e-3)
    assert tuner.plan_levels(1, 6) > 0


def test_a_lap_of_nobody_teaches_nothing() -> None:
    tuner = Tuner(SHAPE, DEMO, QUICK_HEAD)
    tuner.settle([])
    tuner.settle([Returned(grown=2, rows=3, masses=(0.9, 0.5), accepted=2)])
    assert tuner.acceptance.chances()[0] > 0.75
