"""The words of the router's rules are data: every group is complete, and each language is read."""

from __future__ import annotations

import re

import pytest

from specsot_master.core.plans import router_words
from specsot_master.core.plans.router import Decision, decide_question, points_asked

GROUPS = sorted({group for language in router_words.LANGUAGES for group in language} - {"numbers"})


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_is_a_regular_expression(group: str) -> None:
    re.compile(router_words.expression(group))


def test_every_table_consists_of_words_and_patterns_alone() -> None:
    for language in router_words.LANGUAGES:
        for group, table in language.items():
            assert group == "numbers" or set(table) <= {"words", "patterns"}, group


def test_a_group_that_no_language_has_is_an_error() -> None:
    with pytest.raises(KeyError, match="sarcasm"):
        router_words.expression("sarcasm")


@pytest.mark.parametrize(
    ("question", "mode", "reason"),
    [
        ("Why is the sky blue?", "direct", "one cause is asked for"),
        ("Why should we protect forests?", "sot", "the answer has several points"),
        ("Please explain the benefits of sleep.", "sot", "the answer has several points"),
        ("What are the differences between Python and Java?", "sot", "the answer has several points"),
        ("Write a function that sorts a list in Rust.", "direct", "code"),
        ("What is 12 plus 30?", "direct", "arithmetic"),
        ("为什么天空是蓝色的？", "direct", "one cause is asked for"),
        ("请介绍一下锻炼的好处", "sot", "the answer has several points"),
        ("用一句话解释重力", "direct", "a short answer is wanted"),
        ("如何用Python读取文件？", "direct", "code"),
        ("怎样节约用电？请用JSON格式输出", "direct", "code"),
        ("列出三个学习Python的好处", "sot", "the answer has several points"),
        ("怎样节约用电？用表格回答", "direct", "a form is asked for"),
        ("How can I save electricity? Answer as a table.", "direct", "a form is asked for"),
        ("How can I save electricity? Answer in bullet points.", "direct", "a form is asked for"),
        ("Give me tips for saving money as a table", "direct", "a form is asked for"),
        ("Please list the benefits of exercise in a table.", "direct", "a form is asked for"),
        ("Compare cats and dogs in bullet points.", "direct", "a form is asked for"),
        ("How can I clean a wooden table?", "sot", "the answer has several points"),
        ("Wie kann ich Strom sparen? Antworte als Tabelle.", "direct", "a form is asked for"),
        ("Wie kann ich Strom sparen? Höchstens 50 Wörter.", "direct", "a short answer is wanted"),
        ("¿Cómo puedo ahorrar electricidad? Responde en una tabla.", "direct", "a form is asked for"),
        ("Warum ist Bildung wichtig?", "sot", "the answer has several points"),
        ("Schreibe ein Gedicht über den Mond.", "direct", "one text is to be written"),
        ("Wie geht es dir?", "direct", "small talk"),
        ("¿Por qué es importante la educación?", "sot", "the answer has several points"),
        ("¿Quién pintó la Mona Lisa?", "direct", "a short fact"),
        ("Traduce este texto", "direct", "a text is to be worked on"),
    ],
)
def test_questions_of_every_language_are_decided_by_their_form(question: str, mode: str, reason: str) -> None:
    decision = decide_question(question)
    assert (decision.mode, decision.reason) == (mode, reason)


@pytest.mark.parametrize(
    "question",
    [
        "What are the advantages of the JSON format over XML?",
        "What are the best ways to sort data in a table?",
        "How do I make a table",
        "How do I present results as a table?",
        "How can I learn to speak fluently in Italian?",
        "What are the advantages of writing notes in bullet points?",
        "How can I work without formatting my notes?",
        "Explain how to sort data in a table.",
        "Explain the benefits of writing notes in bullet points.",
        "What are the differences between YAML, XML and JSON?",
        "What are the differences between XML, and JSON?",
        "How do I collect, sort and present results as a table?",
        "Was sind die Vorteile einer Tabelle?",
        "Wie kann ich meine Notizen in einer Tabelle sortieren?",
        "Warum mögen Menschen keine Listen?",
        "Wie kann ich gut auf Französisch schreiben?",
        "¿Qué trabajos puedo conseguir sin títulos?",
        "¿Qué trabajos puedo conseguir en España, sin títulos?",
        "¿Cómo puedo escribir sin listas?",
        "怎么用Excel做表格？",
        "怎么用 Excel 做表格？",
        "如何用表格整理数据？",
        "为什么不要用标题？",
        "用表格展示数据的方法有哪些？",
    ],
)
def test_a_question_about_forms_is_planned(question: str) -> None:
    assert decide_question(question).mode == "sot"


@pytest.mark.parametrize(
    "question",
    [
        "What are the benefits of tea? In bullet points, please.",
        "What are the benefits of tea, as a table?",
        "What are the benefits of tea (in bullet points)?",
        "What are the benefits of tea in bullet points?",
        "What are the benefits of tea? Present them in a table.",
        "What are the benefits of tea? Use a table.",
        "What are the benefits of tea? Don't use bullet points.",
        "What are the benefits of tea? Write in prose, without headings.",
        "What are the benefits of tea? In French, please.",
        "Using a table, compare renting and buying.",
        "Can you compare renting and buying in a table with two columns?",
        "Explain how tides work in bullet points.",
        "Wie kann ich Strom sparen? Bitte in Stichpunkten.",
        "Wie kann ich Strom sparen? Antworte ohne Überschriften und Listen.",
        "Wie kann ich Strom sparen? Antworte bitte auf Französisch.",
        "Stelle Tee und Kaffee tabellarisch gegenüber.",
        "¿Cómo puedo ahorrar electricidad? Usa una tabla.",
        "¿Cómo puedo ahorrar electricidad? Responde sin títulos ni listas.",
        "Explica las ventajas del té en forma de tabla.",
        "请用表格比较茶和咖啡",
        "列出茶的好处并用表格展示",
        "怎样节约用电？不要用列表",
        "怎样节约用电？请用法语回答",
    ],
)
def test_a_form_of_the_answer_is_recognised_in_every_language(question: str) -> None:
    assert decide_question(question) == Decision("direct", "a form is asked for")


@pytest.mark.parametrize(
    "question",
    ["List three rivers.", "列出三个河流", "Nenne mir drei Flüsse.", "Dame los tres ríos"],
)
def test_a_number_of_things_is_read_in_every_language(question: str) -> None:
    assert points_asked(question) == 3
