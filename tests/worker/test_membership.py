"""A member's life over a part that records what it is asked."""

from __future__ import annotations

import asyncio

from specsot.links import Arrival, Inbox
from specsot.members import Configuration, Leaving, Registration
from specsot.membership import take_part


class EagerPart:
    """Always wants to be called again at once; leaves when the last word arrives."""

    epoch = 1

    def __init__(self, leaving: asyncio.Event) -> None:
        self.leaving, self.turns = leaving, 0

    async def registration(self) -> Registration:
        return Registration("worker", "eager", "nowhere", "abc", 8, 64, 1 << 20, 64)

    async def configure(self, configuration: Configuration, uplink: object) -> None: ...

    async def handle(self, arrival: Arrival) -> None:
        if arrival.message == "the last word":
            self.leaving.set()

    async def settle(self) -> float | None:
        self.turns += 1
        return 0.0

    async def disband(self) -> None: ...


class Recorder:
    """An uplink that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)

    async def close(self) -> None: ...


async def test_a_part_in_a_hurry_leaves_the_loop_to_its_links() -> None:
    leaving, inbox, uplink = asyncio.Event(), Inbox(), Recorder()
    part = EagerPart(leaving)

    async def connect(registration: Registration) -> Recorder:
        inbox.put("peer", "a word")  # from now on it is in a hurry
        asyncio.get_running_loop().call_later(0.01, inbox.put, "peer", "the last word")
        return uplink

    await asyncio.wait_for(take_part(part, inbox, connect, leaving), 10)
    assert part.turns > 2
    assert uplink.sent == [Leaving()]
