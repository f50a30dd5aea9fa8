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

    async def registration(self) -> None: ...

    async def configure(self, configuration: Configuration, uplink: Any) -> None: ...

    async def prepare(self, order: Any, uplink: Any) -> None: ...

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


def is_searched(wanted: object) -> bool:
    """Whether the collector looks at this object: it is tracked, and not frozen."""
    return any(found is wanted for found in gc.get_objects())


async def test_what_an_epoch_loads_is_not_searched_until_the_epoch_ends(member: ReportingMember) -> None:
    configuration = Configuration(1, "w", (), 4, 4, 1)
    loaded: list[list[int]] = []
    assert is_searched(loaded)
    await member.configure(configuration, None)  # type: ignore[arg-type]
    assert not is_searched(loaded)
    captured: list[list[int]] = []
    assert is_searched(captured)
    await member.handle(Arrival("d", Tap(1, 0, None)))
    assert not is_searched(captured), "graphs are captured after the last slice"
    await member.disband()
    assert gc.get_freeze_count() == 0
    assert is_searched(loaded)
    assert is_searched(captured)
