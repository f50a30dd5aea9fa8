"""Who plans: what is read from a request before anybody asks the model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsot.core.frames import End
from specsot.events import Candidate, Numbered, Reason, TokenLogprobs
from specsot.params import Ask, Form, Limits, Message
from specsot_master.core.limits import rules_of
from specsot_master.core.plans.plan import OpenAnswer, OpenScore, OpenSkeleton, TextPiece
from specsot_master.core.plans.router import (
    ASKED_FOR,
    BY_ITSELF,
    LONG_TEXT,
    UNDECIDED,
    Decision,
    ScorePrompt,
    asks_for_things,
    compares,
    decide,
    decide_question,
    ends_loops,
    judge,
    points_asked,
    score_of,
)
from specsot_master.prompts import messages_of
from tests.master.play import Play

EXERCISE = "What are the benefits of regular exercise?"


def way(question: str, later: bool = False) -> str:
    decision = decide_question(question, later)
    return "planned" if decision.mode == "sot" else decision.reason


@pytest.mark.parametrize(
    ("reason", "questions"),
    [
        (
            UNDECIDED,
            [
                "X is the sister of Y. Y is the mother of Z. What is the relationship between X and Z?",
                "Anna faces north and turns around. Can you tell me the direction towards which she looks?",
                "Is a thrown ball slow at its top? Please justify your answer using principles of physics.",
                "Guide: every second word is left out.",
            ],
        ),
        (
            "a text is to be worked on",
            [
                "Read this review and categorize it as good or bad.",
                "Any suggestions to make my sentence more grammatically correct?",
            ],
        ),
        ("one text is to be written", ["Prepare an email signature for a student."]),
        (
            "small talk",
            [
                "hi",
                "Hello there!",
                "How are you today?",
                "How are you? I am fine.",
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
        (
            "one cause is asked for",
            [
                "Why is the sky blue?",
                "天空为什么是蓝色的？",
                "Warum ist der Himmel blau?",
                "¿Por qué el cielo es azul?",
            ],
        ),
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
        "Why is the sky blue, and why is it red at sunset?",
        "Why is the sky blue? Give me three reasons.",
        "Could you please give me some tips for a job interview?",
        "How can a small business attract more customers?",
        "I am moving next month. What should I think of?",
        "Discuss the pros and cons of nuclear energy.",
        "What are the main differences between Python and Java?",
        "Ideas for cheap family dinners",
        "How can I sleep better? Thanks!",
        "What are ways to lower my resting heart rate as I get older?",
        "What are the effects of a high interest rate, such as today's?",
        "How do food makers label their products as organic?",
        "What are tips for writing grammatically correct English?",
        "Describe your top five tips for sleeping well.",
        "Provide your best ideas for a birthday party.",
        "What are good hobbies for the winter? I am bored.",
        "如何缓解工作压力？谢谢！",
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


@pytest.mark.parametrize(
    ("instructions", "reason"),
    [
        ("You are a helpful assistant.", "the answer has several points"),
        ("You are a poet and love tables. Mind your manners.", "the answer has several points"),
        ("You help people with JSON and XML tables.", "the answer has several points"),
        ("Answer in one sentence only.", "a short answer is wanted"),
        ("Your answers must be in JSON format.", "a form is asked for"),
        ("You are a tutor who answers in French.", "a form is asked for"),
        ("只输出JSON", "a form is asked for"),
        ("Respond only with YAML.", "a form is asked for"),
        ("Always answer in French.", "a form is asked for"),
        ("Write plain prose. Do not use headings or lists.", "a form is asked for"),
        ("Answer as a table. " + "Know this fact. " * 100, "the answer has several points"),
    ],
)
def test_a_system_message_may_want_all_answers_in_a_form(instructions: str, reason: str) -> None:
    messages = (Message("system", instructions), Message("user", EXERCISE))
    decision = decide(Ask(messages=messages), messages, taught=False)
    assert decision.reason == reason
    assert decision.mode == ("sot" if reason == "the answer has several points" else "direct")


@pytest.mark.parametrize(
    ("question", "decision"),
    [
        (EXERCISE, Decision("auto", BY_ITSELF)),
        ("Blue.", Decision("auto", BY_ITSELF)),
        ("hi", Decision("direct", "small talk")),
        ("2+2", Decision("direct", "arithmetic")),
    ],
)
def test_a_model_that_was_taught_to_plan_chooses_where_no_rule_wants_a_direct_answer(
    question: str, decision: Decision
) -> None:
    ask = Ask(question)
    assert decide(ask, messages_of(ask), taught=True) == decision


QUESTIONS = [
    line
    for line in (Path(__file__).parent / "router_questions.txt").read_text().splitlines()
    if line[0] != "#"
]


@pytest.mark.parametrize(
    ("question", "things"),
    [
        ("Which skills does a manager need?", True),
        ("Please tell me how to sleep better.", True),
        ("How do I choose a mattress?", True),
        ("How do tides work?", False),
        ("Why do wars start?", False),
        ("What is the role of bees?", False),
        ("Compare tea and coffee.", False),
        ("Welche Vorteile hat Lesen?", True),
        ("Wie wirkt Kaffee?", False),
        ("¿Qué debo llevar a la playa?", True),
        ("¿Por qué es importante leer?", False),
        ("喝茶有哪些好处？", True),
        ("解释一下潮汐。", False),
        ("Who are you?", False),
        ("", False),
    ],
)
def test_a_question_asks_for_several_things_or_for_an_explanation(question: str, things: bool) -> None:
    assert asks_for_things(question) is things


def test_the_rules_are_wrong_where_it_is_known() -> None:
    """9 of 484."""
    for line in QUESTIONS:
        head, _, question = line.partition(": ")
        planned = ("list" in head) != head.endswith("!")
        assert (decide_question(question).mode == "sot") == planned, line


@pytest.mark.parametrize(
    ("question", "count"),
    [
        ("List five European rivers.", 5),
        ("Could you give me six ideas?", 6),
        ("3 reasons to learn chess", 3),
        ("Write a list of 7 animals", 7),
        ("给我五个省钱的建议", 5),
        ("Nenne mir drei Flüsse in Europa.", 3),
        ("Dame cinco consejos.", 5),
        ("What are the benefits of exercise for 50 year olds?", None),
        ("Give me 3 minutes of advice", None),
        ("What are 2 and 3?", None),
    ],
)
def test_a_question_may_say_how_many_things_it_asks_for(question: str, count: int | None) -> None:
    assert points_asked(question) == count


def test_a_list_has_as_many_points_as_are_asked_for_and_no_more_than_a_plan_can_have() -> None:
    few = Ask("List five European rivers.", limits=Limits(max_new_tokens=512))
    assert rules_of(few, listed=True).max_points == 5
    assert rules_of(few, listed=True, points=3).max_points == 3, "so many as there is time for"
    assert way("Give me 13 tips for better sleep.") == "more than 12 points"


@pytest.mark.parametrize(
    ("question", "count"),
    [
        ("List ten foods that are rich in iron.", 10),
        ("Name twelve rivers and say where they end.", 12),
        ("Nenne zehn gesunde Frühstücksideen.", 10),
        ("Enumera doce ideas para un cumpleaños.", 12),
        ("给我十个省钱的建议", 10),
    ],
)
def test_a_list_of_up_to_twelve_things_is_planned_with_as_many_points(question: str, count: int) -> None:
    assert way(question) == "planned"
    assert rules_of(Ask(question), listed=True, speculates=True).max_points == count


@pytest.mark.parametrize(
    ("question", "count"),
    [
        ("What are the benefits of wind energy?", 6),
        ("Welche Vorteile hat das Fahrrad in der Stadt?", 6),
        ("学习编程有哪些好处？", 6),
    ],
)
def test_a_plan_has_no_more_points_than_answers_in_its_language_have_room_for(
    question: str, count: int
) -> None:
    assert rules_of(Ask(question), listed=True, speculates=True).max_points == count


@pytest.mark.parametrize(
    "question",
    [
        "Give me fifteen tips for better sleep.",
        "Nenne zwanzig Tiere des Waldes.",
        "Dame veinte ideas para un regalo.",
        "列出二十种植物。",
    ],
)
def test_a_list_of_more_than_twelve_things_is_answered_directly(question: str) -> None:
    assert way(question) == "more than 12 points"


def test_a_list_without_a_number_has_no_more_points_than_branches_run_at_once() -> None:
    assert rules_of(Ask(EXERCISE), listed=True).max_points == 8


def test_a_conversation_that_ends_with_an_answer_is_gone_on_with() -> None:
    ask = Ask(messages=(Message("user", EXERCISE), Message("assistant", "1. Health")))
    assert decide(ask, ask.messages, taught=False).mode == "direct"


PROMPT = ScorePrompt((1, 2), several=(10,), one=(20, 21))


def told(**chances: float) -> TokenLogprobs:
    """The likeliest tokens by number, `t10=0.5` and so on."""
    top = [Candidate(int(name[1:]), b"", math.log(chance)) for name, chance in chances.items()]
    return TokenLogprobs(top[0], tuple(top))


@pytest.mark.parametrize(
    ("found", "score"),
    [
        (told(t10=0.6, t20=0.2, t21=0.1), math.log(2)),
        (told(t20=0.4, t21=0.2, t10=0.15), math.log(0.25)),
        (told(t10=0.6, t7=0.1), math.log(6)),  # the other one is no likelier than the last
        (told(t20=0.6, t7=0.1), -math.log(6)),
        (told(t7=0.9, t8=0.1), None),
    ],
)
def test_the_score_tells_how_much_likelier_several_things_are(
    found: TokenLogprobs, score: float | None
) -> None:
    assert score_of(found, PROMPT) == pytest.approx(score)


def test_a_score_decides_by_its_threshold() -> None:
    assert judge(0.5, 0.5) == Decision("sot", "score 0.50 >= 0.50")
    assert judge(0.49, 0.5) == Decision("direct", "score 0.49 < 0.50")
    assert judge(None, 0.5).mode == "direct"


@pytest.mark.parametrize(
    ("question", "threshold", "scored"),
    [("Blue.", None, False), ("Blue.", -1.0, True), (EXERCISE, -1.0, False), ("2+2", -1.0, False)],
)
def test_the_model_is_asked_only_where_no_rule_holds_and_its_threshold_is_known(
    question: str, threshold: float | None, scored: bool
) -> None:
    ask = Ask(question)
    decision = decide(ask, messages_of(ask), taught=False, threshold=threshold)
    assert (decision.threshold is not None, decision.mode == "auto") == (scored, scored)


def scored_play(several: float, one: float, end: End = End.LENGTH) -> Play:
    """A request whose score is there, or whose score's sequence ended otherwise."""
    play = Play(told=("words",), score=PROMPT, decision=Decision("auto", "", 0.0), max_new_tokens=600)
    assert [type(command) for command in play.said] == [Numbered, OpenScore]
    play.said += play.plan.on_text(0, [TextPiece(9, "x", told(t10=several, t20=one))], now=2.0)
    play.end(0, end)
    return play


def test_a_high_score_is_followed_by_a_plan() -> None:
    play = scored_play(0.6, 0.2)
    assert [order.limit for order in play.of(OpenSkeleton) if isinstance(order, OpenSkeleton)] == [300]
    play.write(0, " Light\n2. Deep")
    play.end(0)
    assert play.open_ready() == [1, 2]
    for id in (1, 2):
        play.write(id, "So.")
        play.end(id)
    figures = play.finished.statistics
    assert figures.decision == "planned: score 1.10 >= 0.00"
    assert figures.plan_tokens == len(" Light\n2. Deep") + 2, "an end token, and that of the score"
    play.check_stream()


def test_a_low_score_is_followed_by_a_direct_answer() -> None:
    play = scored_play(0.2, 0.6)
    assert play.said[-1] == OpenAnswer(599)
    assert play.plan.all_opened
    play.write(0, "So.")
    play.end(0)
    figures = play.finished.statistics
    assert (play.finished.text, figures.decision) == ("So.", "direct: score -1.10 < 0.00")
    assert (figures.completion_tokens, figures.plan_tokens) == (5, 1)
    play.check_stream()


def test_a_request_with_a_failing_score_ends_there() -> None:
    assert scored_play(0.6, 0.2, End.FAILED).finished.reason is Reason.FAILED


def test_a_request_may_be_cancelled_while_its_score_is_awaited() -> None:
    play = Play(told=("words",), score=PROMPT, decision=Decision("auto", "", 0.0))
    play.said += play.plan.cancel(now=2.0)
    assert play.closed == [0]
    assert play.finished.reason is Reason.CANCELLED


@pytest.mark.parametrize(
    "question",
    [
        "How can I make a web page load faster?",
        "Give me tips for writing readable Python code.",
        "What are best practices for writing SQL queries?",
        "How do I keep my JavaScript code readable?",
        "How can I improve the performance of my website?",
        "How should I structure a Django project?",
        "What are common mistakes in C++?",
        "Gib mir Tipps für lesbaren Python-Code.",
        "Wie kann ich eine Webseite schneller machen?",
        "Wie schreibe ich sauberen Java-Code?",
        "Dame consejos para escribir código Python legible.",
        "¿Cómo puedo hacer que una página web cargue más rápido?",
        "怎样让网页加载更快？",
        "请给我一些写出可读 Python 代码的建议。",
    ],
)
def test_advice_about_programs_is_prose(question: str) -> None:
    assert decide_question(question).mode == "sot"


@pytest.mark.parametrize(
    "question",
    [
        "Make a web page with a button.",
        "How do I make a web page with a login form?",
        "Write a function that makes sorting faster.",
        "How do I write a Python script that downloads files faster?",
        "How can I speed up this SQL query?",
        "How do I make this query faster? SELECT a FROM b",
        "Give me tips for fixing this code: print(x)",
        "Give me tips for clean code. Then write a Python function that sorts a list.",
        "Schreibe eine Funktion, die schneller sortiert.",
        "Wie mache ich diese Python-Funktion schneller?",
        "Wie lese ich eine Datei in Python?",
        "¿Cómo hago una función que devuelva el número más grande?",
        "¿Cómo puedo hacer esta consulta más rápida?",
        "如何用 Python 读取文件？",
        "怎样让这段代码更快？",
    ],
)
def test_a_request_for_code_is_answered_directly_whatever_it_wants_of_it(question: str) -> None:
    assert decide_question(question) == Decision("direct", "code")


@pytest.mark.parametrize(
    ("question", "compared"),
    [
        ("Compare Python and Go for building web services.", True),
        ("Could you please compare tea and coffee?", True),
        ("What is the difference between TCP and UDP?", True),
        ("What are the main differences between cats and dogs?", True),
        ("SQL vs. NoSQL", True),
        ("How do cats and dogs differ?", True),
        ("Vergleiche Stadtleben und Landleben.", True),
        ("Was ist der Unterschied zwischen Wetter und Klima?", True),
        ("Compara la vida en el campo y en la ciudad.", True),
        ("¿Cuál es la diferencia entre TCP y UDP?", True),
        ("比较一下电动汽车和汽油车。", True),
        ("猫和狗有什么区别？", True),
        ("What are the benefits of comparing prices?", False),
        ("What are the advantages of electric cars?", False),
        ("什么方法比较好？", False),
        ("Why do opinions about art matter?", False),
    ],
)
def test_a_comparison_is_recognised(question: str, compared: bool) -> None:
    assert compares(question) is compared


@pytest.mark.parametrize(
    ("ask", "ended"),
    [
        (Ask("What are good habits?"), True),
        (Ask("What are good habits?", mode="direct"), True),
        (Ask(tokens=(1, 2), mode="direct"), False),
        (Ask("What are good habits?", ignore_eos=True), False),
        (Ask("What are good habits?", min_tokens=9), False),
        (Ask("Write 'I will not talk in class' ten times."), False),
        (Ask("Schreibe den Satz zwanzig Mal."), False),
        (Ask("Repite la frase."), False),
        (Ask("把这句话写十遍。"), False),
        (Ask("Write a Python function that prints a table."), False),
    ],
)
def test_loops_end_only_if_no_option_expects_repeated_text(ask: Ask, ended: bool) -> None:
    assert ends_loops(ask) is ended
