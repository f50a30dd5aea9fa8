"""The conductor end to end on a fake ring: every mode, every end, nothing left behind.

Refuses to know models: scripts say what is written.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from specsot.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PlanError,
    SpecsotError,
    Unavailable,
)
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Finished,
    MergedText,
    Planned,
    Reason,
    SkeletonText,
    Started,
)
from specsot.frames import Close, End, Lease, Open, Opening, Outcome, Result
from specsot.params import Ask, Limits, Message
from specsot_master.conductor import ConductorConfig, RingState
from tests.master.stage import Stage, of, repeat

pytestmark = pytest.mark.slow

PLAN = "[PLAN]\n1.<40><None>[-]Alpha\n2.<20><None>[-]Beta 你好\n3.<30><None>[1]Gamma 🎉\n[END]"
SAYS = {
    "Write the plan.": PLAN,
    "Write point 1": "Alpha is the first letter.",
    "Write point 2": "Beta 正文在这里。🎉",
    "Write point 3": "Gamma follows alpha.\n",
    "Count": repeat("word", 300),
    "What is": "It is naïve 你好.",
}
ANSWER = (
    "## 1. Alpha\nAlpha is the first letter.\n\n## 2. Beta 你好\nBeta 正文在这里。🎉\n\n"
    "## 3. Gamma 🎉\nGamma follows alpha."
)
SOT = Ask(prompt="Tell me about letters.", mode="sot", seed=5)
DIRECT = Ask(prompt="What is it?", mode="direct", seed=5)
COUNT = Ask(prompt="Count.", mode="direct", seed=5, limits=Limits(max_new_tokens=400))


def openings(stage: Stage) -> list[Opening]:
    return [order.opening for order in stage.ring.orders if isinstance(order, Open)]


def finished(events: list[object]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last


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


@pytest.mark.parametrize("seed", range(12))
async def test_no_token_lost_doubled_or_reordered_whatever_the_laps(seed: int) -> None:
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
    assert sum(one.limit for one in branches) == 1024


async def test_a_dependent_branch_starts_behind_its_parent_and_sees_its_text() -> None:
    stage = Stage(SAYS)
    events = await stage.answer(SOT)
    child = next(event for event in of(BranchStarted, events) if event.branch == 3)
    parent = next(event for event in of(BranchFinished, events) if event.branch == 1)
    assert events.index(parent) < events.index(child)
    *_, (opening, prompt) = stage.prompts_seen
    assert opening.ordinal == 3
    assert "Alpha is the first letter." in prompt


async def test_the_model_may_answer_directly() -> None:
    stage = Stage({"Write the plan.": "[DIRECT]\nIt is 你好 4.[END]"})
    events = await stage.answer(Ask(prompt="2 + 2?"))
    assert finished(events).text == "It is 你好 4." == "".join(e.text for e in of(MergedText, events))
    assert stage.text.decode(finished(events).tokens) == "It is 你好 4."
    assert of(Planned, events) == [Planned(())]
    assert finished(events).statistics.mode == "direct"
    stage.assert_clean()


async def test_a_direct_request_is_one_sequence() -> None:
    stage = Stage(SAYS)
    events = await stage.answer(DIRECT)
    assert finished(events).text == "It is naïve 你好."
    assert len(openings(stage)) == 1
    assert openings(stage)[0].fork is None
    stage.assert_clean()


async def test_without_constraint_the_end_marker_closes_the_skeleton() -> None:
    stage = Stage({**SAYS, "Write the plan.": f"Sure:\n{PLAN}\n{repeat('more', 50)}"})
    events = await stage.answer(Ask(prompt="Letters?", mode="sot", constraint=False))
    assert finished(events).text == ANSWER
    skeleton = openings(stage)[1]
    assert skeleton.plan is None
    assert Close(skeleton.sequence) in stage.ring.orders
    stage.assert_clean()


async def test_a_plan_without_a_line_is_an_error_with_its_text() -> None:
    stage = Stage({"Write the plan.": "[PLAN]\nno idea\n[END]"})
    with pytest.raises(PlanError) as caught:
        await stage.answer(Ask(prompt="Letters?", mode="sot", constraint=False))
    assert "no idea" in caught.value.text
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


async def test_limits_cut_and_say_so() -> None:
    stage = Stage(SAYS)
    events = await stage.answer(Ask(prompt="Count.", mode="direct", limits=Limits(max_new_tokens=20)))
    assert finished(events).reason is Reason.LENGTH
    assert len(finished(events).tokens) == 20
    stage.assert_clean()


async def test_max_parallel_is_kept() -> None:
    plan = "[PLAN]\n" + "".join(f"{n}.<20><None>[-]P{n}\n" for n in range(1, 9)) + "[END]"
    stage = Stage({"Write the plan.": plan, "Write point": repeat("text", 20)})
    events = await stage.answer(Ask(prompt="Many?", mode="sot", limits=Limits(max_parallel=3)))
    assert stage.ring.most_live == 3
    assert len(of(BranchFinished, events)) == 8


async def test_the_prefix_is_closed_once_nothing_forks_from_it() -> None:
    stage = Stage({**SAYS, "Write point 3": repeat("long", 200)})
    client = stage.listen(SOT)
    prefix = 1
    while len(openings(stage)) < 5:
        await stage.lap()
        assert prefix in stage.ring.live
    while prefix in stage.ring.live:
        await stage.lap()
    assert not client.done()
    await stage.play(client)
    stage.assert_clean()


async def test_statistics() -> None:
    stage = Stage(SAYS, burst=4)
    figures = finished(await stage.answer(SOT)).statistics
    ends = 3  # end tokens of the branches; the grammar ends the skeleton
    assert figures.merged_tokens == sum(len(stage.text.encode(SAYS[f"Write point {n}"])) for n in (1, 2, 3))
    assert figures.completion_tokens == figures.merged_tokens + ends + len(stage.text.encode(PLAN))
    assert 1.0 < figures.mean_accepted < 4.0
    assert figures.laps > 10
    assert set(figures.phases) == {"skeleton", "branches"}
    assert 0 < figures.seconds_to_first_token < figures.seconds


async def test_no_drafter_is_asked_for() -> None:
    stage = Stage(SAYS)
    await stage.answer(Ask(prompt="What is it?", mode="direct", drafter="none"))
    assert not openings(stage)[0].drafted


async def test_a_seed_is_drawn_when_none_is_given() -> None:
    stage = Stage(SAYS)
    first, second = [(await stage.answer(Ask(prompt="What is it?", mode="direct")))[0] for _ in range(2)]
    assert isinstance(first, Started)
    assert isinstance(second, Started)
    assert first.seed != second.seed
    assert [one.seed for one in openings(stage)] == [first.seed, second.seed]


# --- cancel, drop, break ---


@pytest.mark.parametrize("laps", [0, 1, 5, 12, 20, 24])
async def test_cancel_leaves_nothing_behind(laps: int) -> None:
    stage = Stage(SAYS, seed=1)
    client = stage.listen(SOT, "mine")
    await stage.settle()
    for _ in range(laps):
        await stage.lap()
    assert stage.conductor.cancel("mine")
    await stage.settle()
    events = client.result()
    assert finished(events).reason is Reason.CANCELLED
    assert finished(events).text == "".join(event.text for event in of(MergedText, events))
    assert not stage.conductor.cancel("mine")
    stage.assert_clean()


@pytest.mark.parametrize("reads", [0, 1, 4, 12, 20])
async def test_a_dropped_client_cancels_its_request(reads: int) -> None:
    stage = Stage(SAYS, seed=2)
    events = stage.conductor.generate(SOT)
    for _ in range(reads):
        reading = asyncio.ensure_future(anext(events))
        while not reading.done():
            await stage.lap()
    await events.aclose()
    await stage.settle()
    stage.assert_clean()


async def test_a_dropped_task_cancels_its_request() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    for _ in range(4):
        await stage.lap()
    client.cancel()
    await asyncio.wait([client])
    await stage.settle()
    stage.assert_clean()


async def test_a_broken_ring_ends_requests_and_a_new_one_serves_again() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    for _ in range(6):
        await stage.lap()
    last = max(stage.ring.live)
    again = Stage(SAYS)
    stage.ring.now = None
    stage.conductor.epoch_ended("worker-2 is gone: connection reset")
    with pytest.raises(Unavailable, match="worker-2 is gone"):
        await client
    assert stage.conductor.idle
    with pytest.raises(Unavailable, match="waiting for 1 of 2 workers"):
        await anext(stage.conductor.generate(SOT))
    stage.ring.now = RingState(epoch=2, pages=64, page_rows=64, slots=8, max_positions=2048)
    stage.ring.live.clear()
    assert again.ring.now is not None
    assert finished(await stage.answer(DIRECT)).text == "It is naïve 你好."
    assert openings(stage)[-1].sequence > last


async def test_an_order_that_cannot_be_sent_breaks_the_request_off() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    await asyncio.sleep(0)
    stage.ring.now, state = None, stage.ring.now
    with pytest.raises(Unavailable, match="the ring broke"):
        await client
    stage.ring.now = state
    assert stage.conductor.idle


async def test_a_failed_branch_ends_its_children_and_nobody_else() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    while len(openings(stage)) < 4:
        await stage.lap()
    alpha = next(one for one in openings(stage) if one.ordinal == 1)
    await stage.settle()
    state = stage.ring.now
    assert state is not None
    await stage.ring.order(Close(alpha.sequence))
    stage.conductor.received(Result(state.epoch, 999, (Outcome(alpha.sequence, 0, (), (), End.FAILED),)))
    (events,) = await stage.play(client)
    assert {event.branch: event.reason for event in of(BranchFinished, events)} == {
        1: Reason.FAILED, 2: Reason.STOP, 3: Reason.PARENT_FAILED,
    }  # fmt: skip
    assert finished(events).reason is Reason.FAILED
    stage.assert_clean()


async def test_results_that_come_twice_or_from_another_epoch_change_nothing() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    while not client.done():
        await stage.settle()
        if (result := stage.ring.lap()) is None:
            break
        stale = Result(result.epoch + 1, result.number, result.outcomes)
        for one in (stale, result, result, stale):
            stage.conductor.received(one)
        await stage.settle()
    assert finished(client.result()).text == ANSWER
    stage.assert_clean()


async def test_a_missing_result_ends_only_the_request_it_belongs_to() -> None:
    stage = Stage(SAYS)
    broken, whole = stage.listen(DIRECT), stage.listen(COUNT)
    await stage.settle()
    stage.conductor.received(Result(1, 1, (Outcome(1, 3, (0,), (5,)),)))
    with pytest.raises(SpecsotError, match="result of step 3 came, 0 is missing"):
        await broken
    (events,) = await stage.play(whole)
    assert finished(events).text == SAYS["Count"]
    stage.assert_clean()


# --- leases and readers ---


async def test_leases_follow_the_writing() -> None:
    stage = Stage(SAYS)
    await stage.answer(COUNT)
    opened = next(order for order in stage.ring.orders if isinstance(order, Open))
    leases = [order.position for order in stage.ring.orders if isinstance(order, Lease)]
    prompt = opened.opening.prompt
    assert opened.lease == prompt + 256
    assert leases == [prompt + 512]


async def test_a_slow_reader_stalls_only_itself() -> None:
    config = ConductorConfig(model="demo", lease=32, unread=10)
    stage = Stage(SAYS, config=config, burst=2)
    slow = stage.conductor.generate(COUNT)
    first = await anext(slow)
    while await stage.lap():
        pass
    (player,) = stage.ring.live.values()
    assert player.committed >= player.lease
    assert player.committed < 32 + 64 + len(player.prompt)
    assert finished(await stage.answer(DIRECT)).text == "It is naïve 你好."

    async def read() -> list[object]:
        return [first.event] + [numbered.event async for numbered in slow]

    (events,) = await stage.play(asyncio.create_task(read()))
    assert finished(events).text == SAYS["Count"]
    stage.assert_clean()


# --- refusals ---


@pytest.mark.parametrize(
    ("ask", "error", "complaint"),
    [
        (Ask(prompt="Hi", model="other"), NotFound, "no model named 'other' here, only 'demo'"),
        (Ask(prompt="word " * 3000, mode="direct"), InvalidRequest, "the model has 2048"),
        (Ask(prompt="word " * 3000), InvalidRequest, "the model has 2048"),
        (Ask(prompt="Hi", limits=Limits(max_new_tokens=2040)), InvalidRequest, "max_new_tokens 2040"),
        (Ask(prompt="x" * 600_000), InvalidRequest, "prompt: 600000 characters cannot fit"),
        (Ask(prompt="Hi", stop=("x",) * 17), InvalidRequest, "stop: at most 16"),
        (Ask(prompt="Hi", stop=("x" * 257,)), InvalidRequest, "stop: at most 256 characters"),
        (Ask(prompt="Hi", tools=("Search",) * 65), InvalidRequest, "tools: at most 64"),
        (Ask(messages=(Message("boss", "Hi"),)), InvalidRequest, "roles are system, user"),
    ],
)
async def test_what_cannot_be_is_refused(ask: Ask, error: type[Exception], complaint: str) -> None:
    stage = Stage(SAYS)
    with pytest.raises(error, match=complaint):
        await stage.answer(ask)
    assert stage.ring.orders == []
    stage.assert_clean()


async def test_a_request_too_large_for_the_rings_memory_is_refused() -> None:
    state = RingState(epoch=1, pages=4, page_rows=64, slots=8, max_positions=2048)
    with pytest.raises(InvalidRequest, match="KV pages of 64 rows, the ring has 4"):
        await Stage(SAYS, state=state).answer(COUNT)


async def test_a_request_id_is_used_once_at_a_time() -> None:
    stage = Stage(SAYS)
    client = stage.listen(DIRECT, "mine")
    await stage.settle()
    with pytest.raises(InvalidRequest, match="already running"):
        await anext(stage.conductor.generate(DIRECT, "mine"))
    await stage.play(client)
    await stage.play(stage.listen(DIRECT, "mine"))


async def test_a_full_queue_says_when_to_come_back() -> None:
    stage = Stage(SAYS, config=ConductorConfig(model="demo", live=1, queue=1, retry_after=2.5))
    clients = [stage.listen(DIRECT), stage.listen(DIRECT)]
    await stage.settle()
    with pytest.raises(Overloaded) as caught:
        await anext(stage.conductor.generate(DIRECT))
    assert caught.value.retry_after == 2.5
    await stage.play(*clients)
    stage.assert_clean()


# --- many at once ---

TIGHT = RingState(epoch=1, pages=40, page_rows=64, slots=8, max_positions=2048)
SMALL = Limits(max_new_tokens=300, max_skeleton_tokens=200)


@pytest.mark.parametrize("seed", range(6))
async def test_many_requests_on_few_pages_all_get_on(seed: int) -> None:
    stage = Stage(SAYS, seed, state=TIGHT)
    asks = [Ask(prompt="Letters?", mode="sot", limits=SMALL), DIRECT]
    clients = [stage.listen(asks[n % 2], client=f"c{n % 3}") for n in range(14)]
    answers = await stage.play(*clients)
    assert [finished(events).text for events in answers] == [ANSWER, "It is naïve 你好."] * 7
    stage.assert_clean()


async def test_a_client_with_many_requests_does_not_keep_others_out() -> None:
    stage = Stage(SAYS, config=ConductorConfig(model="demo", live=2))
    greedy = [stage.listen(DIRECT, f"g{n}", "greedy") for n in range(8)]
    await stage.settle()
    modest = stage.listen(DIRECT, "m", "modest")
    await stage.play(modest)
    assert sum(task.done() for task in greedy) <= 3
    await stage.play(*greedy)
    stage.assert_clean()


async def test_places_are_shared_between_requests() -> None:
    plan = "[PLAN]\n" + "".join(f"{n}.<20><None>[-]P{n}\n" for n in range(1, 9)) + "[END]"
    state = RingState(epoch=1, pages=32, page_rows=64, slots=8, max_positions=2048)
    stage = Stage({"Write the plan.": plan, "Write point": repeat("text", 100)}, state=state, burst=1)
    ask = Ask(prompt="Many?", mode="sot", limits=SMALL)
    clients = [stage.listen(ask, client=name) for name in ("a", "b")]
    compared = 0
    while sum(one.ordinal > 0 for one in openings(stage)) < 16:
        await stage.lap()
        held = Counter(one.opening.fork for one in stage.ring.live.values() if one.opening.ordinal)
        if len(held) == 2:
            compared += 1
            assert max(held.values()) - min(held.values()) <= 2
    assert compared > 50
    await stage.play(*clients)
    stage.assert_clean()


@pytest.mark.parametrize("seed", range(4))
async def test_after_random_ends_nothing_is_left(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage(SAYS, seed, state=TIGHT)
    running: dict[str, asyncio.Task[list[object]]] = {}
    for n in range(60):
        ask = chance.choice([SOT, DIRECT, Ask(prompt="Letters?", mode="sot", limits=SMALL)])
        running[f"r{n}"] = stage.listen(ask, f"r{n}", client=chance.choice("ab"))  # type: ignore[assignment]
        for _ in range(chance.randint(0, 4)):
            await stage.lap()
        name = chance.choice(sorted(running))
        match chance.randint(0, 2):
            case 0:
                stage.conductor.cancel(name)
            case 1:
                running.pop(name).cancel()
            case _:
                pass
    await stage.play(*running.values())
    await stage.settle()
    stage.assert_clean()
    assert len(asyncio.all_tasks()) == 1
