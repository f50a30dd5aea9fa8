"""The view of a request: what a watcher knows after each event."""

from __future__ import annotations

import json

from specsot.core.event_json import line_of
from specsot.core.skeleton import Point
from specsot.events import (
    BranchStarted,
    BranchText,
    Candidate,
    Event,
    MergedText,
    Numbered,
    Planned,
    Reason,
    SkeletonText,
    TokenLogprobs,
)
from tests.app.stories import DIRECT, MERGED, PLANNED, watch


def test_the_plan_opens_one_panel_for_each_point() -> None:
    view = watch(PLANNED[:4])
    assert view.skeleton == "[PLAN]\n1.<80><None>[-]NREM Stages of Sleep\n"
    assert [panel.point.id for panel in view.panels] == [1, 2, 3]
    assert not any(panel.started for panel in view.panels)


def test_branches_fill_side_by_side() -> None:
    view = watch(PLANNED[:10])
    assert [panel.text for panel in view.panels] == ["Slow ", "Dreams.", ""]
    assert [panel.writing for panel in view.panels] == [True, True, False]


def test_a_finished_branch_knows_why_and_how_much() -> None:
    first, second, third = watch(PLANNED[:13]).panels
    assert (first.reason, first.tokens) == (Reason.LENGTH, 5)
    assert (second.reason, second.tokens, second.steps) == (Reason.STOP, 5, 2)
    assert third.reason is None


def test_the_whole_story_ends_with_the_merged_answer() -> None:
    view = watch(PLANNED)
    assert view.merged == MERGED
    assert view.finished is not None
    assert view.finished.statistics.branches == 3


def test_a_direct_answer_has_no_panels() -> None:
    view = watch(DIRECT)
    assert view.planned
    assert view.panels == ()
    assert view.merged == "Yes, it is."


def test_a_repeated_text_is_not_doubled() -> None:
    events = [BranchStarted(1, "One", 9), BranchText(1, 0, "ab"), BranchText(1, 1, "bc")]
    assert watch(events).panels[0].text == "abc"
    assert watch([MergedText(0, "ab"), MergedText(0, "abc")]).merged == "abc"


def test_logprobs_gather_in_the_order_of_the_merged_answer() -> None:
    told = [TokenLogprobs(Candidate(n, b"\xe4", -0.5), (Candidate(9, b"x", -0.1),)) for n in range(3)]
    events = [MergedText(0, "ab", (told[0],)), MergedText(2, "", (told[1],)), MergedText(2, "c", (told[2],))]
    assert watch(events).logprobs == tuple(told)


def test_a_line_has_no_logprobs_unless_they_were_requested() -> None:
    told = TokenLogprobs(Candidate(4, b"\xe4x", -0.5))
    with_them, without = (
        json.loads(line_of(Numbered(3, event))) for event in (MergedText(0, "a", (told,)), MergedText(0, "a"))
    )
    assert without == {"event": "merged_text", "number": 3, "offset": 0, "text": "a", "step_tokens": 0}
    assert with_them["logprobs"] == [{"chosen": {"token": 4, "raw": [228, 120], "logprob": -0.5}, "top": []}]


def test_what_precedes_the_points_is_the_introduction_and_the_closing_is_the_last_panel() -> None:
    points = (Point(1, 9, "One"), Point(2, 9, "Two"))
    events: list[Event] = [MergedText(0, "Both count."), SkeletonText("1. One\n2. Two"), Planned(points)]
    view = watch(
        [*events, MergedText(11, "\n\n## 1. One\nFirst."), BranchStarted(3, "", 9), BranchText(3, 0, "So.")]
    )
    assert view.merged[: view.introduced] == "Both count."
    assert [(panel.point.id, panel.point.title) for panel in view.panels] == [(1, "One"), (2, "Two"), (3, "")]
