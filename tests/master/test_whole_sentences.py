"""A limit leaves out the sentence of a branch that it interrupts, however many tokens arrive at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsot.core.skeleton import Point
from specsot.events import Reason
from specsot_master.core.limits import BudgetShares
from specsot_master.core.plans.branches import PlanBranches
from specsot_master.core.plans.sentences import SentenceBuffer, SoftEnd, ends_sentence
from specsot_master.core.plans.text_pieces import TextPiece

POINT = Point(1, 100, "Light")


def branches(budget: int, holds_sentences: bool = True) -> PlanBranches:
    shares = BudgetShares((POINT,), {1: 3}, {1: budget})
    made = PlanBranches(shares, (), 8, False, None, holds_sentences=holds_sentences)
    made.open(1)
    return made


def pieces(words: Sequence[str]) -> list[TextPiece]:
    return [TextPiece(number, word) for number, word in enumerate(words)]


def write(made: PlanBranches, words: Sequence[str], reason: Reason, together: int = 1) -> str:
    """The text of a branch that ends for `reason` after these tokens, which arrive so many at once."""
    tokens = pieces(words)
    groups = [tokens[at : at + together] for at in range(0, len(tokens), together)]
    shown = "".join(made.write(1, group) for group in groups) + made.flush(1, reason)
    made.end(1, reason)
    assert shown == made[1].answer.text
    return shown


WORDS = ["Light", " is", " fast", ".", " It", " has", " many", " colours", "."]


def test_a_limit_leaves_out_the_sentence_that_it_interrupts() -> None:
    made = branches(8)
    assert write(made, WORDS[:8], Reason.LENGTH) == "Light is fast."
    assert made[1].mark == ""
    assert made.written == 8, "tokens that are left out were written, too"


def test_a_branch_that_ends_by_itself_shows_all_of_its_text() -> None:
    assert write(branches(20), WORDS[:8], Reason.STOP) == "Light is fast. It has many colours"


def test_a_sentence_that_began_before_anything_whole_is_shown_and_marked() -> None:
    made = branches(4)
    assert write(made, ["Light", " is", " very", " fast"], Reason.LENGTH) == "Light is very fast"
    assert made[1].mark == "…"


def test_a_line_ends_as_a_sentence_does() -> None:
    made = branches(6)
    assert write(made, ["- red", "\n", "- green", "\n", "- bl", "ue-"], Reason.LENGTH) == "- red\n- green"
    assert made[1].mark == ""


def test_without_it_every_token_is_shown_at_once() -> None:
    made = branches(8, holds_sentences=False)
    assert [made.write(1, [piece]) for piece in pieces(WORDS[4:8])] == ["It", " has", " many", " colours"]


@pytest.mark.parametrize("reason", [Reason.LENGTH, Reason.STOP])
@given(
    words=st.lists(st.sampled_from([" a", " bee", ".", "!", "\n", " 3", " c。"]), min_size=1, max_size=24),
    together=st.integers(2, 9),
)
def test_the_text_depends_on_the_tokens_alone(reason: Reason, words: list[str], together: int) -> None:
    one_by_one = write(branches(len(words)), words, reason)
    assert write(branches(len(words)), words, reason, together) == one_by_one


def aimed(aim: int, budget: int = 400) -> PlanBranches:
    shares = BudgetShares((POINT,), {1: 3}, {1: budget})
    made = PlanBranches(shares, (), 8, False, None, holds_sentences=True, aim=aim)
    made.open(1)
    return made


LONG = [*WORDS, *[" It", " goes", " on", " and", " on", " again", "."] * 9]


@pytest.mark.parametrize("together", [1, 3, 100])
def test_a_branch_ends_softly_after_the_sentence_that_reaches_its_aim(together: int) -> None:
    made = aimed(20)
    tokens = pieces(LONG)
    for at in range(0, len(tokens), together):
        if not made[1].stopped:
            made.write(1, tokens[at : at + together])
    assert made[1].stopped
    assert made[1].answer.text == "".join(LONG[:23])
    made.flush(1, Reason.STOP)
    assert made.written == 23, "tokens after the end are not counted"


@pytest.mark.parametrize(
    "text",
    [
        "Steps to take now:\n- Do this first. Then do that too.",
        "1. Do this first now. Then do that too.",
        "```\na. B. C. D. E. F.",
        "| a. | B. | C. | D. |",
        "Use tools, e.g. a hammer, i.e. a heavy one, etc. or so",
    ],
)
def test_no_branch_ends_softly_in_a_list_in_code_in_a_table_or_at_an_abbreviation(text: str) -> None:
    end = SoftEnd(after=1, limit=1000)
    assert not any(end.ends_before(piece) for piece in pieces(re.findall(r"\s?\w+|\s|.", text)))


def test_at_its_longest_a_branch_ends_before_its_unfinished_sentence() -> None:
    made = aimed(6)
    made.write(1, pieces(WORDS[:8]))
    assert not made[1].stopped
    made.write(1, pieces([" and", " more"]))
    assert made[1].stopped
    assert made[1].answer.text == "Light is fast."
    assert made.written == 9, "tokens that are left out were written, too"


def test_a_branch_without_a_whole_sentence_goes_on_to_its_first_one() -> None:
    made = aimed(6)
    made.write(1, pieces(["Light", *[" and", " light"] * 9, ".", " It"]))
    assert made[1].stopped
    assert made[1].answer.text == "Light" + " and light" * 9 + "."


def test_the_closing_is_one_sentence() -> None:
    shares = BudgetShares((POINT, Point(2, 50, "")), {1: 3}, {1: 90, 2: 90})
    made = PlanBranches(shares, (), 8, False, None, holds_sentences=True, aim=30, closing=2)
    made.open(2)
    made.write(2, pieces(WORDS))
    assert made[2].stopped
    assert made[2].answer.text == "Light is fast."


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        ("Here are steps:\n", ""),
        ("以下是步骤：\n\n", ""),
        ("It is so.\n**", " It is so."),
        ("It is so.\n- ", " It is so."),
    ],
)
def test_a_text_does_not_end_with_an_announcement_or_with_marks(tail: str, shown: str) -> None:
    assert not ends_sentence(tail)
    made = aimed(6)
    made.write(1, pieces(["It", " is", " so", ".", *re.findall(r"\s?\w+|\s|.", " " + tail)]))
    made.flush(1, Reason.LENGTH)
    assert made[1].answer.text == f"It is so.{shown}"


def test_a_buffer_releases_whole_sentences_only() -> None:
    buffer = SentenceBuffer()
    released = [[piece.text for piece in buffer.add(one)] for one in pieces(["A b", ".", " C", "\n", "D"])]
    assert released == [[], ["A b", "."], [], [" C", "\n"], []]
    assert [piece.text for piece in buffer.take()] == ["D"]
    assert buffer.whole
