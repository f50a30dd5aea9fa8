"""The tuner on recorded cost curves: never far below plain, well above it where drafting pays."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from specsot_drafter.core.budget import ROOT_ONLY, LapSeconds, TreeOutcome
from specsot_drafter.core.tree_budget import (
    FIRST_REST_LAPS,
    LOOK_LAPS,
    LOOK_TEXTS,
    MAX_REST_LAPS,
    MeasuredBudget,
)
from tests.conftest import is_full, some
from tests.drafter.laps import (
    BF16,
    BF16_HEAD,
    DEMO,
    FP32,
    FP32_HEAD,
    LARGE,
    QUICK_HEAD,
    SHAPE,
    SLOW_HEAD,
    STEEP,
    Ring,
    Run,
    World,
    hop,
    looked,
    ring,
    seconds_of,
)

pytestmark = pytest.mark.slow

LAPS = {"demo": DEMO, "bf16": BF16, "fp32": FP32, "large": LARGE, "steep": STEEP}
HEADS = {"quick": QUICK_HEAD, "bf16": BF16_HEAD, "fp32": FP32_HEAD, "slow": SLOW_HEAD}
TRUTHS = (0.0, 0.2, 0.5, 0.8, 1.0)


def truths() -> tuple[float, ...]:
    return TRUTHS if is_full() else TRUTHS[::2]


def worlds(live: int) -> list[World]:
    """All of them by `make test-all`; else a fifth, in which every two of lap, head and truth meet."""
    numbers = itertools.product(range(len(LAPS)), range(len(HEADS)), range(len(TRUTHS)))
    laps, heads = [*LAPS.values()], [*HEADS.values()]
    return [
        World(laps[lap], heads[head], live, TRUTHS[truth])
        for lap, head, truth in numbers
        if is_full() or (lap + head + truth) % 5 == 0
    ]


@pytest.mark.parametrize(("live", "laps"), some([(1, 120), (2, 300), (3, 120), (8, 300), (16, 120)], 0))
def test_never_below_097_of_plain(live: int, laps: int) -> None:
    """Good heads and bad ones, cheap and expensive, alone and with many branches."""
    for seed, world in enumerate(worlds(live)):
        assert ring(world, seed, jitter=0.05).run(world, laps).ratio >= 0.97, world


@pytest.mark.parametrize("live", some([1, 4, 8], 1))
@pytest.mark.parametrize("strain", [1.3, 1.8])
def test_not_even_where_laps_with_trees_take_longer_than_measured(strain: float, live: int) -> None:
    for truth in truths():
        world = World(DEMO, QUICK_HEAD, live, truth, strain)
        assert ring(world, live).run(world, 400).ratio >= 0.97


@pytest.mark.parametrize("handover", [1e-3, 4e-3])
@pytest.mark.parametrize("row", some([5e-6, 2e-5], 1))
def test_not_even_where_drafts_come_from_far_away_or_catching_up_is_slow(handover: float, row: float) -> None:
    for truth in truths():
        world = World(DEMO, QUICK_HEAD, 2, truth, handover=handover, row=row)
        assert ring(world).run(world, 800).ratio >= 0.97


@pytest.mark.parametrize("seed", some(range(4), 1, 2))
def test_not_even_where_texts_and_numbers_of_branches_change_all_the_time(seed: int) -> None:
    rng = random.Random(seed)
    base = World(BF16, BF16_HEAD, 1, 0.5)
    turning, done = ring(base, seed, jitter=0.1), Run()
    for _ in range(60):
        world = replace(base, live=rng.choice([1, 1, 2, 5, 8]), truth=rng.choice(TRUTHS))
        turning.run(world, rng.randrange(5, 60), done)
    assert done.ratio >= 0.97


def test_a_text_that_turns_against_the_head_costs_little() -> None:
    """Drafting pays, then nothing is ever accepted again; counted from the turn on."""
    good = World(DEMO, QUICK_HEAD, 1, truth=1.0)
    turning = ring(good)
    assert turning.run(good, 100).ratio > 1.3
    assert turning.run(replace(good, truth=0.0), 400).ratio > 0.9


def test_hope_returns_when_the_text_turns_friendly() -> None:
    bad = World(DEMO, QUICK_HEAD, 1, truth=0.0)
    turning = ring(bad)
    turning.run(bad, 200)
    assert turning.run(replace(bad, truth=1.0), 600).ratio > 1.3


@pytest.mark.parametrize(
    ("lap", "live", "least"), [("demo", 1, 1.5), ("demo", 4, 1.2), ("large", 1, 2.0), ("large", 16, 1.4)]
)
def test_where_drafting_pays_it_is_done(lap: str, live: int, least: float) -> None:
    world = World(LAPS[lap], QUICK_HEAD, live, truth=1.0)
    assert ring(world).run(world, 200).ratio > least


def test_a_drafter_that_cannot_pay_is_hardly_ever_asked() -> None:
    """Even perfect guesses would lose. What trials there are come from the allowance."""
    world = World(STEEP, SLOW_HEAD, 4, truth=1.0)
    tried = ring(world).run(world, 2000)
    assert tried.drafted <= 20
    assert tried.ratio >= 0.98


def test_a_wrong_measurement_is_found_out() -> None:
    """The head was measured twenty times too slow; trials from the allowance show what it really takes."""
    slow = tuple((rows, seconds * 20) for rows, seconds in QUICK_HEAD)
    world = World(LARGE, QUICK_HEAD, 1, truth=1.0)
    turning = Ring(MeasuredBudget(SHAPE, LARGE, slow), random.Random(0))
    turning.run(world, 1000)
    assert turning.run(world, 100).ratio > 1.4


def test_trials_are_few_where_nothing_is_accepted() -> None:
    world = World(DEMO, QUICK_HEAD, 8, truth=0.0)
    assert ring(world).run(world, 400).drafted < 20


def test_rests_grow_while_trials_fail() -> None:
    """Each at least as long as the one before, up to the longest; a thousand laps cost a few trials."""
    world = World(DEMO, BF16_HEAD, 1, truth=0.0)
    turning, rests = ring(world), list[int]()
    for _ in range(5000):
        turning.run(world, 1)
        if turning.tuner.rest > 1 and turning.resting == turning.tuner.rest - 1:  # 1: a look at a plain lap
            rests.append(turning.tuner.rest)
    assert rests == sorted(rests)
    assert rests[-1] == MAX_REST_LAPS


def test_short_requests_do_not_begin_the_trials_anew() -> None:
    """What is known is the engine's: forty sequences of fifty laps cost no more than one long one."""
    world = World(BF16, BF16_HEAD, 1, truth=0.1)
    turning, done = ring(world), Run()
    for _ in range(40):
        turning.run(world, 50, done)
        turning.due = 0
    assert done.drafted < 100
    assert done.ratio >= 0.98


def test_more_rows_are_sent_where_rows_are_cheap() -> None:
    worth = np.linspace(0.8, 0.05, 40)
    counts = [MeasuredBudget(SHAPE, lap, QUICK_HEAD).count_rows(worth, 4, 1) for lap in (STEEP, DEMO, LARGE)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_no_rows_are_chosen_that_are_worth_nothing() -> None:
    assert MeasuredBudget(SHAPE, DEMO, QUICK_HEAD).count_rows(np.zeros(20), 1, 1) == 0


def test_nothing_is_planned_for_nobody() -> None:
    tuner = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD)
    assert tuner.plan_levels(0, 6) == 0
    assert tuner.plan_levels(3, 0) == 0
    assert tuner.rest == 0


def test_a_tuner_without_curves_drafts() -> None:
    """Nothing measured: a lap costs the same whatever its rows."""
    tuner = looked(MeasuredBudget(SHAPE, (), ((1, 0.01), (64, 0.02))), 2)
    assert tuner.plan_levels(2, 6) > 0


def test_a_level_is_not_grown_for_a_row_that_is_not_worth_sending() -> None:
    """It takes nothing itself: three were grown and two rows sent."""
    tuner = MeasuredBudget(SHAPE, STEEP, ((1, 1e-9), (64, 2e-9)))
    likely, unlikely = np.log(np.array([[0.99]])), np.log(np.array([[0.5]]))
    tuner.acceptance.record([(2, (0.99, 0.98), 2)] * 50)
    assert tuner.pays_deeper(likely, 1) == 1
    assert tuner.pays_deeper(unlikely, 1) == 0


def test_trees_begin_as_chains_of_one_and_double() -> None:
    worth = np.full(20, 0.99)
    tuner = looked(MeasuredBudget(SHAPE, LARGE, QUICK_HEAD), 1)
    assert tuner.plan_levels(1, 6) == 1
    for nodes in (1, 2, 4, 8, 16):
        assert tuner.count_rows(worth, 1, 1) == nodes
        tuner.record_lap([TreeOutcome(1, 1 + nodes, (0.99,), 1)])


def test_of_many_texts_a_few_are_drafted_for_first_and_after_each_rest() -> None:
    tuner = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD)
    assert tuner.plan_levels(4, 6, 0, 60) == 0
    for few in (4, 16, 64):
        assert tuner.limit_texts(64) == few
        assert tuner.plan_levels(few, 6, 0, 64 - few) > 0
        tuner.record_lap([TreeOutcome(1, 2, (0.9,), 1)] * few + [ROOT_ONLY] * (64 - few))
    while tuner.rest < 16 * 64:
        if tuner.plan_levels(64, 6):
            tuner.record_lap([TreeOutcome(1, 2, (0.9,), 0)] * 64)
    assert tuner.limit_texts(64) == 4


def test_a_client_that_dawdles_is_no_hop() -> None:
    """One lap that waited for its reader for ten seconds."""
    tuner = MeasuredBudget(SHAPE, DEMO, QUICK_HEAD)
    for _ in range(20):
        hop(tuner, True, 0.3e-3)
        hop(tuner, False, 0.1e-3)
    hop(tuner, True, 10.0)
    for _ in range(10):
        hop(tuner, True, 0.3e-3)
    assert looked(tuner, 1).plan_levels(1, 6) > 0


def lap(
    tuner: MeasuredBudget, live: int, accepted: int, seconds: float, wall: float, growing: float = 1e-3
) -> None:
    """One that comes back: chains of two levels, or roots alone."""
    grown = 2 if accepted else 0
    trees = [TreeOutcome(grown, 1 + grown, (0.8, 0.6)[:grown], accepted)] * live
    tuner.record_lap(trees, LapSeconds(seconds, wall, growing if grown else 0.0))


def test_a_look_at_plain_laps_of_many_texts_is_long_enough_to_see_them_begun_early() -> None:
    """One alone is not begun early: 64 texts on an H100 take 12 ms then, and 8 in a row of such laps."""
    tuner = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD)
    assert (tuner.plan_levels(LOOK_TEXTS, 6), tuner.rest) == (0, LOOK_LAPS * LOOK_TEXTS)
    tuner.record_rest(LOOK_LAPS * LOOK_TEXTS, LOOK_TEXTS)
    lap(tuner, LOOK_TEXTS, 0, 7e-3, 7.4e-3)
    assert tuner.costs.plain_lap(LOOK_TEXTS) < 9e-3


def test_it_does_not_look_amid_prompts() -> None:
    """Such laps are not timed. 64 texts that came one after another were looked at for 11 laps in vain."""
    tuner = looked(MeasuredBudget(SHAPE, LARGE, QUICK_HEAD), 4)
    tuner.record_lap([TreeOutcome(1, 2, (0.9,), 1)] * 4)
    assert tuner.plan_levels(16, 6) > 0
    lap(tuner, 16, 1, 7e-3, 8e-3)
    assert (tuner.plan_levels(16, 6), tuner.rest) == (0, LOOK_LAPS * 16)


def test_the_first_lap_is_plain_and_says_how_long_laps_are() -> None:
    """What was measured at a busy start was 41 times what laps took, and hardly rose with rows."""
    tuner = looked(MeasuredBudget(SHAPE, ((1, 1.3186), (32, 1.3195), (64, 1.56)), QUICK_HEAD), 1)
    lap(tuner, 1, 0, 31.7e-3, 32e-3)
    assert tuner.costs.plain_lap(1) == pytest.approx(32e-3)
    assert float(tuner.costs.level_seconds(1, 1)) == pytest.approx(seconds_of(QUICK_HEAD, 1)), "no 41st of it"
    assert tuner.plan_levels(1, 6) == 1
    assert tuner.count_rows(np.full(20, 0.99), 1, 1) == 1


def test_before_the_first_rest_a_plain_lap_shows_how_long_the_ring_is() -> None:
    """By its curves alone drafting never pays here; over links of 100 ms a lap it does."""
    tuner = MeasuredBudget(SHAPE, STEEP, SLOW_HEAD)
    assert (tuner.plan_levels(4, 6), tuner.rest) == (0, 4)
    tuner.record_rest(4, 4)
    lap(tuner, 4, 0, 4e-3, 104e-3)
    assert tuner.plan_levels(4, 6) > 0


def test_where_no_lap_is_timed_it_looks_once_and_rests() -> None:
    tuner = MeasuredBudget(SHAPE, STEEP, SLOW_HEAD)
    assert (tuner.plan_levels(4, 6), tuner.rest) == (0, 4)
    tuner.record_rest(4, 4)
    assert tuner.plan_levels(4, 6) == 0
    assert tuner.rest > 4


def test_a_block_is_one_pass_however_deep() -> None:
    """Its deeper levels feed nothing, and a pass over nothing takes no time."""
    level = ((0, 0.0), (1, 6e-3), (8, 8e-3))
    for widths, levels in (((0,) * SHAPE.depth, 6), (None, 1)):
        tuner = looked(MeasuredBudget(SHAPE, LARGE, level, widths), 1)
        tuner.record_lap([TreeOutcome(1, 9, (0.9,), 1)])
        assert (tuner.plan_levels(1, 6) == 6) is (levels == 6)


def test_one_slow_lap_at_the_beginning_is_not_what_drafts_cost() -> None:
    """It loses what may be risked at first; but what was accepted says that the next will gain."""
    tuner = MeasuredBudget(SHAPE, DEMO, QUICK_HEAD)
    tuner.plan_levels(6, 6)
    lap(tuner, 6, 1, 7e-3, 10e-3)
    tuner.plan_levels(6, 6)
    lap(tuner, 6, 0, 3.5e-3, 5e-3)
    assert tuner.plan_levels(6, 6) > 0


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_first_drafts_that_load_their_kernels_are_not_what_drafts_cost(slow: int) -> None:
    """Each takes twenty laps, once for every number of rows: drafting goes on."""
    tuner, drafted = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD), 0
    for _ in range(60):
        if tuner.plan_levels(1, 6):
            drafted += 1
            growing = 131e-3 if drafted <= slow else 2e-3
            lap(tuner, 1, 2, 7.1e-3, 7.5e-3 + growing, growing)
        else:
            assert tuner.rest == 1, "a look, no rest"
            lap(tuner, 1, 0, 7e-3, 7.4e-3)
    assert drafted > 50


def test_a_first_prompt_that_loads_kernels_is_not_what_catching_up_costs() -> None:
    """65 ms for 31 rows, as on a GPU whose kernels were cold: the next prompt is drafted for at once."""
    tuner = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD)
    before = tuner.costs.catchup(31)
    tuner.record_growth(1, 4, 31, 65e-3)
    assert before <= tuner.costs.catchup(31) < 2 * before
    assert tuner.costs.catchup(0) == 0


def test_rows_are_caught_up_with_in_one_pass() -> None:
    """Kernels that were compiled once, 1.5 s for 452 rows on an H200, made every trial of 64 texts look like
    0.7 ms a row: 810 ms for their prompts, for which no purse was ever large enough.
    """
    tuner = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD)
    tuner.record_growth(35, 1, 452, 1.548)
    assert tuner.costs.catchup(1132) < seconds_of(QUICK_HEAD, 1132)


def test_where_all_levels_are_grown_at_once_as_many_are_as_pay() -> None:
    """Nobody can stop them halfway: eight were grown where the second was hardly ever right."""
    tuner = looked(MeasuredBudget(SHAPE, LARGE, QUICK_HEAD), 1)
    tuner.record_growth(1, 3, 2, 1e-3)
    for _ in range(12):
        tuner.acceptance.record([(3, (0.8, 0.1, 0.01), 1)])
        tuner.record_lap([TreeOutcome(3, 9, (0.8, 0.1, 0.01), 1)])
    assert 1 <= tuner.plan_levels(1, 8) <= 3


def test_a_drafter_with_fewer_levels_than_are_asked_for_rests_all_the_same() -> None:
    """A parallel head, say: nobody knows what deeper trees cost, and nobody needs to."""
    tuner = looked(MeasuredBudget(SHAPE, STEEP, SLOW_HEAD, (1, 1)), 1)
    assert [tuner.plan_levels(1, 3) for _ in range(8)][-1] == 0
    assert tuner.rest >= FIRST_REST_LAPS


def test_drafts_that_always_take_that_long_soon_rest() -> None:
    tuner, drafted = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD), 0
    while tuner.rest <= 1 and drafted < 60:
        if tuner.plan_levels(1, 6):
            drafted += 1
            tuner.record_growth(1, 2, 2, 131e-3)
            lap(tuner, 1, 2, 7.1e-3, 138e-3, 131e-3)
        elif tuner.rest == 1:
            lap(tuner, 1, 0, 7e-3, 7.4e-3)
    assert drafted <= 12


def test_laps_that_a_busy_machine_holds_up_now_and_then_are_not_what_drafts_cost() -> None:
    tuner = MeasuredBudget(SHAPE, DEMO, QUICK_HEAD)
    for number in range(60):
        if tuner.plan_levels(1, 6):
            lap(tuner, 1, 1, 4e-3, 60e-3 if number % 8 == 7 else 6e-3)
        else:
            assert tuner.rest == 1, "a look, no rest"
            lap(tuner, 1, 0, 3e-3, 4e-3)


def test_a_lap_of_nobody_teaches_nothing() -> None:
    tuner = MeasuredBudget(SHAPE, DEMO, QUICK_HEAD)
    tuner.record_lap([])
    tuner.record_lap([TreeOutcome(grown=2, rows=3, masses=(0.9, 0.5), accepted=2)], LapSeconds(4e-3))
    assert tuner.acceptance.by_depth()[0] > 0.75


def test_now_and_then_a_lap_without_drafts_shows_what_plain_takes() -> None:
    world = World(LARGE, QUICK_HEAD, 2, truth=1.0)
    done = ring(world).run(world, 600)
    assert 2 <= done.laps - done.drafted < 20


def test_looks_are_rare_where_they_would_lose_much() -> None:
    """Three laps at most of the first hundred behind the first one; they were six, of 64 texts five times as
    many, and a quarter of all."""
    world = World(LARGE, QUICK_HEAD, 2, truth=1.0)
    turning = ring(world)
    turning.run(world, 1)
    done = turning.run(world, 100)
    assert 1 <= done.laps - done.drafted <= 4


def test_what_is_grown_for_nothing_lessens_what_drafts_may_be_hoped_to_bring() -> None:
    """All that is sent is accepted, but seldom is anything worth it."""
    tuner = looked(MeasuredBudget(SHAPE, LARGE, QUICK_HEAD), 1)
    for lap in range(40):
        sent = lap % 8 == 0
        spent = LapSeconds(7.1e-3, 11e-3, 3e-3)
        tuner.record_growth(1, 1, 2, 3e-3)
        tuner.record_lap([TreeOutcome(1, 2, (0.9,), 1) if sent else TreeOutcome(1, 1, (), 0)], spent)
    tuner.record_rest(4000, 1)  # there is something to risk again
    assert (tuner.plan_levels(1, 6), tuner.rest) == (0, 1), "a look"
    assert tuner.acceptance.by_depth()[0] > 0.8
    assert tuner.plan_levels(1, 6) == 0


def test_what_is_grown_for_nothing_is_booked() -> None:
    """No node is ever worth its row, and of such a lap the ring tells what plain ones take, 2.7 ms less."""
    tuner, laps, grown = MeasuredBudget(SHAPE, LARGE, QUICK_HEAD), 0, 0
    while laps < 2000:
        if levels := tuner.plan_levels(1, 6, 1):
            tuner.record_growth(1, levels, 1, 1.8e-3)
            tuner.count_rows(np.zeros(20), 1, levels)
            tuner.record_lap([TreeOutcome(levels, 1, (), 0)], LapSeconds(7e-3, 7.5e-3, 2.7e-3))
            laps, grown = laps + 1, grown + 1
        else:
            laps += tuner.rest
            tuner.record_rest(tuner.rest, 1)
            tuner.record_lap([TreeOutcome(0, 1, (), 0)], LapSeconds(7e-3, 7.5e-3))
    assert grown * 2.7e-3 < 0.03 * laps * 7.5e-3


def test_a_trial_that_was_held_up_is_not_the_last() -> None:
    """One hop of 200 ms, when all that was seen of drafts was that."""
    world = World(FP32, QUICK_HEAD, 1, 1.0)
    turning = ring(world)
    turning.run(world, 2)
    hop(turning.tuner, True, 0.2)  # loads its kernels
    for _ in range(2):
        turning.tuner.costs.record_hop(True, 0.2, 0.2, 2, 1)
    turning.tuner.record_lap([TreeOutcome(1, 2, (0.5,), 0)])
    done = turning.run(world, 3000)
    assert turning.run(world, 500).drafted > 400, done.drafted


def test_another_look_is_due_soon_once_the_machine_is_a_faster_one() -> None:
    world = World(FP32, QUICK_HEAD, 1, 1.0)
    turning = ring(world)
    turning.run(world, 600)
    faster = replace(world, lap=tuple((rows, seconds / 3) for rows, seconds in FP32))
    assert any(turning.tuner.looks_next(1) for _ in range(8) if turning.run(faster, 1))
