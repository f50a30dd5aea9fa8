"""Which part of a direct answer is the introduction of a planned one: a function of its own tokens."""

from __future__ import annotations

import re

import pytest

from specsot_master.core.plans.introduction import (
    MAX_INTRODUCTION_TOKENS,
    NO_INTRODUCTION,
    Introduction,
    announced_count,
    find_introduction,
)

SAVING = "Saving energy at home helps the planet and your purse."


def tokens_of(text: str) -> list[str]:
    """Words with the space before them, line ends and other characters, as tokenizers roughly cut."""
    return re.findall(r" ?\w+|\n+|\s|.", text)


def grown(text: str) -> list[tuple[str, Introduction]]:
    """What is known after each token, up to the one that completes the introduction, or at the end."""
    found: list[tuple[str, Introduction]] = []
    so_far = ""
    for count, token in enumerate(tokens_of(text), 1):
        so_far += token
        found.append((so_far, find_introduction(so_far, count)))
        if found[-1][1].complete:
            return found
    return [*found, (so_far, find_introduction(so_far, len(found), ended=True))]


def introduction_of(text: str) -> str | None:
    """The introduction of a whole direct answer, or None."""
    so_far, found = grown(text)[-1]
    assert found.complete
    return so_far[: found.visible] if found.usable else None


@pytest.mark.parametrize(
    ("answer", "introduction"),
    [
        (f"{SAVING}\n\n1. Turn off lights", SAVING),
        (f"{SAVING} Here are some ways to do it:\n\n1. Turn off lights", SAVING),
        (f"{SAVING} Here are 10:\n\n1. Turn off lights", SAVING),
        (f"{SAVING} There are three ways to do it.\n\n**Lights**", SAVING),
        (f"{SAVING} It is cheap, too. These include:\n- Lights", f"{SAVING} It is cheap, too."),
        ("Der Sport hält gesund. Hier sind einige Vorteile:\n\n1. Kraft", "Der Sport hält gesund."),
        ("Aprender idiomas es útil. A continuación, varias ventajas.\n\n1. Uno", "Aprender idiomas es útil."),
        ("编程很有用。以下是一些常见的方法：\n\n1. 课程", "编程很有用。"),
        # An announcement that is the first sentence was streamed already, and headings may follow it.
        (
            "Docker has several advantages, including:\n\n1. Isolation",
            "Docker has several advantages, including:",
        ),
        ("准备演讲需要以下几个步骤：\n\n1. 主题", "准备演讲需要以下几个步骤："),
        ("A tool, e.g. a hammer, helps. It is heavy.\n\nMore", "A tool, e.g. a hammer, helps. It is heavy."),
        (' "Yes," he said. Then he left.\n\nMore', ' "Yes," he said. Then he left.'),
    ],
)
def test_the_introduction_is_the_first_paragraph_up_to_an_announcement(
    answer: str, introduction: str
) -> None:
    assert introduction_of(answer) == introduction


@pytest.mark.parametrize(
    "answer",
    [
        "1. Danube\n2. Rhine",
        "- Danube\n- Rhine",
        "## Rivers\n\nThe Danube is long.",
        "```python\nprint()\n```",
        "| a | b |\n|---|---|",
        "**Rivers**\n\nThe Danube is long.",
        "Yes",
        "",
        "one word after another " * MAX_INTRODUCTION_TOKENS,
    ],
)
def test_an_answer_that_begins_otherwise_has_no_introduction(answer: str) -> None:
    """A list, a heading, code, a table, a title, or a sentence without end."""
    assert grown(answer)[-1][1] == NO_INTRODUCTION


@pytest.mark.parametrize(
    ("answer", "usable"),
    [
        ("As an AI language model, I have no favourites. But here is one.\n\n1. Jazz", False),
        ("I'm sorry, but I need more details.\n\n1. Names", False),
        ("Als KI habe ich keine Vorlieben.\n\n1. Jazz", False),
        ("Como asistente de inteligencia artificial, no tengo gustos.\n\n1. Jazz", False),
        ("作为一个AI语言模型，我没有爱好。\n\n1. 爵士", False),
        ("As an airline grows, so do its costs.\n\n1. Fuel", True),
        ("作为人工智能的分支，机器学习很有用。\n\n1. 数据", True),
    ],
)
def test_words_about_the_model_are_no_introduction(answer: str, usable: bool) -> None:
    """What follows them would be missing: "However, here are some tips"."""
    assert (introduction_of(answer) is not None) == usable


def test_a_long_paragraph_is_cut_after_its_last_whole_sentence() -> None:
    sentence = "Social media is a part of the lives of many people today. "
    found = introduction_of(sentence * 9)
    assert found is not None
    assert found == (sentence * 9)[: len(found)]
    assert found.endswith("today.")
    assert 1 < found.count("today.") <= MAX_INTRODUCTION_TOKENS / len(tokens_of(sentence)) + 1
    assert len(tokens_of(found)) <= MAX_INTRODUCTION_TOKENS


def test_the_first_sentence_is_visible_token_by_token_and_nothing_visible_is_taken_back() -> None:
    for answer in (f"{SAVING} Here are some ways:\n\n1. Lights", f"{SAVING} It is easy. Do it.\n\nMore"):
        states = grown(answer)
        visible = [found.visible for _, found in states]
        assert visible == sorted(visible)
        for text, found in states:
            if len(text) <= len(SAVING):
                assert found.visible == len(text.rstrip())


def test_a_later_sentence_is_withheld_until_it_is_known_not_to_announce() -> None:
    begun = find_introduction(f"{SAVING} Here are some", 14)
    assert begun == Introduction(len(SAVING))
    assert not find_introduction(f"{SAVING} It is easy", 14).complete


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Here are 10 tips:", 10),
        ("Here are five healthy breakfasts:", 5),
        ("下面是五个方法：", 5),
        ("Hier sind drei Gründe:", 3),
        ("Here are some tips:", None),
        ("Here are the differences between the two:", None),
        ("TCP and UDP are two protocols with these differences:", None),
        ("Within 24 hours you can do this:", None),
        ("There are five ways, and all are good.", None),
        ("Hier sind die wichtigsten Vorteile:", None),
        ("Man sollte die folgenden Punkte beachten; das sollten Käufer wissen:", None),
        ("Hier sind zehn Tipps:", 10),
    ],
)
def test_how_many_points_an_announcement_promises(text: str, count: int | None) -> None:
    assert announced_count(text) == count
