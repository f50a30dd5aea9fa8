"""Models of what steps take: of stages on CPUs, and of a stage on a GPU."""

from __future__ import annotations

import pytest

from specsot.members import Curve
from specsot_drafter.core.budget import StepSeconds
from specsot_drafter.core.device_costs import DeviceCosts
from specsot_drafter.core.step_costs import HELD_STEPS, LOOK_STEPS, QUANTILE, StepCosts
from tests.drafter.curves import DEAR, DEMO, QUICK_HEAD, SHAPE, STEEP

WIDTHS = (SHAPE.top_k,) * SHAPE.depth
FLAT: Curve = ((1, 1e-3), (64, 1e-3))
FLAT_LEVEL: Curve = ((1, 1e-5), (64, 1e-5))


def wall(seconds: float, growing: float = 0.0, waited: float | None = None) -> StepSeconds:
    """A step of which the computing of the stages is unknown."""
    return StepSeconds(0.0, seconds, growing, waited)


def costs(step: Curve = DEMO, level: Curve = QUICK_HEAD) -> StepCosts:
    return StepCosts(step, level, WIDTHS)


def test_a_curve_that_a_busy_start_spoilt_is_scaled_by_the_first_step() -> None:
    """41 times what steps took, and flat."""
    seen = costs(((1, 1.3186), (32, 1.3195), (64, 1.56)))
    seen.record_baseline(1, wall(32e-3))
    seen.learn()
    assert seen.baseline(1) == pytest.approx(32e-3)
    assert float(seen.drafted(1, 1, 1, 0)) < 40e-3


def test_steps_that_take_longer_whatever_their_size_are_no_reason_to_draft_less_deep() -> None:
    """The host takes 2 ms: one size was seen, and others take that much more, not that many times as much."""
    seen = costs(FLAT)
    for _ in range(4 * HELD_STEPS):
        seen.record_baseline(1, wall(1e-3))
        seen.record_drafted(1, 1, 1, 2, wall(3e-3 + 0.3e-3, 0.3e-3))
        seen.learn()
    assert float(seen.drafted(1, 1, 1, 20)) == pytest.approx(3.3e-3, rel=0.05)


# Seconds of four hops between stages 100 ms apart.
HOPS = 0.216


def test_hops_are_added_to_what_rows_take_and_do_not_scale_it() -> None:
    costs = StepCosts(DEAR, FLAT_LEVEL, WIDTHS)
    for _ in range(LOOK_STEPS):
        costs.record_baseline(1, StepSeconds(0.011, HOPS + 0.011))
    costs.learn()
    assert costs.hops == pytest.approx(HOPS)
    assert costs.baseline(1) == pytest.approx(HOPS + 0.011)
    assert costs.drafted(1, 1, 1, 15) == pytest.approx(HOPS + 0.052, abs=1e-3)
    costs.record_drafted(1, 1, 1, 16, wall(HOPS + 0.052, 1e-5))
    costs.learn()
    assert costs.drafted(6, 6, 1, 58) == pytest.approx(HOPS + 0.230, abs=1e-3)
    assert costs.baseline(6) == pytest.approx(HOPS + 0.025, abs=1e-3)


def test_where_computing_is_most_of_a_step_there_are_no_hops() -> None:
    costs = StepCosts(DEAR, FLAT_LEVEL, WIDTHS)
    for away, computing in ((0.010, 0.011), (0.5, 0.0), (0.009, 0.012)):
        costs.record_baseline(1, StepSeconds(computing, away + computing))
    assert costs.hops == 0


def test_sizes_that_were_seen_cost_what_they_took() -> None:
    """Rows cost twice what the curve says, from eight on."""
    seen = costs()
    for _ in range(4 * HELD_STEPS):
        seen.record_drafted(1, 1, 1, 2, wall(4e-3, 0.3e-3))
        seen.record_drafted(1, 1, 1, 9, wall(9e-3, 0.3e-3))
        seen.learn()
    assert float(seen.drafted(1, 1, 1, 1)) == pytest.approx(4e-3, rel=0.1)
    assert float(seen.drafted(1, 1, 1, 8)) == pytest.approx(9e-3, rel=0.1)


def test_steps_that_a_neighbour_slows_down_now_and_then_are_not_what_drafts_cost() -> None:
    seen = costs()
    for number in range(40):
        seen.record_drafted(1, 1, 1, 2, wall(60e-3 if number % 8 == 7 else 5e-3, 0.3e-3))
    seen.learn()
    assert float(seen.drafted(1, 1, 1, 1)) < 6e-3


def test_a_baseline_seen_in_a_slow_moment_is_no_longer_than_steps_with_drafts() -> None:
    seen = costs()
    seen.record_baseline(1, wall(30e-3))
    for _ in range(5):
        seen.record_drafted(1, 1, 1, 2, wall(5e-3, 0.3e-3))
    seen.learn()
    assert seen.baseline(1) < 6e-3


def test_a_pause_forgets_the_slow_steps() -> None:
    """A minute in which neighbours computed is not believed for as long as nothing is drafted."""
    seen = costs()
    for number in range(20):
        seen.record_drafted(1, 1, 1, 2, wall(5e-3 if number < 4 else 50e-3, 0.3e-3))
    seen.forget()
    assert seen.known == 1 + int(20 * QUANTILE)
    seen.forget()
    seen.learn()
    assert float(seen.drafted(1, 1, 1, 1)) < 6e-3


def test_the_first_slow_steps_of_a_new_number_of_sequences_are_not_what_its_steps_cost() -> None:
    """They capture graphs: until eight steps have run, steps of the nearest number of sequences count."""
    seen = DeviceCosts(FLAT, FLAT_LEVEL, WIDTHS)
    for _ in range(2 * HELD_STEPS):
        seen.record_drafted(1, 1, 3, 24, wall(2e-3))
    for _ in range(HELD_STEPS // 2):
        seen.record_drafted(8, 8, 3, 24, wall(60e-3))
    seen.learn()
    assert float(seen.drafted(8, 8, 1, 16)) < 2.5e-3
    for _ in range(6 * HELD_STEPS):
        seen.record_drafted(8, 8, 3, 24, wall(4e-3))
    seen.learn()
    assert float(seen.drafted(8, 8, 1, 16)) == pytest.approx(4e-3, rel=0.1)


def test_no_step_takes_negative_seconds_if_a_busy_start_has_spoilt_the_curve() -> None:
    """512 rows take 5 ms, where the curve has 9 ms."""
    seen = DeviceCosts(((1, 2.6e-3), (64, 3.2e-3), (512, 9e-3)), FLAT_LEVEL, WIDTHS)
    for _ in range(4 * HELD_STEPS):
        seen.record_baseline(64, wall(2.5e-3))
        seen.record_drafted(64, 64, 1, 512, wall(5e-3))
        seen.learn()
    assert seen.baseline(64) == pytest.approx(2.5e-3)
    assert float(seen.drafted(64, 64, 1, 0)) >= 2.5e-3


# Seconds of a stage on a GPU.
DEVICE: Curve = ((1, 2e-3), (64, 2.5e-3), (512, 4e-3))


def test_where_nothing_overlaps_more_rows_cost_what_the_curve_says() -> None:
    """64 sequences take 5 ms beyond the curve with drafts, and 2 ms without, whatever the number of nodes."""
    seen = DeviceCosts(DEVICE, FLAT_LEVEL, WIDTHS)
    for _ in range(4 * HELD_STEPS):
        seen.record_baseline(64, wall(4.5e-3))
        seen.record_drafted(64, 64, 3, 512, wall(9e-3))
        seen.learn()
    assert seen.baseline(64) == pytest.approx(4.5e-3)
    assert float(seen.drafted(64, 64, 1, 0)) == pytest.approx(7.5e-3, rel=0.02)


@pytest.mark.parametrize(
    ("waited", "with_fewer_rows"),
    [
        (0.0, 9.0e-3),  # the device was done before the host: fewer rows save nothing
        (1.0e-3, 8.0e-3),  # the host waited 1 ms for 4 ms of the device: fewer rows save that wait only
        (4.0e-3, 7.5e-3),  # nothing overlapped: fewer rows save 1.5 ms, as the curve says
    ],
)
def test_what_overlaps_with_the_host_costs_nothing(waited: float, with_fewer_rows: float) -> None:
    """512 rows took 9 ms."""
    seen = DeviceCosts(DEVICE, FLAT_LEVEL, WIDTHS)
    for _ in range(8 * HELD_STEPS):
        seen.record_drafted(64, 64, 1, 512, wall(9e-3, waited=waited))
        seen.learn()
    assert float(seen.drafted(64, 64, 1, 448)) == pytest.approx(9e-3, rel=0.01)
    assert float(seen.drafted(64, 64, 1, 0)) == pytest.approx(with_fewer_rows, rel=0.01)


def test_a_host_that_hardly_waits_hides_larger_trees_too() -> None:
    """128 rows took 9 ms, of which the host waited 0.1 ms. For 512 rows, the device computes 1.3 ms more."""
    seen = DeviceCosts(DEVICE, FLAT_LEVEL, WIDTHS)
    for _ in range(8 * HELD_STEPS):
        seen.record_drafted(64, 64, 1, 128, wall(9e-3, waited=1e-4))
        seen.learn()
    assert float(seen.drafted(64, 64, 1, 448)) == pytest.approx(9e-3, rel=0.02)


def test_without_any_curve_a_step_costs_the_same_whatever_its_size() -> None:
    seen = costs((), ())
    assert seen.baseline(1) == seen.baseline(9) == 1.0


def test_a_tree_larger_than_any_seen_costs_its_rows() -> None:
    """A line through noisy steps of nearly equal rows is flat, but 64 rows are not as cheap as seven."""
    costs = StepCosts(STEEP, QUICK_HEAD, (10,) * 5)
    costs.record_baseline(1, wall(1.0e-3))
    for rows, took in ((6, 6.5e-3), (7, 5.5e-3), (6, 6.4e-3), (7, 5.6e-3)) * 3:
        costs.record_drafted(1, 1, 1, rows, wall(took))
    costs.learn()
    assert float(costs.drafted(1, 1, 1, 63)) > 40e-3


def test_growth_of_the_few_steps_that_are_not_asynchronous_does_not_count() -> None:
    """These steps catch up, too: levels seemed to cost five times as much as by the curve (H200)."""
    seen = DeviceCosts(FLAT, FLAT_LEVEL, WIDTHS)
    for levels in (1, 3):
        seen.record_drafted(1, 1, levels, 8, wall(5e-3, growing=levels * 1e-3))
    seen.learn()
    assert float(seen.drafted(1, 1, 5, 7) - seen.drafted(1, 1, 3, 7)) > 1e-3
    seen.record_drafted(1, 1, 3, 8, wall(2e-3, waited=1e-3))
    seen.learn()
    assert float(seen.drafted(1, 1, 5, 7) - seen.drafted(1, 1, 3, 7)) == pytest.approx(2e-5)
    seen.record_drafted(64, 64, 3, 192, wall(25e-3, growing=14e-3))
    seen.learn()
    assert float(seen.drafted(1, 1, 3, 7)) < 5e-3, "nor does that of a step after the asynchronous ones"
