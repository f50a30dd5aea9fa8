"""A member's garbage collector: no full search stops a serving ring, and no epoch's objects stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specsot.members import Configuration, Tap
from specsot.service.member import ReportingMember
from specsot.transport.links import Arrival


class Member:
    """A member that does nothing."""

    epoch = 1

    async def configure(self, configuration: Configuration, uplink: Any) -> None: ...

    async def handle(self, arrival: Arrival) -> None: ...

    async def disband(self) -> None: ...


class Endpoint:
    """Takes reports of health."""

    async def report(self, service: str, serving: bool) -> None: ...


@pytest.fixture
def member() -> Iterator[ReportingMember]:
    usual = gc.get_threshold()
    dialers: Any = SimpleNamespace(turn_to=lambda transport: None)
    idle: Any = SimpleNamespace(restart=lambda: None)
    yield ReportingMember(Member(), "worker", Endpoint(), dialers, idle)  # type: ignore[arg-type]
    gc.set_threshold(*usual)
    gc.unfreeze()


async def test_what_an_epoch_loads_is_not_searched_until_the_epoch_ends(member: ReportingMember) -> None:
    configuration = Configuration(1, "w", (), 4, 4, 1)
    await member.configure(configuration, None)  # type: ignore[arg-type]
    frozen = gc.get_freeze_count()
    assert frozen > 0
    graphs = [[] for _ in range(1000)]
    await member.handle(Arrival("d", Tap(1, 0, None)))
    assert gc.get_freeze_count() >= frozen + len(graphs), "graphs are captured after the last slice"
    await member.disband()
    assert gc.get_freeze_count() == 0
    assert len(graphs) == 1000
