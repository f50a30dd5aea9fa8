"""A plan and a direct answer that are begun together: which is used depends on tokens only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.frames import Close, End, Fork, Open
from specsot.core.skeleton import read_plan
from specsot.events import BranchFinished, BranchStarted, MergedText, Planned, Reason, SkeletonText
from specsot.params import Ask, Limits, Message
from specsot_master.core.commands import OpenAnswer, OpenBranch, OpenSkeleton
from specsot_master.core.plans.speculation import (
    NO_BEGINNING,
    NO_ROOM,
    OTHER_LANGUAGE,
    PLAN_ORDINAL,
    SHORT_ANSWER,
    TOO_FEW_POINTS,
)
from specsot_master.engine import Caller, EngineConfig, RequestJournal, RingState
from specsot_master.journal import open_journal
from tests.conftest import seeds, some
from tests.master.fake_ring import STATE
from tests.master.letters import finished, openings
from tests.master.play import Play
from tests.master.stage import Stage, of
from tests.master.test_repair import break_and_form
from tests.master.test_resuming import CONFIG, kept_in, reading, revived, text_of
from tests.there import there

TOLD = ("Answer with a short numbered list.",)
INTRODUCTION = "Letters are signs that stand for sounds."
# The first item is no one-liner in tokens of any test, so that the answer is not short.
ITEM = "Alpha is the first of them, and it stands for an open vowel in most of the words that begin with it."
DIRECT = f"{INTRODUCTION} Here are some of them:\n\n1. {ITEM}\n2. Beta is the second."
LIST = " Alpha\n2. Beta\n3. Gamma\n4. Delta"
PLANNED = (
    f"{INTRODUCTION}\n\n## 1. Alpha\nIt is first.\n\n## 2. Beta\nIt is second.\n\n## 3. Gamma\nIt is third."
    "\n\n## 4. Delta\nIt is fourth.\n\nSo there are four."
)
SAYS = {
    "numbered list": LIST,
    "## 5. A final piece": "So there are four.",
    "## 1. Alpha": "It is first.",
    "## 2. Beta": "It is second.",
    "## 3. Gamma": "It is third.",
    "## 4. Delta": "It is fourth.",
    "letters": DIRECT,
}
ASK = Ask("What are the main letters?", seed=5, constraint=False, limits=Limits(max_new_tokens=600))
ALONE = replace(ASK, mode="direct")


def begin(**limits: int) -> Play:
    return Play("auto", told=TOLD, speculates=True, **({"max_new_tokens": 600} | limits))


def begin_in_markers() -> Play:
    return Play("auto", told=TOLD, speculates=True, shows_markers=True, max_new_tokens=600)


def write_plan(play: Play, text: str = LIST) -> None:
    play.write(PLAN_ORDINAL, text, step=7)
    play.end(PLAN_ORDINAL)


def write_branches(play: Play) -> None:
    for id in play.open_ready():
        play.write(id, "So it is." if id == 5 else f"Text {id}.")
        play.end(id)


def merged(play: Play) -> str:
    return "".join(event.text for event in play.of(MergedText))


# --- the state machine ---


def test_the_direct_answer_is_opened_before_the_plan() -> None:
    play = begin()
    answer, skeleton = play.of(OpenAnswer, OpenSkeleton)
    assert answer.limit == 600
    assert (skeleton.ordinal, skeleton.limit) == (PLAN_ORDINAL, 45)
    assert not play.plan.all_opened


def test_an_answer_that_ends_at_once_closes_the_plan() -> None:
    play = begin()
    play.end(0)
    assert PLAN_ORDINAL in play.closed
    assert play.finished.text == ""


def test_a_speculative_plan_is_shown_in_markers_once_it_is_used() -> None:
    play = begin_in_markers()
    write_plan(play)
    assert not play.of(SkeletonText), "the plan may still be discarded"
    play.write(0, DIRECT)
    (skeleton,), (planned,) = play.of(SkeletonText), play.of(Planned)
    assert [point.title for point in there(read_plan(skeleton.text))] == ["Alpha", "Beta", "Gamma", "Delta"]
    assert read_plan(skeleton.text) == planned.points, "the closing is no point"
    write_branches(play)
    play.check_stream()


def test_a_discarded_plan_is_not_shown_in_markers() -> None:
    play = begin_in_markers()
    write_plan(play, " Alpha")
    play.write(0, DIRECT)
    play.end(0)
    assert not play.of(SkeletonText)
    assert play.finished.text == DIRECT


def test_the_answer_is_read_from_its_first_token_and_what_follows_its_introduction_is_withheld() -> None:
    play = begin()
    play.write(0, "Let", step=1)
    assert merged(play) == "Let"
    play.write(0, DIRECT[3:], step=1)
    assert merged(play) == INTRODUCTION
    assert not play.of(Planned)


@pytest.mark.parametrize("plan_first", [True, False])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_plan_that_stands_follows_the_introduction(plan_first: bool, step: int) -> None:
    play = begin()
    if plan_first:
        write_plan(play)
        assert not play.of(Planned), "the introduction is still unknown"
    play.write(0, DIRECT, step=step)
    if not plan_first:
        write_plan(play)
    assert [point.title for point in play.of(Planned)[0].points] == ["Alpha", "Beta", "Gamma", "Delta"]
    assert 0 in play.closed
    write_branches(play)
    headed = "".join(f"\n\n## {id}. {name}\nText {id}." for id, name in enumerate(LIST_NAMES, 1))
    assert play.finished.text == f"{INTRODUCTION}{headed}\n\nSo it is."
    assert [order.introduction for order in play.of(OpenBranch)] == [INTRODUCTION] * 5
    play.check_stream()
    counted = play.finished.statistics
    assert counted.plan_tokens == len(LIST) + 1
    assert counted.merged_tokens == len(play.finished.tokens) == len(INTRODUCTION) + 4 * 7 + 9
    # Each branch has an end token in addition.
    assert (
        counted.completion_tokens == counted.plan_tokens + counted.merged_tokens + counted.heading_tokens + 5
    )
    assert play.finished.statistics.decision.startswith("planned: ")


LIST_NAMES = ("Alpha", "Beta", "Gamma", "Delta")


def test_discarded_tokens_are_counted_apart() -> None:
    early, late = begin(), begin()
    for play, written in ((early, len(INTRODUCTION) + 20), (late, len(DIRECT))):
        play.write(0, DIRECT[:written], step=1)
        write_plan(play)
        play.write(0, DIRECT[written:], step=1)
        write_branches(play)
    ends = [play.finished.statistics for play in (early, late)]
    assert early.finished.text == late.finished.text
    assert ends[0].completion_tokens == ends[1].completion_tokens
    assert ends[0].discarded_tokens < ends[1].discarded_tokens == len(DIRECT) - len(INTRODUCTION)


@pytest.mark.parametrize("plan_first", [True, False])
def test_a_plan_that_does_not_stand_releases_the_direct_answer(plan_first: bool) -> None:
    play = begin()
    if plan_first:
        write_plan(play, " Alpha\n2. Alpha")
    play.write(0, DIRECT[:90], step=4)
    if not plan_first:
        assert merged(play) == INTRODUCTION
        write_plan(play, " Alpha\n2. Alpha")
    assert DIRECT.startswith(merged(play))
    # The beginning of a line that may repeat the one before is held back, as in any direct answer.
    assert len(merged(play)) > 70
    assert play.plan.all_opened
    play.write(0, DIRECT[90:], step=4)
    play.end(0)
    assert play.finished.text == DIRECT
    assert len(play.finished.tokens) == len(DIRECT)
    counted = play.finished.statistics
    assert (counted.mode, counted.plan_tokens, counted.completion_tokens) == ("direct", 0, len(DIRECT) + 1)
    assert counted.discarded_tokens == len(" Alpha\n2. Alpha") + 1
    assert [event.points for event in play.of(Planned)] == [()]
    play.check_stream()


@pytest.mark.parametrize(
    ("answer", "plan", "reason"),
    [
        ("The main one is Alpha. It is the first.", LIST, SHORT_ANSWER),
        ("Two.\n\n- Alpha\n- Beta\n- Gamma", LIST, SHORT_ANSWER),
        ("# Alpha\n\n1. Beta", LIST, NO_BEGINNING),
        (f"Here are seven letters:\n\n1. {ITEM}", LIST, TOO_FEW_POINTS),
        (f"Um besser zu lesen, kannst du folgende Schritte ausführen:\n\n1. {ITEM}", LIST, OTHER_LANGUAGE),
        (f"Para leer mejor, puedes realizar varias acciones.\n\n1. {ITEM}", LIST, OTHER_LANGUAGE),
    ],
)
def test_an_answer_without_introduction_or_with_more_points_is_not_replaced(
    answer: str, plan: str, reason: str
) -> None:
    for plan_first in (True, False):
        play = begin()
        if plan_first:
            write_plan(play, plan)
        play.write(0, answer, step=3)
        play.end(0)
        if not plan_first:
            write_plan(play, plan)
        assert (play.finished.text, play.finished.reason) == (answer, Reason.STOP)
        assert play.finished.statistics.decision == f"direct: {reason}"
        play.check_stream()


@pytest.mark.parametrize(
    ("question", "introduction", "way"),
    [
        ("Which places are there?", "Los Angeles offers great beaches:", "planned"),
        ("Which places are there?", "El Niño has several effects on weather.", "planned"),
        ("Welche Orte gibt es?", "Los Angeles, Las Vegas, Santa Fe:", "planned"),
        ("Welche Orte gibt es?", "Here are some of the places:", f"direct: {OTHER_LANGUAGE}"),
        ("Which places are there?", "Estos son los lugares más importantes:", f"direct: {OTHER_LANGUAGE}"),
    ],
)
def test_names_in_the_introduction_tell_no_language(question: str, introduction: str, way: str) -> None:
    play = begin_with(question, f"{introduction}\n\n1. {ITEM}\n2. Beta is the second.", LIST, plan_first=True)
    if way == "planned":
        assert merged(play) == introduction
        write_branches(play)
    else:
        play.end(0)
        assert play.finished.statistics.decision == way
    assert play.finished.text.startswith(introduction)


def begin_with(question: str, answer: str, plan: str, plan_first: bool) -> Play:
    """A speculative plan whose direct answer to this question is read up to `answer`."""
    play = Play("auto", told=TOLD, speculates=True, prompt=question, max_new_tokens=600)
    if plan_first:
        write_plan(play, plan)
    play.write(0, answer, step=3)
    if not plan_first:
        write_plan(play, plan)
    return play


@pytest.mark.parametrize("plan_first", [True, False])
def test_several_things_are_planned_if_the_answer_begins_with_a_list(plan_first: bool) -> None:
    play = begin_with("Which letters are there?", f"1. {ITEM}\n2. Beta is the second.", LIST, plan_first)
    assert merged(play) == ""
    write_branches(play)
    assert play.finished.text.startswith("## 1. Alpha\n")
    play.check_stream()


@pytest.mark.parametrize("plan_first", [True, False])
@pytest.mark.parametrize("question", ["Which letters are there?", "Explain the letters."])
@pytest.mark.parametrize(
    "answer",
    [
        "They are Alpha and Beta.",
        f"{INTRODUCTION} They are Alpha, which is the first, and Beta, and others.",
    ],
)
def test_an_answer_of_one_paragraph_is_not_replaced(question: str, answer: str, plan_first: bool) -> None:
    play = begin_with(question, answer, LIST, plan_first)
    play.end(0)
    assert play.finished.statistics.decision == f"direct: {SHORT_ANSWER}"
    assert play.finished.text == answer


@pytest.mark.parametrize(
    ("answer", "planned"),
    [
        (DIRECT, True),
        (f"Pros and cons of letters are these:\n\n1. {ITEM}", True),
        (f"Pros:\n\n1. {ITEM}", False),
    ],
)
def test_a_plan_of_the_things_that_the_question_names_may_repeat_them(answer: str, planned: bool) -> None:
    plan = " Pros\n2. Cons\n3. Pros\n4. Cons"
    play = begin_with("What are the pros and cons of letters?", answer, plan, plan_first=True)
    assert bool(play.of(Planned)[0].points) == planned


def test_a_plan_has_no_more_points_than_its_introduction_promises() -> None:
    play = begin()
    play.write(0, f"Here are three letters:\n\n1. {ITEM}", step=3)
    write_plan(play)
    assert len(play.of(Planned)[0].points) == 3
    assert play.open_ready() == [1, 2, 3], "a plan of three points has no closing"


def test_a_direct_answer_that_ended_first_is_replaced_all_the_same() -> None:
    play = begin()
    play.write(0, DIRECT)
    play.end(0)
    assert not play.plan.finished
    write_plan(play)
    write_branches(play)
    assert play.finished.text.startswith(f"{INTRODUCTION}\n\n## 1. Alpha")
    play.check_stream()


@pytest.mark.parametrize("end", [End.FAILED, End.CANCELLED])
def test_a_plan_with_a_failed_sequence_loses_nothing(end: End) -> None:
    play = begin()
    play.write(0, DIRECT[:60], step=5)
    play.write(PLAN_ORDINAL, LIST[:9])
    play.end(PLAN_ORDINAL, end)
    play.write(0, DIRECT[60:], step=5)
    play.end(0)
    assert play.finished.text == DIRECT


def test_a_ring_without_room_for_the_plan_answers_directly() -> None:
    play = Play("auto", told=TOLD, speculates=True, plans=False, max_new_tokens=600)
    assert [type(one) for one in play.of(OpenAnswer, OpenSkeleton)] == [OpenAnswer]
    play.write(0, DIRECT, step=9)
    play.end(0)
    assert play.finished.text == DIRECT
    assert play.finished.statistics.decision == f"direct: {NO_ROOM}"


def test_the_closing_starts_with_the_points_and_is_no_point() -> None:
    play = begin(max_parallel=8)
    play.write(0, DIRECT)
    write_plan(play)
    assert play.open_ready() == [1, 2, 3, 4, 5]
    closing = play.of(OpenBranch)[-1]
    assert not closing.point.title
    assert [point.id for point in closing.points] == [1, 2, 3, 4, 5]
    assert [point.id for point in play.of(Planned)[0].points] == [1, 2, 3, 4]
    started = play.of(BranchStarted)[-1]
    assert (started.branch, started.title) == (5, "")


def test_everything_that_is_delivered_stays_within_the_limit() -> None:
    play = begin(max_new_tokens=400)
    play.write(0, DIRECT)
    write_plan(play)
    play.open_ready()
    for order in play.of(OpenBranch):
        play.write(order.point.id, "x" * order.budget)
        play.end(order.point.id, End.LENGTH)
    assert 350 < play.finished.statistics.completion_tokens <= 400


def test_a_cancelled_answer_closes_its_code_and_marks_a_cut_branch_once() -> None:
    play = begin()
    play.write(0, DIRECT)
    write_plan(play)
    play.open_ready()
    play.write(1, "Run it.\n```\nls")
    play.write(2, "It is so and so")
    play.end(2, End.LENGTH)
    play.said += play.plan.cancel(now=4.0)
    assert play.finished.text == (
        f"{INTRODUCTION}\n\n## 1. Alpha\nRun it.\n```\nls\n```\n\n## 2. Beta\nIt is so and so…"
    )


@pytest.mark.parametrize("phase", ["introduction", "withheld", "waiting for the introduction", "branches"])
def test_cancelled_in_any_phase_the_text_so_far_is_the_answer(phase: str) -> None:
    play = begin()
    if phase == "waiting for the introduction":
        write_plan(play)
    play.write(0, DIRECT[: 70 if phase == "withheld" else 20], step=3)
    if phase == "branches":
        play.write(0, DIRECT[20:])
        write_plan(play)
        assert play.open_ready() == [1, 2, 3, 4, 5]
        play.write(1, "It is")
    play.said += play.plan.cancel(now=4.0)
    assert play.finished.reason is Reason.CANCELLED
    expected = {"withheld": DIRECT[:70], "branches": f"{INTRODUCTION}\n\n## 1. Alpha\nIt is"}
    assert play.finished.text == expected.get(phase, DIRECT[:20])
    assert merged(play) == play.finished.text
    if phase in ("introduction", "withheld"):
        assert {0, PLAN_ORDINAL} <= set(play.closed)
    if phase == "branches":
        assert {1, 2, 3, 4, 5} <= set(play.closed)


def test_logprobs_are_those_of_the_delivered_tokens() -> None:
    for plan in (LIST, " Alpha"):
        play = begin()
        play.write(0, DIRECT, step=5)
        write_plan(play, plan)
        if plan is LIST:
            write_branches(play)
        else:
            play.end(0)
        told = [one.chosen.token for event in play.of(MergedText) for one in event.logprobs]
        assert told == list(play.finished.tokens)


def test_the_plan_is_reported_while_it_is_generated() -> None:
    play = begin()
    write_plan(play)
    assert "".join(event.text for event in play.of(SkeletonText)) == "1." + LIST


# --- the engine ---


def stage(seed: int = 0, says: dict[str, str] = SAYS, **changes: object) -> Stage:
    return Stage(says, seed=seed, style="list", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", seeds(8, quick=3))
@pytest.mark.parametrize("burst", [1, 4, 40])
async def test_the_answer_is_the_same_whatever_the_steps_accept(seed: int, burst: int) -> None:
    """The fake ring advances some of the sequences by some tokens, so either of the two is ready first."""
    theatre = stage(seed, burst=burst)
    events = await theatre.answer(ASK)
    assert finished(events).text == PLANNED
    assert len(of(BranchFinished, events)) == 5
    theatre.assert_clean()


@pytest.mark.parametrize("seed", seeds(6, quick=2))
async def test_without_a_usable_plan_the_answer_is_that_of_a_direct_request(seed: int) -> None:
    says = SAYS | {"numbered list": " Alpha\n2. Alpha"}
    events, alone = await stage(seed, says).answer(ASK), await stage(seed, says).answer(ALONE)
    assert finished(events).text == finished(alone).text == DIRECT
    assert finished(events).tokens == finished(alone).tokens


async def test_both_sequences_draw_from_the_seed_with_ordinals_of_their_own() -> None:
    theatre = stage()
    await theatre.answer(ASK)
    decoding = [one for one in openings(theatre) if one.decodes]
    assert {one.seed for one in decoding} == {5}
    assert [one.ordinal for one in decoding] == [0, PLAN_ORDINAL, 1, 2, 3, 4, 5]
    assert len({one.family for one in decoding}) == 1


async def test_the_branches_fork_one_prefix_and_read_few_tokens_of_their_own() -> None:
    theatre = stage()
    await theatre.answer(ASK)
    branches = [one for one in openings(theatre) if 0 < one.ordinal < PLAN_ORDINAL]
    assert len({one.fork.sequence for one in branches if one.fork}) == 1
    prompts = {opening.sequence: text for opening, text in theatre.prompts_seen}
    for one in branches:
        assert one.fork
        if one.ordinal != 5:
            # A token of this tokenizer is a letter or two.
            assert one.prompt - one.fork.length <= len("1. Alpha\n")
        assert INTRODUCTION in prompts[one.sequence]
        assert "1. Alpha\n2. Beta\n3. Gamma\n4. Delta" in prompts[one.sequence]


async def test_the_direct_sequence_is_closed_when_the_plan_stands() -> None:
    theatre = stage(says=SAYS | {"letters": f"{INTRODUCTION}\n\n{'On and on. ' * 90}"})
    client = theatre.listen(ASK)
    (events,) = await theatre.play(client)
    assert finished(events).text == PLANNED
    direct = next(one for one in openings(theatre) if one.decodes and one.ordinal == 0)
    assert any(isinstance(one, Close) and one.sequence == direct.sequence for one in theatre.ring.orders)
    assert finished(events).statistics.discarded_tokens > 0


@pytest.mark.parametrize("steps", [1, 4, 12, 20, 28, 34])
@pytest.mark.parametrize("good", [True, False])
async def test_a_ring_that_breaks_in_any_phase_changes_nothing(steps: int, good: bool) -> None:
    says = SAYS if good else SAYS | {"numbered list": " Alpha\n2. Alpha"}
    theatre = stage(steps, says, burst=1)
    client = theatre.listen(ASK)
    for _ in range(steps):
        await theatre.step()
    await break_and_form(theatre, 2)
    (events,) = await theatre.play(client)
    assert finished(events).text == (PLANNED if good else DIRECT)
    theatre.assert_clean()


@pytest.mark.parametrize("steps", [1, 4, 12, 20, 28, 34])
async def test_a_restarted_master_decides_the_same(tmp_path: Path, steps: int) -> None:
    journal = open_journal(tmp_path, "m")
    theatre = stage(config=CONFIG, notes=RequestJournal(journal, lambda: 0.0), burst=1)
    client = reading(theatre.requests.generate(replace(ASK, resumable=True), Caller("mine", owner="alice")))
    for _ in range(steps):
        await theatre.step()
    (request,) = theatre.engine.all_requests
    told = request.events.position
    kept = await kept_in(tmp_path, journal, client)
    events = await revived(stage(config=CONFIG), kept, told)
    assert text_of(events) == PLANNED


@pytest.mark.parametrize("steps", [1, 4, 12, 20, 28, 34])
async def test_a_cancelled_request_leaves_nothing_in_the_ring(steps: int) -> None:
    theatre = stage(burst=1)
    client = theatre.listen(ASK, "mine")
    for _ in range(steps):
        await theatre.step()
    assert theatre.engine.cancel("mine")
    (events,) = await theatre.play(client)
    assert finished(events).reason is Reason.CANCELLED
    told = "".join(event.text for event in of(MergedText, events))
    assert finished(events).text == told
    await theatre.settle()
    theatre.assert_clean()


def asked(rules: str, letters: str) -> tuple[Message, ...]:
    question = Message("user", f"What are the {letters} letters?")
    return (Message("system", rules), question) if rules else (question,)


def sent_before_the_first_token(theatre: Stage, since: int = 0) -> list[tuple[bool, int, int]]:
    """(decodes, tokens that are fed, tokens that are forked) of each opening up to the answer's own."""
    opened = [one for one in theatre.ring.orders[since:] if isinstance(one, Open)]
    end = next(n for n, one in enumerate(opened) if one.opening.decodes) + 1
    forks = [one.opening.fork for one in opened[:end]]
    return [
        (one.opening.decodes, len(one.tokens), fork.length if fork else 0) for one, fork in zip(opened, forks)
    ]


@pytest.mark.parametrize("state", [STATE, replace(STATE, has_drafter=False)], ids=["drafting", "plain"])
@pytest.mark.parametrize("rules", ["", "You are a careful teacher of letters. " * 3], ids=["short", "long"])
async def test_the_direct_answer_begins_like_that_of_a_direct_request(state: RingState, rules: str) -> None:
    """A prefix that only the plan needs would cost the first token a step."""
    asks = [replace(one, prompt=None, messages=asked(rules, "main")) for one in (ASK, ALONE)]
    both: list[list[tuple[bool, int, int]]] = []
    for ask in asks:
        theatre = stage(state=state)
        # Another question fills the prefix cache with what comes before the question.
        await theatre.answer(replace(ALONE, prompt=None, messages=asked(rules, "Greek")))
        before = len(theatre.ring.orders)
        events = await theatre.answer(ask)
        assert finished(events).text == (DIRECT if ask.mode == "direct" else PLANNED)
        both.append(sent_before_the_first_token(theatre, before))
        theatre.assert_clean()
    assert both[0] == both[1]
    ((_, _, forked),) = both[0]
    assert bool(forked) == bool(rules), "no prefix is computed before the answer's own first step"


async def test_a_plan_waits_for_no_prefix_and_its_branches_fork_one() -> None:
    theatre = stage()
    await theatre.answer(replace(ALONE, prompt="letters of the Greek and of the Latin alphabet"))
    before = len(openings(theatre))
    await theatre.answer(ASK)
    opened = openings(theatre)[before:]
    assert [(one.ordinal, one.decodes) for one in opened] == [
        (0, True),
        (PLAN_ORDINAL, True),
        (0, False),
        *((id, True) for id in (1, 2, 3, 4, 5)),
    ]
    prefix, *branches = opened[2:]
    assert {one.fork for one in branches} == {Fork(prefix.sequence, prefix.prompt)}


async def test_a_question_asked_twice_at_once_computes_the_prefix_of_its_branches_once() -> None:
    theatre = stage()
    ask = replace(ASK, limits=replace(ASK.limits, max_parallel=4))
    await theatre.answer(replace(ALONE, prompt="letters of the Greek and of the Latin alphabet"))
    before = len(openings(theatre))
    for events in await theatre.play(theatre.listen(ask), theatre.listen(ask)):
        assert finished(events).text == PLANNED
    assert sum(not one.decodes for one in openings(theatre)[before:]) == 1
    theatre.assert_clean()


@pytest.mark.parametrize("pages", some(range(14, 34), 0, 5, 9, 14))
@pytest.mark.parametrize("page_rows", [16, 64])
async def test_on_few_pages_the_answer_is_planned_or_direct(pages: int, page_rows: int) -> None:
    """The fake ring fails a sequence for which it has no pages."""
    small = replace(STATE, pages=pages * 64 // page_rows, page_rows=page_rows)
    theatre = stage(pages, state=small, config=EngineConfig(model="demo", prefix_cache=pages % 2 == 0))
    asks = [replace(ASK, prompt=f"What are the {word} letters?") for word in ("main", "other", "last")]
    for events in await theatre.play(*map(theatre.listen, asks)):
        assert finished(events).text in (PLANNED, DIRECT)
    theatre.assert_clean()


async def arriving_together(*asks: Ask, live: int = 256) -> list[str]:
    """The answers to requests that all arrive before the first step, in a ring with enough pages."""
    theatre = stage(config=EngineConfig(model="demo", live=live), state=replace(STATE, pages=1024))
    clients = [theatre.listen(ask, client=str(n)) for n, ask in enumerate(asks)]
    while len(theatre.engine.all_requests) < len(asks):
        await theatre.settle()
    return [finished(events).text for events in await theatre.play(*clients)]


async def test_plans_that_are_not_opened_yet_take_their_places() -> None:
    """A plan of at most six points with its closing takes seven places, from its admission on."""
    assert await arriving_together(ASK, ASK, ASK) == [PLANNED, DIRECT, DIRECT]
    assert await arriving_together(ALONE, ASK, live=7) == [DIRECT, DIRECT]
    assert await arriving_together(ALONE, ASK, live=8) == [DIRECT, PLANNED]


async def test_many_requests_are_answered_directly_although_the_ring_has_places() -> None:
    """A plan beside five direct answers has twelve sequences; with more, all answers would come later."""
    for others, planned in ((5, [PLANNED]), (6, [DIRECT])):
        assert await arriving_together(*[ALONE] * others, ASK) == [DIRECT] * others + planned
    assert await arriving_together(*[ASK] * 16) == [PLANNED] + [DIRECT] * 15


async def test_a_full_batch_admits_no_plan() -> None:
    theatre = stage(config=EngineConfig(model="demo", live=9))
    first, second = theatre.listen(ASK), theatre.listen(ASK, client="other")
    events, others = await theatre.play(first, second)
    assert finished(events).text == PLANNED
    assert finished(others).text == DIRECT
    assert finished(others).statistics.decision == f"direct: {NO_ROOM}"


async def test_too_few_pages_admit_no_plan_and_a_restart_remembers_it(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "m")
    notes = RequestJournal(journal, lambda: 0.0)
    theatre = stage(config=CONFIG, notes=notes)
    grant = theatre.state
    theatre = stage(config=CONFIG, notes=notes, state=replace(grant, pages=17))
    client = reading(theatre.requests.generate(replace(ASK, resumable=True), Caller("mine", owner="alice")))
    for _ in range(4):
        await theatre.step()
    (request,) = theatre.engine.all_requests
    assert not request.has_room_for_plan
    told = request.events.position
    kept = await kept_in(tmp_path, journal, client)
    assert text_of(await revived(stage(config=CONFIG), kept, told)) == DIRECT
