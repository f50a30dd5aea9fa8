"""A worker that stands by takes over in the middle of an answer, which stays the same."""

import pytest

pytest.importorskip("torch")

from specsot_app.asking import ask_of
from specsot_app.local import LocalFleet, LocalOptions
from specsot_app.mock.members import Mock

pytestmark = pytest.mark.torch


async def test_one_that_stands_by_takes_over_in_the_middle_of_an_answer(demo_model):
    mock = Mock(demo_model / "base")
    parts = {
        name: lambda name, dialer, compute: mock.worker(name, name, dialer, compute)
        for name in ("one", "two", "three")
    }
    fleet = await LocalFleet.start(LocalOptions(demo_model / "base", stages=2, drafter="none"), parts)
    try:

        async def written(lose=None):
            events = []
            async for one in fleet.generate(ask_of("Why?", mode="direct", max_new_tokens=40)):
                events.append(one.event)
                if len(events) == 9 and lose:
                    fleet._master.members.lost(lose, "killed")
            return events[-1].text

        undisturbed = await written()
        assert await written(lose="two") == undisturbed
        info = await fleet.info()
        assert info.epoch == 2
        assert {one.name: str(one.layers) for one in info.members} == {"one": "0:4", "three": "4:8"}
        assert info.plan.startswith("one 0:4")
    finally:
        await fleet.close()
