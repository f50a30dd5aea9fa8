"""Soft ends on their way through the master: branches have one, answers and plans have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.frames import End, Opening
from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.events import BranchFinished, Planned, Reason
from specsot.params import Ask, Form
from specsot_master.core.commands import OpenBranch
from specsot_master.core.limits import CLOSING_AIM, FIRST_SENTENCE_TOKENS, aim_of, longest_branch, soft_limit
from specsot_master.core.plans.merged_answer import heading_of
from specsot_master.core.plans.speculation import PLAN_ORDINAL
from specsot_master.core.sequence import SequenceFactory
from specsot_master.engine import Caller, RequestJournal
from specsot_master.journal import open_journal
from tests.master.letters import SAYS, SOT, finished, openings
from tests.master.play import Play
from tests.master.stage import END_OF_TEXT, Stage, of
from tests.master.test_repair import break_and_form
from tests.master.test_resuming import CONFIG, kept_in, reading, revived, text_of
from tests.master.test_speculation import ASK as TOGETHER
from tests.master.test_speculation import DIRECT, INTRODUCTION, TOLD, write_plan
from tests.master.test_speculation import SAYS as SAID

ASK = Ask(prompt="x", mode="sot")


@pytest.mark.parametrize(("limit", "soft"), [(1000, 850), (400, 340), (100, 60), (50, 25), (24, 12), (1, 0)])
def test_a_sentence_has_room_between_the_soft_and_the_hard_end(limit: int, soft: int) -> None:
    assert soft_limit(limit) == soft


def soft_end(ask: Ask = ASK, rules: PlanRules | None = None, soft: int | None = 60) -> SoftEnd | None:
    factory = SequenceFactory((2, 3))
    return factory.decoding_opening(5, ask, 7, ordinal=1, limit=100, rules=rules, soft_limit=soft).soft_end


def test_a_sequence_ends_softly_by_an_end_token_of_the_model() -> None:
    assert soft_end() == SoftEnd(60, 2)
    assert soft_end(soft=None) is None
    assert soft_end(rules=PlanRules()) is None
    assert soft_end(Ask(prompt="x", form=Form("regex", ("a",)))) is None
    assert soft_end(Ask(prompt="x", mode="sot", ignore_eos=True)) is None
    assert SequenceFactory(()).decoding_opening(5, ASK, 7, ordinal=1, limit=9, soft_limit=5).soft_end is None


async def test_branches_end_softly_and_nothing_else_does() -> None:
    stage = Stage(SAYS)
    await stage.answer(SOT)
    decoding = [one for one in openings(stage) if one.decodes]
    assert len({one.ordinal for one in decoding}) > 2
    for one in decoding:
        assert (one.soft_end is not None) == (one.ordinal > 0)
        assert one.soft_end is None or one.soft_end.after == soft_limit(one.limit)


def begun(**ends: object) -> Play:
    play = Play("sot", told=TOLD, speculates=True, answer_tokens=320, max_new_tokens=900, ends=ends)
    play.write(0, DIRECT)
    write_plan(play)
    assert play.open_ready() == [1, 2, 3, 4, 5]
    return play


def test_the_branches_of_an_answer_of_usual_length_may_end_at_85_percent_of_their_mean() -> None:
    play = begun()
    headings = [heading_of(point) for point in play.of(Planned)[0].points]
    aim = aim_of(320, 4, sum(map(len, headings)) + len(INTRODUCTION) + CLOSING_AIM)
    *points, closing = play.of(OpenBranch)
    soft = int(0.85 * aim)
    longest = max(int(1.5 * aim), FIRST_SENTENCE_TOKENS)
    assert [(one.soft_limit, one.budget) for one in points] == [(soft, longest)] * 4
    assert not closing.point.title
    assert (closing.soft_limit, closing.budget) == (1, longest)


@pytest.mark.parametrize(("aim", "longest"), [(24, 60), (30, 65), (60, 91), (70, 105), (80, 120)])
def test_a_sentence_that_began_before_the_soft_limit_has_room(aim: int, longest: int) -> None:
    assert longest_branch(aim) == longest


def test_a_client_that_ignores_end_tokens_gets_the_whole_share_of_each_branch() -> None:
    for bound, free in zip(begun().of(OpenBranch), begun(ignore_eos=True).of(OpenBranch), strict=True):
        assert free.budget > bound.budget


@pytest.mark.parametrize(
    ("text", "reason"), [("It is so. It i", Reason.STOP), ("It is so and so", Reason.LENGTH)]
)
def test_a_branch_of_usual_length_lacks_nothing_if_a_whole_sentence_precedes(
    text: str, reason: Reason
) -> None:
    play = begun()
    for order in play.of(OpenBranch):
        # Each branch begins with words of its own, so that none is opened again.
        own = f"{'abcde'[order.point.id - 1] * 3} is such a letter and "
        play.write(order.point.id, (own + text.rjust(order.budget - len(own), "o")))
        play.said += play.plan.pass_openings(now=2.5)
        play.end(order.point.id, End.LENGTH)
    # The closing is left out if it has no whole sentence, and then lacks nothing.
    assert [event.reason for event in play.of(BranchFinished)] == [*[reason] * 4, Reason.STOP]
    assert play.finished.reason is reason
    assert "It is so" in play.finished.text
    assert "It is so. It i" not in play.finished.text
    play.check_stream()


class SoftStage(Stage):
    """A ring whose last stage writes the end token in place of the token at which a soft end applies."""

    def _script(self, opening: Opening, prompt: tuple[int, ...]) -> tuple[int, ...]:
        script = super()._script(opening, prompt)
        if (soft := opening.soft_end) is None:
            return script
        ends = (at for at in range(soft.after, len(script)) if self.text.decode(script[:at]).endswith("."))
        return (*script[: next(ends, len(script) - 1)], soft.token)


def soft_stage(seed: int = 0, **changes: object) -> SoftStage:
    longer = {
        piece: f"{said} And more. " + "It goes on. " * 30 for piece, said in SAID.items() if piece[0] == "#"
    }
    closing = {"## 5. A final piece": "So there are four. That is all of them."}
    return SoftStage(SAID | longer | closing, seed=seed, style="list", **changes)  # type: ignore[arg-type]


def soft_ends(stage: Stage) -> dict[int, tuple[SoftEnd | None, int]]:
    """The soft end and the limit of each ordinal, the same at each of its openings."""
    found: dict[int, tuple[SoftEnd | None, int]] = {}
    for one in openings(stage):
        if one.decodes:
            assert found.setdefault(one.ordinal, (one.soft_end, one.limit)) == (one.soft_end, one.limit)
    return found


async def softly_answered() -> tuple[str, dict[int, tuple[SoftEnd | None, int]]]:
    stage = soft_stage()
    return finished(await stage.answer(TOGETHER)).text, soft_ends(stage)


async def test_a_branch_that_ended_softly_is_complete() -> None:
    stage = soft_stage()
    events = await stage.answer(TOGETHER)
    assert [event.reason for event in of(BranchFinished, events)] == [Reason.STOP] * 5
    assert finished(events).reason is Reason.STOP
    assert finished(events).text.endswith("It goes on.\n\nSo there are four.")
    ordered = soft_ends(stage)
    assert ordered[0][0] is ordered[PLAN_ORDINAL][0] is None
    assert ordered[5][0] == SoftEnd(1, END_OF_TEXT)
    assert len({ordered[id] for id in (1, 2, 3, 4)}) == 1
    stage.assert_clean()


@pytest.mark.parametrize("steps", [20, 28, 36])
async def test_a_ring_that_breaks_ends_branches_at_the_same_places(steps: int) -> None:
    stage = soft_stage(steps, burst=1)
    client = stage.listen(TOGETHER)
    for _ in range(steps):
        await stage.step()
    await break_and_form(stage, 2)
    (events,) = await stage.play(client)
    assert (finished(events).text, soft_ends(stage)) == await softly_answered()


@pytest.mark.parametrize("steps", [4, 20, 36])
async def test_a_restarted_master_orders_the_same_soft_ends(tmp_path: Path, steps: int) -> None:
    journal = open_journal(tmp_path, "m")
    stage = soft_stage(config=CONFIG, notes=RequestJournal(journal, lambda: 0.0), burst=1)
    asked = replace(TOGETHER, resumable=True)
    client = reading(stage.requests.generate(asked, Caller("mine", owner="alice")))
    for _ in range(steps):
        await stage.step()
    (request,) = stage.engine.all_requests
    told = request.events.position
    kept = await kept_in(tmp_path, journal, client)
    again = soft_stage(config=CONFIG)
    events = await revived(again, kept, told)
    text, ordered = await softly_answered()
    assert text_of(events) == text
    assert soft_ends(again).items() <= ordered.items()
