"""The measure of aspects, on made-up answers whose coverage is known."""

from __future__ import annotations

import pytest

from specsot_lab.eval.core.aspect_table import (
    AskedQuestion,
    PlannedAnswer,
    aspects_of,
    by_category,
    copied_titles,
    count_distinct,
    coverage,
    cut_to_words,
    interval_of,
    lines_of,
    listed_titles,
    mean_overlap,
    measure,
    plans_of,
    repetition,
    shuffled_controls,
    singular,
    terms_of,
)


@pytest.mark.parametrize(
    ("word", "folded"),
    [
        ("cities", "city"),
        ("benefits", "benefit"),
        ("causes", "cause"),
        ("movies", "movy"),
        ("shoes", "shoes"),
        ("stress", "stress"),
        ("status", "status"),
        ("sleep", "sleep"),
    ],
)
def test_plurals_are_folded_by_harmans_three_rules(word: str, folded: str) -> None:
    assert singular(word) == folded


def test_terms_are_words_of_three_letters_and_no_numbers() -> None:
    assert terms_of("It is 100 Foods, an MP3 of **Foods**!") == {"food"}


def test_an_aspect_is_agreed_on_and_is_not_asked_for() -> None:
    found = aspects_of({"q": "Why sleep?"}, {"q": ["sleep, memory, mood", "memory and mood", "heart"]})
    assert found == {"q": frozenset()}, "with one question every term is common to all of them"
    samples = {f"q{n}": ["the memory", "the memory"] if n == 0 else ["the", "the cat"] for n in range(9)}
    found = aspects_of(dict.fromkeys(samples, "Why?"), samples)
    assert found["q0"] == {"memory"}
    assert found["q1"] == frozenset(), "`the` is everywhere, `cat` in one answer of each"


def test_coverage_is_the_share_of_aspects_in_any_part() -> None:
    assert coverage(["Good moods.", "Memories"], frozenset({"mood", "memory", "heart", "lung"})) == 0.5


@pytest.mark.parametrize(
    ("words", "left"),
    [(3, ["a", "b", "f"]), (6, ["a", "b c", "f g h"]), (9, ["a", "b c d e", "f g h i"]), (0, ["", "", ""])],
)
def test_a_cut_takes_from_every_part_alike(words: int, left: list[str]) -> None:
    assert cut_to_words(["a", "b c d e", "f g h i"], words) == left


def planned(*bodies: str) -> PlannedAnswer:
    return PlannedAnswer("", tuple(f"t{n}" for n in range(len(bodies))), bodies)


def test_the_control_has_its_own_headings_over_points_of_another_of_its_category() -> None:
    answers = {"a": planned("1", "2"), "b": planned("3"), "c": planned("4"), "d": PlannedAnswer("direct")}
    found = shuffled_controls(answers, {"a": "x", "b": "x", "c": "y", "d": "x"})
    assert (found["a"].headings, found["a"].bodies) == (("t0", "t1"), ("3", "3"))
    assert found["b"].bodies == ("1",)
    assert set(found) == {"a", "b"}, "nobody is there to change with c, and d has no points"
    assert shuffled_controls(answers, {"a": "x", "b": "y", "c": "z", "d": "x"}).keys() == {"a", "b", "c"}


def test_an_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    low, high = interval_of([0.0, 1.0] * 50)
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.02), "0.5 plus and minus 1.96 times 0.05"
    assert interval_of([0.0, 1.0] * 50) == (low, high)
    assert interval_of([0.0, 1.0] * 50, [1.0, 3.0] * 50)[0] > high, "the weighted mean is 0.75"


def test_repetition_counts_four_words_that_stood_there_before() -> None:
    assert repetition("a b c d e") == 0
    assert repetition("a b c d a b c d") == pytest.approx(1 / 5)
    assert repetition("a b") == 0


def test_titles_are_the_same_whatever_their_case_and_points() -> None:
    assert count_distinct(["Eat well", "eat well.", "Sleep"]) == 2


def test_a_title_is_copied_if_its_words_stand_together_in_a_source() -> None:
    sources = ["What are the benefits of regular exercise?", "Where the idea comes from"]
    titles = ["Regular exercise", "Better exercise", "Where the idea comes from", "Exercise regular", "art"]
    assert copied_titles(titles, sources) == ["Regular exercise", "Where the idea comes from"]


def test_a_title_that_the_question_lists_is_no_copy() -> None:
    question = "Describe the pros and cons of cats, and what is a petting zoo?"
    titles = ["Pros", "Cons", "Cats", "A petting zoo", "Prices"]
    assert listed_titles(titles, question) == ["Pros", "Cons", "A petting zoo"]
    answer = PlannedAnswer("a b", ("Pros", "Point 1 of ours"), ("a", "b"))
    found = plans_of([AskedQuestion("1", "one", question, "", answer, ())], ["Point 1 of ours"])
    assert (found["copied"], found["listed"]) == (0.5, 0.5)
    assert (found["copied_titles"], found["listed_titles"]) == ({"1": ["Point 1 of ours"]}, {"1": ["Pros"]})


def test_points_that_say_the_same_overlap() -> None:
    assert mean_overlap(["a b c", "a b c", "x y z"]) == pytest.approx(1 / 3)
    assert mean_overlap(["a b c"]) is None


def question(name: str, words: str, direct: str, *bodies: str) -> AskedQuestion:
    answer = PlannedAnswer(" ".join(bodies), tuple(f"Point {n}" for n in range(len(bodies))), bodies)
    return AskedQuestion(name, "one" if int(name) < 8 else "two", "Why?", direct, answer, (words, words))


def told(own: bool) -> tuple[list[dict[str, object]], str]:
    """Sixteen questions of eight words each. The plan has six of them, or those of another question."""
    questions: list[AskedQuestion] = []
    for n in range(16):
        words = [f"{chr(97 + n)}{letter * 3}" for letter in "stuvwxyz"]
        written = words if own else [f"{chr(97 + (n + 1) % 16)}{letter * 3}" for letter in "stuvwxyz"]
        texts = " ".join(written[:3]), " ".join(written[3:6])
        questions.append(question(str(n), " ".join(words), " ".join(words[:4]), *texts))
    rows = measure(questions)
    return rows, "\n".join(lines_of(by_category(rows), plans_of(questions, ["Point 1 of ours"])))


def test_more_aspects_are_more_and_another_questions_points_lose() -> None:
    rows, page = told(own=True)
    assert [(row["direct"], row["sot"], row["shuffled"]) for row in rows] == [(0.5, 0.75, 0)] * 16
    assert "it loses, as it must" in page
    whole = by_category(rows)[-1]
    assert (whole["category"], whole["more"], whole["wins"], whole["planned"]) == ("all", "sot", [16, 0], 1)
    assert whole["gain"] == 0.25
    assert "distinct titles 100.0%, copied 50.0%, listed by the question 0.0%" in page


def test_a_control_that_does_not_lose_is_reported() -> None:
    rows, page = told(own=False)
    assert by_category(rows)[-1]["more"] == "direct"
    assert "IT DOES NOT LOSE" in page
