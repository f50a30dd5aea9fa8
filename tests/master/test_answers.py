"""The conductor end to end on a fake ring: every mode, what is opened, what the figures say.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specsot.core.frames import Close
from specsot.errors import ContextLengthExceeded, InvalidRequest, TooLarge
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    MergedText,
    Planned,
    Reason,
    SkeletonText,
    Started,
)
from specsot.params import Ask, Form, Limits
from specsot_master.chat_template import ChatTemplate
from specsot_master.engine import EngineConfig
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from tests.conftest import seeds
from tests.master.fake_ring import STATE, chance_of
from tests.master.letters import ANSWER, COUNT, DIRECT, PLAN, SAYS, SOT, finished, openings
from tests.master.stage import Counted, Stage, of, repeat
from tests.master.test_repair import break_and_form

pytestmark = pytest.mark.slow


async def test_a_planned_answer() -> None:
    stage = Stage(SAYS)
    events = await stage.answer(SOT)
    started, plan = events[0], of(Planned, events)[0]
    assert isinstance(started, Started)
    assert (started.mode, started.seed, started.model) == ("sot", 5, "demo")
    assert "".join(event.text for event in of(SkeletonText, events)) == PLAN
    assert [point.title for point in plan.points] == ["Alpha", "Beta 你好", "Gamma 🎉"]
    assert [event.branch for event in of(BranchStarted, events)] == [1, 2, 3]
    assert {event.branch: event.reason for event in of(BranchFinished, events)} == dict.fromkeys(
        (1, 2, 3), Reason.STOP
    )
    assert finished(events).text == ANSWER == "".join(event.text for event in of(MergedText, events))
    stage.assert_clean()


async def test_a_direct_answer_says_what_each_step_brought() -> None:
    stage = Stage(SAYS)
    events = await stage.answer(DIRECT)
    steps = [event.step_tokens for event in of(MergedText, events)]
    assert min(steps) > 0, "a step without text, in the middle of a character, is not told"
    assert len(steps) < sum(steps) <= len(finished(events).tokens)
    assert all(event.step_tokens == 0 for event in of(MergedText, await stage.answer(SOT)))


async def test_a_prompt_in_tokens_is_taken_as_it_is() -> None:
    stage = Stage({"Once upon": " a time"})
    tokens = stage.text.encode_prompt("Once upon")
    events = await stage.answer(Ask(tokens=tokens, mode="direct"))
    assert finished(events).text == " a time"
    assert stage.prompts_seen[0][1] == "Once upon"
    assert openings(stage)[0].prompt == len(tokens)
    stage.assert_clean()


@pytest.mark.parametrize("seed", seeds(12, quick=4))
async def test_no_token_lost_doubled_or_reordered_whatever_the_steps(seed: int) -> None:
    stage = Stage(SAYS, seed=seed, burst=1 + seed % 6)
    events = await stage.answer(SOT)
    bodies = {id: "".join(e.text for e in of(BranchText, events) if e.branch == id) for id in (1, 2, 3)}
    assert bodies == {id: SAYS[f"Write point {id}"].strip() for id in (1, 2, 3)}
    assert not any("\ufffd" in event.text for event in of(BranchText, events))
    tokens = [token for id in (1, 2, 3) for token in stage.text.encode(SAYS[f"Write point {id}"])]
    assert finished(events).text == ANSWER
    assert list(finished(events).tokens) == tokens
    stage.assert_clean()


async def test_what_sequences_are_opened_with() -> None:
    stage = Stage(SAYS)
    await stage.answer(SOT)
    prefix, skeleton, *branches = openings(stage)
    assert not prefix.decodes
    assert skeleton.fork
    assert skeleton.fork.sequence == prefix.sequence
    assert skeleton.fork.length == prefix.prompt
    assert skeleton.plan
    assert not skeleton.plan.direct
    assert skeleton.stop_ids == ()
    assert [one.ordinal for one in (skeleton, *branches)] == [0, 1, 2, 3]
    assert all(one.fork == skeleton.fork and one.seed == 5 and one.drafted for one in branches)
    assert all(one.plan is None and one.stop_ids == (2,) for one in branches)
    written = len(stage.text.encode(PLAN)) + sum(
        len(stage.text.encode(f"\n\n## {id}. {title}\n"))
        for id, title in enumerate(("Alpha", "Beta 你好", "Gamma 🎉"), 1)
    )
    assert written + sum(one.limit for one in branches) == 1024


async def test_a_dependent_branch_starts_after_its_parent_and_sees_its_text() -> None:
    stage = Stage(SAYS)
    events = await stage.answer(SOT)
    child = next(event for event in of(BranchStarted, events) if event.branch == 3)
    parent = next(event for event in of(BranchFinished, events) if event.branch == 1)
    assert events.index(parent) < events.index(child)
    *_, (opening, prompt) = stage.prompts_seen
    assert opening.ordinal == 3
    assert "Alpha is the first letter." in prompt


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("ask", [SOT, DIRECT], ids=["sot", "direct"])
async def test_logprobs_of_every_token_of_the_answer(ask: Ask, count: int) -> None:
    stage = Stage(SAYS, seed=3)
    events = await stage.answer(replace(ask, logprobs=count))
    told = [one for event in of(MergedText, events) for one in event.logprobs]
    assert [one.chosen.token for one in told] == list(finished(events).tokens)
    for one in told:
        chance = chance_of(one.chosen.token, count)
        assert one.chosen.logprob == chance.logprob
        assert [(other.token, other.logprob) for other in one.top] == list(chance.top)
        assert all(other.raw == stage.text.spell(other.token) for other in one.top)
    bodies = b"".join(one.chosen.raw for one in told).decode()
    assert bodies == stage.text.decode(finished(events).tokens)
    raw = b"".join(one.chosen.raw for event in of(SkeletonText, events) for one in event.logprobs)
    assert raw.decode() == "".join(event.text for event in of(SkeletonText, events))
    stage.assert_clean()


async def test_a_plan_may_be_short_where_the_answer_may_not() -> None:
    """Held to `min_tokens`, it would go on behind the end that its model writes."""
    stage = Stage({"Letters": " Alpha and more\n2. Beta and more"}, threshold=0.0)
    least, limits = 100, Limits(max_new_tokens=300)
    ask = Ask("Letters of ours", mode="sot", seed=5, constraint=False, min_tokens=least, limits=limits)
    end = finished(await stage.answer(ask))
    plan, *branches = (one for one in openings(stage) if one.decodes)
    assert plan.min_tokens == 0
    assert len(branches) == 2
    assert all(one.min_tokens > 0.9 * least * one.limit / 300 for one in branches)
    assert end.statistics.plan_tokens < 20
    stage.assert_clean()


async def test_without_constraint_the_end_marker_closes_the_skeleton() -> None:
    stage = Stage({**SAYS, "Write the plan.": f"Sure:\n{PLAN}\n{repeat('more', 50)}"})
    events = await stage.answer(Ask(prompt="Letters?", mode="sot", constraint=False))
    assert finished(events).text == ANSWER
    skeleton = openings(stage)[1]
    assert skeleton.plan is None
    assert Close(skeleton.sequence) in stage.ring.orders
    stage.assert_clean()


@pytest.mark.parametrize("burst", [1, 3, 7])
@pytest.mark.parametrize("seed", range(3))
async def test_stop_strings_across_tokens(seed: int, burst: int) -> None:
    stage = Stage({"What is": "one two thr" + "ee four " + repeat("five", 50)}, seed, burst=burst)
    events = await stage.answer(Ask(prompt="What is it?", mode="direct", stop=("three f",)))
    assert finished(events).text == "one two "
    assert finished(events).reason is Reason.STOP
    assert Close(openings(stage)[0].sequence) in stage.ring.orders
    stage.assert_clean()


async def test_statistics() -> None:
    stage = Stage(SAYS, burst=4)
    figures = finished(await stage.answer(SOT)).statistics
    ends = 3  # end tokens of the branches; the grammar ends the skeleton
    assert figures.merged_tokens == sum(len(stage.text.encode(SAYS[f"Write point {n}"])) for n in (1, 2, 3))
    assert figures.plan_tokens == len(stage.text.encode(PLAN))
    assert 15 < figures.heading_tokens < 40
    assert figures.completion_tokens == (
        figures.plan_tokens + figures.heading_tokens + figures.merged_tokens + ends
    )
    assert 1.0 < figures.mean_accepted < 4.0
    assert figures.steps > 10
    assert set(figures.phases) == {"queue", "skeleton", "skeleton_prefill", "branches", "branches_prefill"}
    assert figures.seconds == pytest.approx(
        sum(figures.phases[phase] for phase in ("queue", "skeleton", "branches"))
    )
    assert 0 < figures.seconds_to_first_token < figures.seconds


async def test_no_drafter_is_asked_for() -> None:
    stage = Stage(SAYS)
    await stage.answer(Ask(prompt="What is it?", mode="direct", drafter="none"))
    assert not openings(stage)[0].drafted


LONG_TALK = Ask(prompt="Tell me about letters. " * 200 + "x" * 20_000, mode="sot", seed=5)
ESCAPING = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | replace('&', '+') }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, ESCAPING], ids=["verbatim", "escaping"])
async def test_a_long_prompt_is_built_once_and_outside_the_event_loop(template: str | None) -> None:
    """This also holds if a branch's prompt needs more than its own words, and after the ring is re-formed."""
    text = Counted()
    if template is not None:
        text._template = ChatTemplate(template)
    room = {"pages": 1024, "max_positions": 32_768}
    stage = Stage(SAYS, text=text, state=replace(STATE, **room))
    listener, most, epochs = stage.listen(LONG_TALK), 0, 0
    while not listener.done():
        text.work = 0
        stage.ring.news.clear()
        moved = await stage.step()
        most = max(most, text.work)
        if moved and epochs < 3 and len(openings(stage)) > 3:
            epochs += 1
            text.work = 0
            await break_and_form(stage, epochs + 1, **room)
            most = max(most, text.work)
        if not moved and not listener.done():
            await asyncio.sleep(0.01)
    assert finished(await listener).text == ANSWER
    assert most < 2000
    assert epochs == 3


async def test_a_seed_is_drawn_when_none_is_given() -> None:
    stage = Stage(SAYS)
    first, second = [(await stage.answer(Ask(prompt="What is it?", mode="direct")))[0] for _ in range(2)]
    assert isinstance(first, Started)
    assert isinstance(second, Started)
    assert first.seed != second.seed
    assert [one.seed for one in openings(stage)] == [first.seed, second.seed]


@pytest.mark.parametrize(("asked", "positions"), [(COUNT, 200), (SOT, 600)], ids=["direct", "planned"])
async def test_who_names_no_limit_gets_as_many_tokens_as_the_context_holds(
    asked: Ask, positions: int
) -> None:
    stage = Stage(
        SAYS, state=replace(STATE, max_positions=positions), config=EngineConfig("demo", keep_for=30)
    )
    free = replace(asked, limits=Limits(), resumable=True)
    (events,) = await stage.play(stage.listen(free, "mine"))
    end = finished(events)
    if asked is SOT:
        assert end.text == ANSWER
    else:
        assert end.reason is Reason.LENGTH
        assert end.statistics.prompt_tokens + end.statistics.completion_tokens == positions
    with pytest.raises(ContextLengthExceeded, match="maximum context length"):
        await stage.answer(replace(asked, limits=Limits(max_new_tokens=1024)))
    assert finished(await stage.listen(free, "mine")) == end, "the same call reads the same answer"
    stage.time.advance(60)
    await stage.settle()
    stage.assert_clean()


@pytest.mark.parametrize(
    ("asked", "pages"), [(COUNT, 3), (COUNT, 2), (SOT, 9)], ids=["direct", "tiny", "planned"]
)
async def test_who_names_no_limit_gets_as_many_tokens_as_the_kv_pages_hold(asked: Ask, pages: int) -> None:
    stage = Stage(SAYS, state=replace(STATE, pages=pages))
    end = finished(await stage.answer(replace(asked, limits=Limits())))
    if asked is SOT:
        assert end.text == ANSWER
    else:
        held = end.statistics.prompt_tokens + end.statistics.completion_tokens
        assert end.reason is Reason.LENGTH
        assert held + STATE.slots == pages * STATE.page_rows, "not a row is left"
    with pytest.raises(TooLarge, match=rf"the ring has {pages}: shorten the prompt.* \(--kv-memory\)"):
        await stage.answer(replace(asked, limits=Limits(max_new_tokens=1024)))
    stage.assert_clean()


async def test_an_endpoints_own_default_is_granted_and_shrinks_alike() -> None:
    stage = Stage(SAYS, state=replace(STATE, pages=2))
    for default, granted in ((16, 16), (512, 2 * STATE.page_rows - STATE.slots)):
        end = finished(await stage.answer(replace(COUNT, limits=Limits(default_new_tokens=default))))
        prompt = end.statistics.prompt_tokens if default > granted else 0
        assert end.statistics.completion_tokens == granted - prompt


async def test_who_gets_no_plan_for_want_of_room_has_all_the_room_of_its_shorter_prompt() -> None:
    stage = Stage(SAYS, state=replace(STATE, max_positions=100))
    end = finished(await stage.answer(Ask(prompt="Count the letters, and say what they are for.", seed=5)))
    assert end.reason is Reason.LENGTH
    assert end.statistics.prompt_tokens + end.statistics.completion_tokens == 100


@pytest.mark.parametrize(
    ("asked", "positions", "refusal"),
    [
        (SOT, 100, r"mode sot needs max_new_tokens of at least 64, got \d\d:"),
        (replace(SOT, polish=True), 300, r"polish needs max_new_tokens of at least 256, got 2\d\d:"),
        (replace(COUNT, form=Form("regex", ("[a-z]{100}",))), 110, r"must be at least 100 .* got 95"),
        (replace(COUNT, min_tokens=500, limits=Limits()), 150, r"min_tokens must be whole, in \[0, 1\d\d\]"),
        (replace(COUNT, form=Form("regex", ("[a-z]{100}",))), 15, "maximum context length"),
    ],
    ids=["plan", "polish", "form", "least", "nothing"],
)
async def test_what_needs_more_than_the_context_holds_is_refused(
    asked: Ask, positions: int, refusal: str
) -> None:
    forms = GrammarSandbox(lambda form: "", lambda form: 100)
    stage = Stage(SAYS, state=replace(STATE, max_positions=positions), forms=forms)
    with pytest.raises(InvalidRequest, match=refusal):
        await stage.play_whenever(stage.listen(replace(asked, limits=Limits())))
    stage.assert_clean()
