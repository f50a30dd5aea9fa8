"""Which sentences of a point are left out: those that repeat an earlier point, however fast it was."""

from __future__ import annotations

import random

import pytest

from specsot.core.frames import End
from specsot.events import BranchFinished, BranchText, Reason
from specsot_master.core.commands import CloseSequence
from specsot_master.core.plans.repetition import RepetitionFilter
from tests.conftest import seeds
from tests.master.play import Play
from tests.master.test_speculation import DIRECT, INTRODUCTION, TOLD, write_plan

QUESTION = "How do I sleep well in an old and noisy house?"
REST = "Rest in a dark and quiet room."


@pytest.mark.parametrize(
    ("before", "sentence", "repeats"),
    [
        (REST, "Work in a dark and quiet room, too.", True),
        (REST, "Working in dark, quiet rooms helps.", False),
        (REST, "A quiet room helps.", False),
        (REST, "", False),
        ("", REST, False),
        ("You sleep well in an old and noisy house.", "To sleep well in an old and noisy house, go.", True),
        ("这可以帮助你放松身心。", "这可以帮助你放松身心。", True),
        ("这可以帮助你放松身心。", "这可以帮助你放松。", False),
        (f"太极 is a sport. {REST}", "Work in a dark and quiet room, too.", True),
    ],
)
def test_a_sentence_repeats_what_has_five_of_its_words_in_a_row(
    before: str, sentence: str, repeats: bool
) -> None:
    earlier = RepetitionFilter(QUESTION)
    earlier.add(before)
    assert earlier.repeats(sentence) == repeats


TEXTS = {
    1: f"Alpha comes first of all. {REST} Then sleep.",
    2: f"Beta comes second. {REST} Then get up.",
    3: "Gamma comes third. Work in a dark and quiet room. Eat little.",
    4: f"Delta is last. {INTRODUCTION}",
    5: "So there are four.",
}
SHOWN = {
    1: TEXTS[1],
    2: "Beta comes second. Then get up.",
    3: "Gamma comes third. Eat little.",
    4: "Delta is last.",
    5: TEXTS[5],
}


def begin(max_parallel: int = 8) -> Play:
    limits = {"max_new_tokens": 2000, "max_parallel": max_parallel}
    play = Play("auto", told=TOLD, speculates=True, answer_tokens=700, **limits)  # type: ignore[arg-type]
    play.write(0, DIRECT)
    write_plan(play)
    play.open_ready()
    return play


def shown(play: Play) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in play.of(BranchText):
        texts[event.branch] = texts.get(event.branch, "") + event.text
    return texts


def write(play: Play, id: int, text: str) -> None:
    play.write(id, text)
    play.said += play.plan.pass_openings(now=2.5)


def test_the_later_sentences_of_a_point_wait_until_all_earlier_points_are_over() -> None:
    play = begin()
    for id in (1, 2, 3, 4):
        write(play, id, TEXTS[id])
    assert shown(play) == {
        1: TEXTS[1],
        2: "Beta comes second.",
        3: "Gamma comes third.",
        4: "Delta is last.",
    }, "first sentences do not wait, and there is no point before the first"
    play.end(2)
    assert not play.of(BranchFinished)
    play.end(1)
    assert [event.branch for event in play.of(BranchFinished)] == [1, 2]
    assert shown(play)[2] == SHOWN[2]
    assert shown(play)[3] == SHOWN[3], "it is its turn, although it has not ended"


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (f"{REST} Then get up.", f"{REST} Then get up."),
        (f"Get up. {REST} This is how to rest. Then eat.", "Get up. Then eat."),
        ("Get up. This is how to rest. Then eat.", "Get up. This is how to rest. Then eat."),
        (
            "Eat in the big and old kitchen. Cook in the big and old kitchen. Sit.",
            "Eat in the big and old kitchen. Sit.",
        ),
        (REST, REST),
        ("Rest in a dark and quiet room and", "Rest in a dark and quiet room and"),
    ],
)
def test_a_later_sentence_that_repeats_is_left_out_with_what_leans_on_it(text: str, visible: str) -> None:
    play = begin()
    write(play, 1, TEXTS[1])
    write(play, 2, text)
    play.end(2)
    play.end(1)
    assert shown(play)[2] == visible


@pytest.mark.parametrize("seed", seeds(20, 5))
def test_the_answer_does_not_depend_on_which_point_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    play = begin()
    rest = dict(TEXTS)
    while rest:
        id = draw.choice(list(rest))
        size = draw.choice((1, 3, 30, 100))
        write(play, id, rest[id][:size])
        rest[id] = rest[id][size:]
        if not rest[id]:
            del rest[id]
            play.end(id)
            play.said += play.plan.pass_openings(now=2.5)
    assert shown(play) == SHOWN
    assert [event.branch for event in play.of(BranchFinished) if event.branch < 5] == [1, 2, 3, 4]
    assert play.finished.reason is Reason.STOP
    assert play.finished.text.endswith(f"## 4. Delta\n{SHOWN[4]}\n\n{SHOWN[5]}")
    left_out = sum(map(len, TEXTS.values())) - sum(map(len, SHOWN.values()))
    figures = play.finished.statistics
    assert figures.completion_tokens >= figures.merged_tokens + left_out, "what is left out was decoded"
    play.check_stream()


def test_a_point_that_waits_leaves_its_place_to_another_one() -> None:
    play = begin(max_parallel=2)
    assert not play.plan.ready()
    write(play, 1, "Alpha comes first.")
    write(play, 2, TEXTS[2])
    play.end(2)
    assert not play.of(BranchFinished)
    assert [point.id for point in play.plan.ready()] == [3]


def test_a_cancelled_answer_has_the_whole_sentences_that_waited() -> None:
    play = begin()
    for id in (1, 2, 3):
        write(play, id, TEXTS[id])
    play.end(2)
    play.said += play.plan.cancel(now=3.0)
    assert shown(play) == {id: SHOWN[id] for id in (1, 2, 3)}
    assert play.finished.reason is Reason.CANCELLED
    play.check_stream()


def test_a_point_that_fails_ends_at_once() -> None:
    play = begin()
    for id in (1, 2, 3, 4):
        write(play, id, TEXTS[id])
    play.end(2, End.FAILED)
    assert [event.branch for event in play.of(BranchFinished)] == [2]
    for id in (1, 3, 4, 5):
        write(play, id, TEXTS[id] if id == 5 else "")
        play.end(id)
    assert play.finished.reason is Reason.FAILED
    play.check_stream()


def test_a_point_whose_text_runs_into_the_next_heading_is_closed_at_once() -> None:
    play = begin()
    write(play, 1, "Alpha comes first.")
    write(play, 2, "Beta comes second.\n\n")
    write(play, 2, "## 3. Gamma")
    assert CloseSequence(2) in play.said
    assert not play.of(BranchFinished)
