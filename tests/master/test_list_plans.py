"""The request machine where a model plans in lists, by transcripts."""

from __future__ import annotations

import pytest

from specsot.core.frames import End
from specsot.core.skeleton import PlanRules, read_plan
from specsot.events import Planned, Reason, SkeletonText
from specsot_master.core.plans.plan import CloseSequence, OpenAnswer, OpenBranch, OpenSkeleton, TextPiece
from tests.master.play import Play, text_of

TOLD = ("Answer with a short numbered list.",)
LIST = " Better sleep\n2. **More energy**: you feel it\n3. better sleep\n4. Less stress"


def titles(play: Play) -> list[str]:
    (planned,) = play.of(Planned)
    assert isinstance(planned, Planned)
    return [point.title for point in planned.points]


def test_a_list_becomes_points_that_get_equal_shares() -> None:
    play = Play("auto", told=TOLD, max_new_tokens=600)
    rules = PlanRules(direct=False, max_points=8, listed=True)
    assert play.of(OpenSkeleton) == [OpenSkeleton(300, rules, True)]
    play.write(0, LIST, step=7)
    play.end(0)
    assert "".join(e.text for e in play.tell() if isinstance(e, SkeletonText)) == "1." + LIST
    assert titles(play) == ["Better sleep", "More energy", "Less stress"]
    assert play.open_ready() == [1, 2, 3]
    budgets = [order.budget for order in play.of(OpenBranch) if isinstance(order, OpenBranch)]
    assert max(budgets) - min(budgets) <= 1
    for id in (3, 1, 2):
        play.write(id, f"Text {id}.")
        play.end(id)
    assert play.finished.text == (
        "## 1. Better sleep\nText 1.\n\n## 2. More energy\nText 2.\n\n## 3. Less stress\nText 3."
    )
    assert play.finished.statistics.plan_tokens == len(LIST) + 1
    play.check_stream()


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_list_can_be_shown_in_markers(step: int) -> None:
    """The skeleton's text is written once, by the master, from the points that are used."""
    play = Play("sot", told=TOLD, shows_markers=True, max_new_tokens=600)
    play.write(0, LIST, step=step)
    play.end(0)
    (skeleton,) = play.of(SkeletonText)
    length = (600 - len(LIST) - 1) // 3
    assert skeleton.text == (
        f"[PLAN]\n1.<{length}><None>[-]Better sleep\n2.<{length}><None>[-]More energy\n"
        f"3.<{length}><None>[-]Less stress\n[END]"
    )
    (planned,) = play.of(Planned)
    assert read_plan(skeleton.text) == planned.points
    assert skeleton.logprobs == (), "the model did not write this text"
    for id in play.open_ready():
        play.write(id, f"Text {id}.")
        play.end(id)
    assert play.finished.text.startswith("## 1. Better sleep\nText 1.\n\n## 2. More energy")
    play.check_stream()


def test_an_unusable_list_is_never_shown_in_markers() -> None:
    play = Play("sot", told=TOLD, shows_markers=True, max_new_tokens=600)
    play.write(0, " Only this one")
    play.end(0)
    play.write(0, "Sleep well.")
    play.end(0)
    assert not play.of(SkeletonText)
    assert play.finished.text == "Sleep well."
    play.check_stream()


@pytest.mark.parametrize(
    ("text", "found"),
    [(" Rest\n2. Walk\n3. rest\n4. Walk\n", ["Rest", "Walk"]), (" Rest\n2. Rest\n3. Rest\n", [])],
)
def test_a_list_that_only_repeats_itself_is_over(text: str, found: list[str]) -> None:
    """Its model would go on so to the last point that it may have."""
    play = Play("sot", told=TOLD, max_new_tokens=900)
    play.write(0, text)
    assert CloseSequence(0) in play.said
    assert titles(play) == found


@pytest.mark.parametrize(
    "text", [" Better sleep\n2. Better sleep\n3. the", " Only this one", " ?\n2. Better sleep"]
)
def test_with_fewer_than_two_points_the_answer_is_a_plain_one(text: str) -> None:
    play = Play("sot", told=TOLD, max_new_tokens=600)
    play.write(0, text)
    play.end(0)
    assert titles(play) == []
    rest = 600 - len(text) - 1
    assert play.said[-1] == OpenAnswer(rest)
    assert play.plan.all_opened
    play.write(0, "Sleep well [END].")
    play.end(0)
    found = play.finished
    assert (found.text, found.reason) == ("Sleep well [END].", Reason.STOP)
    assert text_of(found.tokens) == "Sleep well [END]."
    counted = found.statistics
    assert (counted.mode, counted.plan_tokens, counted.merged_tokens) == ("direct", len(text) + 1, 17)
    assert counted.completion_tokens == len(text) + 1 + 17 + 1
    play.check_stream()


def test_a_plain_answer_in_the_place_of_a_plan_ends_where_it_repeats_itself() -> None:
    """One that was asked for goes on a little longer."""
    said = "We think that this is the symmetry of it. " * 3
    play, plain = Play("sot", told=TOLD, max_new_tokens=600), Play("direct", max_new_tokens=600)
    play.write(0, " A\n")
    play.end(0)
    play.write(0, said, step=5)
    plain.write(0, said, step=5)
    assert (play.finished.text.strip(), play.finished.reason) == (said[:41].strip(), Reason.STOP)
    assert not plain.plan.finished
    play.check_stream()


def test_the_stop_token_that_ended_a_list_did_not_end_the_plain_answer() -> None:
    """Both are of ordinal 0."""
    ends = {"stop_token_ids": (7,)}
    play = Play("sot", told=TOLD, constraint=False, ends=ends, max_new_tokens=600)
    play.said += play.plan.on_text(0, [TextPiece(ord("A"), " A"), TextPiece(None, "", stop=7)], now=2.0)
    play.end(0)
    play.write(0, "Sleep well.")
    play.end(0)
    assert play.finished.reason is Reason.STOP
    assert play.finished.stop_token is None


def test_the_plain_answer_and_the_list_share_one_budget() -> None:
    play = Play("sot", told=TOLD, max_new_tokens=130)
    play.write(0, " A\n")
    play.end(0)
    (order,) = play.of(OpenAnswer)
    assert isinstance(order, OpenAnswer)
    play.write(0, "x" * order.limit)
    assert play.finished.reason is Reason.LENGTH
    assert play.finished.statistics.completion_tokens == 130


def test_a_list_that_ran_out_of_tokens_loses_the_title_that_was_cut() -> None:
    play = Play("sot", told=TOLD, constraint=False, max_new_tokens=600, max_skeleton_tokens=40)
    play.write(0, (" Better sleep\n2. More energy\n3. Less stress")[:40])
    assert titles(play) == ["Better sleep", "More energy"]
    assert play.closed == [0]


def test_a_list_that_is_complete_is_closed_where_nothing_holds_it() -> None:
    play = Play("sot", told=TOLD, constraint=False, max_new_tokens=160)
    play.write(0, " One thing\n2. Two things\nThat is all")
    assert titles(play) == ["One thing", "Two things"]
    assert isinstance(play.said[-2], CloseSequence)
    play.write(0, " that I said")
    assert play.open_ready() == [1, 2]


@pytest.mark.parametrize("end", [End.FAILED, End.CANCELLED])
def test_a_list_that_broke_is_no_reason_to_answer_plainly(end: End) -> None:
    play = Play("sot", told=TOLD)
    play.write(0, " Better")
    play.end(0, end)
    assert not play.of(OpenAnswer, Planned)
    assert play.finished.reason is (Reason.FAILED if end is End.FAILED else Reason.CANCELLED)


def test_a_branch_that_repeats_itself_ends_and_its_tokens_match_its_text() -> None:
    play = Play("sot", told=TOLD, max_new_tokens=900)
    play.write(0, " Better sleep\n2. More energy")
    play.end(0)
    play.open_ready()
    sentence = "You sleep better when you have run around."
    play.write(1, f"{sentence} So run. {sentence} So run. {sentence}", step=5)
    assert play.closed == [1]
    play.write(2, f"{sentence} It is so.")
    play.end(2)
    assert play.finished.text == (
        f"## 1. Better sleep\n{sentence} So run.\n\n## 2. More energy\n{sentence} It is so."
    )
    play.check_stream()


def test_an_item_that_a_limit_ends_while_it_comes_again_and_again_is_shown_once() -> None:
    item = "- Open the windows for ten minutes\n"
    play = Play("sot", told=TOLD, max_new_tokens=1600)
    play.write(0, " Better sleep\n2. More energy")
    play.end(0)
    play.open_ready()
    play.write(1, f"In the evening:\n- Shut the door\n{item}{item}- Open")
    play.end(1, End.LENGTH)
    play.write(2, "It is so.")
    play.end(2)
    text = f"In the evening:\n- Shut the door\n{item}"
    assert play.finished.text == f"## 1. Better sleep\n{text}\n## 2. More energy\nIt is so."
    assert play.finished.reason is Reason.STOP
    play.check_stream()
