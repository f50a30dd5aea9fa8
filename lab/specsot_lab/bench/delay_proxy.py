"""A TCP proxy that delays: every byte arrives so much later, in order, and as many at once as were sent.

It stands in for a network that is far, not for one that is narrow.
Delays are as exact as the timers of the loop that it runs on: see `exact_loop`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from typing import cast

Act = Callable[[asyncio.Transport], None]


def exact_loop() -> asyncio.AbstractEventLoop:
    """One whose timers know microseconds; those of uvloop and of epoll know whole milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


class DelayProxy:
    """Listens at a port of the loopback for a server at another. delay: seconds of each direction, which may
    change at any time. carried: bytes that passed, both ways.
    """

    def __init__(self, target: int, delay: float = 0.0) -> None:
        self.delay, self.carried = delay, 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._dialing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        """Cuts what is still connected."""
        assert self._server is not None
        self._server.close()
        for end in tuple(self._ends):
            end.abort()
        await asyncio.gather(*self._dialing, return_exceptions=True)

    def _accept(self) -> _End:
        near, far = _End(self, self._ends), _End(self, self._ends)
        near.other, far.other = far, near
        task = asyncio.get_running_loop().create_task(self._dial(near, far))
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)
        return near

    async def _dial(self, near: _End, far: _End) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: far, "127.0.0.1", self._target)
        except OSError:
            near.abort()


class _End(asyncio.Protocol):
    """One socket of a connection: what it hears the other one says, later."""

    def __init__(self, proxy: DelayProxy, ends: set[_End]) -> None:
        self._proxy, self._ends = proxy, ends
        self.other: _End | None = None
        self._transport: asyncio.Transport | None = None
        self._coming: deque[Act] = deque()
        self._late = 0  # of them were due before there was a connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ends.add(self)
        while self._late:
            self._late -= 1
            self._say()

    def data_received(self, data: bytes) -> None:
        self._proxy.carried += len(data)
        assert self.other is not None
        self.other.say(lambda end: end.write(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.discard(self)
        assert self.other is not None
        self.other.say(lambda end: end.close())

    def say(self, what: Act) -> None:
        """Do this to the socket when its time has come; what was asked for before comes before it."""
        self._coming.append(what)
        asyncio.get_running_loop().call_later(self._proxy.delay, self._say)

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()

    def _say(self) -> None:
        """The oldest of all. Each has a timer, so nothing stays here, however coarse a loop's timers are."""
        if self._transport is None:
            self._late += 1
            return
        act = self._coming.popleft()
        if not self._transport.is_closing():
            act(self._transport)
