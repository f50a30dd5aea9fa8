"""Which ring takes a request, and which a worker."""

import asyncio
from dataclasses import replace

import pytest

from specsot.core.info import Info, PagesInfo, ReplicaInfo, RequestsInfo, StepsInfo
from specsot.errors import Cancelled, InvalidRequest, Refused, TooLarge
from specsot.events import Finished
from specsot.members import Range, Ready
from specsot.params import Ask, Limits, Message
from specsot.transport.links import Inbox, LocalLink
from specsot_master.core.ring.epoch import EpochNumbers
from specsot_master.engine import Caller, intake
from specsot_master.fleet import Fleet
from specsot_master.master import RequestCounter
from specsot_master.replicas import (
    BLOCK_CHARACTERS,
    MemberRouter,
    PrefixAffinity,
    Replica,
    ReplicaLoad,
    RequestRouter,
    least_loaded,
    total_info,
)
from tests.fleet.test_formation import WISHES, drafter, worker
from tests.master.fake_ring import STATE
from tests.master.letters import COUNT, SAYS
from tests.master.stage import Stage
from tests.master.test_repair import break_and_form
from tests.master.test_resuming import read

FIRST, SECOND = Range(0, 4), Range(4, 8)


@pytest.mark.parametrize(
    ("loads", "familiar", "chosen"),
    [
        ({0: ReplicaLoad(0, 0.0), 1: ReplicaLoad(0, 0.0)}, None, 0),
        ({0: ReplicaLoad(0, 0.5), 1: ReplicaLoad(0, 0.1)}, None, 1),
        ({0: ReplicaLoad(2, 0.1), 1: ReplicaLoad(1, 0.9)}, None, 1),
        ({0: ReplicaLoad(0, 0.0), 1: ReplicaLoad(0, 0.0)}, 1, 1),
        ({0: ReplicaLoad(0, 0.0), 1: ReplicaLoad(0, 0.1)}, 1, 0),
        ({1: ReplicaLoad(9, 1.0)}, 0, 1),
    ],
)
def test_the_least_loaded_takes_it_and_familiarity_breaks_ties(loads, familiar, chosen):
    assert least_loaded(loads, familiar) == chosen


def test_a_conversation_is_known_by_how_it_begins():
    beginnings = PrefixAffinity()
    first = Message("user", "a" * 3 * BLOCK_CHARACTERS)
    beginnings.note(Ask(messages=(first,)), 1)
    longer = (first, Message("assistant", "b"), Message("user", "c"))
    assert beginnings.find(Ask(messages=longer)) == 1
    assert beginnings.find(Ask(messages=(Message("user", "b" * 3 * BLOCK_CHARACTERS),))) is None
    assert beginnings.find(Ask(prompt="Hi")) is None, "too short to be worth anything"
    beginnings.note(Ask(messages=longer), 0)
    assert beginnings.find(Ask(messages=longer)) == 0, "the newest counts"


class Nobody:
    """Nobody runs anything on the ring."""

    at_work = 0

    def fitting(self, ring):
        return 0

    def final_rows(self):
        return {}

    def handle(self, event):
        pass


class Stand:
    """Two rings of two workers each, and what every member was told."""

    def __init__(self, wishes=WISHES):
        epochs = EpochNumbers()
        nothing = lambda *_: None  # noqa: E731
        self.fleets = [Fleet(wishes, nothing, epochs) for _ in range(2)]
        for fleet in self.fleets:
            fleet.user = Nobody()
        self.members = MemberRouter(self.fleets, nothing)

    async def join(self, *registrations):
        for registration in registrations:
            await self.members.join(registration, LocalLink("master", Inbox()))
        self.confirm()

    def confirm(self):
        """Whoever is configured is ready."""
        for fleet in self.fleets:
            for one in fleet.registrations:
                self.members.on_message(one.name, Ready(fleet.epoch))

    def where(self):
        return [{one.name for one in fleet.registrations} for fleet in self.fleets]


async def test_workers_fill_one_ring_after_another_and_the_others_stand_by():
    stand = Stand()
    await stand.join(*(worker(name) for name in "abc"), drafter("d"), drafter("e"))
    assert stand.where() == [{"a", "b", "d"}, {"c", "e"}]
    assert [fleet.ready for fleet in stand.fleets] == [True, False]
    await stand.join(*(worker(name) for name in "fgh"))
    assert stand.where() == [{"a", "b", "d", "g"}, {"c", "e", "f", "h"}]
    assert all(fleet.ready for fleet in stand.fleets)
    assert stand.fleets[0].epoch != stand.fleets[1].epoch


async def test_one_that_comes_back_goes_where_it_was_if_it_is_missing_there():
    stand = Stand()
    await stand.join(*(worker(name) for name in "abcd"))
    stand.members.on_disconnect("d", "killed")
    stand.members.on_disconnect("b", "killed")
    await stand.join(worker("d"))
    assert stand.where() == [{"a"}, {"c", "d"}]


async def test_one_that_stands_by_serves_whichever_ring_breaks():
    stand = Stand()
    await stand.join(*(worker(name) for name in "abcde"))
    assert stand.where() == [{"a", "b", "e"}, {"c", "d"}]
    stand.members.on_disconnect("d", "killed")
    stand.members.lend_workers()
    stand.confirm()
    assert stand.where() == [{"a", "b"}, {"c", "e"}]
    assert [str(one.layers) for one in stand.fleets[1].members()] == ["0:4", "4:8"]
    assert stand.fleets[1].ready
    stand.members.on_disconnect("e", "killed")
    stand.members.lend_workers()
    assert stand.where() == [{"a", "b"}, {"c"}], "nobody who works is taken away"


async def test_two_halves_make_a_whole():
    stand = Stand()
    await stand.join(*(worker(name) for name in "abcd"))
    stand.members.on_disconnect("a", "killed")
    stand.members.lend_workers()
    assert stand.where() == [{"b"}, {"c", "d"}]
    stand.members.on_disconnect("d", "killed")
    stand.members.lend_workers()
    stand.confirm()
    assert stand.where() == [{"b", "c"}, set()]
    assert stand.fleets[0].ready


async def test_a_ring_that_waits_for_its_drafter_keeps_its_workers():
    """Otherwise two rings would take each other's workers without end: found by `make faults SEED=1109`."""
    stand = Stand(replace(WISHES, drafter_grace=60.0))
    await stand.join(worker("a"), worker("b"))
    assert stand.fleets[0].waiting_for() == "the drafter"
    stand.members.lend_workers()
    assert stand.where() == [{"a", "b"}, set()]
    await stand.join(drafter("d"))
    assert stand.fleets[0].ready


async def test_pinned_ranges_and_drafters_find_the_ring_that_lacks_them():
    stand = Stand()
    halves = [worker(f"{half}{n}", half) for n in range(2) for half in (FIRST, SECOND)]
    await stand.join(*halves)
    assert all(fleet.ready for fleet in stand.fleets)
    with pytest.raises(Refused, match="overlap"):
        await stand.join(worker("more", FIRST))
    await stand.join(*(drafter(name) for name in "defg"))
    found = [{one for one in names if one in set("defg")} for names in stand.where()]
    assert found == [{"d", "f"}, {"e", "g"}], "a drafter goes where the fewest are"


async def test_gpus_are_spread_over_all_rings():
    stand = Stand(replace(WISHES, workers=1))
    await stand.join(*(worker(name, host="one", gpus=("x", "y")) for name in "ab"))
    assert [fleet.registrations[0].gpus for fleet in stand.fleets] == [("x",), ("y",)]


def test_an_account_of_several_is_their_sum():
    one = ReplicaInfo(
        0,
        5,
        True,
        (),
        PagesInfo(8, 3, 16),
        StepsInfo(2, 9, 1.0, 4.0, 2.0),
        RequestsInfo(1, 2, kept=3, ended=(("stop", 1),)),
    )
    other = ReplicaInfo(
        1, 7, False, ("a worker",), None, StepsInfo(1, 1), RequestsInfo(kept=3, ended=(("stop", 2),))
    )
    told = total_info([one, other])
    assert (told.epoch, told.ready, told.waiting_for) == (7, True, ("replica 1: a worker",))
    assert told.pages == PagesInfo(8, 3, 16)
    assert told.requests == RequestsInfo(1, 2, kept=3, ended=(("stop", 3),))
    assert (told.steps and told.steps.tokens, told.steps and told.steps.tokens_per_step) == (10, 4.0)
    assert total_info([one]).replicas == ()


class Complete:
    """A fleet whose ring is complete."""

    ready, lacks_members = True, False

    def __init__(self, stage):
        self.ring = stage.ring.now


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_request_id_is_live_in_one_ring_alone(monkeypatch, resumable):
    """The same call again, while the first one is still looked into, and counts as load of its ring."""
    monkeypatch.setattr(intake, "THREAD_CHARACTERS", 0)
    stages = [Stage(SAYS), Stage(SAYS)]
    router = RequestRouter([Replica(n, one.engine, Complete(one)) for n, one in enumerate(stages)])
    ask, requests = replace(COUNT, resumable=resumable), RequestCounter(router, Info)
    calls = [asyncio.create_task(read(requests.generate(ask, Caller("mine")))) for _ in range(2)]
    await asyncio.sleep(0)
    calls.append(asyncio.create_task(read(requests.generate(ask, Caller("mine")))))
    ends = asyncio.as_completed(calls)
    async with asyncio.timeout(60):  # two of them run for ever where they are in two rings
        for _ in range(2):
            with pytest.raises(Cancelled if resumable else InvalidRequest):
                await next(ends)
    assert [len(one.engine.all_requests) for one in stages] == [1, 0]
    assert router.cancel("mine")
    (event,) = (await next(ends))[-1:]
    assert isinstance(event.event, Finished)
    assert not any(one.engine.all_requests for one in stages)
    assert not router._arriving


def rings_of(*sizes):
    """Stages with so many pages each, and the router in front of them."""
    stages = [Stage(SAYS, state=replace(STATE, pages=pages)) for pages in sizes]
    return stages, RequestRouter([Replica(n, one.engine, Complete(one)) for n, one in enumerate(stages)])


@pytest.mark.parametrize(("sizes", "taken"), [((4, 64, 16), 1), ((4, 16, 8), None), ((64, 4, 80), 0)])
async def test_a_request_too_large_for_one_ring_goes_where_it_fits(sizes, taken):
    """It needs some 18 pages. The first ring is asked first, then the largest of those with more pages."""
    stages, router = rings_of(*sizes)
    ask = replace(COUNT, limits=Limits(max_new_tokens=1024))
    if taken is None:
        with pytest.raises(TooLarge, match=f"the ring has {max(sizes)}"):
            await router.open(ask, Caller("mine"))
        assert not any(one.engine.all_requests for one in stages)
        return
    await router.open(ask, Caller("mine"))
    assert [len(one.engine.all_requests) for one in stages] == [number == taken for number in range(3)]
    assert router.home("mine").number == taken
    assert router.cancel("mine")


async def test_a_parked_request_continues_in_a_ring_that_has_room_for_it():
    """The least loaded one is too small for it."""
    stages, router = rings_of(64, 4, 64)
    await router.open(replace(COUNT, limits=Limits(max_new_tokens=1024)), Caller("mine"))
    router._replicas[0].fleet.ready, router._replicas[0].fleet.lacks_members = False, True
    router.move_parked()
    assert [len(one.engine.all_requests) for one in stages] == [0, 0, 1]


async def test_a_request_that_outgrew_its_ring_continues_in_another_and_the_others_stay():
    stages, router = rings_of(64, 64)
    for id, tokens in (("large", 1024), ("small", 100)):
        await stages[0].engine.open(replace(COUNT, limits=Limits(max_new_tokens=tokens)), Caller(id))
    await break_and_form(stages[0], 2, pages=8)
    router.move_parked()
    assert [[one.id for one in stage.engine.all_requests] for stage in stages] == [["small"], ["large"]]
    assert not any(stage.engine.parked for stage in stages)
