"""Repair: when a ring breaks, its requests go on in the next one, and nobody can tell from the answer.

A fake ring breaks wherever a test wants.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specsot.core.frames import Open, Opening, Outcome
from specsot.errors import Unavailable
from specsot.events import BranchText, Started
from specsot.params import Ask
from specsot_master.core.inputs import RingLost, RingReady
from specsot_master.core.sequence import SequenceFactory, TokenLog
from specsot_master.engine import EngineConfig
from tests.conftest import seeds
from tests.master.fake_ring import STATE
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished, openings
from tests.master.stage import Stage, of

TEXTS = {SOT: ANSWER, COUNT: SAYS["Count"], DIRECT: "It is naïve 你好."}


async def break_and_form(stage: Stage, epoch: int, **changes: object) -> None:
    stage.ring.break_off()
    stage.engine.handle(RingLost("worker-2 is gone"))
    await stage.settle()
    state = replace(STATE, epoch=epoch, **changes)  # type: ignore[arg-type]
    stage.ring.form(state)
    stage.state = state
    stage.engine.handle(RingReady())


@pytest.mark.parametrize("seed", seeds(12, quick=3))
async def test_rings_that_break_at_any_step(seed: int) -> None:
    """Pages, page sizes, slots and the drafter may be others in every new ring."""
    chance, stage, epoch = random.Random(seed), Stage(SAYS, seed=seed), 1
    clients = {ask: stage.listen(ask) for ask in TEXTS}
    while not all(client.done() for client in clients.values()):
        for _ in range(16):  # so that nobody is taken for the reason
            await stage.step()
        if chance.random() < 0.6:
            epoch += 1
            pages, rows = chance.choice([(64, 64), (24, 64), (90, 32)])
            drafts = chance.random() < 0.5
            await break_and_form(stage, epoch, pages=pages, page_rows=rows, has_drafter=drafts)
    assert epoch > 2
    for ask, text in TEXTS.items():
        events = clients[ask].result()
        assert finished(events).text == text
        assert len(of(Started, events)) == 1
        written: dict[int, int] = {}
        for one in of(BranchText, events):
            assert one.offset == written.get(one.branch, 0)
            written[one.branch] = one.offset + len(one.text)
    stage.assert_clean()


async def test_what_was_written_is_part_of_the_prompt() -> None:
    stage = Stage(SAYS)
    client = stage.listen(COUNT)
    for _ in range(5):
        await stage.step()
    (before,) = [player for player in stage.ring.live.values() if player.opening.decodes]
    written = len(before.written)
    await break_and_form(stage, 2)
    await stage.settle()
    again = openings(stage)[-1]
    assert (again.generated, again.prompt) == (written, before.opening.prompt + written)
    assert (again.limit, again.seed) == (before.opening.limit, before.opening.seed)
    assert again.sequence > before.opening.sequence
    await stage.play(client)
    stage.assert_clean()


async def test_a_shared_prefix_is_fed_once() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    while sum(player.opening.decodes for player in stage.ring.live.values()) < 2:
        await stage.step()
    stage.ring.orders.clear()
    await break_and_form(stage, 2)
    await stage.settle()
    opened = [order.opening for order in stage.ring.orders if isinstance(order, Open)]
    assert [one.decodes for one in opened] == [False, True, True]
    assert {one.fork.sequence for one in opened[1:] if one.fork} == {opened[0].sequence}
    await stage.play(client)


async def test_who_ran_goes_before_who_waits() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=1, queue=1))
    first, second = stage.listen(COUNT), stage.listen(replace(DIRECT, priority=9))
    for _ in range(3):
        await stage.step()
    await break_and_form(stage, 2)
    await stage.settle()
    (player,) = [player for player in stage.ring.live.values() if player.opening.decodes]
    assert player.opening.generated
    await stage.play(first, second)


async def test_branches_that_do_not_fit_together_follow_each_other() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT)
    while sum(player.opening.decodes for player in stage.ring.live.values()) < 2:
        await stage.step()
    stage.ring.most_live = 0
    grant = next(iter(stage.engine._tables.ledger._pages_of_requests.values())).grant
    await break_and_form(stage, 2, pages=stage.engine.prefix_pages + grant + 2)
    (events,) = await stage.play(client)
    assert finished(events).text == ANSWER
    stage.assert_clean()


async def test_a_request_under_which_every_ring_breaks_is_given_up() -> None:
    stage = Stage(SAYS)
    client = stage.listen(DIRECT)
    await stage.step()
    for epoch in range(2, 6):
        await break_and_form(stage, epoch)
        await stage.settle()
    with pytest.raises(
        Unavailable, match="worker-2 is gone; 4 rings broke while this request ran, 2 of them with it alone"
    ):
        await client
    stage.assert_clean()


async def test_a_cancelled_one_does_not_come_back() -> None:
    stage = Stage(SAYS)
    client = stage.listen(SOT, "mine")
    for _ in range(6):
        await stage.step()
    stage.ring.break_off()
    stage.engine.handle(RingLost("worker-2 is gone"))
    assert stage.engine.cancel("mine")
    await client
    stage.ring.form(replace(STATE, epoch=2))
    stage.engine.handle(RingReady())
    await stage.settle()
    assert not stage.ring.live
    stage.assert_clean()


async def test_an_epoch_that_is_over_takes_no_orders() -> None:
    """A link may break before the fleet has noticed."""
    stage = Stage(SAYS)
    client = stage.listen(COUNT)
    for _ in range(3):
        await stage.step()
    stage.engine.handle(RingLost("stage 0 does not answer"))
    stage.ring.orders.clear()
    stage.engine.handle(RingReady())
    await stage.settle()
    assert not stage.ring.orders
    stage.ring.break_off()
    stage.ring.form(replace(STATE, epoch=2))
    stage.engine.handle(RingReady())
    (events,) = await stage.play(client)
    assert finished(events).text == SAYS["Count"]


def test_reported_prompt_logprobs_are_not_requested_again() -> None:
    ask = Ask(prompt="?", mode="direct", prompt_logprobs=2, min_tokens=3)
    factory = SequenceFactory((2,))
    first = factory.decoding_opening(5, ask, 7, ordinal=0, limit=9)
    assert (first.prompt_logprobs, factory.reopening(first, 0).prompt_logprobs) == (2, 2)
    later = factory.reopening(first, 1)
    assert (later.prompt_logprobs, later.min_tokens, later.generated) == (None, 3, 1)


def test_kv_is_final_before_the_root_of_the_newest_verified_tree() -> None:
    """The KV of accepted nodes moves to its place only with the next frame."""
    log = TokenLog(Opening(1, 4), (9, 9, 9, 9))
    assert log.final_rows == 0, "the prompt is not computed yet"
    log.append(Outcome(1, 0, (), (5,)))
    assert (log.position, log.final_rows) == (5, 3)
    log.append(Outcome(1, 1, (0, 2, 3), (6, 7, 8)))
    assert (log.position, log.final_rows) == (8, 4)
    log.append(Outcome(1, 1, (0, 2, 3), (6, 7, 8)))
    assert log.final_rows == 4, "a round that was read already changes nothing"
    log.reopen(Opening(2, 8))
    assert log.final_rows == 0
