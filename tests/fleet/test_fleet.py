"""Epochs: the barrier, losses, a late drafter, and a ring that is formed anew."""

import asyncio

import pytest

from specsot.errors import Refused, Unavailable
from specsot.frames import Close, Result
from specsot.links import Inbox, LocalLink
from specsot.members import Broken, Configuration, Disband, Leaving, Ready
from specsot_master.fleet import Fleet
from tests.fleet.test_formation import WISHES, drafter, worker


class Stand:
    """A fleet with everything it says written down."""

    def __init__(self):
        self.results, self.ends, self.ready, self.idle = [], [], 0, True
        self.fleet = Fleet(WISHES, self.results.append, self._ready, self.ends.append, lambda: self.idle)
        self.inboxes: dict[str, Inbox] = {}

    def _ready(self):
        self.ready += 1

    async def join(self, registration):
        inbox = self.inboxes[registration.name] = Inbox()
        await self.fleet.join(registration, LocalLink("master", inbox))
        await self.calm()

    async def calm(self):
        for _ in range(5):
            await asyncio.sleep(0)

    def told(self, name):
        messages = []
        while (arrival := self.inboxes[name].take()) is not None:
            messages.append(arrival.message)
        return messages

    def all_ready(self, epoch, *names):
        for name in names:
            self.fleet.heard(name, Ready(epoch))


async def stand_with(*registrations):
    stand = Stand()
    for registration in registrations:
        await stand.join(registration)
    return stand


async def test_orders_pass_only_after_the_barrier():
    stand = await stand_with(worker("a"), worker("b"))
    assert isinstance(stand.told("a")[0], Configuration)
    stand.all_ready(1, "a")
    assert stand.fleet.waiting_for() == "b to get ready"
    with pytest.raises(Unavailable, match="b to get ready"):
        await stand.fleet.order(Close(1))
    stand.all_ready(1, "b")
    assert stand.ready == 1
    await stand.fleet.order(Close(1))
    assert stand.told("a") == [Close(1)]
    assert stand.told("b")[1:] == []


async def test_a_lost_stage_ends_the_epoch_and_a_new_worker_begins_the_next():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.fleet.lost("b", "connection reset")
    await stand.calm()
    assert stand.ends == ["b is gone: connection reset"]
    assert [type(message) for message in stand.told("a")] == [Configuration, Disband]
    assert stand.fleet.waiting_for() == "1 of 2 workers"
    await stand.join(worker("c"))
    assert stand.told("a")[0].epoch == 2
    stand.fleet.heard("a", Ready(1))
    assert not stand.fleet.ready
    stand.all_ready(2, "a", "c")
    assert stand.fleet.ready


async def test_a_lost_drafter_disturbs_nobody():
    stand = await stand_with(drafter(), worker("a"), worker("b"))
    stand.all_ready(1, "a", "b", "d")
    assert stand.fleet.ring.drafter == "d:1"
    stand.fleet.lost("d", "killed")
    assert stand.fleet.ready
    assert stand.fleet.ring.drafter is None
    assert stand.ends == []


async def test_a_late_drafter_is_taken_in_when_nobody_is_disturbed():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.idle = False
    await stand.join(drafter())
    assert stand.fleet.ready
    stand.idle = True
    stand.fleet.reform()
    await stand.calm()
    stand.all_ready(2, "a", "b", "d")
    assert stand.fleet.ring.drafter == "d:1"


async def test_results_of_a_past_epoch_are_dropped():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.fleet.heard("b", Result(0, 1))
    stand.fleet.heard("b", Result(1, 1))
    assert stand.results == [Result(1, 1)]


async def test_a_member_that_breaks_is_heard_and_one_that_leaves_is_let_go():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.fleet.heard("a", Broken(1, "out of memory"))
    assert stand.ends == ["a: out of memory"]
    assert "out of memory" in stand.fleet.waiting_for()
    stand.fleet.heard("b", Leaving())
    assert stand.fleet.waiting_for() == "1 of 2 workers"


async def test_a_stranger_is_refused_and_changes_nothing():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    with pytest.raises(Refused, match="one too many"):
        await stand.fleet.join(worker("x"), LocalLink("master", Inbox()))
    assert stand.fleet.ready
    assert len(stand.fleet.members()) == 2
