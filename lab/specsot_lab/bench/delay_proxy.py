"""A TCP proxy that stands in for a long or narrow line: it delays every byte, and limits the bytes per
second.

Delays are as exact as the timers of the event loop, see `exact_loop`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from typing import Final, cast

# An action on a socket's transport.
Act = Callable[[asyncio.Transport], None]
# Seconds of the line's rate. How much data the line's router buffers before the sender has to wait. Untuned.
BUFFER_SECONDS: Final = 0.05


def exact_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop whose timers are exact to microseconds. The timers of uvloop and of epoll are
    exact to milliseconds only.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


class DelayProxy:
    """Forwards the connections to a free loopback port to another loopback port, late.

    target: The server's port.
    delay: Seconds that data takes in each direction; may be changed at any time.
    rate: Bytes per second in each direction, shared by all connections; None: no limit.
    """

    def __init__(self, target: int, delay: float = 0.0, rate: float | None = None) -> None:
        """Make a proxy that does not listen until `open` is called.

        target: The server's port on the loopback interface.
        delay: Seconds that data takes in each direction.
        rate: Bytes per second in each direction, shared by all connections; None: no limit.
        """
        self.delay = delay
        self._target = target
        self._rate = rate
        # By direction, True for that to the server: the time at which all data so far has been sent.
        self._idle_at = {True: 0.0, False: 0.0}
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._dialing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Return the address at which the proxy listens, host:port. The proxy must be open."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        """Start to listen at a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        """Stop listening, and abort all open connections.

        Returns once no connection to the server is being made any more. The proxy must be open.
        """
        assert self._server is not None
        self._server.close()
        for end in tuple(self._ends):
            end.abort()
        await asyncio.gather(*self._dialing, return_exceptions=True)

    def seconds_until_arrival(self, size: int, to_server: bool) -> float:
        """Return the seconds until data that enters the line now arrives at the other end. Data that entered
        earlier is sent first.

        size: Number of bytes; 0 for the end of a connection.
        to_server: True for data from a client to the server, False for data in the other direction.

        The time that the data needs at the line's rate is added to the time at which the line is free, so
        that each call occupies the line. Without a rate, only the delay counts.
        """
        now = asyncio.get_running_loop().time()
        starts = max(now, self._idle_at[to_server])
        self._idle_at[to_server] = starts + (size / self._rate if self._rate else 0.0)
        return self._idle_at[to_server] - now + self.delay

    def _accept(self) -> _End:
        """Return the client's side of a new connection, and start to connect its other side to the server.

        Both sides know each other when this returns; the server's side is connected later.
        """
        client_end = _End(self, self._ends, from_client=True)
        server_end = _End(self, self._ends, from_client=False)
        client_end.other, server_end.other = server_end, client_end
        task = asyncio.get_running_loop().create_task(self._dial(client_end, server_end))
        self._dialing.add(task)
        task.add_done_callback(self._dialing.discard)
        return client_end

    async def _dial(self, client_end: _End, server_end: _End) -> None:
        """Connect to the server; if that fails, abort the client's side.

        client_end: The socket to the client, which is connected.
        server_end: The socket to the server, which is to be connected.

        Returns when the server's side is connected, or the client's has been aborted.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: server_end, "127.0.0.1", self._target)
        except OSError:
            client_end.abort()


class _End(asyncio.Protocol):
    """One socket of a forwarded connection. The data that it receives is sent later by the other socket.

    proxy: Knows the line's delay and rate.
    ends: All open sockets of the proxy.
    from_client: True if the socket is connected to the client, False if it is connected to the server.
    other: The other socket of the connection, which `DelayProxy._accept` sets.
    """

    def __init__(self, proxy: DelayProxy, ends: set[_End], from_client: bool) -> None:
        """Make a socket's protocol before it is connected.

        proxy: Knows the line's delay and rate.
        ends: All open sockets of the proxy; this one joins them when it is connected.
        from_client: True if the socket is connected to the client, False if it is connected to the server.
        """
        self._proxy = proxy
        self._ends = ends
        self._from_client = from_client
        self.other: _End | None = None
        self._transport: asyncio.Transport | None = None
        self._due_actions: deque[Act] = deque()
        # Number of actions that were due before the socket was connected.
        self._overdue = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, and run the actions that were due before it existed.

        transport: The transport of the new connection.

        From now on the socket belongs to `ends`.
        """
        self._transport = cast(asyncio.Transport, transport)
        self._ends.add(self)
        while self._overdue:
            self._overdue -= 1
            self._act()

    def data_received(self, data: bytes) -> None:
        """Send data by the other socket when the line has carried it, and stop reading while the line is
        full.

        data: The bytes that arrived.

        """
        assert self.other is not None
        seconds = self._proxy.seconds_until_arrival(len(data), self._from_client)
        self.other.act_later(lambda end: end.write(data), seconds)
        self._pause_reading(seconds - self._proxy.delay - BUFFER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other socket after all data that is still on its way to it.

        exc: The error that ended the connection, or None; not used.

        The socket is removed from `ends`.
        """
        self._ends.discard(self)
        assert self.other is not None
        self.other.act_later(lambda end: end.close(), self._proxy.seconds_until_arrival(0, self._from_client))

    def act_later(self, action: Act, seconds: float) -> None:
        """Run an action on this socket later. Actions run in the order in which they were requested.

        action: Called with the socket's transport.
        seconds: Delay in seconds.
        """
        self._due_actions.append(action)
        asyncio.get_running_loop().call_later(seconds, self._act)

    def _pause_reading(self, seconds: float) -> None:
        """Stop reading for some time, because the line is full, so that the sender notices. 0 or fewer
        seconds, or a missing connection, have no effect.

        seconds: How long the line remains full.
        """
        if seconds > 0 and self._transport:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self._transport.resume_reading)

    def abort(self) -> None:
        """Abort the connection; without one, nothing happens."""
        if self._transport:
            self._transport.abort()

    def _act(self) -> None:
        """Run the oldest action. Without a connection yet, only count the action as overdue. If the
        connection is closing, the action is dropped.

        Each action has a timer of its own, so that none is left over, however coarse the loop's timers are.
        """
        if self._transport is None:
            self._overdue += 1
            return
        act = self._due_actions.popleft()
        if not self._transport.is_closing():
            act(self._transport)
