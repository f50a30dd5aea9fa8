"""A last turn that joins what the branches wrote: its prompt, its tokens, what takes its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.frames import End
from specsot.errors import InvalidRequest
from specsot.events import Finished, MergedText, Reason
from specsot.params import Ask, Form, Limits, Mode
from specsot_master.core.commands import OpenBranch, OpenPolish
from specsot_master.core.limits import POLISHED_TOKENS, check_plan, rules_of
from specsot_master.engine import Caller, RequestJournal
from specsot_master.http.openai_requests import chat_asks
from specsot_master.http.openai_schemas import ChatBody
from specsot_master.journal import open_journal
from tests.master.letters import SAYS, SOT
from tests.master.play import Play, text_of
from tests.master.stage import Stage, of
from tests.master.test_list_plans import LIST, TOLD
from tests.master.test_repair import break_and_form
from tests.master.test_resuming import CONFIG, KEPT, kept_in, reading, revived
from tests.master.test_resuming import text_of as text_in

JOINED = "Alpha comes first, then 你好, and gamma follows. 🎉"
POLISHED = replace(SOT, polish=True)
WROTE = SAYS | {"from these notes": JOINED}


def branches_of(play: Play, *texts: str) -> Play:
    """Their texts are written, and they end."""
    for id in play.open_ready():
        play.write(id, texts[id - 1])
    for id in range(1, len(texts) + 1):
        play.end(id)
        play.open_ready()
    return play


def polishing(max_new_tokens: int) -> Play:
    play = Play("sot", told=TOLD, polish=True, max_new_tokens=max_new_tokens)
    play.write(0, LIST)
    play.end(0)
    return play


def test_what_the_last_turn_writes_is_the_answer() -> None:
    play = branches_of(polishing(max_new_tokens=1200), "One.", "Two.", "Three.")
    plan, bodies = len(LIST) + 1, len("One.Two.Three.") + 3
    assert play.of(OpenPolish) == [OpenPolish("One.\n\nTwo.\n\nThree.", 1200 - plan - bodies)]
    assert play.of(MergedText, Finished) == [], "nothing is told before"
    play.write(0, "One, two and three.", step=4)
    play.end(0)
    found = play.finished
    assert (found.text, found.reason, text_of(found.tokens)) == (
        "One, two and three.",
        Reason.STOP,
        "One, two and three.",
    )
    figures = found.statistics
    assert (figures.mode, figures.branches, figures.heading_tokens) == ("sot", 3, 0)
    assert (figures.plan_tokens, figures.polish_tokens, figures.merged_tokens) == (plan, 20, 19)
    assert figures.completion_tokens == plan + bodies + 20
    assert {"queue", "skeleton", "branches", "polish"} == set(figures.phases)


def test_half_of_what_the_plan_leaves_is_kept_for_it() -> None:
    play = branches_of(polishing(max_new_tokens=1200), "One.", "Two.", "Three.")
    budgets = [one.budget for one in play.of(OpenBranch) if isinstance(one, OpenBranch)]
    headings = len("\n\n## 1. Better sleep\n\n\n## 2. More energy\n\n\n## 3. Less stress\n")
    assert sum(budgets) == (1200 - len(LIST) - 1) // 2 - headings
    asked = Ask("Why?", limits=Limits(max_new_tokens=1024))
    assert rules_of(replace(asked, polish=True), listed=True).max_points == 6
    assert rules_of(asked, listed=True).max_points == 8


@pytest.mark.parametrize("reason", [End.CANCELLED, End.FAILED, End.STOP])
def test_where_it_writes_nothing_the_branches_are_the_answer(reason: End) -> None:
    play = branches_of(polishing(max_new_tokens=1200), "One.", "Two.", "Three.")
    play.end(0, reason)
    assert play.finished.text.startswith("## 1. Better sleep\nOne.")
    assert play.finished.statistics.heading_tokens > 0
    play.check_stream()


def test_where_there_is_nothing_to_join_it_is_left_out() -> None:
    play = branches_of(polishing(max_new_tokens=1200), "One.", "", "")
    assert play.of(OpenPolish) == []
    assert play.finished.text == "## 1. Better sleep\nOne."
    play.check_stream()


def test_a_loop_ends_it() -> None:
    play = branches_of(polishing(max_new_tokens=1200), "One.", "Two.", "Three.")
    play.write(0, "It is one and two, as was said. " * 4, step=3)
    assert play.finished.text == "It is one and two, as was said. "
    assert play.finished.reason is Reason.STOP


def test_cancelling_before_the_polish_reports_the_branches_so_far() -> None:
    play = polishing(max_new_tokens=1200)
    play.open_ready()
    play.write(1, "One")
    play.said += play.plan.cancel(4.0)
    assert play.finished.text == "## 1. Better sleep\nOne"
    play.check_stream()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mode": "direct"}, "polish joins the branches of a plan; mode direct writes one text"),
        ({"form": Form("json_object")}, "polish joins the branches of a plan; json_object holds one answer"),
    ],
)
def test_where_it_makes_no_sense_it_is_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Ask("Why?", polish=True, **fields)  # type: ignore[arg-type]


def test_with_too_few_tokens_it_is_refused() -> None:
    few = Limits(max_new_tokens=POLISHED_TOKENS - 1)
    with pytest.raises(InvalidRequest, match=f"polish needs max_new_tokens of at least {POLISHED_TOKENS}"):
        check_plan(Ask("Why?", polish=True, limits=few))


@pytest.mark.parametrize(("planning", "mode"), [({}, "auto"), ({"mode": "sot"}, "sot")])
def test_who_asks_for_it_by_http_asks_for_a_plan(planning: dict[str, object], mode: Mode) -> None:
    body = {"messages": [{"role": "user", "content": "Why?"}], "specsot": {"polish": True, **planning}}
    (ask,) = chat_asks(ChatBody.model_validate(body), "direct", 2048)
    assert (ask.polish, ask.mode) == (True, mode)


async def test_its_prompt_has_the_question_and_the_texts_of_the_branches() -> None:
    stage = Stage(WROTE)
    (end,) = of(Finished, events := await stage.answer(POLISHED))
    assert end.text == JOINED
    assert "".join(one.text for one in of(MergedText, events)) == JOINED
    asked = next(prompt for _, prompt in stage.prompts_seen if "from these notes" in prompt)
    assert "Tell me about letters." in asked
    assert "Alpha is the first letter.\n\nBeta 正文在这里。🎉\n\nGamma follows alpha." in asked
    stage.assert_clean()


@pytest.mark.parametrize("steps", [9, 30, 44, 48])
async def test_a_ring_that_breaks_changes_nothing(steps: int) -> None:
    stage = Stage(WROTE, seed=steps, burst=1)
    client = stage.listen(POLISHED)
    for _ in range(steps):
        await stage.step()
    await break_and_form(stage, 2)
    await stage.play(client)
    (end,) = of(Finished, client.result())
    assert end.text == JOINED
    stage.assert_clean()


async def test_another_master_goes_on_in_the_midst_of_it(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "m")
    stage = Stage(WROTE, seed=3, config=CONFIG, notes=RequestJournal(journal, lambda: 0.0), burst=1)
    ask = replace(KEPT, polish=True)
    client = reading(stage.requests.generate(ask, Caller("mine", owner="alice")))
    while not any("from these notes" in prompt for _, prompt in stage.prompts_seen):
        await stage.step()
    for _ in range(4):
        await stage.step()
    kept = await kept_in(tmp_path, journal, client)
    stage = Stage(WROTE, config=CONFIG)
    events = await revived(stage, kept)
    assert text_in(events) == JOINED


async def test_it_ends_in_time_or_is_left_out() -> None:
    for seconds in (70.0, 90.0, 160.0):
        stage = Stage(WROTE | {"from these notes": "It is so. " * 40}, burst=1)
        events = await stage.answer(replace(POLISHED, finish_within_s=seconds))
        (end,) = of(Finished, events)
        assert end.statistics.seconds <= seconds + 1.0
        assert "".join(one.text for one in of(MergedText, events)) == end.text
        stage.assert_clean()
