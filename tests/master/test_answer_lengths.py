"""Planned answers aim at the usual length of direct ones, by kind of question and form of answer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specsot.events import Planned
from specsot.params import Ask, Limits
from specsot_master.core.commands import OpenBranch
from specsot_master.core.limits import (
    CLOSING_AIM,
    USUAL_THINGS,
    aim_of,
    skeleton_limit,
)
from specsot_master.core.plans.answer_forms import FormReader, UsualLengths, form_of
from specsot_master.core.plans.introduction import MAX_INTRODUCTION_TOKENS
from specsot_master.core.plans.merged_answer import heading_of
from specsot_master.core.plans.plan import RequestPlan
from specsot_master.core.plans.speculation import PLAN_ORDINAL
from specsot_master.core.plans.text_pieces import TextPiece
from specsot_master.core.plans.wording import ANSWER_TOKENS, LANGUAGES, QUESTION_KINDS, read_wording
from tests.master.play import Play
from tests.master.test_speculation import INTRODUCTION, ITEM, TOLD, write_plan

PLAIN = f"{INTRODUCTION}\n\n1. {ITEM}"
TITLES = ("Mu", "Nu", "Xi", "Pi", "Ro", "Tau", "Phi", "Chi", "Psi", "Eta")
TITLED = f"{INTRODUCTION}\n\n1. **Alpha**: {ITEM}"


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("Plants need light.\n\n1. Light: without", "plain"),
        ("Plants need light.\n\n1. **Light**: without", "titled"),
        ("Plants need light.\n\n- **Light**: without", "titled"),
        ("Plants need light.\n\n* Light is", "plain"),
        ("Plants need light.\n\n**Light**\nPlants", "titled"),
        ("Plants need light.\n\n### Light\nPlants", "titled"),
        ("Plants need light.\n\nThey grow.", "plain"),
        ("Plants need light.\n\n12 hours a day", "plain"),
        ("**Plants** need light.\n\nThey grow.", "plain"),
        ("植物需要光：\n\n1. **光**：没有", "titled"),
        ("植物需要光：\n\n1、光：没有", "plain"),
        ("Plants need light.", "plain"),
        ("", "plain"),
    ],
)
def test_the_form_of_an_answer_is_that_of_the_first_line_after_its_introduction(
    answer: str, form: str
) -> None:
    assert form_of(answer) == form


@pytest.mark.parametrize("answer", [PLAIN, TITLED, "Light.\n\n* **A", "Light.\n\n* A", "光：\n\n1. **光**"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_the_form_does_not_depend_on_how_the_text_is_cut_into_tokens(answer: str, size: int) -> None:
    reader = FormReader()
    for start in range(0, len(answer), size):
        reader.read(TextPiece(None, answer[start : start + size]))
    reader.end()
    assert reader.form == form_of(answer)


def test_a_long_first_paragraph_is_not_waited_for() -> None:
    reader = FormReader()
    for token in range(MAX_INTRODUCTION_TOKENS - 1):
        reader.read(TextPiece(token, "so "))
    assert reader.form is None
    reader.read(TextPiece(0, "so "))
    assert reader.form == "plain"


def play_of(answer: str, points: int, lengths: UsualLengths, question: str = "?") -> Play:
    """A speculative plan of so many points, with the direct answer that was begun beside it."""
    play = Play("auto", told=TOLD, speculates=True, max_new_tokens=2000)
    ask = Ask(question, mode="auto", limits=Limits(max_new_tokens=2000))
    play.plan = RequestPlan(*(ask, "r", 7, "demo"), told=TOLD, speculates=True, answer_tokens=lengths)
    play.said = play.plan.start(prompt_tokens=5, now=1.0)
    play.write(0, answer)
    write_plan(play, " " + "\n".join(f"{n}. {t}" for n, t in enumerate(TITLES[:points], 1))[3:])
    play.open_ready()
    return play


@pytest.mark.parametrize(("answer", "tokens"), [(PLAIN, 500), (TITLED, 600)])
def test_the_aim_of_each_point_follows_from_the_form_of_the_direct_answer(answer: str, tokens: int) -> None:
    play = play_of(answer, 4, UsualLengths(500, 600))
    points = play.of(Planned)[0].points
    others = sum(len(heading_of(point)) for point in points) + len(INTRODUCTION) + CLOSING_AIM
    aim = aim_of(tokens, 4, others)
    assert {one.budget for one in play.of(OpenBranch)} == {int(1.5 * aim)}


@pytest.mark.parametrize(
    ("question", "introduction", "things"),
    [("List four letters.", "These are some:", 4), ("Which letters are there?", "Here are six of them:", 6)],
)
def test_an_answer_is_as_long_as_the_things_that_are_named(
    question: str, introduction: str, things: int
) -> None:
    play = play_of(f"{introduction}\n\n1. {ITEM}", 6, UsualLengths(800, 900), question)
    points = play.of(Planned)[0].points
    assert len(points) == things
    others = sum(len(heading_of(point)) for point in points) + len(introduction) + CLOSING_AIM
    aim = aim_of(800 * things // USUAL_THINGS, things, others)
    assert {one.budget for one in play.of(OpenBranch)} == {int(1.5 * aim)}


def test_a_plan_has_all_points_that_the_question_asks_for() -> None:
    play = play_of(PLAIN, 10, UsualLengths(300, 300), "List ten letters.")
    assert len(play.of(Planned)[0].points) == 10


@pytest.mark.parametrize(
    ("question", "tokens"),
    [
        ("What are the benefits of tea?", 45),
        ("Welche Vorteile hat Tee?", 67),
        ("¿Qué ventajas tiene el té?", 56),
        ("喝茶有哪些好处？", 62),
        ("List ten rivers of Europe.", 120),
        ("Nenne zehn Flüsse in Europa.", 180),
    ],
)
def test_a_plan_has_as_many_tokens_as_its_words_take_in_its_language(question: str, tokens: int) -> None:
    assert skeleton_limit(Ask(question, mode="auto"), listed=True, speculates=True) == tokens


@pytest.mark.parametrize(
    ("titles", "planned"),
    [
        ("Light\n2. Deep\n3. Deep\n4. Deep", False),
        ("Light\n2. Deep\n3. Dreams", False),
        ("Light\n2. Deep\n3. Dreams\n4. Rest", True),
    ],
)
def test_a_plan_needs_four_usable_points(titles: str, planned: bool) -> None:
    play = Play("auto", told=TOLD, speculates=True, answer_tokens=320, max_new_tokens=600)
    play.write(0, PLAIN)
    write_plan(play, f" {titles}")
    assert bool(play.of(Planned)[0].points) == planned


def test_the_plan_is_used_only_once_the_form_is_known() -> None:
    play = Play("auto", told=TOLD, speculates=True, answer_tokens=320, max_new_tokens=600)
    write_plan(play)
    play.write(0, f"{INTRODUCTION}\n\n1. *")
    assert not play.of(Planned)
    play.write(0, "*Alpha**: " + ITEM)
    assert play.of(Planned)[0].points
    assert PLAN_ORDINAL not in {order.point.id for order in play.of(OpenBranch)}


def test_every_language_and_kind_of_question_has_usual_lengths() -> None:
    assert set(ANSWER_TOKENS) == set(LANGUAGES)
    for by_kind in ANSWER_TOKENS.values():
        assert set(by_kind) == set(QUESTION_KINDS)
        assert all(lengths.plain <= lengths.titled for lengths in by_kind.values())


def test_a_model_may_have_lengths_of_its_own() -> None:
    wording = read_wording(
        {"answer_tokens": {"de": {"list": {"plain": 400}}, "en": {"comparison": {"titled": 200}}}}
    )
    german = ANSWER_TOKENS["de"]["list"].titled
    assert wording.lengths_of("Welche Vorteile hat Sport?") == UsualLengths(400, german)
    assert wording.lengths_of("Compare tea and coffee.").titled == 200
    assert wording.lengths_of("What are the benefits of tea?") == ANSWER_TOKENS["en"]["list"]
    assert wording.lengths_of("锻炼身体有哪些好处？") == ANSWER_TOKENS["zh"]["list"]


@pytest.mark.parametrize(
    "given",
    [
        320,
        {"fr": {"list": {"plain": 3}}},
        {"en": {"plain": 3}},
        {"en": {"list": 3}},
        {"en": {"list": {"long": 3}}},
        {"en": {"list": {"plain": 0}}},
        {"en": {"list": {"plain": "3"}}},
    ],
)
def test_lengths_that_are_no_tokens_by_language_kind_and_form_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"wording\.answer_tokens"):
        read_wording({"answer_tokens": given})


def test_longer_usual_lengths_never_mean_shorter_points() -> None:
    budgets = [
        min(one.budget for one in play_of(PLAIN, 5, UsualLengths(n, n)).of(OpenBranch))
        for n in (300, 400, 500, 900)
    ]
    assert all(shorter <= longer for shorter, longer in pairwise(budgets))
