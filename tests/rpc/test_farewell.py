"""A closing link delivers what is still in it, however long that takes, as long as somebody takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from specsot.core.frames import Result
from specsot.transport.grpc_links import GrpcWire
from specsot.transport.link_ends import FAREWELL_SECONDS as USUAL
from specsot.transport.link_ends import SendingEnd
from specsot.transport.links import Inbox, Lost
from specsot.transport.wires import Wire
from tests.faults.virtual import run

FAREWELL = 0.2  # seconds
MESSAGES = 12


class Narrow(Wire):
    """A wire on which each message takes so long; the peer hangs up behind the last one."""

    def __init__(self, seconds: float | None) -> None:
        """None: it takes nothing."""
        self.written = 0
        self.hung_up = self.delivered = False
        self._seconds, self._over = seconds, asyncio.Event()

    async def write(self, data: bytes) -> None:
        await asyncio.wait({asyncio.ensure_future(self._over.wait())}, timeout=self._seconds)
        self.written += 1

    async def finish(self) -> None:
        self._over.set()

    async def wait_closed(self) -> None:
        await self._over.wait()

    async def hang_up(self) -> None:
        self.hung_up = True


class Wide(Narrow):
    """Takes all at once."""

    def write_now(self, data: bytes) -> bytes:
        return b""


async def closed(wire: Narrow, farewell: float = FAREWELL) -> Narrow:
    link = SendingEnd(wire, "there", 1, None, farewell)
    for number in range(MESSAGES):
        await link.send(Result(1, number, ()))
    wire.delivered = await asyncio.wait_for(link.close(), 200)
    return wire


async def test_a_narrow_network_gets_all_of_it():
    wire = await closed(Narrow(FAREWELL / 4))
    assert wire.written == MESSAGES + 1, "the goodbye, too"
    assert wire.hung_up
    assert wire.delivered


def test_a_piece_may_take_as_long_as_one_mebibyte_at_one_megabit_a_second():
    wire = run(closed(Narrow(8.4), USUAL))
    assert wire.written == MESSAGES + 1


async def test_a_peer_that_takes_nothing_is_not_waited_for():
    wire = await closed(Narrow(None))
    assert wire.written == 0
    assert wire.hung_up
    assert not wire.delivered


async def test_what_was_sent_before_the_link_broke_is_not_known_to_be_there():
    wire, inbox = Wide(0), Inbox()
    link = SendingEnd(wire, "there", 1, inbox, FAREWELL)
    await link.send(Result(1, 0, ()))
    await wire.finish()  # nobody asked for that: the peer is gone
    assert isinstance((await inbox.get()).message, Lost)
    assert not await link.close()


class LateNews:
    """A channel, and its stream: the peer hears the first message and hangs up, and only then is it told that
    the message has gone.
    """

    def __init__(self) -> None:
        self._over: Callable[[Any], None] | None = None

    def add_done_callback(self, over: Callable[[Any], None]) -> None:
        self._over = over

    async def write(self, data: bytes) -> None:
        assert self._over
        self._over(self)
        for _ in range(10):  # turns of the loop
            await asyncio.sleep(0)

    async def done_writing(self) -> None: ...

    async def close(self) -> None: ...


async def test_a_message_that_is_there_counts_though_grpc_tells_it_after_the_streams_end():
    stream: Any = LateNews()
    link = SendingEnd(GrpcWire(stream, stream), "there", 1, None, FAREWELL)
    assert await link.close()
