"""A worker that stands by takes a range in the middle of an answer, which stays the same."""

from contextlib import asynccontextmanager

import pytest

pytest.importorskip("torch")

from specsot.errors import Unavailable
from specsot_app.asking import ask_of
from specsot_app.commands.rebalance import form_anew
from specsot_app.local import LocalFleet, LocalOptions
from specsot_app.mock.members import Mock
from specsot_app.reaching import Reach
from specsot_master.server import MasterService, open_master_door

pytestmark = pytest.mark.torch


@asynccontextmanager
async def fleet_of(demo_model, *names):
    """Two of these share the layers, the others stand by."""
    mock = Mock(demo_model / "base")
    parts = {name: lambda name, dialer, compute: mock.worker(name, name, dialer, compute) for name in names}
    fleet = await LocalFleet.start(LocalOptions(demo_model / "base", stages=2, drafter="none"), parts)
    try:
        yield fleet, fleet._master
    finally:
        await fleet.close()


async def written(fleet, midst=None):
    """A whole answer; `midst` happens in its middle."""
    events = []
    async for one in fleet.generate(ask_of("Why?", mode="direct", max_new_tokens=40)):
        events.append(one.event)
        if len(events) == 9 and midst:
            await midst()
    return events[-1].text


async def test_one_that_stands_by_takes_over_in_the_middle_of_an_answer(demo_model):
    async with fleet_of(demo_model, "one", "two", "three") as (fleet, master):

        async def lose():
            master.members.lost("two", "killed")

        undisturbed = await written(fleet)
        assert await written(fleet, lose) == undisturbed
        info = await fleet.info()
        assert info.epoch == 2
        assert {one.name: str(one.layers) for one in info.members} == {"one": "0:4", "three": "4:8"}
        assert info.plan.startswith("one 0:4")


async def test_specsot_rebalance_gives_it_a_range_in_the_middle_of_an_answer(demo_model):
    async with fleet_of(demo_model, "one", "two", "three") as (fleet, master):
        service = MasterService(master.leader, master.info, rebalance=master.rebalance)
        door = await open_master_door("127.0.0.1:0", service, None)
        done = []

        async def rebalance():
            done.append(await form_anew(f"127.0.0.1:{door.port}", Reach(), 30.0))

        undisturbed = await written(fleet)
        assert {one.name for one in master.info().members if one.stands_by} == {"three"}
        assert await written(fleet, rebalance) == undisturbed
        await rebalance()
        assert [(one.changed, one.epoch) for one in done] == [(True, 2), (False, 2)]
        layers = {one.name: str(one.layers) for one in master.info().members}
        assert layers == {"one": "0:3", "two": "3:6", "three": "6:8"}
        master.members.lost("one", "killed")
        with pytest.raises(Unavailable, match="the ring is not complete"):
            await rebalance()
        await door.close(0)
