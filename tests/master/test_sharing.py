"""Requests that begin alike, on a fake ring: fed once, the same answers, and pages for whoever needs them.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from itertools import product

import pytest

from specsot.core.frames import Close, End, Lease, Open, Opening, Outcome, PrefixProgress, Result
from specsot.errors import InvalidRequest
from specsot.events import Event
from specsot.params import Ask, Limits, Message
from specsot_master.core.inputs import RingLost, RingReady
from specsot_master.core.ring.admission import MIN_SHARED_TOKENS
from specsot_master.engine import EngineConfig, RingState
from tests.conftest import seeds, some
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SMALL, SOT, finished, openings
from tests.master.stage import Stage
from tests.there import there

pytestmark = pytest.mark.slow

PLAIN = RingState(epoch=1, pages=64, page_rows=64, slots=8, max_positions=2048)
RULES = Message("system", "You are a careful teacher. " * 12)
OTHER = Message("system", "You are a poet who never rhymes. " * 12)
FRESH = EngineConfig(model="demo", prefix_cache=False)


def direct(system: Message, question: str, **more: object) -> Ask:
    return Ask(messages=(system, Message("user", question)), mode="direct", seed=5, **more)  # type: ignore[arg-type]


def fed(stage: Stage, since: int = 0) -> int:
    """Prompt tokens that were sent to the ring."""
    return sum(len(order.tokens) for order in stage.ring.orders[since:] if isinstance(order, Open))


def cached(events: list[Event]) -> int:
    return finished(events).statistics.cached_tokens


@pytest.mark.parametrize("state", [PLAIN, replace(PLAIN, has_drafter=True)], ids=["plain", "drafting"])
async def test_the_same_question_is_fed_once(state: RingState) -> None:
    stage = Stage(SAYS, state=state)
    first = await stage.answer(SOT)
    before = len(stage.ring.orders)
    second = await stage.answer(SOT)
    prefix = openings(stage)[0]
    asked = finished(second).statistics.prompt_tokens
    assert (cached(first), cached(second)) == (0, min(prefix.prompt, asked))
    assert finished(first).text == finished(second).text == ANSWER
    assert all(one.decodes for one in openings(stage)[5:]), "no second prefix"
    assert fed(stage) == 2 * fed(stage, before) + prefix.prompt
    stage.assert_clean()


async def test_common_beginnings_of_different_questions_are_fed_once() -> None:
    stage = Stage(SAYS, state=PLAIN)
    for question in ("What is it?", "What is that?", "Count."):
        await stage.answer(direct(RULES, question))
    await stage.answer(direct(OTHER, "What is it?"))
    one, two, three, four = [order for order in openings(stage) if order.decodes]
    assert one.fork
    assert two.fork
    assert three.fork
    assert four.fork
    assert two.fork.length > len(stage.text.encode(RULES.content)), "the common system turn, and more"
    assert two.fork.sequence == three.fork.sequence == one.fork.sequence
    assert four.fork.sequence != one.fork.sequence
    stage.assert_clean()


async def test_those_who_come_together_share_too() -> None:
    """The second one forks what the first has only just ordered."""
    stage = Stage(SAYS, state=PLAIN)
    clients = [stage.listen(direct(RULES, "What is it?")) for _ in range(4)]
    answers = await stage.play(*clients)
    assert {finished(events).text for events in answers} == {"It is naïve 你好."}
    assert len([one for one in openings(stage) if not one.decodes]) == 1
    families = [one.family for one in openings(stage) if one.decodes]
    assert len(set(families)) == 4, "but they do not wait for each other"
    stage.assert_clean()


async def test_a_prefix_without_remaining_clients_is_not_computed_further() -> None:
    """8 long prompts that were given up kept a short question waiting for 142 s."""
    stage = Stage(SAYS, state=PLAIN)
    first, second = (stage.listen(direct(RULES, question)) for question in ("What is it?", "What is that?"))
    await stage.settle()
    assert [one.decodes for one in openings(stage)] == [False, True, True]
    prefix, _, fork = openings(stage)
    await leave(stage, first)
    assert leases(stage, prefix) == [there(fork.fork).length], "as far as the second one forks it"
    await leave(stage, second)
    assert leases(stage, prefix)[1:] == [0]
    while await stage.step():
        pass
    stage.assert_clean()


async def test_an_abandoned_prompt_continues_where_its_prefill_was_interrupted() -> None:
    stage = Stage(SAYS, state=PLAIN)
    ask = direct(RULES, "What is it?")
    for num_computed in (0, 40, 90):
        client = stage.listen(ask)
        await stage.settle()
        (prefix,) = [one for one in openings(stage) if not one.decodes]
        compute(stage, prefix, num_computed)
        await leave(stage, client)
        stage.assert_clean()
    assert leases(stage, prefix) == [0, prefix.prompt, 0, prefix.prompt, 0]
    assert cached(await stage.answer(ask)) == 90, "what was computed, and not what was ordered"
    assert leases(stage, prefix)[5:] == [prefix.prompt]
    assert cached(await stage.answer(ask)) == prefix.prompt
    assert finished(await stage.answer(ask)).text == "It is naïve 你好."
    assert leases(stage, prefix)[6:] == [], "all of it is computed"
    stage.assert_clean()


@pytest.mark.parametrize("way", ["timeout", "cancel"])
async def test_a_prompt_that_times_out_or_is_cancelled_is_kept_too(way: str) -> None:
    stage = Stage(SAYS, state=PLAIN)
    client = stage.listen(direct(RULES, "What is it?"), "r", timeout=500.0)
    await stage.settle()
    prefix = openings(stage)[0]
    compute(stage, prefix, 64)
    if way == "timeout":
        stage.time.advance(500.0)
    else:
        assert stage.engine.cancel("r")
    await asyncio.wait([client])
    await stage.settle()
    assert leases(stage, prefix) == [0]
    assert cached(await stage.answer(direct(RULES, "What is it?"))) == 64
    assert [one.decodes for one in openings(stage)] == [False, True, True]
    stage.assert_clean()


async def test_a_short_question_has_only_the_beginning_of_an_abandoned_prompt_computed() -> None:
    stage = Stage(SAYS, state=PLAIN)
    long = Message("system", RULES.content * 4)
    client = stage.listen(direct(long, "What is it?"))
    await stage.settle()
    prefix = openings(stage)[0]
    await leave(stage, client)
    events = await stage.answer(direct(RULES, "What is it?"))
    *_, fork = [
        there(one.fork) for one in openings(stage) if one.fork and one.fork.sequence == prefix.sequence
    ]
    assert MIN_SHARED_TOKENS <= fork.length < prefix.prompt
    assert leases(stage, prefix) == [0, fork.length, 0]
    assert cached(events) == 0, "nothing of it had been computed"
    stage.assert_clean()


async def test_an_abandoned_prompt_is_evicted_where_its_pages_are_needed() -> None:
    stage = Stage(SAYS, state=replace(PLAIN, pages=8))
    client = stage.listen(direct(RULES, "What is it?", limits=Limits(max_new_tokens=64)))
    await stage.settle()
    prefix = openings(stage)[0]
    assert not prefix.decodes
    compute(stage, prefix, 64)
    await leave(stage, client)
    assert stage.engine.kept == (prefix.sequence,)
    await stage.answer(direct(OTHER, "What is it?", limits=Limits(max_new_tokens=200)))
    assert Close(prefix.sequence) in stage.ring.orders
    stage.assert_clean()


async def test_without_a_prefix_cache_an_abandoned_prompt_is_closed() -> None:
    stage = Stage(SAYS, state=PLAIN, config=FRESH)
    client = stage.listen(SOT)
    await stage.settle()
    prefix = openings(stage)[0]
    assert not prefix.decodes
    compute(stage, prefix, 20)
    await leave(stage, client)
    assert stage.engine.kept == ()
    assert Close(prefix.sequence) in stage.ring.orders
    stage.assert_clean()


@pytest.mark.parametrize("seed", seeds(12, quick=4))
async def test_clients_that_come_and_go_leave_no_page_and_change_no_answer(seed: int) -> None:
    """Few pages, prompts that begin alike, and a ring that breaks now and then."""
    chance = random.Random(seed)
    stage = Stage(SAYS, seed, replace(PLAIN, pages=24, has_drafter=chance.random() < 0.5))
    epoch = 1
    for _ in range(12):
        system = chance.choice([RULES, OTHER, Message("system", RULES.content + OTHER.content)])
        client = stage.listen(direct(system, chance.choice(["What is it?", "Count."])))
        await stage.settle()
        for prefix in [one for one in openings(stage) if not one.decodes]:
            compute(stage, prefix, chance.randrange(prefix.prompt + 1), epoch)
        for _ in range(chance.randrange(3)):
            await stage.step()
        if chance.random() < 0.7:
            await leave(stage, client)
        elif chance.random() < 0.3:
            epoch += 1
            stage.ring.break_off()
            stage.engine.handle(RingLost("a worker is gone"))
            stage.ring.form(replace(stage.state, epoch=epoch))
            stage.engine.handle(RingReady())
            await stage.play(client)
        else:
            await stage.play(client)
    stage.assert_clean()
    assert finished(await stage.answer(direct(RULES, "What is it?"))).text == "It is naïve 你好."
    stage.assert_clean()


def compute(stage: Stage, prefix: Opening, num_computed: int, epoch: int = 1) -> None:
    """The last stage reports how much of a prefix has been computed."""
    player = stage.ring.live.get(prefix.sequence)
    if player:
        player.reported = max(player.reported, num_computed)
    stage.engine.handle(Result(epoch, 999, prefixes=(PrefixProgress(prefix.sequence, num_computed),)))


def leases(stage: Stage, prefix: Opening) -> list[int]:
    """The leases that stage 0 was sent for a prefix, in order."""
    return [
        order.position
        for order in stage.ring.orders
        if isinstance(order, Lease) and order.sequence == prefix.sequence
    ]


async def test_a_cached_prefix_is_kept_if_a_client_that_reuses_it_leaves() -> None:
    stage = Stage(SAYS, state=PLAIN)
    await stage.answer(direct(RULES, "What is it?"))
    kept = stage.engine.kept
    again = stage.listen(direct(RULES, "What is it?"))
    await stage.settle()
    await leave(stage, again)
    assert stage.engine.kept == kept != ()
    while await stage.step():
        pass
    stage.assert_clean()


async def leave(stage: Stage, client: asyncio.Task[list[Event]]) -> None:
    client.cancel()
    await asyncio.wait([client])
    await stage.settle()


async def test_the_next_turn_of_a_conversation_goes_on_from_the_last() -> None:
    stage = Stage(SAYS, state=PLAIN)
    turns = [RULES, Message("user", "What is it?")]
    await stage.answer(Ask(messages=tuple(turns), mode="direct"))
    turns += [Message("assistant", "It is naïve 你好."), Message("user", "What is that?")]
    events = await stage.answer(Ask(messages=tuple(turns), mode="direct"))
    first = openings(stage)[0].prompt
    assert cached(events) >= first - 5, "all of the first prompt but what asked for an answer"
    stage.assert_clean()


async def test_short_prompts_take_no_detour() -> None:
    """One step more before the first token would cost more than feeding a few tokens again."""
    stage = Stage(SAYS, state=PLAIN)
    await stage.answer(DIRECT)
    assert [one.decodes for one in openings(stage)] == [True]
    assert stage.engine.kept == ()


async def test_it_can_be_switched_off() -> None:
    stage = Stage(SAYS, state=PLAIN, config=FRESH)
    for _ in range(2):
        assert cached(await stage.answer(SOT)) == 0
        assert cached(await stage.answer(direct(RULES, "What is it?"))) == 0
    assert stage.engine.kept == ()
    assert sum(not one.decodes for one in openings(stage)) == 2, "what a request's own branches share"
    stage.assert_clean()
    assert stage.ring.free_pages == PLAIN.pages


async def test_a_request_that_needs_pages_gets_the_unused_cached_ones() -> None:
    """A large request after many small ones: what is kept makes room, oldest first, and no more than must."""
    state = replace(PLAIN, pages=24)
    stage = Stage(SAYS, state=state)
    for n in range(4):
        await stage.answer(direct(Message("system", f"Rule {n}: " + "be kind. " * 60), "What is it?",
                                  limits=Limits(max_new_tokens=20)))  # fmt: skip
    before = stage.engine.kept
    large = replace(COUNT, limits=Limits(max_new_tokens=900))
    assert finished(await stage.answer(large)).text == SAYS["Count"]
    after = stage.engine.kept
    assert after
    assert after == before[-len(after) :], "the youngest are still there"
    stage.assert_clean()


async def test_a_branch_gets_unused_cached_pages() -> None:
    plan = "[PLAN]\n" + "".join(f"{n}.<20><None>[-]P{n}\n" for n in range(1, 9)) + "[END]"
    says = {**SAYS, "Write the plan.": plan, **{f"Write point {n}": "Some text." for n in range(1, 9)}}
    state = replace(PLAIN, pages=32)
    stage = Stage(says, state=state)
    for n in range(5):
        await stage.answer(direct(Message("system", f"Rule {n}: " + "be kind. " * 60), "What is it?"))
    kept = len(stage.engine.kept)
    await stage.answer(Ask(prompt="Many?", mode="sot", limits=Limits(512, max_branch_tokens=40)))
    assert stage.ring.most_live == 8, "all branches at once"
    assert len(stage.engine.kept) < kept
    stage.assert_clean()


async def test_what_a_live_request_stands_on_is_not_given_up() -> None:
    state = replace(PLAIN, pages=20)
    stage = Stage(SAYS, state=state)
    ask = direct(RULES, "Count.", limits=Limits(max_new_tokens=400))
    counting = stage.listen(ask)
    for _ in range(3):
        await stage.step()
    (node,) = stage.engine.kept
    others = [stage.listen(replace(COUNT, limits=Limits(max_new_tokens=1200))) for _ in range(3)]
    while not counting.done():
        assert node in stage.ring.live
        await stage.step()
    answers = await stage.play(counting, *others)
    assert [finished(events).text for events in answers] == [SAYS["Count"]] * 4
    assert Close(node) in stage.ring.orders, "then it had to go"
    stage.assert_clean()


async def test_a_new_epoch_begins_with_nothing() -> None:
    stage = Stage(SAYS, state=PLAIN)
    await stage.answer(SOT)
    stage.ring.break_off()
    stage.engine.handle(RingLost("a worker is gone"))
    assert stage.engine.kept == ()
    stage.state = replace(PLAIN, epoch=2)
    stage.ring.form(stage.state)
    stage.engine.handle(RingReady())
    assert cached(await stage.answer(SOT)) == 0
    assert cached(await stage.answer(SOT)) > 0
    stage.assert_clean()


async def test_a_failed_sequence_is_not_forked_from_again() -> None:
    """A sequence whose numbers are none may have them from what it was forked from."""
    stage = Stage(SAYS, state=PLAIN)
    await stage.answer(SOT)
    client = stage.listen(SOT)
    for _ in range(4):
        await stage.step()
    skeleton = openings(stage)[-1]
    assert skeleton.plan or skeleton.ordinal
    await stage.ring.order(Close(skeleton.sequence))
    stage.engine.handle(Result(1, 999, (Outcome(skeleton.sequence, 0, (), (), End.FAILED),)))
    await stage.play(client)
    assert cached(await stage.answer(SOT)) == 0
    assert cached(await stage.answer(SOT)) > 0
    stage.assert_clean()


async def test_those_without_a_drafter_have_their_own() -> None:
    """What the drafter has not followed it cannot go on from."""
    stage = Stage(SAYS, state=replace(PLAIN, has_drafter=True))
    await stage.answer(SOT)
    assert cached(await stage.answer(replace(SOT, drafter="none"))) == 0
    assert cached(await stage.answer(replace(SOT, drafter="none"))) > 0
    assert cached(await stage.answer(SOT)) > 0


# Few pages with and without drafts, each number of pages, each seed.
KEPT = (0, 7, 10, 15)


@pytest.mark.parametrize(
    ("seed", "pages", "drafting"), some(product(range(3), (28, 64, 400), (False, True)), *KEPT)
)
async def test_answers_are_the_same_with_and_without(seed: int, pages: int, drafting: bool) -> None:
    """Random requests, some of them given up, on few pages and many; the ring itself never runs dry."""
    said: list[list[str]] = []
    for config in (EngineConfig(model="demo", live=6), replace(FRESH, live=6)):
        chance = random.Random(seed)
        stage = Stage(SAYS, seed, replace(PLAIN, pages=pages, has_drafter=drafting), config)
        clients: list[asyncio.Task[list[Event]]] = []
        for n in range(24):
            clients.append(stage.listen(choose(chance), f"r{n}", chance.choice("ab")))
            for _ in range(chance.randint(0, 6)):
                await stage.step()
            if chance.random() < 0.2:
                stage.engine.cancel(f"r{chance.randint(0, n)}")
        answers = await stage.play(*clients)
        said.append([finished(events).text for events in answers if finished(events).reason.value == "stop"])
        stage.assert_clean()
    assert set(said[0]) == set(said[1]) == {ANSWER, "It is naïve 你好.", SAYS["Count"]}


def choose(chance: random.Random) -> Ask:
    match chance.randint(0, 3):
        case 0:
            return Ask(prompt=chance.choice(["Letters?", "More letters?"]), mode="sot", limits=SMALL)
        case 1:
            return DIRECT
        case 2:
            return replace(COUNT, limits=Limits(max_new_tokens=310))
        case _:
            return direct(chance.choice([RULES, OTHER]), chance.choice(["What is it?", "What is that?"]))


@pytest.mark.parametrize("pages", range(2, 14))
async def test_on_very_few_pages_it_fits_or_is_refused(pages: int) -> None:
    """Whatever else is kept there, and whatever it could begin with."""
    stage = Stage(SAYS, state=replace(PLAIN, pages=pages))
    for ask in (DIRECT, direct(RULES, "What is it?", limits=SMALL), SOT, replace(SOT, limits=SMALL)) * 2:
        with contextlib.suppress(InvalidRequest):
            # A request without a limit of its own gets what fits, and may end at that.
            assert finished(await stage.answer(ask)).reason.value in ("stop", "length")
    stage.assert_clean()
