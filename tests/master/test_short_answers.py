"""Whether a direct answer is short is known from its first tokens, and depends on nothing else."""

from __future__ import annotations

import re

import pytest

from specsot_master.core.plans.introduction import MAX_INTRODUCTION_TOKENS
from specsot_master.core.plans.short_answers import ONE_LINER_TOKENS, READ_FRACTION, ShortAnswer
from specsot_master.core.plans.text_pieces import TextPiece
from specsot_master.core.plans.wording import PARAGRAPH_TOKENS
from tests.conftest import some

RIVERS = "Europe has many long rivers. Here are some of them:"
LONG = "the Danube, which rises in the Black Forest and has its mouth at the coast of the Black Sea."


LONG_PLAN = 1000  # Tokens, more than any answer has here.


def pieces_of(text: str) -> list[TextPiece]:
    """Words with the space before them, line ends and other characters, as tokenizers roughly cut."""
    return [TextPiece(number, one) for number, one in enumerate(re.findall(r" ?\w+|\n+|\s|.", text))]


def read(text: str) -> tuple[bool | None, int]:
    """Whether the answer is short, as far as its tokens tell, and how many tokens were needed."""
    answer = ShortAnswer()
    for number, piece in enumerate(pieces_of(text), 1):
        answer.read(piece)
        if (short := answer.is_short(LONG_PLAN, plan_complete=False)) is not None:
            return short, number
    return None, len(pieces_of(text))


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (f"{RIVERS}\n\n1. Danube\n2. Rhine\n3. E", True),
        (f"{RIVERS}\n- Danube\n- Rhine\n", True),
        (f"{RIVERS}\n\n1. Danube\n\n2. Rhine\n\n3", True),
        ("以下是一些河流：\n\n1、多瑙河\n2、莱茵河\n", True),
        ("word " * PARAGRAPH_TOKENS, True),
        (f"{RIVERS}\n\n1. {LONG}", False),
        (f"{RIVERS}\n\n1. Danube\n2. {LONG}", False),
        # A line that announces items of its own is no one-liner.
        (f"{RIVERS}\n\n1. Danube:\n", False),
        (f"{RIVERS}\n\n1. **Danube:**\n", False),
        (f"{RIVERS}\n\n## The Danube", False),
        (f"{RIVERS}\n\n**The Danube**", False),
        (f"{RIVERS}\n\nThe Danube", False),
        (f"{RIVERS}\n\n1. Danube\n", None),
        (f"{RIVERS}\n\n1", None),
        (RIVERS, None),
    ],
)
def test_an_answer_is_short_if_it_is_one_paragraph_or_a_list_of_one_liners(
    text: str, short: bool | None
) -> None:
    assert read(text)[0] is short


def test_a_long_paragraph_is_not_short_for_a_model_that_answers_in_long_paragraphs() -> None:
    """It is not short once it has more tokens than an introduction, however long the plan is."""
    answer = ShortAnswer(paragraph_tokens=None)
    told = list[bool | None]()
    for piece in pieces_of("word " * PARAGRAPH_TOKENS):
        answer.read(piece)
        told.append(answer.is_short(40, plan_complete=True))
    assert told[: MAX_INTRODUCTION_TOKENS - 1] == [None] * (MAX_INTRODUCTION_TOKENS - 1)
    assert set(told[MAX_INTRODUCTION_TOKENS - 1 :]) == {False}
    ended = ShortAnswer(paragraph_tokens=None)
    ended.read(TextPiece(1, "Yes."))
    ended.end()
    assert ended.is_short(40, plan_complete=False) is True


# What Qwen2.5-Coder-1.5B-Instruct answered to "What should a good README contain?", in 60 tokens.
README = (
    "A good README should provide a clear and concise overview of the project, including its purpose, "
    "features, installation instructions, usage, and any important information that users need to know. It "
    "should also include a table of contents, a list of contributors, and a link to the project's GitHub "
    "repository."
)


@pytest.mark.parametrize(
    "text", ["Yes.", README, RIVERS, f"{RIVERS}\n\n1. Danube", f"{RIVERS}\n\n1. Danube\n2. R"]
)
def test_an_answer_that_ended_before_it_was_decided_is_short(text: str) -> None:
    answer = ShortAnswer()
    for piece in pieces_of(text):
        answer.read(piece)
    answer.end()
    assert answer.is_short(LONG_PLAN, plan_complete=False)


def test_the_end_changes_nothing_once_the_answer_is_known_to_be_long() -> None:
    answer = ShortAnswer()
    for piece in pieces_of(f"{RIVERS}\n\n1. {LONG}"):
        answer.read(piece)
    answer.end()
    assert answer.is_short(LONG_PLAN, plan_complete=False) is False


def test_a_long_item_is_known_at_its_first_tokens_so_that_no_plan_waits_for_its_end() -> None:
    _, needed = read(f"{RIVERS}\n\n1. {LONG}")
    assert needed <= len(pieces_of(f"{RIVERS}\n\n")) + ONE_LINER_TOKENS


@pytest.mark.parametrize("plan_tokens", some(range(10, 60), *range(0, 50, 7)))
def test_one_liners_count_within_a_part_of_the_plans_tokens_whichever_is_decoded_first(
    plan_tokens: int,
) -> None:
    pieces = pieces_of(f"{RIVERS}\n\n1. Danube\n2. Rhine\n3. Elbe\n" + "4. More of them\n" * 9)
    results = set[bool]()
    for ahead in range(-30, 30):
        answer = ShortAnswer()
        for number, piece in enumerate(pieces, 1):
            answer.read(piece)
            written = max(min(number + ahead, plan_tokens), 0)
            short = answer.is_short(written, plan_complete=written == plan_tokens)
            if short is not None:
                results.add(short)
                break
    needed = read(f"{RIVERS}\n\n1. Danube\n2. Rhine\n")[1]
    assert results == {needed <= int(READ_FRACTION * plan_tokens)}
