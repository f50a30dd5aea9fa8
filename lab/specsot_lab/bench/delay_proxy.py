"""A TCP proxy that stands in for a line that is long, narrow, or both: every byte arrives so much later, in
order, and no more of them a second than the line carries.

Delays are as exact as the timers of the loop that it runs on: see `exact_loop`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from typing import cast

Act = Callable[[asyncio.Transport], None]
# Seconds of its rate that a line's router buffers. Untuned.
BUFFER_SECONDS = 0.05  # of its rate that a line's router keeps; not measured


def exact_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop whose timers are exact to microseconds; those of uvloop and of epoll are exact to
    milliseconds.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


class DelayProxy:
    """Listens at a port of the loopback for a server at another. delay: seconds of each direction, which may
    change at any time. rate: bytes a second of each direction, shared by all connections; None: no limit.
    carried: bytes that passed, both ways.
    """

    def __init__(self, target: int, delay: float = 0.0, rate: float | None = None) -> None:
        self.delay = delay
        self.carried = 0
        self._target = target
        self._rate = rate
        self._free_at = {True: 0.0, False: 0.0}  # to the server, and back: when all before is on its way
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._dialing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Return the address at which the proxy listens, host:port."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        """Start to listen at a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        """Stop to listen, and cut what is still connected."""
        assert self._server is not None
        self._server.close()
        for end in tuple(self._ends):
            end.abort()
        await asyncio.gather(*self._dialing, return_exceptions=True)

    def seconds_until_arrival(self, size: int, forth: bool) -> float:
        """Return the seconds until bytes arrive that enter the line now, after those before them. size: in
        bytes. forth: to the server.
        """
        now = asyncio.get_running_loop().time()
        begins = max(now, self._free_at[forth])
        self._free_at[forth] = begins + (size / self._rate if self._rate else 0.0)
        return self._free_at[forth] - now + self.delay

    def _accept(self) -> _End:
        """Return the client's side of a new connection, and connect its other side to the server."""
        near = _End(self, self._ends, forth=True)
        far = _End(self, self._ends, forth=False)
        near.other, far.other = far, near
        task = asyncio.get_running_loop().create_task(self._dial(near, far))
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)
        return near

    async def _dial(self, near: _End, far: _End) -> None:
        """Connect the far side to the server; if that fails, cut the near side."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: far, "127.0.0.1", self._target)
        except OSError:
            near.abort()


class _End(asyncio.Protocol):
    """One socket of a connection. Data that it receives is sent by the other socket, later.

    proxy: has the line's delay and rate. ends: all open sockets. forth: it receives from the client.
    """

    def __init__(self, proxy: DelayProxy, ends: set[_End], forth: bool) -> None:
        self._proxy = proxy
        self._ends = ends
        self._forth = forth
        self.other: _End | None = None
        self._transport: asyncio.Transport | None = None
        self._coming: deque[Act] = deque()
        self._late = 0  # of them were due before there was a connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the connection, and send what was due before it existed."""
        self._transport = cast(asyncio.Transport, transport)
        self._ends.add(self)
        while self._late:
            self._late -= 1
            self._say()

    def data_received(self, data: bytes) -> None:
        """Send these bytes by the other socket when the line has carried them, and pause reading while the
        line is full.
        """
        self._proxy.carried += len(data)
        assert self.other is not None
        later = self._proxy.seconds_until_arrival(len(data), self._forth)
        self.other.say(lambda end: end.write(data), later)
        self._hold_back(later - self._proxy.delay - BUFFER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other socket after all that is on its way."""
        self._ends.discard(self)
        assert self.other is not None
        self.other.say(lambda end: end.close(), self._proxy.seconds_until_arrival(0, self._forth))

    def say(self, what: Act, later: float) -> None:
        """Do something to this socket after so many seconds; earlier actions come first. what: called with
        the socket. later: seconds.
        """
        self._coming.append(what)
        asyncio.get_running_loop().call_later(later, self._say)

    def _hold_back(self, seconds: float) -> None:
        """Read nothing more for so many seconds while the line is full, so that the sender notices; 0 or less
        does nothing.
        """
        if seconds > 0 and self._transport:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self._transport.resume_reading)

    def abort(self) -> None:
        """Cut the connection, if there is one."""
        if self._transport:
            self._transport.abort()

    def _say(self) -> None:
        """Run the oldest action. Each action has a timer, so that none stays here, however coarse a loop's
        timers are.
        """
        if self._transport is None:
            self._late += 1
            return
        act = self._coming.popleft()
        if not self._transport.is_closing():
            act(self._transport)
