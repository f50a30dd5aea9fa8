"""Which closings are shown: those that conclude, and list neither the points nor the introduction again."""

from __future__ import annotations

import pytest

from specsot.core.frames import End
from specsot.events import BranchText, Reason
from specsot_master.core.plans.closings import ClosingRule
from tests.master.play import Play
from tests.master.test_speculation import DIRECT, INTRODUCTION, TOLD, write_plan

HABITS = ClosingRule(
    "How can I improve my time management?",
    "Improving your time management is a crucial aspect of personal and professional success.",
    ("Set clear goals", "Prioritize tasks", "Use a planner", "Take breaks"),
)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Start small, and practice every day.", True),
        ("A planner is the easiest way to begin.", True),
        ("By setting clear goals, prioritizing tasks and taking breaks, you can do more.", False),
        ("Begin with a planner and with clear goals.", False),
        ("It is a crucial aspect of personal and professional success.", False),
        ("Time management is a crucial skill.", True),
        ("The first sentence is about clear goals.", False),
        ("This answer is about planners.", False),
        ("Your answer must contain exactly three points.", False),
        ("Overall, the last sentence of the answer is:", False),
        ('In short, the answer is "Use time".', False),
        ("Here is a final piece of advice.", False),
        ("Time is a final piece of advice for everybody.", False),
        ("Practice every day, and then", False),
        ("", False),
    ],
)
def test_a_closing_concludes(text: str, allowed: bool) -> None:
    assert HABITS.allows(text) == allowed


@pytest.mark.parametrize(
    ("question", "introduction", "titles", "text", "allowed"),
    [
        (
            "Vergleiche Tee und Kaffee.",
            "",
            ("Geschmack", "Koffein", "Preis"),
            "Entscheidend sind der Preis und das Koffein.",
            False,
        ),
        (
            "Gib mir Tipps für ein Gespräch.",
            "",
            ("Fragen",),
            "Im Gespräch sollte das Fazit kurz sein.",
            False,
        ),
        (
            "¿Cómo puedo mejorar mi memoria?",
            "",
            ("Evita el estrés", "Duerme bien"),
            "Lo mejor es evitar el estrés.",
            True,
        ),
        (
            "第一次去日本旅行要注意什么？",
            "",
            ("了解日本文化", "注意安全", "学习日语"),
            "了解日本文化、注意安全是旅行前的准备。",
            False,
        ),
        (
            "怎样选择一台笔记本电脑？",
            "选择笔记本电脑时，需要考虑多个因素。",
            ("比较价格", "检查屏幕"),
            "购买之前，最好先到店里试用。",
            True,
        ),
        (
            "怎样选择一台电脑？",
            "购买电脑以前需要考虑多个因素。",
            ("比较价格", "检查屏幕"),
            "购买电脑以前需要考虑多个因素。",
            False,
        ),
    ],
)
def test_a_closing_concludes_in_every_language(
    question: str, introduction: str, titles: tuple[str, ...], text: str, allowed: bool
) -> None:
    assert ClosingRule(question, introduction, titles).allows(text) == allowed


def test_a_word_that_two_titles_share_names_neither() -> None:
    rule = ClosingRule(titles=("Unique products", "Unique atmosphere"))
    assert rule.allows("Such a shop is unique.")
    assert not rule.allows("The products and the atmosphere count.")


def begin() -> Play:
    play = Play("auto", told=TOLD, speculates=True, answer_tokens=320, max_new_tokens=900)
    play.write(0, DIRECT)
    write_plan(play)
    assert play.open_ready() == [1, 2, 3, 4, 5]
    for id, text in enumerate(
        ("It is first.", "Beta comes second.", "Then comes Gamma.", "Delta is last."), 1
    ):
        play.write(id, text)
    return play


def closed(play: Play) -> str:
    return "".join(event.text for event in play.of(BranchText) if event.branch == 5)


def end(play: Play, reason: End = End.STOP) -> None:
    for id in (1, 2, 3, 4):
        play.end(id)
    play.end(5, reason)
    play.said += play.plan.pass_openings(now=2.5)


def test_a_closing_is_shown_once_it_is_complete() -> None:
    play = begin()
    play.write(5, "So there are four.")
    play.said += play.plan.pass_openings(now=2.5)
    assert closed(play) == ""
    end(play)
    assert closed(play) == "So there are four."
    assert play.finished.text.endswith("\n\nSo there are four.")
    play.check_stream()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("So there are Alpha, Beta and Gamma.", End.STOP),
        ("It is so that there", End.LENGTH),
        (INTRODUCTION, End.STOP),
    ],
)
def test_a_closing_that_concludes_nothing_is_left_out(text: str, reason: End) -> None:
    play = begin()
    play.write(5, text)
    end(play, reason)
    assert closed(play) == ""
    assert play.finished.text.endswith("Delta is last.")
    assert play.finished.reason is (Reason.STOP if reason is End.STOP else Reason.LENGTH)
    assert play.finished.statistics.completion_tokens > len(play.finished.text)
    play.check_stream()


def test_the_sentence_that_a_closing_has_begun_is_left_out() -> None:
    play = begin()
    play.write(5, "So there are four. And then the")
    end(play, End.LENGTH)
    assert closed(play) == "So there are four."
