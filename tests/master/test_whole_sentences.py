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
from specsot_master.core.plans.sentences import SentenceBuffer, ends_sentence, open_fence
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
    """The text of a branch whose sequence ends for `reason` after these tokens, so many of them at once."""
    tokens = pieces(words)
    groups = [tokens[at : at + together] for at in range(0, len(tokens), together)]
    shown = "".join(made.write(1, group) for group in groups) + made.flush(1, reason)
    made.end(1, made[1].settle_reason(reason))
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


ANNOUNCED = ["Light", " is", " fast", ".", " It", " is", ":", "\n", "-", " red", "\n", "-", " green", "\n"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (7, "Light is fast."),
        (9, "Light is fast."),
        (11, "Light is fast."),
        (13, "Light is fast."),
        (14, "Light is fast. It is:\n- red\n- green"),
    ],
)
@pytest.mark.parametrize("together", [1, 3, 100])
def test_a_limit_leaves_out_a_list_that_it_interrupts_within_the_first_two_items(
    size: int, text: str, together: int
) -> None:
    made = branches(size)
    assert write(made, ANNOUNCED[:size], Reason.LENGTH, together) == text
    assert made[1].mark == ""


def test_a_branch_that_ends_by_itself_after_an_announcement_leaves_the_announcement_out() -> None:
    made = branches(40)
    assert write(made, ANNOUNCED[:8], Reason.STOP) == "Light is fast."
    assert (made[1].reason, made.written) == (Reason.STOP, 8)


def test_a_list_without_announcement_is_not_cut_after_its_first_item_either() -> None:
    words = ["Light", " is", " fast", ".", "\n", "-", " red", "\n", "-", " gr"]
    assert write(branches(10), words, Reason.LENGTH) == "Light is fast."


def test_a_list_of_one_item_that_the_branch_ends_by_itself_is_shown() -> None:
    assert write(branches(40), ANNOUNCED[:10], Reason.STOP) == "Light is fast. It is:\n- red"


@pytest.mark.parametrize(
    ("text", "fence"),
    [
        ("Run this:\n```sh\nls", "```"),
        ("Run this:\n~~~\nls\n```\n", "~~~"),
        ("Run this:\n```sh\nls\n```\nSo it is.", ""),
        ("Run `ls`.", ""),
    ],
)
def test_the_open_fence_of_a_text_is_the_one_that_no_line_closes(text: str, fence: str) -> None:
    assert open_fence(text) == fence


@pytest.mark.parametrize("reason", [Reason.LENGTH, Reason.STOP, Reason.CANCELLED])
def test_a_code_block_that_a_branch_leaves_open_is_closed_in_the_merged_answer(reason: Reason) -> None:
    made = branches(40)
    text = write(made, ["Run", " it", ".", "\n", "```", "\n", "ls", "\n", "cd", "\n"], reason)
    assert text + made[1].mark == "Run it.\n```\nls\ncd\n```"


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


@pytest.mark.parametrize(
    ("aim", "share", "soft", "hard"), [(60, 400, 51, 96), (60, 70, 35, 70), (80, 400, 68, 120)]
)
def test_a_branch_may_end_at_85_percent_of_its_aim_and_has_room_for_its_first_sentence(
    aim: int, share: int, soft: int, hard: int
) -> None:
    branch = aimed(aim, share)[1]
    assert (branch.soft_limit, branch.budget) == (soft, hard)


def test_a_branch_without_an_aim_may_have_its_whole_share() -> None:
    branch = branches(400)[1]
    assert (branch.soft_limit, branch.budget) == (340, 400)


def test_a_branch_that_cannot_leave_its_last_sentence_out_may_have_its_whole_share() -> None:
    shares = BudgetShares((POINT,), {1: 3}, {1: 400})
    branch = PlanBranches(shares, (), 8, False, None, holds_sentences=False, aim=60)[1]
    assert (branch.soft_limit, branch.budget) == (51, 400)


def test_the_closing_may_end_after_its_first_sentence() -> None:
    shares = BudgetShares((POINT, Point(2, 50, "")), {1: 3}, {1: 90, 2: 90})
    for aim in (None, 30):
        made = PlanBranches(shares, (), 8, False, None, holds_sentences=True, aim=aim, closing=2)
        assert made[2].soft_limit == 1


@pytest.mark.parametrize("together", [1, 3, 100])
def test_at_its_longest_a_branch_leaves_its_unfinished_sentence_out_and_lacks_nothing(together: int) -> None:
    made = aimed(6)
    longest = made[1].longest
    assert longest == 45
    words = [*WORDS[:4], *[" and"] * (longest - 4), " so", "."]
    assert write(made, words, Reason.LENGTH, together) == "Light is fast."
    assert (made[1].reason, made[1].mark) == (Reason.STOP, "")
    assert made.written == longest, "tokens that are left out were written, too"


@pytest.mark.parametrize("together", [1, 3, 100])
@pytest.mark.parametrize("fence", ["```", "~~~"])
def test_at_its_longest_a_branch_leaves_out_code_that_is_not_complete(fence: str, together: int) -> None:
    made = aimed(12)
    words = ["It is", ".", " Run", " it", ":", "\n", fence, "py", "\n", "# light", "\n", "light", "()"]
    words += ["\n"] * (made[1].budget - len(words))
    assert write(made, words, Reason.LENGTH, together) == "It is."
    assert (made[1].reason, made[1].mark) == (Reason.STOP, "")


def test_code_that_is_complete_stays() -> None:
    made = aimed(12)
    words = [
        "It is",
        ".",
        "\n",
        "```",
        "py",
        "\n",
        "light",
        "()",
        "\n",
        "```",
        "\n",
        "It",
        " runs",
        ".",
        " So",
        " it",
    ]
    words += [" so"] * (made[1].budget - len(words))
    assert write(made, words, Reason.LENGTH) == "It is.\n```py\nlight()\n```\nIt runs."


@pytest.mark.parametrize("together", [1, 3, 100])
@pytest.mark.parametrize(
    "announcement",
    [
        "Here are some points to keep in mind.",
        "Hier sind einige Punkte, die wichtig sind.",
        "A continuación se muestran algunos consejos.",
        "以下是一些建议。",
    ],
)
def test_an_announcement_that_nothing_follows_is_left_out(announcement: str, together: int) -> None:
    made = aimed(20)
    words = ["It is", " so", ".", *re.findall(r"\s?\w+|\s|.", f" {announcement}")]
    assert write(made, words, Reason.STOP, together) == "It is so."
    assert made[1].mark == ""
    made = aimed(20)
    assert write(made, [*words, " Light", " is", "."], Reason.STOP, together).endswith(" Light is.")


def test_a_text_that_only_announces_is_shown() -> None:
    words = ["Here are", " some", " points", "."]
    assert write(aimed(20), words, Reason.STOP) == "Here are some points."


def test_a_long_sentence_that_begins_early_is_left_out_too() -> None:
    made = aimed(80)
    words = ["It is", " so", ".", *[" and"] * (made[1].budget - 3)]
    assert write(made, words, Reason.LENGTH) == "It is so."
    assert (made[1].reason, made[1].mark) == (Reason.STOP, "")


@pytest.mark.parametrize("together", [1, 3, 100])
def test_the_first_sentence_of_a_branch_is_whole_even_if_it_is_long(together: int) -> None:
    made = aimed(32)
    words = ["Light", *[" and"] * 90, "."]
    assert made[1].longest == 67
    assert write(made, [*words, " It", " is"], Reason.LENGTH, together) == "".join(words)
    assert (made[1].reason, made[1].mark, made[1].stopped) == (Reason.STOP, "", True)


def test_at_its_limit_a_branch_without_a_whole_sentence_is_cut() -> None:
    made = aimed(4, budget=6)
    assert write(made, ["Light", *[" and"] * 5], Reason.LENGTH) == "Light and and and and and"
    assert (made[1].reason, made[1].mark) == (Reason.LENGTH, "…")


def test_a_branch_with_a_share_below_its_maximum_was_cut_by_the_client() -> None:
    made = aimed(6, budget=8)
    assert write(made, WORDS[:8], Reason.LENGTH) == "Light is fast."
    assert made[1].reason is Reason.LENGTH


def test_a_branch_that_the_client_ends_before_its_longest_was_cut_by_the_client() -> None:
    made = aimed(6)
    assert write(made, WORDS[:4], Reason.LENGTH) == "Light is fast."
    assert made[1].reason is Reason.LENGTH


@pytest.mark.parametrize("aim", [None, 60])
def test_a_branch_ends_before_the_heading_of_the_next_point(aim: int | None) -> None:
    shares = BudgetShares((POINT,), {1: 3}, {1: 90})
    made = PlanBranches(shares, (), 8, False, None, holds_sentences=True, aim=aim)
    made.open(1)
    made.write(1, pieces(["Light", ".", "\n\n", "##", " 2", ". Deep"]))
    assert made[1].stopped
    assert made[1].answer.text == "Light."


def test_a_line_of_code_is_no_heading() -> None:
    made = branches(90)
    code = ["```", "\n", "# Light", "\n", "```", "\n", "It is", "."]
    assert write(made, code, Reason.STOP) == "".join(code)


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


@pytest.mark.parametrize(
    ("tail", "ended"),
    [("for its screenplay (J.K.", False), ("by J. R.", False), ("in the U", False), ("for all of us.", True)],
)
def test_a_full_stop_after_an_initial_ends_no_sentence(tail: str, ended: bool) -> None:
    assert ends_sentence(tail) == ended


def test_a_buffer_releases_whole_sentences_only() -> None:
    buffer = SentenceBuffer()
    released = [[piece.text for piece in buffer.add(one)] for one in pieces(["A b", ".", " C", "\n", "D"])]
    assert released == [[], ["A b", "."], [], [" C", "\n"], []]
    assert [piece.text for piece in buffer.take()] == ["D"]
    assert buffer.whole
