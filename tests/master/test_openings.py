"""No branch begins like an earlier one: which is opened again depends on tokens only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.frames import End
from specsot.events import BranchStarted, BranchText, MergedText, Reason
from specsot.params import Sampling
from specsot_master.core.commands import CloseSequence, OpenBranch
from specsot_master.core.plans.openings import MAX_REWRITES, NOT_PROSE, opening_of
from specsot_master.core.plans.speculation import PLAN_ORDINAL
from specsot_master.core.request import MIN_BIAS
from specsot_master.engine import Caller, RequestJournal
from specsot_master.journal import open_journal
from tests.conftest import seeds
from tests.master.letters import finished, openings
from tests.master.play import Play
from tests.master.stage import Stage, of
from tests.master.test_repair import break_and_form
from tests.master.test_resuming import CONFIG, kept_in, reading, revived, text_of
from tests.master.test_speculation import ASK, DIRECT, INTRODUCTION, SAYS, TOLD, write_plan


@pytest.mark.parametrize(
    ("text", "whole", "words"),
    [
        ("Electric cars typically ha", False, "electric cars typically"),
        ("Electric cars typ", False, None),
        ("Electric, cars. Typically ", False, "electric cars typically"),
        ("Electric cars", True, "electric cars"),
        ("", True, ""),
        ("学习编程需要耐心", False, "学习编程"),
        ("学习编", False, None),
    ],
)
def test_the_opening_of_a_text_is_its_first_words(text: str, whole: bool, words: str | None) -> None:
    assert opening_of(text, whole) == words


QUESTION = "Name three letters of the alphabet."


def tokens_of(word: str) -> tuple[int, ...]:
    """Stands for a tokenizer in which a word may begin with its first letter or with a letter of its own."""
    return (ord(word[0]), ord(word[0]) + 1000)


MARKS = tuple(dict.fromkeys(token for mark in NOT_PROSE for token in tokens_of(mark)))


def begin(question: str = "Name three letters.", titles: str = " Alpha\n2. Beta\n3. Gamma") -> Play:
    play = Play(
        "auto",
        told=TOLD,
        speculates=True,
        answer_tokens=860,
        max_new_tokens=900,
        prompt=question,
        beginnings=tokens_of,
    )
    play.write(0, DIRECT)
    write_plan(play, titles)
    assert play.open_ready()[:3] == [1, 2, 3]
    return play


def step(play: Play, texts: dict[int, str]) -> None:
    for id, text in texts.items():
        play.write(id, text)
    play.said += play.plan.pass_openings(now=2.5)


def shown(play: Play) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in play.of(BranchText):
        texts[event.branch] = texts.get(event.branch, "") + event.text
    return texts


def test_a_branch_is_withheld_until_earlier_ones_have_started() -> None:
    play = begin()
    step(play, {2: "Beta comes second. ", 3: "Gamma comes third. "})
    assert not shown(play)
    step(play, {1: "Alpha comes "})
    assert not shown(play)
    step(play, {1: "first of all. "})
    assert shown(play) == {
        1: "Alpha comes first of all.",
        2: "Beta comes second.",
        3: "Gamma comes third.",
    }


def test_no_branch_begins_with_a_mark_of_a_list_a_heading_or_a_quotation() -> None:
    """Such a branch would be opened again, and would begin some steps after the others."""
    assert [order.excluded for order in begin().of(OpenBranch)] == [MARKS] * 3


@pytest.mark.parametrize("first", [1, 2])
def test_a_branch_that_begins_like_an_earlier_one_is_opened_again_without_its_first_word(first: int) -> None:
    """Another token may spell the beginning of the same word, so that excluding one is not enough."""
    play = begin()
    other = 3 - first
    step(play, {first: "The letter is old. "})
    step(play, {other: "The letter is older. "})
    assert CloseSequence(2) in play.said
    assert CloseSequence(1) not in play.said
    assert not play.plan.all_opened
    assert [point.id for point in play.plan.ready()] == [2]
    assert play.open_ready() == [2]
    order = play.of(OpenBranch)[-1]
    assert (order.point.id, order.excluded) == (2, (*MARKS, *tokens_of("The")))
    assert len(play.of(BranchStarted)) == 3, "its client has seen it begin once"
    step(play, {2: "Old is the second. ", 3: "Gamma is it. "})
    assert shown(play)[2] == "Old is the second."
    assert play.plan.all_opened


def test_a_branch_that_is_opened_again_twice_begins_with_no_first_token_of_earlier_ones() -> None:
    """So that it is not opened again for each word with which another branch begins."""
    play = begin()
    step(play, {1: "Alpha comes first. ", 3: "Alpha comes first, too. "})
    assert play.open_ready() == [3]
    assert play.of(OpenBranch)[-1].excluded == (*MARKS, *tokens_of("Alpha"))
    step(play, {3: "What a wonderful letter. "})
    assert not play.open_ready(), "it waits for the second branch's first token"
    step(play, {2: "Beta comes second. "})
    assert play.open_ready() == [3]
    assert play.of(OpenBranch)[-1].excluded == (
        *MARKS,
        *tokens_of("Alpha"),
        *tokens_of("What"),
        ord("B"),
    )
    step(play, {3: "Gamma comes third. "})
    assert shown(play)[3] == "Gamma comes third."


def test_a_branch_that_fails_before_its_first_token_holds_no_other_up() -> None:
    play = begin()
    play.end(2, End.FAILED)
    step(play, {1: "Alpha comes first. ", 3: "Alpha comes first, too. "})
    assert play.open_ready() == [3]
    step(play, {3: "Alpha comes first, too. "})
    assert play.open_ready() == [3]


@pytest.mark.parametrize(
    ("alike", "own"),
    [
        ("Electric cars typically need", "A charger at home is"),
        ("Elektroautos brauchen meist eine", "Eine Ladestation zu Hause ist"),
        ("Los coches eléctricos necesitan", "Un cargador en casa es"),
        ("电动汽车通常需要充电", "家里的充电桩很方便"),
    ],
)
def test_no_branch_begins_like_an_earlier_one_in_any_language(alike: str, own: str) -> None:
    play = begin()
    step(play, {1: f"{alike} light. ", 2: f"{alike} time. ", 3: "Gamma comes third. "})
    assert play.closed[-1] == 2
    assert play.open_ready() == [2]
    assert play.of(OpenBranch)[-1].excluded == (*MARKS, *tokens_of(alike))
    step(play, {2: f"{own} good. "})
    assert shown(play)[2].startswith(own)
    assert len({opening_of(text, whole=True) for text in shown(play).values()}) == 3


@pytest.mark.parametrize("alike", ["Compare the letters to learn them.", "Letters are signs to learn."])
def test_the_closing_may_begin_like_the_question_or_the_introduction(alike: str) -> None:
    """Opened again, it listed the titles: "Plants, light and water are important"."""
    play = begin("Compare the letters of the alphabet.", " Alpha\n2. Beta\n3. Gamma\n4. Delta")
    points = {1: "Alpha is it. ", 2: "Beta comes second. ", 3: "Gamma comes third. ", 4: "Delta is last. "}
    step(play, points | {5: alike})
    assert not play.open_ready()
    play.end(5)
    assert shown(play)[5] == alike


@pytest.mark.parametrize("alike", [QUESTION, INTRODUCTION])
def test_no_point_begins_like_the_question_or_the_introduction(alike: str) -> None:
    play = begin(QUESTION)
    step(play, {1: f"{alike} So it is. ", 2: "Beta comes second. ", 3: "Gamma comes third. "})
    assert play.closed[-1] == 1
    assert not shown(play), "the others wait for the first"
    assert play.open_ready() == [1]
    step(play, {1: "Alpha comes first. "})
    assert set(shown(play)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("Here's a revised version of your answer: Beta is second. ", True),
        ("In two sentences, Beta is the second. ", True),
        ("I'm ready to help. ", True),
        ("What a wonderful question. ", True),
        ("Hier ist der Absatz zu Beta. ", True),
        ("Aquí está el párrafo sobre Beta. ", True),
        ("以下是关于第二点的说明。", True),
        ("Here, Beta follows Alpha. ", False),
        ("In two ways Beta is the second. ", False),
        ("Claroscuro is no letter. ", False),
    ],
)
def test_a_branch_that_speaks_of_itself_is_opened_again(text: str, rewritten: bool) -> None:
    play = begin()
    step(play, {1: "Alpha comes first. ", 2: text, 3: "Gamma comes third. "})
    assert play.open_ready() == ([2] if rewritten else [])


def test_a_branch_that_ended_while_it_waited_ends_once_it_is_settled() -> None:
    play = begin()
    play.write(2, "Beta is it.")
    play.end(2)
    play.write(3, "Gamma is it.")
    play.end(3)
    step(play, {})
    assert not shown(play)
    step(play, {1: "Alpha is what comes first."})
    play.end(1)
    assert play.finished.text == (
        f"{INTRODUCTION}\n\n## 1. Alpha\nAlpha is what comes first.\n\n## 2. Beta\nBeta is it."
        "\n\n## 3. Gamma\nGamma is it."
    )
    play.check_stream()


def test_a_branch_is_opened_again_so_often_and_not_more() -> None:
    play = begin()
    step(play, {1: "The letter is old. "})
    for _ in range(MAX_REWRITES):
        step(play, {2: "The letter is old. "})
        assert play.open_ready() == [2]
    step(play, {2: "The letter is old. "})
    assert len([one for one in play.of(OpenBranch) if one.point.id == 2]) == 1 + MAX_REWRITES
    assert 2 in shown(play)


def test_tokens_of_discarded_beginnings_are_no_part_of_the_answer() -> None:
    play = begin()
    step(play, {1: "The letter is old.", 2: "The letter is older.", 3: "Gamma is it."})
    play.open_ready()
    step(play, {2: "Old is the second."})
    for id in (1, 2, 3):
        play.end(id)
    counted = play.finished.statistics
    after = len(DIRECT) - len(INTRODUCTION)
    assert counted.discarded_tokens == after + len("The letter is older.")
    assert counted.merged_tokens == len(INTRODUCTION) + len(
        "The letter is old.Old is the second.Gamma is it."
    )
    play.check_stream()


@pytest.mark.parametrize("end", [End.FAILED, None])
def test_what_waited_is_shown_when_the_branch_fails_or_the_request_is_cancelled(end: End | None) -> None:
    play = begin()
    play.write(2, "Beta is")
    if end:
        play.end(2, end)
    play.said += play.plan.cancel(now=4.0)
    assert play.finished.reason is Reason.CANCELLED
    assert shown(play) == {2: "Beta is"}
    merged = "".join(event.text for event in play.of(MergedText))
    assert merged == play.finished.text


def letters_of(theatre: Stage, tokens: tuple[int, ...]) -> str:
    """The letters with which these tokens begin, after a space if there is one."""
    texts = {theatre.text.decode((token,)).strip()[:1] for token in tokens}
    return "".join(sorted(text for text in texts if text.isalpha()))


def stage(seed: int = 0, **changes: object) -> Stage:
    """Branches 1, 3 and 4 begin alike, unless the first token of a beginning is excluded."""
    theatre = Stage(SAYS, seed=seed, style="list", **changes)  # type: ignore[arg-type]
    script = theatre.ring._script

    def begins_alike(opening, prompt):  # type: ignore[no-untyped-def]
        told = {
            1: "A sign of ours, one.",
            2: "Second.",
            3: "A sign of ours, three.",
            4: "A sign of ours, four.",
        }
        barred = len(letters_of(theatre, opening.excluded_first))
        if opening.ordinal in told:
            said = (told[opening.ordinal], "One sign of ours, again.", "Now it differs.")[min(barred, 2)]
            return (*theatre.text.encode(said), script(opening, prompt)[-1])
        return script(opening, prompt)

    theatre.ring._script = begins_alike
    return theatre


PLANNED = (
    f"{INTRODUCTION}\n\n## 1. Alpha\nA sign of ours, one.\n\n## 2. Beta\nSecond."
    "\n\n## 3. Gamma\nOne sign of ours, again.\n\n## 4. Delta\nNow it differs.\n\nSo there are four."
)


@pytest.mark.parametrize("seed", seeds(10, quick=4))
@pytest.mark.parametrize("burst", [1, 4, 40])
async def test_the_answer_is_the_same_whichever_branch_is_faster(seed: int, burst: int) -> None:
    theatre = stage(seed, burst=burst)
    events = await theatre.answer(ASK)
    assert finished(events).text == PLANNED
    decoding = [one for one in openings(theatre) if one.decodes]
    excluded = {one.ordinal: letters_of(theatre, one.excluded_first) for one in decoding}
    assert excluded == {0: "", PLAN_ORDINAL: "", 1: "", 2: "", 3: "A", 4: "AOS", 5: "AFP"}
    branches = {one.sampling for one in decoding if one.ordinal > 0 and one.ordinal != PLAN_ORDINAL}
    assert len(branches) == 1, "a reopened branch is sampled like any other"
    assert len(of(BranchStarted, events)) == 5
    theatre.assert_clean()


@pytest.mark.parametrize("steps", [20, 24, 28, 32, 36])
async def test_a_ring_that_breaks_meanwhile_changes_nothing(steps: int) -> None:
    theatre = stage(steps, burst=1)
    client = theatre.listen(ASK)
    for _ in range(steps):
        await theatre.step()
    await break_and_form(theatre, 2)
    (events,) = await theatre.play(client)
    assert finished(events).text == PLANNED
    theatre.assert_clean()


@pytest.mark.parametrize("steps", [20, 24, 28, 32, 36])
async def test_a_restarted_master_opens_the_same_again(tmp_path: Path, steps: int) -> None:
    journal = open_journal(tmp_path, "m")
    theatre = stage(steps, config=CONFIG, notes=RequestJournal(journal, lambda: 0.0), burst=1)
    client = reading(theatre.requests.generate(replace(ASK, resumable=True), Caller("mine", owner="alice")))
    for _ in range(steps):
        await theatre.step()
    (request,) = theatre.engine.all_requests
    told = request.events.position
    kept = await kept_in(tmp_path, journal, client)
    assert text_of(await revived(stage(config=CONFIG), kept, told)) == PLANNED


def test_branches_that_write_nothing_are_not_opened_again() -> None:
    play = begin()
    for id in (1, 2, 3):
        play.end(id)
    step(play, {})
    assert play.finished.text == INTRODUCTION
    assert len(play.of(OpenBranch)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "- **Use it**: now. ",
        "* Use it now, please. ",
        "### Use\nIt is so. ",
        "**Use**: It is so. ",
        "1. Use it now, please. ",
        "1. **Use**: It is so. ",
        '"To use it, begin now. ',
        "„Gamma“ ist der dritte. ",
    ],
)
def test_a_branch_that_begins_with_a_list_a_heading_or_a_quotation_is_opened_again(text: str) -> None:
    play = begin()
    step(play, {3: text})
    assert [point.id for point in play.plan.ready()] == [3], "no other branch is waited for"
    play.open_ready()
    assert ord(text[0]) in play.of(OpenBranch)[-1].excluded
    step(play, {1: "Alpha comes first now. ", 2: "Beta comes second. ", 3: "3. is a number here. "})
    assert shown(play)[3].startswith("3. is")


async def test_branches_announce_no_list_and_plans_and_answers_may() -> None:
    theatre = Stage(SAYS, style="list")
    await theatre.answer(ASK)
    for one in openings(theatre):
        if one.decodes:
            announcing = theatre.text.announcing_tokens if 0 < one.ordinal < PLAN_ORDINAL else ()
            assert dict(one.sampling.logit_bias) == dict.fromkeys(announcing, MIN_BIAS)


async def test_a_bias_of_the_client_wins_over_that_of_a_token_that_announces_a_list() -> None:
    theatre = Stage(SAYS, style="list")
    token, *others = theatre.text.announcing_tokens
    await theatre.answer(replace(ASK, sampling=Sampling(logit_bias=((token, 5.0),))))
    branches = [one for one in openings(theatre) if one.decodes and 0 < one.ordinal < PLAN_ORDINAL]
    assert branches
    for one in branches:
        assert dict(one.sampling.logit_bias) == {token: 5.0} | dict.fromkeys(others, MIN_BIAS)
