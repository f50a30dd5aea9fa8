"""The request machine by transcripts: what happened, and what it wants and tells.

A character is a token, its code the id.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsot.core.frames import End, Outcome
from specsot.core.skeleton import PlanRules
from specsot.errors import PlanError
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    MergedText,
    Numbered,
    Planned,
    Reason,
    SkeletonText,
    Started,
)
from specsot.params import Mode
from specsot_master.core.limits import POINT_TOKENS
from specsot_master.core.plans.plan import (
    CloseSequence,
    FailRequest,
    OpenAnswer,
    OpenBranch,
    OpenSkeleton,
    TextPiece,
)
from tests.master.play import HEADINGS, PLAN, Play, text_of


def test_a_direct_request_is_one_sequence() -> None:
    play = Play("direct", max_new_tokens=50)
    assert play.said == [Numbered(0, Started("r", "demo", "direct", 7, 5)), OpenAnswer(50)]
    play.write(0, "Hello [PLAN] you.", step=4)
    play.end(0)
    assert (play.finished.reason, play.finished.text) == (Reason.STOP, "Hello [PLAN] you.")
    assert text_of(play.finished.tokens) == "Hello [PLAN] you."
    play.check_stream()


def test_a_planned_answer_from_start_to_end() -> None:
    play = Play("sot", max_new_tokens=400).planned()
    assert play.of(OpenSkeleton) == [
        OpenSkeleton(200, PlanRules(direct=False, max_points=6, plan_tokens=200), True)
    ]
    assert "".join(e.text for e in play.tell() if isinstance(e, SkeletonText)) == PLAN
    assert play.open_ready() == [1, 2]
    play.write(2, "Deep sleep. ")
    play.write(1, " Light sleep.")
    play.end(2)
    assert play.open_ready() == []
    play.end(1)
    assert play.open_ready() == [3]
    play.write(3, "[ANSWER]\nDreams.[END] never seen")
    assert (
        play.finished.text == "## 1. Light\nLight sleep.\n\n## 2. Deep\nDeep sleep.\n\n## 3. Dreams\nDreams."
    )
    assert text_of(play.finished.tokens) == " Light sleep.Deep sleep. Dreams."
    assert play.finished.reason is Reason.STOP
    assert play.closed == [0, 3]
    assert [(e.branch, e.tokens) for e in play.tell() if isinstance(e, BranchFinished)] == [
        (2, 12), (1, 13), (3, 7),
    ]  # fmt: skip
    play.check_stream()


def test_dependent_branches_see_their_parents_text() -> None:
    play = Play("sot").planned()
    play.open_ready()
    for id, body in ((1, "one"), (2, "two")):
        play.write(id, body)
        play.end(id)
    play.open_ready()
    *_, order = play.of(OpenBranch)
    assert isinstance(order, OpenBranch)
    assert [(point.title, text) for point, text in order.parents] == [("Light", "one"), ("Deep", "two")]


def test_headings_count_without_a_point_that_ends_without_text() -> None:
    play = Play("sot").planned("[PLAN]\n1.<9><None>[-]Air\n2.<9><None>[-]Bees\n3.<9><None>[-]Cats\n[END]")
    play.open_ready()
    play.write(3, "Cats purr.")
    play.end(2)
    play.write(1, "Air is thin.")
    play.end(1)
    play.end(3)
    assert [e.branch for e in play.tell() if isinstance(e, BranchFinished)] == [2, 1, 3]
    assert play.finished.text == "## 1. Air\nAir is thin.\n\n## 2. Cats\nCats purr."
    play.check_stream()


@pytest.mark.parametrize("end", [End.FAILED, End.CANCELLED])
def test_a_failed_parent_ends_its_children(end: End) -> None:
    play = Play("sot").planned()
    play.open_ready()
    play.write(1, "half")
    play.end(1, end)
    play.write(2, "whole")
    play.end(2)
    reasons = {e.branch: e.reason for e in play.tell() if isinstance(e, BranchFinished)}
    assert reasons[3] is Reason.PARENT_FAILED
    assert play.finished.reason is Reason.FAILED
    assert play.finished.text == "## 1. Light\nhalf\n\n## 2. Deep\nwhole"
    play.check_stream()


def test_max_parallel_is_kept_and_the_longest_path_goes_first() -> None:
    play = Play("sot", max_parallel=1).planned()
    assert play.open_ready() == [1]
    play.end(1)
    assert play.open_ready() == [2]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("[DIRECT]\nIt is 4.[END]", "It is 4."),
        ("[DIRECT]\nA [tricky] one [EN[END]", "A [tricky] one [EN"),
        ("[DIRECT]\n[END]", ""),
    ],
)
def test_a_direct_answer_streams_without_its_markers(raw: str, text: str, step: int) -> None:
    play = Play("auto")
    play.write(0, raw, step)
    play.end(0, End.GRAMMAR)
    assert Planned(()) in play.tell()
    assert play.finished.text == text
    assert text_of(play.finished.tokens) == text
    assert (play.finished.reason, play.finished.statistics.mode) == (Reason.STOP, "direct")
    play.check_stream()


def test_a_direct_answer_keeps_max_new_tokens() -> None:
    play = Play("auto", max_new_tokens=150)
    play.write(0, "[DIRECT]\n" + "x" * 500, step=7)
    assert play.finished.text == "x" * 141
    assert play.finished.reason is Reason.LENGTH
    assert len(play.finished.tokens) == 141
    assert play.finished.statistics.completion_tokens == 150
    assert play.closed == [0]


@pytest.mark.parametrize(("tokens", "asked"), [(127, OpenAnswer), (128, OpenSkeleton)])
def test_auto_asks_for_no_plan_where_two_points_cannot_be_afforded(tokens: int, asked: type) -> None:
    play = Play("auto", max_new_tokens=tokens)
    assert len(play.of(asked)) == 1
    assert play.plan.all_opened is (asked is OpenAnswer)


@pytest.mark.parametrize("mode", ["auto", "sot"])
def test_without_constraint_and_marker_the_text_is_the_answer(mode: Mode) -> None:
    play = Play(mode, constraint=False)
    assert play.of(OpenSkeleton) == [OpenSkeleton(1024, PlanRules(direct=mode == "auto"), False)]
    play.write(0, "Sleep is good." * 30, step=5)
    play.end(0)
    assert play.finished.text == "Sleep is good." * 30
    assert text_of(play.finished.tokens) == play.finished.text
    play.check_stream()


def test_without_constraint_a_plan_ends_at_its_end_marker() -> None:
    play = Play("auto", constraint=False)
    play.write(0, f"Sure!\n{PLAN}\nand so on", step=6)
    assert CloseSequence(0) in play.said
    assert len(next(e for e in play.tell() if isinstance(e, Planned)).points) == 3
    assert play.plan.ready()


def test_the_same_points_again_and_again_are_no_plan() -> None:
    """What the small model wrote for a question that it had not learned."""
    play, plan = (
        Play("sot"),
        PLAN.replace("Light", "Serve chilled or at").replace("Deep", "Serve chilled or at"),
    )
    plan = plan.replace("Dreams", "Serve chilled or at")
    play.write(0, plan)
    assert play.said[-1] == OpenAnswer(1024 - len(plan))
    play.write(0, "No idea.")
    play.end(0)
    assert (play.finished.text, play.finished.statistics.mode) == ("No idea.", "direct")
    play.check_stream()


def test_points_that_say_something_are_left_with_what_they_need() -> None:
    play = Play("sot").planned(
        PLAN.replace("\n[END]", "\n4.<10><None>[3]Light\n5.<10><None>[3]Waking\n[END]")
    )
    (planned,) = play.of(Planned)
    assert isinstance(planned, Planned)
    assert [(one.id, one.length, one.needs, one.title) for one in planned.points] == [
        (1, 60, (), "Light"), (2, 30, (), "Deep"), (3, 10, (1, 2), "Dreams"), (4, 10, (3,), "Waking")
    ]  # fmt: skip


def test_an_endless_plan_is_taken_as_it_stands() -> None:
    play = Play("auto", constraint=False, max_skeleton_tokens=80)
    play.write(0, "[PLAN]\n" + "".join(f"{n}.<10><None>[-]Point {n}\n" for n in range(1, 30)), step=4)
    assert CloseSequence(0) in play.said
    assert [point.id for point in play.plan.ready()] == [1, 2, 3]


def test_a_plan_without_a_line_is_an_error_with_the_raw_text() -> None:
    play = Play("sot", constraint=False)
    play.write(0, "[PLAN]\nnothing of use\n[END]")
    (close, given) = play.said[-2:]
    assert close == CloseSequence(0)
    assert isinstance(given, FailRequest)
    assert isinstance(given.error, PlanError)
    assert "nothing of use" in given.error.text
    assert play.plan.finished


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_logprobs_come_with_their_text(step: int) -> None:
    """A token whose text is held back waits for it; one that is cut never comes."""
    play = Play("direct", stop=("STOP",))
    play.write(0, "Say ST. Then STOP now", step)
    play.end(0)
    play.check_stream()
    for event in play.tell():
        if isinstance(event, MergedText):
            assert text_of(one.chosen.token for one in event.logprobs) == event.text
    assert play.finished.text == "Say ST. Then "


def test_logprobs_are_reported_only_if_they_were_requested() -> None:
    play = Play("direct")
    play.said += play.plan.on_text(0, [TextPiece(72, "H"), TextPiece(None, "i")], now=2.0)
    play.end(0)
    assert [e for e in play.tell() if isinstance(e, MergedText)] == [MergedText(0, "Hi", step_tokens=1)]


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_text_after_a_stop_string_never_leaks(step: int) -> None:
    play = Play("direct", stop=("END.",))
    play.write(0, "This is the END. Or not.", step)
    assert play.finished.text == "This is the "
    assert text_of(play.finished.tokens) == "This is the "
    assert play.closed == [0]
    play.end(0)
    play.check_stream()


def test_stop_strings_cut_branches_not_plans() -> None:
    play = Play("sot", stop=("\n",)).planned()
    assert play.open_ready() == [1, 2]
    play.write(1, "one\ntwo")
    assert play.closed == [0, 1]
    assert BranchFinished(1, Reason.STOP, 3) in play.tell()


def test_branches_keep_their_stop_strings_and_write_their_share_of_min_tokens() -> None:
    budget = len(PLAN) + len(HEADINGS) + 200
    ends = {"include_stop_str_in_output": True, "min_tokens": budget // 10}
    play = Play("sot", stop=("\n",), ends=ends, max_new_tokens=budget).planned()
    play.open_ready()
    shares = {event.branch: event.budget for event in play.of(BranchStarted)}
    early = "x\n" * (shares[1] // 20)
    play.write(1, early + "yyyy" + "\n" + "never")
    assert BranchFinished(1, Reason.STOP, len(early) + 5) in play.tell()
    (said,) = [event for event in play.of(BranchText) if event.branch == 1]
    assert said.text == (early + "yyyy\n").rstrip()


def test_the_budget_is_split_when_the_plan_is_complete() -> None:
    play = Play("sot", max_new_tokens=len(PLAN) + len(HEADINGS) + 200, max_branch_tokens=100).planned()
    play.open_ready()
    assert [(e.branch, e.budget) for e in play.tell() if isinstance(e, BranchStarted)] == [(1, 100), (2, 59)]


@pytest.mark.parametrize(("tokens", "last"), [(180, "Dreams"), (200, "Dreams of all kinds")])
def test_points_that_would_get_less_than_a_sentence_are_left_out(tokens: int, last: str) -> None:
    play = Play("sot", max_new_tokens=tokens).planned(PLAN.replace("Dreams", last))
    (planned,) = play.of(Planned)
    assert isinstance(planned, Planned)
    assert [point.title for point in planned.points] == ["Light", "Deep"]
    assert play.open_ready() == [1, 2]
    play.write(1, "one")
    play.end(1)
    play.write(2, "two")
    play.end(2)
    assert play.finished.text == "## 1. Light\none\n\n## 2. Deep\ntwo"
    assert play.finished.reason is Reason.LENGTH, "a limit took a point"


def test_a_title_that_leaves_no_room_for_its_text_is_no_heading() -> None:
    play = Play("sot", constraint=False, max_new_tokens=124)
    play.write(0, f"[PLAN]\n1.<9><None>[-]{'T' * 34}\n[END]")
    play.open_ready()
    play.write(1, "Text.")
    play.end(1)
    assert play.finished.text == "Text."
    assert play.finished.statistics.heading_tokens == 0


@given(
    st.integers(POINT_TOKENS, 700),
    st.integers(40, 600),
    st.none() | st.integers(1, 90),
    st.lists(st.tuples(st.integers(1, 9999), st.text("ab 你", max_size=30)), min_size=1, max_size=20),
    st.sampled_from(["auto", "sot"]),
    st.randoms(use_true_random=False),
)
def test_all_that_is_written_is_within_max_new_tokens(
    limit: int,
    skeleton: int,
    cap: int | None,
    lines: list[tuple[int, str]],
    mode: Mode,
    chance: random.Random,
) -> None:
    """Every sequence writes as much as it is allowed to, or ends by an end token at some time before."""
    branches: dict[str, Any] = {} if cap is None else {"max_branch_tokens": cap}
    play = Play(mode, constraint=False, max_new_tokens=limit, max_skeleton_tokens=skeleton, **branches)
    written = 0

    def write(ordinal: int, text: str, most: int) -> None:
        nonlocal written
        for place, character in enumerate(text[:most], 1):
            if ordinal in play.closed or play.plan.finished:
                return
            written += 1
            last = place == most
            if not last and chance.random() < 0.002:
                play.end(ordinal, End.STOP)
                return
            play.write(ordinal, character)
            if last and ordinal not in play.closed:
                play.end(ordinal, End.LENGTH)
                return
        if ordinal not in play.closed and not play.plan.finished:
            written += 1
            play.end(ordinal, End.STOP)

    raw = "[PLAN]\n" + "".join(
        f"{n}.<{size}><None>[-]T{n}{title}\n" for n, (size, title) in enumerate(lines, 1)
    )
    first = play.of(OpenSkeleton, OpenAnswer)[0]
    assert isinstance(first, OpenSkeleton | OpenAnswer)
    write(0, f"{raw}[END]", first.limit)
    while ready := play.plan.ready():
        budget = play.plan.preview(ready[0]).budget
        play.said += play.plan.open_branch(ready[0])
        write(ready[0].id, chance.choice(["short", "long " * 200]), budget)
    if any(isinstance(one, FailRequest) for one in play.said) or play.tell()[-1] == Planned(()):
        return  # no plan: a direct answer begins
    figures = play.finished.statistics
    headings = re.findall(r"(?m)^\n*## .*\n", play.finished.text)
    assert figures.completion_tokens == written + figures.heading_tokens <= limit
    assert figures.heading_tokens >= sum(map(len, headings))
    assert figures.plan_tokens + figures.merged_tokens + figures.heading_tokens <= figures.completion_tokens


def test_a_branch_at_its_limit_makes_the_request_end_by_length() -> None:
    play = Play("sot").planned("[PLAN]\n1.<60><None>[-]Light\n[END]")
    play.open_ready()
    play.write(1, "no end")
    play.end(1, End.LENGTH)
    assert play.finished.reason is Reason.LENGTH


def test_a_branch_that_a_limit_ends_within_a_sentence_is_marked_in_the_merged_answer_alone() -> None:
    play = Play("sot").planned("[PLAN]\n1.<9><None>[-]Air\n2.<9><None>[-]Bees\n3.<9><None>[-]Cats\n[END]")
    play.open_ready()
    for id, text in ((1, "Air is a mixt"), (2, "Bees fly."), (3, " ")):
        play.write(id, text)
        play.end(id, End.LENGTH)
    assert play.finished.text == "## 1. Air\nAir is a mixt…\n\n## 2. Bees\nBees fly."
    assert "…" not in "".join(event.text for event in play.of(BranchText))
    play.check_stream()


@pytest.mark.parametrize("phase", ["skeleton", "branches", "direct"])
def test_cancel_closes_what_lives_and_keeps_the_text(phase: str) -> None:
    play = Play("direct" if phase == "direct" else "sot")
    if phase == "branches":
        play.planned().open_ready()
        play.write(1, "half")
        play.write(2, "begun")
    else:
        play.write(0, "[PLAN]\n1.")
    play.said += play.plan.cancel(now=9.0)
    both = "## 1. Light\nhalf\n\n## 2. Deep\nbegun"
    expected = {"skeleton": "", "branches": both, "direct": "[PLAN]\n1."}
    ways = {"skeleton": "planned: asked for", "branches": "planned: asked for", "direct": "direct: asked for"}
    assert play.finished.statistics.decision == ways[phase]
    closed = {"skeleton": [0], "branches": [0, 1, 2], "direct": [0]}
    assert play.closed == closed[phase]
    assert (play.finished.reason, play.finished.text) == (Reason.CANCELLED, expected[phase])
    assert play.plan.cancel(now=10.0) == []
    assert play.plan.ready() == ()
    play.check_stream()


def test_nothing_follows_the_end() -> None:
    play = Play("direct")
    play.end(0)
    before = len(play.said)
    play.write(0, "late")
    play.end(0)
    assert len(play.said) == before


def test_statistics_count_steps_trees_and_phases() -> None:
    play = Play("sot")
    play.plan.on_step([Outcome(2, 0, (), (1,))], now=2.0)
    play.plan.on_step([Outcome(2, 1, (0, 1), (1, 2))], now=3.0)
    play.planned("[PLAN]\n1.<60><None>[-]Light\n[END]")
    play.open_ready()
    play.plan.on_step([Outcome(3, 0, (), (5,)), Outcome(4, 1, (0, 1, 2, 3), (5, 6, 7, 8))], now=5.0)
    play.write(1, "done")
    play.said += play.plan.on_end(1, End.STOP, now=11.0)
    figures = play.finished.statistics
    assert (figures.steps, figures.mean_accepted) == (3, 3.0)
    plan, heading = len("[PLAN]\n1.<60><None>[-]Light\n[END]"), len("\n\n## 1. Light\n")
    assert (figures.plan_tokens, figures.heading_tokens) == (plan, heading)
    assert figures.completion_tokens == plan + heading + len("done") + 1, "the end token counts"
    assert (figures.merged_tokens, figures.branches, figures.prompt_tokens) == (4, 1, 5)
    assert (figures.seconds, figures.seconds_to_first_token) == (11.0, 2.0)
    assert figures.tokens_per_second == 0.3636, "4 / 11, as a reader wants it"
    assert figures.phases == {
        "queue": 1.0, "skeleton": 1.0, "skeleton_prefill": 1.0, "branches": 9.0, "branches_prefill": 3.0,
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.text("ab \n你", max_size=6)), max_size=30), st.data()
)
def test_the_merged_answer_does_not_depend_on_the_interleaving(
    writes: list[tuple[int, str]], data: st.DataObject
) -> None:
    play = Play("sot").planned("[PLAN]\n1.<9><None>[-]Air\n2.<9><None>[-]Bees\n3.<9><None>[-]Cats\n[END]")
    play.open_ready()
    for id, text in writes:
        play.write(id, text, step=data.draw(st.integers(1, 3)))
    for id in data.draw(st.permutations([1, 2, 3])):
        play.end(id)
    bodies = {id: "".join(text for one, text in writes if one == id).strip() for id in (1, 2, 3)}
    titles = {1: "Air", 2: "Bees", 3: "Cats"}
    shown = [id for id, body in bodies.items() if body]
    expected = [f"## {number}. {titles[id]}\n{bodies[id]}" for number, id in enumerate(shown, 1)]
    assert play.finished.text == "\n\n".join(expected)
    play.check_stream()
