"""Who plans: what is read from a request before anybody asks the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specsot.params import Ask, Form, Limits, Message
from specsot_master.core.router import ASKED_FOR, BY_ITSELF, LONG_TEXT, Decision, decide, decide_question
from specsot_master.prompts import messages_of

EXERCISE = "What are the benefits of regular exercise?"


def way(question: str, later: bool = False) -> str:
    decision = decide_question(question, later)
    return "planned" if decision.mode == "sot" else decision.reason


@pytest.mark.parametrize(
    ("reason", "questions"),
    [
        (
            "small talk",
            [
                "hi",
                "Hello there!",
                "How are you today?",
                "thanks a lot",
                "I'm bored.",
                "你好",
                "Hallo!",
                "¡Hola!",
            ],
        ),
        (
            "arithmetic",
            [
                "2+2",
                "What is 17 * 24?",
                "Solve for x: 2x + 6 = 14",
                "Find the area of a circle with radius 5.",
            ],
        ),
        (
            "arithmetic",
            [
                "Tom has 12 apples and gives 5 to Mary. How many are left?",
                "小明有10个苹果，吃了3个，还剩几个？",
            ],
        ),
        (
            "code",
            [
                "```\nx = 1\n```",
                "Write a Python function that reverses a string.",
                "def fib(n):",
                "How do I sort a list in Java?",
            ],
        ),
        (
            "code",
            [
                "Implement a linked list.",
                "写一个函数，判断素数",
                "Schreibe eine Funktion, die sortiert.",
                "SELECT a FROM b; faster",
            ],
        ),
        (
            "a yes-or-no question",
            [
                "Is the earth flat?",
                "Can dogs eat chocolate?",
                "太阳是恒星吗？",
                "Ist Glas flüssig?",
                "¿Es verdad?",
            ],
        ),
        (
            "a short fact",
            [
                "Who wrote Hamlet?",
                "How tall is the Eiffel Tower?",
                "What is the capital of France?",
                "法国的首都是哪里？",
            ],
        ),
        (
            "a short fact",
            ["Wer hat das Telefon erfunden?", "¿Quién pintó la Mona Lisa?", "When did World War II end?"],
        ),
        (
            "a text is to be worked on",
            [
                "Translate to French: Good day.",
                "Correct the grammar: She like it.",
                "翻译成英文：我喜欢读书。",
            ],
        ),
        ("a text is to be worked on", ["Discuss this:\n" + "All happy families are alike. " * 8]),
        (
            "one text is to be written",
            [
                "Write a haiku about autumn.",
                "Draft an email to my landlord.",
                "写一首诗",
                "Escribe un poema.",
            ],
        ),
        ("one thing is asked for", ["Suggest a recipe.", "Tell me another joke, please."]),
        (
            "a short answer is wanted",
            [f"{EXERCISE} Answer briefly.", "Explain gravity in one sentence.", "用一句话解释通货膨胀。"],
        ),
        ("a long text is given", ["What are the main points? " + "word " * (LONG_TEXT // 5)]),
        ("nothing says that the answer has several points", ["Knock knock", "Blue."]),
        ("no words", ["  \n "]),
    ],
)
def test_one_answer_is_asked_for(reason: str, questions: list[str]) -> None:
    assert {question: way(question) for question in questions} == dict.fromkeys(questions, reason)


@pytest.mark.parametrize(
    "question",
    [
        EXERCISE,
        "Could you please give me some tips for a job interview?",
        "How can a small business attract more customers?",
        "I am moving next month. What should I think of?",
        "Discuss the pros and cons of nuclear energy.",
        "What are the main differences between Python and Java?",
        "Ideas for cheap family dinners",
        "锻炼身体有哪些好处？",
        "如何缓解工作压力？",
        "Welche Vorteile hat regelmäßiger Sport?",
        "Gib mir Tipps für ein Vorstellungsgespräch.",
        "¿Cuáles son los beneficios de hacer ejercicio?",
        "Dame consejos para ahorrar dinero.",
    ],
)
def test_several_points_are_asked_for(question: str) -> None:
    assert way(question) == "planned"


@pytest.mark.parametrize(
    "question", ["Why?", "List more of them", "他为什么这样？", "Now explain the second point."]
)
def test_a_question_that_refers_back_is_answered_directly(question: str) -> None:
    assert way(question, later=True) == "it refers back"


@pytest.mark.parametrize(
    "question",
    [
        EXERCISE,
        "What are the main causes of air pollution in large cities, and how can people there reduce it?",
        "锻炼身体有哪些好处？",
    ],
)
def test_a_new_question_in_a_conversation_may_be_planned(question: str) -> None:
    assert way(question, later=True) == "planned"


@pytest.mark.parametrize(
    ("given", "decision"),
    [
        ({}, Decision("sot", "the answer has several points")),
        ({"mode": "sot"}, Decision("sot", ASKED_FOR)),
        ({"mode": "direct"}, Decision("direct", ASKED_FOR)),
        ({"form": Form("choice", ("yes", "no"))}, Decision("direct", ASKED_FOR)),
        ({"tools": ("Search",)}, Decision("direct", "tools are offered")),
        ({"stop": ("\n",)}, Decision("direct", "stop strings are given")),
        ({"limits": Limits(max_new_tokens=127)}, Decision("direct", "max_new_tokens below 128")),
    ],
)
def test_the_request_itself_may_decide(given: dict[str, Any], decision: Decision) -> None:
    ask = replace(Ask(EXERCISE), **given)
    assert decide(ask, messages_of(ask), taught=False) == decision


def test_a_model_that_was_taught_to_plan_chooses_by_itself() -> None:
    ask = Ask("2+2")
    assert decide(ask, messages_of(ask), taught=True) == Decision("auto", BY_ITSELF)


def test_a_conversation_that_ends_with_an_answer_is_gone_on_with() -> None:
    ask = Ask(messages=(Message("user", EXERCISE), Message("assistant", "1. Health")))
    assert decide(ask, ask.messages, taught=False).mode == "direct"
