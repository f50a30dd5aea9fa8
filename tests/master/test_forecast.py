"""What is foreseen of an answer: from steps, from lengths of past answers, for one request on a fake ring."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import median

import pytest

from specsot.core.frames import End, Outcome, Result
from specsot.core.skeleton import Point
from specsot.events import BranchFinished, Event, Finished, Forecast, Planned, Reason, Started, Statistics
from specsot.params import Limits
from specsot_master.core.plans.forecast import (
    SHORT_ANSWERS,
    WIDEST,
    Forecaster,
    Outlook,
    RingStepTimes,
    Workload,
    kind_of_question,
    likeliest,
    name_of_misses,
)
from specsot_master.core.plans.router import CODE, SEVERAL_POINTS, SMALL_TALK, decide_question
from specsot_master.engine.forecast_memory import PAUSE, ForecastMemory
from tests.master.letters import DIRECT, SAYS, SOT
from tests.master.stage import Stage, of

CURVE = ((1, 0.1), (4, 0.2), (16, 0.8))
POINTS = tuple(Point(id, 40, f"Point {id}") for id in range(1, 5))


def turns(number: int, *sequences: int, tokens: int = 1, end: End | None = None) -> Result:
    """A step in which each of these verified one tree, of a root alone."""
    outcomes = tuple(Outcome(one, number, (0,), tuple(range(tokens)), end) for one in sequences)
    return Result(1, number, outcomes, (0.05,), rows=len(sequences))


def seen(*steps: tuple[float, Result]) -> RingStepTimes:
    costs = RingStepTimes(CURVE)
    for now, result in steps:
        costs.on_result(result, now)
    return costs


def test_a_turn_is_the_time_between_two_results_of_a_sequence() -> None:
    alone = seen(*((n / 2, turns(n, 7, tokens=3)) for n in range(1, 9)))
    assert (alone.turn(1), alone.tokens(1)) == (pytest.approx(0.5), pytest.approx(3))


def test_two_frames_in_flight_are_one_turn_of_all_their_sequences() -> None:
    steps = ((float(n), turns(n, *((1, 2) if n % 2 else (3,)))) for n in range(1, 9))
    costs = seen(*steps)
    assert costs.turn(3) == pytest.approx(2.0)


def test_what_no_step_has_shown_has_the_shape_of_the_stages_curve() -> None:
    costs = seen(*((n / 2, turns(n, 7)) for n in range(1, 9)))
    assert costs.turn(4) == pytest.approx(1.0)
    assert costs.turn(28) == pytest.approx(0.5 * 14)
    assert RingStepTimes(CURVE).turn(1) is None


def test_a_step_with_a_prompt_is_no_sample_of_a_turn() -> None:
    prompt = Result(1, 3, (Outcome(8, 0, (), (5,)),), (0.4,), rows=4)
    costs = seen((1.0, turns(1, 7)), (2.0, turns(2, 7)), (9.0, prompt), (10.0, turns(4, 7, 8)))
    assert costs.turn(1) == pytest.approx(1.0)
    assert costs.prompt(16) == pytest.approx(1.6), "twice what the curve says, as the prompt was"
    assert costs.prompt(0) == 0


def test_who_has_ended_or_stopped_takes_no_turns() -> None:
    costs = seen((1.0, turns(1, 1, 2)), (2.0, turns(2, 1, 2, end=End.STOP)), (3.0, turns(3, 3)))
    costs.on_result(turns(4, 3), 3.5)
    assert (costs.turn(2), costs.turn(1)) == (pytest.approx(1.0), pytest.approx(0.5))


def model(*events: Event) -> Forecaster:
    """Turns of 0.1 s bring 2 tokens, whoever takes them."""
    costs = Forecaster()
    for n in range(1, 9):
        costs.steps.on_result(turns(n, 7, tokens=2), n / 10)
    for event in events:
        costs.lengths.on_event(event)
        if isinstance(event, Finished) and event.reason in (Reason.STOP, Reason.LENGTH):
            told = event.statistics
            cut = event.reason is Reason.LENGTH
            Outlook(costs, Workload(0, Limits(), kind=told.decision)).on_end(
                told.branches > 0, 1.0, told.steps, 2 * told.steps, cut
            )
    return costs


def ended(reason: Reason, steps: int = 0, plan: int = 0, decision: str = "") -> Finished:
    told = Statistics(steps=steps, plan_tokens=plan, branches=int(plan > 0), decision=decision)
    return Finished(reason, "", (), told)


DIRECTLY = (ended(Reason.STOP, 40), ended(Reason.STOP, 50), ended(Reason.LENGTH, 400))
BRANCHES = tuple(BranchFinished(1, Reason.STOP, 20 * n) for n in (1, 2, 3, 4))
PLAN = (Planned(POINTS), *BRANCHES, ended(Reason.STOP, 9, 10))


def rounded(told: Forecast | None) -> Forecast:
    assert told is not None
    direct, planned = (one if one is None else round(one, 6) for one in (told.direct, told.planned))
    return Forecast(direct, planned)


@pytest.mark.parametrize(
    ("events", "limits", "forecast"),
    [
        ((), Limits(), Forecast()),
        (DIRECTLY, Limits(), Forecast(5.0)),
        (DIRECTLY, Limits(max_new_tokens=60), Forecast(3.0)),
        ((ended(Reason.CANCELLED, 7), BranchFinished(1, Reason.FAILED, 7)), Limits(), Forecast()),
        (PLAN, Limits(), Forecast(None, 0.5 + 4.0)),
        (PLAN, Limits(max_branch_tokens=30), Forecast(None, 0.5 + 1.5)),
        (PLAN, Limits(max_new_tokens=130), Forecast(None, 0.5 + 1.5)),
        (PLAN, Limits(max_parallel=1), Forecast(None, 0.5 + 10.0)),
        (DIRECTLY + PLAN, Limits(max_parallel=2), Forecast(5.0, 0.5 + 5.0)),
    ],
)  # fmt: skip
def test_both_methods_are_forecast(events: tuple[Event, ...], limits: Limits, forecast: Forecast) -> None:
    assert rounded(model(*events).forecast(Workload(0, limits))) == forecast


def test_answers_of_one_kind_tell_of_another_of_it() -> None:
    talk = tuple(ended(Reason.STOP, steps, decision="small talk") for steps in (10, 11, 30))
    costs = model(*DIRECTLY, *talk)
    assert costs.direct(Workload(0, Limits()), 8) == pytest.approx(0.4)
    told = costs.forecast(Workload(0, Limits(), kind="small talk"))
    assert told.direct == pytest.approx(1.1)
    assert costs.forecast(Workload(0, Limits(), kind="arithmetic")).direct == pytest.approx(5.0)
    assert costs.forecast(Workload(0, Limits(), kind="code")).direct is None


def test_the_form_of_a_question_takes_precedence_over_other_answers() -> None:
    """A greeting is not forecast as long as an essay, and does not make essays look short."""
    costs = model(*DIRECTLY)
    for kind, tokens in SHORT_ANSWERS.items():
        told = costs.forecast(Workload(0, Limits(), kind=kind)).direct
        assert told == pytest.approx(0.1 * tokens / 2)
    greeted = model(*DIRECTLY, *(ended(Reason.STOP, 3, decision="small talk") for _ in range(9)))
    assert greeted.forecast(Workload(0, Limits())).direct == costs.forecast(Workload(0, Limits())).direct


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([7], 7),
        ([10, 30], 20),
        ([8, 20, 40, 100, 1000, 1000, 1000], 1000),  # the median is near one of them
        ([10, 12, 50, 60, 500], 50),
    ],
)
def test_most_answers_are_near_the_forecast(lengths: list[float], told: float) -> None:
    assert likeliest(lengths) == told


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (800, (4.0 + 40.0) / 2),
        (1600, (4.0 + 80.0) / 2),
        (60, 3.0),
    ],  # 40 steps of 80 tokens, and 400 cut at 800
)
def test_what_a_limit_cut_is_taken_to_run_into_the_next_one(limit: int, seconds: float) -> None:
    costs = model(ended(Reason.STOP, 40), ended(Reason.LENGTH, 400))
    told = costs.forecast(Workload(0, Limits(max_new_tokens=limit)))
    assert told.direct == pytest.approx(seconds)


def test_a_branch_that_a_limit_cut_has_no_end_of_its_own() -> None:
    cut = (Planned(POINTS), BranchFinished(1, Reason.LENGTH, 20), ended(Reason.LENGTH, 9, 10))
    assert model(*cut).branches(Workload(0, Limits(max_new_tokens=400)), POINTS[:1]) == pytest.approx(20.0)


def test_a_direct_answer_among_plans_is_forecast_from_direct_answers_alone() -> None:
    """Which else are those to small talk and sums."""
    costs, several = model(*DIRECTLY), Workload(0, Limits(), kind=SEVERAL_POINTS)
    assert costs.forecast(several).direct is None
    Outlook(costs, several).on_end(False, 1.0, 90, 180, False)
    assert costs.forecast(several).direct == pytest.approx(9.0)


KIND = kind_of_question(decide_question(str(SOT.prompt)).reason, "en")


def sure(costs: Forecaster, *kinds: str) -> Forecaster:
    """Past forecasts of each way came within a few percent."""
    for about in ("direct", "planned", "branches"):
        for kind in kinds or ("",):
            costs.misses[name_of_misses(about, kind)].extend([0.97, 1.03] * 12)
    return costs


def figures_of(costs: Forecaster) -> Forecast:
    told = Outlook(costs, Workload(0, Limits())).of_both(0.0)
    assert told is not None
    return told


def test_one_answer_gives_no_forecast_and_more_of_them_the_range_of_what_was_missed() -> None:
    costs = model(ended(Reason.STOP, 50, decision=""))
    workload = Workload(0, Limits())
    assert costs.spread("direct", workload, 5.0) is None
    assert Outlook(costs, workload).of_both(0.0) is None, (
        "nothing is known of how far the forecast may be off"
    )
    for took in (5.5, 6.0, 5.0, 4.0) * 8:
        outlook = Outlook(costs, Workload(0, Limits()))
        outlook.of_both(0.0)
        outlook.on_end(False, took, 50, 100, False)
    later = figures_of(costs)
    assert (later.direct_min, later.direct_max) == pytest.approx((4.0, 6.0), abs=0.5)


@pytest.mark.parametrize(
    ("least", "errors", "outside"),
    # From 0.3 to 1.3 the next errors would make the range too wide to be sent; from 0.5 to 1.5 they do not.
    [(0.3, 14, 1), (0.3, 19, 2), (0.3, 29, 3), (0.3, 64, 6), (0.5, 19, 1), (0.5, 29, 2), (0.5, 64, 5)],
)
def test_a_tenth_of_the_errors_is_left_out_at_each_end_of_a_range(
    least: float, errors: int, outside: int
) -> None:
    costs = model(ended(Reason.STOP, 50))
    workload = Workload(0, Limits(), kind=KIND)
    ratios = [least + number / errors for number in range(errors)]
    costs.misses[name_of_misses("planned", KIND)].extend(ratios)
    range_of_ratios = ratios[outside - 1], ratios[-outside]
    assert costs.spread("planned", workload, 1.0) == pytest.approx((median(ratios), *range_of_ratios))


def test_a_forecast_that_is_always_too_short_is_corrected() -> None:
    costs = model(*DIRECTLY)
    costs.misses[name_of_misses("direct", "")].extend([1.9, 2.0, 2.1] * 6)
    before = costs.forecast(Workload(0, Limits())).direct
    told = figures_of(costs)
    assert before is not None
    assert told.direct == pytest.approx(2 * before)


def test_errors_of_other_kinds_of_questions_say_nothing() -> None:
    costs = model(ended(Reason.STOP, 50))
    costs.misses[name_of_misses("direct", CODE)].extend([1.0] * 30)
    assert costs.spread("direct", Workload(0, Limits(), kind=KIND), 1.0) is None


def test_long_answers_are_remembered_by_language_and_short_ones_are_not() -> None:
    german = kind_of_question(SEVERAL_POINTS, "de")
    assert german != kind_of_question(SEVERAL_POINTS, "en")
    assert kind_of_question(SMALL_TALK, "de") == SMALL_TALK
    costs = model(*DIRECTLY)
    assert costs.lengths.steps(german, 1000) == [], "answers to other kinds stand in for no list"


def test_no_forecast_exceeds_the_limit_of_its_request() -> None:
    told = Outlook(sure(model(*DIRECTLY)), Workload(0, Limits(max_new_tokens=95))).of_both(0.0)
    assert told is not None
    assert told.direct == pytest.approx(4.75)
    assert told.direct_max == pytest.approx(4.75)


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3, 0.6])
def test_a_reported_range_is_narrow_and_holds_eight_of_ten_later_answers(
    noise: float,
) -> None:
    chance = random.Random(7)
    costs = model(ended(Reason.STOP, 50))
    within: list[bool] = []
    for _ in range(400):
        outlook = Outlook(costs, Workload(0, Limits()))
        told = outlook.of_both(0.0)
        steps = round(50 * math.exp(chance.gauss(0, noise)))
        if told is not None and told.direct_min is not None and told.direct_max is not None:
            assert told.direct_max <= WIDEST * told.direct_min
            within.append(told.direct_min <= steps / 10 <= told.direct_max)
        outlook.on_end(False, steps / 10, steps, 2 * steps, False)
    if noise < 0.6:
        assert 0.78 < sum(within) / len(within) < 0.9
    else:
        assert len(within) < 100


def test_what_was_learned_is_there_again_and_as_fast_as_the_ring(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "model.json"
    costs = model(*DIRECTLY, *PLAN)
    ForecastMemory(file).write(costs.kept, 0.0)
    again = ForecastMemory(file).read()
    assert again.kept() == costs.kept()
    assert again.forecast(Workload(0, Limits())) == costs.forecast(Workload(0, Limits()))
    costs.begin(CURVE)
    slower = Forecaster(costs.kept())
    slower.begin(tuple((rows, 3 * seconds) for rows, seconds in CURVE))
    assert slower.steps.turn(1) == pytest.approx(0.3)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', '{"version": 0, "steps": {"1": 7}}'])
def test_a_file_that_says_nothing_is_nothing_learned(text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(text)
    assert ForecastMemory(file).read().kept() == Forecaster().kept()


def test_a_busy_master_writes_now_and_then(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    memory = ForecastMemory(file)
    memory.write(Forecaster().kept, 0.0)
    file.unlink()
    memory.write(Forecaster().kept, PAUSE / 2)
    assert not file.exists()
    memory.write(Forecaster().kept, PAUSE)
    assert file.exists()


def test_a_plan_that_leaves_no_tokens_for_its_branches_is_not_forecast() -> None:
    costs = model(*DIRECTLY, *PLAN)
    assert costs.forecast(Workload(0, Limits(max_new_tokens=2))).planned is None
    assert costs.branches(Workload(0, Limits(max_new_tokens=9)), POINTS, 9) is None


def test_a_branch_waits_for_those_it_needs() -> None:
    chain = (Point(1, 40, "A"), Point(2, 40, "B", needs=(1,)))
    assert model(*PLAN).branches(Workload(0, Limits()), chain) == pytest.approx(3.0 + 1.0)


def test_what_has_passed_already_counts() -> None:
    outlook = Outlook(sure(model(*DIRECTLY, *PLAN)), Workload(0, Limits()))
    assert rounded(outlook.of_both(2.0)) == Forecast(7.0, 6.5)
    assert rounded(outlook.of_plan(POINTS[:1], 2.0)) == Forecast(None, 2.0 + 2.0)
    assert Outlook(Forecaster(), Workload(0, Limits())).of_both(2.0) is None


async def test_nothing_is_forecast_before_a_similar_request_has_ended() -> None:
    stage = Stage(SAYS)
    (first,) = of(Started, await stage.answer(DIRECT))
    assert first.forecast is None
    second = await stage.answer(SOT)
    (started,), (planned,) = of(Started, second), of(Planned, second)
    assert (started.forecast, planned.forecast) == (None, None)
    stage.engine._costs.misses.clear()
    sure(stage.engine._costs, *(one.kind for one in stage.engine._costs.lengths.direct), KIND)
    (again,) = of(Started, await stage.answer(DIRECT))
    assert again.forecast is not None
    assert again.forecast.direct is not None
    third = await stage.answer(SOT)
    (started,), (planned,), (end,) = of(Started, third), of(Planned, third), of(Finished, third)
    assert planned.forecast is not None
    assert started.forecast is not None
    assert started.forecast.planned == pytest.approx(end.statistics.seconds, rel=0.5)
    assert planned.forecast.planned == pytest.approx(end.statistics.seconds, rel=0.5)
