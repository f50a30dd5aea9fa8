"""Which titles of a list are points."""

from __future__ import annotations

import pytest

from specsot.core.list_plan import ListReader
from specsot.core.skeleton import PlanRules, Point
from specsot_master.core.guards import keep_points

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


@pytest.mark.parametrize(
    ("question", "titles", "left"),
    [
        (
            "What if Alan Turing had not cracked the Enigma code during World War II?",
            ["Alan Turing", "The Enigma code", "World War II", "Turing", "The end of the war"],
            ["The end of the war"],
        ),
        ("How do plant-based and animal-based diets differ?", ["Plant-based", "Animal-based", "Diets"], 2),
        ("What are the pros and cons of electric cars?", ["Pros", "Cons", "Electric car"], 2),
        ("Tell me about the food, hotels and prices in Japan.", ["Food", "Hotels", "Prices", "Japan"], 3),
        ("Was sind die Vor- und Nachteile von Katzen?", ["Nachteile", "Katzen"], 1),
        ("咖啡和茶有什么区别？", ["咖啡", "茶", "区别"], 2),
        ("Explore the history and culture of jazz.", ["The history of jazz", "Jazz"], 1),
    ],
)
def test_what_a_question_is_about_is_no_point_but_what_it_compares(
    question: str, titles: list[str], left: list[str] | int
) -> None:
    assert kept(*titles, question=question) == (titles[:left] if isinstance(left, int) else left)


@pytest.mark.parametrize(
    ("before", "title", "said"),
    [
        ("Shop at local farmers' markets", "Shop at markets", True),
        ("Shop at markets", "Shop at local markets", True),
        ("Brain exercise", "Brain exercises", True),
        ("Take breaks to avoid burnout", "Take regular breaks to avoid burnout", True),
        ("Solar energy", "Solar energy storage", False),
        ("Energy", "Solar energy", False),
        ("Solar energy", "Energy", False),
        ("Add milk", "Add sugar", False),
        ("Increased accessibility", "Improved accessibility", False),
    ],
)
def test_a_title_with_another_one_s_words_says_nothing_new(before: str, title: str, said: bool) -> None:
    assert kept(before, title) == ([before] if said else [before, title])


@pytest.mark.parametrize(
    ("titles", "left"),
    [
        (["Tax cuts, 2016-2022", "Trade"], ["Tax cuts", "Trade"]),
        (["Map, 20g", "Camera, 20g", "Map, 20g"], ["Map", "Camera"]),
        (["World Cup, 2014", "World Cup, 2018"], ["World Cup, 2014", "World Cup, 2018"]),
    ],
)
def test_figures_behind_a_title_go_unless_they_tell_two_apart(titles: list[str], left: list[str]) -> None:
    assert kept(*titles) == left


@pytest.mark.parametrize("open", ["and the", "new cultures and ways of", "serious illness,such as", "Cars y"])
def test_a_title_that_must_go_on_is_no_point(open: str) -> None:
    assert kept(open, "Vitamin A", "Room 1,000") == ["Vitamin A", "Room 1,000"]


@pytest.mark.parametrize("empty", ["", "—", "A", "12", "the", "3.14"])
def test_what_says_nothing_is_no_point(empty: str) -> None:
    assert kept(empty, "More energy") == ["More energy"]


@pytest.mark.parametrize("unending", ["one of the many words that are said on and on", "x" * 78, "睡" * 26])
def test_what_was_cut_at_its_bound_is_no_point(unending: str) -> None:
    assert kept(unending, "More energy", "睡") == ["More energy", "睡"]


# What SmolLM2-135M-Instruct wrote, greedy, behind "1.": the first three held by the grammar, the others free.
RECORDED = [
    (
        "How do I prepare for a job interview?",
        " Research the company thoroughly.\n2. Practice common interview questions.\n3."
        " Dress professionally.\n"
        "4. Arrive early.\n5. Bring extra copies of your resume.\n",
        [
            "Research the company thoroughly",
            "Practice common interview questions",
            "Dress professionally",
            "Arrive early",
            "Bring extra copies of your resume",
        ],
    ),
    (
        "Give me tips for saving money as a student.",
        " Budget:\n2. Plan your meals:\n3. Use coupons:\n4. Buy things you need:\n5. Save money:\n",
        ["Budget", "Plan your meals", "Use coupons", "Buy things you need", "Save money"],
    ),
    ("Welche Vorteile hat regelmäßiger Sport?", " 2\n2. 3\n3. 4\n4. 5\n5. 6\n", []),
    ("What is 2+2?", " 2 + 2 = 4\n2. 2 + 2 = 4\n3. 2 + 2 = 4", []),
    (
        "Write a python function that reverses a string.",
        " The original function is not efficient for large inputs.\n"
        "2. The original function is not efficient for large inputs.\n"
        "3. The original function is not efficient for large inputs.",
        ["The original function is not efficient for large inputs"],
    ),
    (
        "Make a list of common phrases for the given section of the paper.\n\nIntroduction",
        " Introduction\n2. Methodology\n3. Results\n4. Discussion\n5. Conclusion\n6. References\n"
        "7. Conclusion\n8. References\n9. Conclusion",
        ["Methodology", "Results", "Discussion", "Conclusion", "References"],
    ),
    (
        "Explain the causes of the French Revolution.",
        " The French Revolution was a historical event that began in 1789 and lasted until 1815.\n"
        "2. The French Revolution was a result of the Enlightenment, which emphasized reason.",
        [],
    ),
]


@pytest.mark.parametrize(("question", "text", "titles"), RECORDED)
def test_what_is_kept_of_recorded_plans(question: str, text: str, titles: list[str]) -> None:
    reader = ListReader(PlanRules(direct=False, max_points=8, listed=True))
    reader.feed(text)
    reader.finish()
    assert [point.title for point in keep_points(reader.points, question, TOLD)] == titles
