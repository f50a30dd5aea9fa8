"""Answers that must end within a time: the way, the points, the end of each text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsot.errors import InvalidRequest
from specsot.events import BranchFinished, Finished, Numbered, Planned, Reason
from specsot.params import Ask, Limits
from specsot_master.core.commands import CloseSequence, OpenSkeleton
from specsot_master.core.plans.forecast import Forecaster, Outlook, Workload
from specsot_master.core.plans.plan import RequestPlan
from specsot_master.core.plans.router import SEVERAL_POINTS, UNDECIDED, Decision
from specsot_master.core.plans.sentences import ends_sentence
from specsot_master.core.plans.text_pieces import TextPiece
from specsot_master.core.plans.time_limit import TimeLimit, choose, points_in_time
from tests.master.letters import COUNT, SAYS, SOT
from tests.master.stage import Stage, of
from tests.master.test_forecast import DIRECTLY, PLAN, POINTS, model

OPEN, SEVERAL = Decision("direct", UNDECIDED), Decision("sot", SEVERAL_POINTS)
CODE = Decision("direct", "code")
ASKED = Workload(0, Limits())


@pytest.mark.parametrize(
    ("decision", "seconds", "mode"),
    [
        (OPEN, None, "direct"),
        (OPEN, 9.0, "direct"),
        (OPEN, 4.7, "sot"),  # 5.0 directly, 4.5 planned
        (CODE, 4.7, "direct"),
        (SEVERAL, 4.7, "sot"),
        (SEVERAL, 3.6, "sot"),  # neither way: what was decided
        (SEVERAL, 1.4, "direct"),  # not even a sentence for each of two points
    ],
)
def test_the_way_that_ends_in_time_is_taken(decision: Decision, seconds: float | None, mode: str) -> None:
    costs = model(*DIRECTLY, *PLAN)
    assert choose(decision, Ask("Why?", finish_within_s=seconds), costs, ASKED).mode == mode


def test_less_than_a_sentence_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"finish_within_s 0.5: one sentence takes about 1.2 s here"):
        choose(OPEN, Ask("Why?", finish_within_s=0.5), model(), ASKED)
    assert choose(OPEN, Ask("Why?", finish_within_s=0.5), Forecaster(), ASKED) == OPEN, "nothing was measured"


@pytest.mark.parametrize(("seconds", "points"), [(9.0, 4), (3.5, 2), (0.1, 2)])
def test_a_plan_keeps_the_points_that_end_in_time(seconds: float, points: int) -> None:
    costs = model(*PLAN)
    deadline = TimeLimit(seconds, seconds, Outlook(costs, Workload(0, Limits(max_parallel=2))))
    assert deadline.fit(POINTS, 0.0) == POINTS[:points]


@pytest.mark.parametrize(("seconds", "points"), [(None, None), (9.0, 12), (4.4, 3), (0.1, 2)])
def test_a_list_is_asked_for_as_many_points_as_end_in_time(seconds: float | None, points: int) -> None:
    assert points_in_time(Ask("Why?", finish_within_s=seconds), model(*PLAN), ASKED) == points
    assert points_in_time(Ask("Why?", finish_within_s=seconds), Forecaster(), ASKED) is None


def test_a_plan_leaves_time_for_a_sentence_of_each_of_two_points() -> None:
    deadline = TimeLimit(10.0, 10.0, Outlook(model(*PLAN), Workload(0, Limits())))
    assert (deadline.ends_plan(8.7), deadline.ends_plan(8.9)) == (False, True)
    plan = RequestPlan(Ask("Why?", mode="sot", finish_within_s=10.0), "r", 7, told=("words",), most=3)
    assert plan.deadline is not None
    plan.deadline.outlook = deadline.outlook
    _, skeleton = plan.start(3, 0.0)
    assert isinstance(skeleton, OpenSkeleton)
    assert skeleton.rules.max_points == 3
    plan.on_text(0, pieces(" Green light", "\n2.", " Blue paint", "\n3."), 6.0)
    told = plan.on_text(0, pieces(" Thr"), 9.0)  # a title has begun
    assert CloseSequence(0) in told
    (planned,) = (one.event for one in told if isinstance(one, Numbered) and isinstance(one.event, Planned))
    assert [point.title for point in planned.points] == ["Green light", "Blue paint"]


def pieces(*texts: str) -> list[TextPiece]:
    return [TextPiece(number, text) for number, text in enumerate(texts)]


def shown(*texts: str) -> list[str]:
    """What is shown of each piece of a text in time."""
    limit = TimeLimit(100.0, 100.0)
    return ["".join(one.text for one in limit.take(1, pieces(text), 1.0, 1)[0]) for text in texts]


def test_text_is_shown_by_whole_sentences_and_lines() -> None:
    assert shown("It", " ends", ".", " It is 3", ".", "5 x. ", "- one\n") == [
        "",
        "",
        "It ends.",
        "",
        "",
        " It is 3.5 x. ",
        "- one\n",
    ]


@pytest.mark.parametrize(
    ("now", "texts", "kept", "over"),
    [
        (1.0, ("It ends.", " Then"), 1, False),
        (9.5, ("It ends.",), 1, False),  # there is time for some words more
        (9.8, ("It ends.", " Then"), 1, True),  # two turns of 0.1 s
        (9.7, ("It ends.",), 1, True),  # and none for a sentence of eight tokens, two a turn
    ],
)
def test_a_sequence_ends_shortly_before_the_time_limit(
    now: float, texts: tuple[str, ...], kept: int, over: bool
) -> None:
    limit = TimeLimit(10.0, 10.0, Outlook(model(), Workload(0, Limits())))
    said = pieces(*texts)
    assert limit.take(1, said, now, 1) == (said[:kept], over)
    assert limit.passed is over


def test_where_nothing_was_measured_the_last_pause_counts() -> None:
    limit = TimeLimit(10.0, 10.0)
    assert [limit.take(1, pieces(" so"), now, 1)[1] for now in (1.0, 2.0, 4.0, 7.0)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("ordinal", "whole", "rest"), [(1, True, [" Then", " not"]), (1, False, []), (2, False, ["Then", " so"])]
)
def test_an_unfinished_sentence_is_shown_if_the_sequence_ended_by_itself_or_has_no_other(
    ordinal: int, whole: bool, rest: list[str]
) -> None:
    limit = TimeLimit(10.0, 10.0)
    if ordinal == 1:
        limit.take(1, pieces("It ends.", " Then", " not"), 1.0, 1)
    else:
        limit.take(2, pieces("Then", " so"), 1.0, 1)
    assert [one.text for one in limit.rest(ordinal, whole)] == rest


@pytest.mark.parametrize("text", ["Yes.", 'He said "no!"', "好。", "- one\n", "**Done.** "])
def test_these_end_a_sentence(text: str) -> None:
    assert ends_sentence(text)


@pytest.mark.parametrize("text", ["Yes", "1.", "is 3.", "", "and,"])
def test_these_do_not(text: str) -> None:
    assert not ends_sentence(text)


def test_what_is_resumable_cannot_be_promised() -> None:
    with pytest.raises(InvalidRequest, match="finish_within_s"):
        Ask("Why?", finish_within_s=1.0, resumable=True)
    with pytest.raises(InvalidRequest, match="finish_within_s must be > 0"):
        Ask("Why?", finish_within_s=0)


async def test_a_direct_answer_ends_in_time() -> None:
    stage = Stage({"Count.": "One and two. " * 60}, burst=1)
    (end,) = of(Finished, await stage.answer(replace(COUNT, finish_within_s=20.0)))
    assert end.reason is Reason.LENGTH
    assert end.text.endswith("two.")
    assert end.statistics.seconds <= 20.0
    assert end.statistics.in_time
    stage.assert_clean()


async def test_every_branch_ends_in_time_and_none_begins_after() -> None:
    stage = Stage(SAYS, burst=1)
    ask = replace(SOT, finish_within_s=60.0, limits=Limits(max_parallel=1))
    events = await stage.answer(ask)
    (end,), (planned,) = of(Finished, events), of(Planned, events)
    assert end.statistics.seconds <= 61.0
    ended = of(BranchFinished, events)
    assert sorted(one.branch for one in ended) == [point.id for point in planned.points]
    assert Reason.LENGTH in {one.reason for one in ended}
    stage.assert_clean()
