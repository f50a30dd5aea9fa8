"""Requests that outlive their reader: read on from any event, by anybody who knows the id, for a while.

Scripts say what is written, the test passes the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.errors import Cancelled, InvalidRequest, NotFound, TimedOut, Unavailable
from specsot.events import Finished, Numbered, Reason, Started
from specsot_master.core.inputs import MasterLeaving
from specsot_master.engine import Caller, EngineConfig
from specsot_master.journal import Journal, JournaledRequest, open_journal
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished
from tests.master.stage import Stage

pytestmark = pytest.mark.slow

KEPT = replace(SOT, resumable=True)
CONFIG = EngineConfig(model="demo", keep_for=30.0, keep=2)


async def read(events: AsyncGenerator[Numbered, None], most: int | None = None) -> list[Numbered]:
    """Up to so many events, then hang up."""
    got: list[Numbered] = []
    async with aclosing(events):
        while most is None or len(got) < most:
            if (event := await anext(events, None)) is None:
                break
            got.append(event)
    return got


def reading(events: AsyncGenerator[Numbered, None], most: int | None = None) -> asyncio.Task[list[Numbered]]:
    return asyncio.create_task(read(events, most))


async def kept_in(folder: Path, journal: Journal, client: asyncio.Task[list[Numbered]]) -> JournaledRequest:
    """Of the only request, once client and master are gone."""
    client.cancel()
    await journal.close()
    (kept,) = (again := open_journal(folder, "m")).kept
    await again.close()
    return kept


async def revived(stage: Stage, kept: JournaledRequest, told: int = 0) -> list[Numbered]:
    """What is read of it at another master."""
    await stage.engine.revive([kept])
    events = stage.requests.generate(None, Caller(kept.id, owner=kept.owner), told)
    return (await stage.play(reading(events)))[0]


def text_of(events: list[Numbered]) -> str:
    last = events[-1].event
    assert isinstance(last, Finished)
    return last.text


@pytest.mark.parametrize("away", [0, 3, 1000])
@pytest.mark.parametrize("cuts", [[0], [1], [2, 5, 9], [1, 2, 3, 4, 5, 6, 7, 8], [30], [40, 3]])
async def test_what_is_read_in_parts_is_the_whole(cuts: list[int], away: int) -> None:
    """The ring goes on while nobody reads: for no step, some, or to the end."""
    stage = Stage(SAYS, seed=3, config=CONFIG)
    got: list[Numbered] = []
    (part,) = await stage.play(reading(stage.requests.generate(KEPT, Caller("mine")), cuts[0]))
    got += part
    for most in (*cuts[1:], None):
        for _ in range(away):
            if not await stage.step():
                break
        if not got:  # nothing came back, not even that it is known: the very same call is safe
            events = stage.requests.generate(KEPT, Caller("mine"))
        else:
            events = stage.requests.generate(None, Caller("mine"), len(got))
        (part,) = await stage.play(reading(events, most))
        got += part
    assert [event.number for event in got] == list(range(len(got)))
    assert text_of(got) == ANSWER
    stage.time.advance(31)
    stage.assert_clean()


async def test_a_finished_request_replays_from_any_event_for_a_while() -> None:
    stage = Stage(SAYS, config=CONFIG)
    (whole,) = await stage.play(reading(stage.requests.generate(KEPT, Caller("mine"))))
    stage.time.advance(29)
    orders = len(stage.ring.orders)
    for offset in (0, 1, len(whole) - 1, len(whole)):
        assert await read(stage.requests.generate(None, Caller("mine"), offset)) == whole[offset:]
        stage.time.advance(29)  # counted from the last reader on
    assert await read(stage.requests.generate(KEPT, Caller("mine"))) == whole
    assert len(stage.ring.orders) == orders, "nothing is written again"
    stage.time.advance(31)
    with pytest.raises(NotFound, match="no request 'mine' is kept here"):
        await read(stage.requests.generate(None, Caller("mine"), 1))
    stage.assert_clean()


async def test_only_so_many_are_kept() -> None:
    stage = Stage(SAYS, config=CONFIG)
    for id in ("a", "b", "c"):
        await stage.play(reading(stage.requests.generate(replace(DIRECT, resumable=True), Caller(id))))
    with pytest.raises(NotFound):
        await read(stage.requests.generate(None, Caller("a"), 0))
    assert await read(stage.requests.generate(None, Caller("b"), 1))
    assert await read(stage.requests.generate(None, Caller("c"), 1))
    stage.time.advance(31)
    stage.assert_clean()


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_reader_that_does_not_come_back_cancels_it(resumable: bool) -> None:
    """The one that was not meant to be resumed at once, the other one when its time is over."""
    stage = Stage(SAYS, config=CONFIG)
    await stage.play(reading(stage.requests.generate(replace(SOT, resumable=resumable), Caller("mine")), 3))
    await stage.settle()
    assert stage.engine.idle is not resumable
    stage.time.advance(29)
    await stage.settle()
    assert stage.engine.idle is not resumable
    stage.time.advance(2)
    await stage.settle()
    with pytest.raises(NotFound):
        await read(stage.requests.generate(None, Caller("mine"), 3))
    stage.assert_clean()


async def test_what_cannot_be_resumed() -> None:
    stage = Stage(SAYS, config=CONFIG)
    plain = stage.listen(COUNT, "plain")
    first = reading(stage.requests.generate(KEPT, Caller("mine")), 4)
    await stage.play(first)
    for id in ("nobody", "plain"):
        with pytest.raises(NotFound, match=f"no request '{id}' is kept here"):
            await read(stage.requests.generate(None, Caller(id), 1))
    with pytest.raises(InvalidRequest, match="resume_from 999 is ahead") as caught:
        await read(stage.requests.generate(None, Caller("mine"), 999))
    assert caught.value.field == "resume_from"
    with pytest.raises(InvalidRequest, match="asks for something else") as caught:
        await read(stage.requests.generate(replace(KEPT, seed=6), Caller("mine"), 4))
    assert caught.value.field == "request_id"
    with pytest.raises(InvalidRequest, match="asks for something else"):
        await read(stage.requests.generate(SOT, Caller("mine")))
    (rest,) = await stage.play(reading(stage.requests.generate(KEPT, Caller("mine"), 4)))
    assert text_of(rest) == ANSWER
    await stage.play(plain)
    stage.time.advance(31)
    stage.assert_clean()


async def test_the_newest_reader_reads_on() -> None:
    """The master may not have noticed yet that the old connection is dead."""
    stage = Stage(SAYS, config=CONFIG)
    old = reading(stage.requests.generate(KEPT, Caller("mine")))
    for _ in range(5):
        await stage.step()
    new = reading(stage.requests.generate(None, Caller("mine"), 2))
    await stage.settle()
    with pytest.raises(Cancelled, match="another call has resumed this request"):
        await old
    (got,) = await stage.play(new)
    assert (got[0].number, text_of(got)) == (2, ANSWER)
    stage.time.advance(31)
    stage.assert_clean()


async def test_no_request_waits_for_a_disconnected_reader() -> None:
    """Unlike for one that is there and does not read: what it misses is kept anyway."""
    stage = Stage(SAYS, config=replace(CONFIG, lease=32, unread=10), burst=2)
    ask = replace(COUNT, resumable=True)
    (first,) = await stage.play(reading(stage.requests.generate(ask, Caller("mine")), 1))
    while await stage.step():
        pass
    assert stage.engine.idle
    rest = await read(stage.requests.generate(None, Caller("mine"), len(first)))
    assert text_of(rest) == SAYS["Count"]
    stage.time.advance(31)
    stage.assert_clean()


async def test_a_cancelled_request_reports_that_to_a_client_that_resumes() -> None:
    stage = Stage(SAYS, config=CONFIG)
    await stage.play(reading(stage.requests.generate(KEPT, Caller("mine")), 3))
    assert stage.engine.cancel("mine")
    last = (await read(stage.requests.generate(None, Caller("mine"), 3)))[-1].event
    assert isinstance(last, Finished)
    assert last.reason is Reason.CANCELLED
    assert not stage.engine.cancel("mine")
    await stage.settle()
    stage.time.advance(31)
    stage.assert_clean()


async def test_an_error_that_ended_a_request_is_raised_on_resume() -> None:
    stage = Stage(SAYS, config=CONFIG)
    await stage.play(reading(stage.requests.generate(KEPT, Caller("mine")), 3))
    stage.engine.handle(MasterLeaving("worker-2 is gone"))
    events = stage.requests.generate(None, Caller("mine"), 2)
    assert (await anext(events)).number == 2
    with pytest.raises(Unavailable, match="worker-2 is gone"):
        await anext(events)


async def test_the_newest_deadline_counts() -> None:
    stage = Stage(SAYS, config=replace(CONFIG, keep_for=1000))
    await stage.play(reading(stage.requests.generate(KEPT, Caller("mine", timeout=100)), 3))
    longer = reading(stage.requests.generate(None, Caller("mine", timeout=500), 3))
    await stage.settle()
    stage.time.advance(400)
    await stage.settle()
    assert not longer.done()
    stage.time.advance(150)
    with pytest.raises(TimedOut):
        await longer
    await stage.settle()
    stage.time.advance(1001)
    stage.assert_clean()


async def test_a_request_without_a_chosen_id_is_resumed_by_the_id_in_its_started_event() -> None:
    stage = Stage(SAYS, config=CONFIG)
    (first,) = await stage.play(reading(stage.requests.generate(KEPT), 1))
    started = first[0].event
    assert isinstance(started, Started)
    (rest,) = await stage.play(reading(stage.requests.generate(None, Caller(started.request), 1)))
    assert finished([event.event for event in rest]).text == ANSWER
    stage.time.advance(31)
    stage.assert_clean()


async def test_an_old_request_takes_nothing_from_a_newer_one_of_its_name() -> None:
    """It was evicted while somebody read it; that reader leaves when the name is another's already."""
    stage = Stage(SAYS, config=replace(CONFIG, keep=1))
    ask = replace(DIRECT, resumable=True)
    old = stage.requests.generate(ask, Caller("mine"))
    first = asyncio.create_task(anext(old))
    while await stage.step():
        pass
    await first
    await stage.play(reading(stage.requests.generate(ask, Caller("other"))))  # takes the only place
    (whole,) = await stage.play(reading(stage.requests.generate(KEPT, Caller("mine"))))
    await old.aclose()
    stage.time.advance(29)
    assert await read(stage.requests.generate(None, Caller("mine"), 0)) == whole
    stage.time.advance(20)
    assert await read(stage.requests.generate(None, Caller("mine"), 0)) == whole
    stage.time.advance(31)
    stage.assert_clean()


async def test_one_client_does_not_evict_anothers_answers() -> None:
    stage = Stage(SAYS, config=replace(CONFIG, keep=3))
    ask = replace(DIRECT, resumable=True)
    for id, client in (("a", "alice"), *((f"m{n}", "mallory") for n in range(6)), ("b", "bob")):
        await stage.play(reading(stage.requests.generate(ask, Caller(id, client))))
    assert [id for id in ("a", "b", *(f"m{n}" for n in range(6))) if stage.engine.has_request(id)] == [
        "a",
        "b",
        "m5",
    ]


async def test_what_is_kept_of_a_running_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its oldest events go when they were read; while its client is away it pauses, and then goes on."""
    monkeypatch.setattr("specsot_master.core.request.MAX_BUFFERED_EVENTS", 20)
    stage = Stage(SAYS, config=replace(CONFIG, lease=8), burst=1)
    ask = replace(COUNT, resumable=True)
    (first,) = await stage.play(reading(stage.requests.generate(ask, Caller("mine")), 30))
    (request,) = stage.engine.all_requests
    while await stage.step():
        pass
    assert not stage.engine.idle, "it waits for its client"
    assert len(request.events._events) <= 20 + 2 * 8
    with pytest.raises(InvalidRequest, match="resume_from 3 is too far back"):
        await read(stage.requests.generate(None, Caller("mine"), 3))
    (rest,) = await stage.play(reading(stage.requests.generate(None, Caller("mine"), len(first))))
    assert [one.number for one in (*first, *rest)] == list(range(len(first) + len(rest)))
    assert text_of(rest) == SAYS["Count"]
    assert len(request.events._events) <= 20


@pytest.mark.parametrize("over", [False, True])
async def test_a_request_is_of_the_token_that_opened_it(over: bool) -> None:
    """To others it is a request that is not there, running or kept; its name is taken, whoever has it."""
    stage = Stage(SAYS, config=CONFIG)
    mine = stage.requests.generate(KEPT, Caller("mine", owner="alice"))
    await stage.play(reading(mine, None if over else 3))
    for other in ("bob", ""):
        with pytest.raises(NotFound) as told:
            await read(stage.requests.generate(None, Caller("mine", owner=other), 3))
        with pytest.raises(NotFound) as unknown:
            await read(stage.requests.generate(None, Caller("nobody", owner=other), 3))
        assert str(told.value).replace("mine", "nobody") == str(unknown.value)
        assert not stage.engine.cancel("mine", other)
        with pytest.raises(InvalidRequest, match="already running"):
            await read(stage.requests.generate(KEPT, Caller("mine", owner=other)))
    (rest,) = await stage.play(reading(stage.requests.generate(KEPT, Caller("mine", owner="alice"))))
    assert text_of(rest) == ANSWER
    assert not stage.engine.cancel("mine", "alice")


async def test_without_tokens_any_caller_with_the_id_can_resume_a_request() -> None:
    stage = Stage(SAYS, config=CONFIG)
    await stage.play(reading(stage.requests.generate(KEPT, Caller("mine")), 3))
    (rest,) = await stage.play(reading(stage.requests.generate(None, Caller("mine", owner="anybody"), 3)))
    assert text_of(rest) == ANSWER
