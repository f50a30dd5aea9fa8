"""Embedded fleets whose members are lost, or die, in the middle of an answer."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from specsot.errors import Hung, Unavailable
from specsot.service.options import DraftModelOptions
from specsot_app.commands.status import RebalanceOptions, rebalance_and_wait
from specsot_app.core.ask import ask_of
from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions
from specsot_master.grpc_api import MasterService, open_master_port
from tests.conftest import some
from tests.simulator import Simulator

pytestmark = pytest.mark.torch


@asynccontextmanager
async def fleet_of(demo_model, *names, stages=2, **more):
    """Two of these share the layers, the others stand by."""
    mock = Simulator(demo_model / "base", **more)
    parts = {name: lambda name, dialer, compute: mock.worker(name, name, dialer, compute) for name in names}
    fleet = await EmbeddedFleet.start(
        EmbeddedOptions(DraftModelOptions(demo_model / "base", drafter="none"), stages=stages), parts
    )
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
            master.members.on_disconnect("two", "killed")

        undisturbed = await written(fleet)
        assert await written(fleet, lose) == undisturbed
        info = await fleet.info()
        assert info.epoch == 2
        assert {one.name: str(one.layers) for one in info.members} == {"one": "0:4", "three": "4:8"}
        assert info.plan.startswith("one 0:4")


async def test_specsot_rebalance_gives_it_a_range_in_the_middle_of_an_answer(demo_model):
    async with fleet_of(demo_model, "one", "two", "three") as (fleet, master):
        service = MasterService(master.requests, master.info, rebalance=master.rebalance)
        endpoint = await open_master_port("127.0.0.1:0", service, None)
        done = []

        async def rebalance():
            done.append(await rebalance_and_wait(RebalanceOptions(f"127.0.0.1:{endpoint.port}", wait=30.0)))

        undisturbed = await written(fleet)
        assert {one.name for one in master.info().members if one.is_standby} == {"three"}
        assert await written(fleet, rebalance) == undisturbed
        await rebalance()
        assert [(one.changed, one.epoch) for one in done] == [(True, 2), (False, 2)]
        layers = {one.name: str(one.layers) for one in master.info().members}
        assert layers == {"one": "0:3", "two": "3:6", "three": "6:8"}
        master.members.on_disconnect("one", "killed")
        with pytest.raises(Unavailable, match="the ring is not complete"):
            await rebalance()
        await endpoint.close(0)


def going_wrong(step, error):
    """Steps of no length, of which one raises this."""
    steps = iter(range(1, 1000))

    def spend(seconds):
        if next(steps) == step:
            raise error

    return spend


class Panic(BaseException):
    """As Rust's, seen from Python."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize(
    "bug", some([KeyError("a bug"), IndexError(), AssertionError(), Panic("in Rust")], 3)
)
async def test_a_bug_in_a_stage_costs_one_epoch_and_no_token(demo_model, bug):
    async with fleet_of(demo_model, "one", stages=1, sleep=going_wrong(0, bug)) as (fleet, _):
        undisturbed = await written(fleet)
    async with fleet_of(demo_model, "one", stages=1, sleep=going_wrong(9, bug)) as (fleet, _):
        assert await written(fleet) == undisturbed
        assert (await fleet.info()).epoch == 2


async def test_a_member_that_dies_ends_what_depends_on_it_now_and_later(demo_model):
    dying = going_wrong(9, Hung("one hangs"))
    async with fleet_of(demo_model, "one", stages=1, sleep=dying) as (fleet, _):
        for _ in range(2):
            with pytest.raises(Unavailable, match="one failed: one hangs"):
                await asyncio.wait_for(written(fleet), 100)
        assert not (await fleet.info()).ready
