"""Which titles of a list are points."""

from __future__ import annotations

import pytest

from specsot.core.skeleton import Point
from specsot_master.core.guards import SentenceWatch, keep_points

QUESTION = "What are the benefits of regular exercise?"
TOLD = ("Answer with a short numbered list of at most 8 points, each 2 to 6 words.",)


def kept(*titles: str, question: str = QUESTION) -> list[str]:
    points = [Point(id, 1, title) for id, title in enumerate(titles, 1)]
    found = keep_points(points, question, TOLD)
    assert [point.id for point in found] == list(range(1, len(found) + 1))
    return [point.title for point in found]


def test_good_titles_stay_as_they_are() -> None:
    assert kept("Better sleep", "More energy", "Exercise and mood") == [
        "Better sleep",
        "More energy",
        "Exercise and mood",
    ]


@pytest.mark.parametrize("again", ["better sleep", "Better  sleep!", "The better sleep", "Sleep, better"])
def test_what_was_said_before_is_no_point(again: str) -> None:
    assert kept("Better sleep", again, "More energy") == ["Better sleep", "More energy"]


@pytest.mark.parametrize(
    "copied",
    [
        "Benefits of regular exercise",
        "What are the benefits of regular exercise",
        "at most 8 points",
        "Short numbered list",
    ],
)
def test_our_words_and_the_question_are_no_points(copied: str) -> None:
    assert kept(copied, "More energy") == ["More energy"]


def test_a_part_of_the_question_may_be_one() -> None:
    question = "Compare renewable energy and nuclear power for a small country."
    assert kept("Renewable energy", "Nuclear power", question=question) == [
        "Renewable energy",
        "Nuclear power",
    ]


@pytest.mark.parametrize("empty", ["", "—", "A", "12", "the", "3.14"])
def test_what_says_nothing_is_no_point(empty: str) -> None:
    assert kept(empty, "More energy") == ["More energy"]


@pytest.mark.parametrize("unending", ["one of the many words that are said on and on", "x" * 78, "睡" * 26])
def test_what_was_cut_at_its_bound_is_no_point(unending: str) -> None:
    assert kept(unending, "More energy", "睡") == ["More energy", "睡"]


LOOP = "It also helps you to keep a healthy weight"


def shown(text: str, size: int) -> tuple[str, bool]:
    watch = SentenceWatch()
    out = "".join(watch.feed(text[at : at + size]) for at in range(0, len(text), size))
    return out + watch.flush(), watch.repeats


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (f"Run. {LOOP}. It is good. {LOOP}. And more.", f"Run. {LOOP}. It is good."),
        (f"Run. {LOOP}. It also helps YOU, to keep a healthy weight!", f"Run. {LOOP}."),
        (f"Run. {LOOP}. {LOOP[:36]}", f"Run. {LOOP}."),
        (f"“{LOOP}.” So. “{LOOP}.”\nMore", f"“{LOOP}.” So."),
        (
            "定期运动可以帮助人们保持健康的体重并且改善每天晚上的睡眠质量。" * 2,
            "定期运动可以帮助人们保持健康的体重并且改善每天晚上的睡眠质量。",
        ),
    ],
)
def test_a_branch_ends_where_it_repeats_a_sentence(text: str, cut: str, size: int) -> None:
    found, repeats = shown(text, size)
    assert (found.rstrip(), repeats) == (cut, True)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        f"{LOOP}. It also helps you to keep a healthy heart. It also helps.",
        "Yes. No. Yes. No. Yes.",
        f"def f(x):\n    return {'x' * 30}\ndef g(x):\n    return {'x' * 30}\n",
        f"{LOOP}. {LOOP} and a strong heart.",
        "It is 3.5 km. " * 2,
    ],
)
def test_what_is_no_loop_is_left_alone(text: str, size: int) -> None:
    assert shown(text, size) == (text, False)
