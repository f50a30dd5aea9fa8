"""The sending end of a link over ZMQ: meets the peer over gRPC, then connects to the place it named.

Refuses to know what the messages mean.
"""

from __future__ import annotations

import asyncio

import zmq

from specsot.errors import Unavailable, WireError
from specsot.links import Inbox
from specsot.members import PROTOCOL, Kind
from specsot.rpc.dial import DIAL_SECONDS
from specsot.rpc.meeting import Endpoint, negotiate
from specsot.rpc.sending import SendingEnd
from specsot.rpc.serve import split_address
from specsot.rpc.tls import PLAIN, Tls
from specsot.v1 import ring_pb2
from specsot.zmq.sockets import Keys, Socket, SocketEvents, Sockets, event_in_words


class ZmqWire:
    """One connection, as a sending end wants it."""

    def __init__(self, socket: Socket, events: SocketEvents) -> None:
        self._socket, self._events = socket, events

    async def write(self, data: bytes) -> None:
        try:
            await self._socket.send(data, copy=False)
        except zmq.ZMQError as error:
            raise Unavailable(f"the connection has ended: {event_in_words(error)}") from None

    async def finish(self) -> None:
        """Goodbye says it all."""

    async def ended(self) -> None:
        await self._events.down.wait()

    async def hang_up(self) -> None:
        self._events.close()


class ZmqDialer:
    """Dials in the name of `sender`. With an inbox, a link that breaks is told there as Lost."""

    def __init__(
        self,
        sender: str,
        sockets: Sockets,
        inbox: Inbox | None = None,
        patience: float = DIAL_SECONDS,
        tls: Tls = PLAIN,
    ) -> None:
        self._sender, self._sockets, self._inbox = sender, sockets, inbox
        self._patience, self._tls = patience, tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> SendingEnd:
        """Raises Unavailable (nobody there), Refused (a peer of another protocol), WireError."""
        keys = None if address.startswith("unix:") else Keys.made()
        shown = keys.public if keys else b""
        name, place = await negotiate(address, self._sender, epoch, shown, kind, self._patience, self._tls)
        endpoint = endpoint_of(address, place)
        socket = self._sockets.sending(keys, place.key)
        events = SocketEvents(socket, sending=True)
        wire = ZmqWire(socket, events)
        try:
            await self._connect(socket, events, endpoint)
            await wire.write(self._hello(epoch))
        except BaseException:
            events.close()
            raise
        return SendingEnd(wire, name, epoch, self._inbox)

    async def _connect(self, socket: Socket, events: SocketEvents, endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise Unavailable(f"cannot connect to {endpoint}: {event_in_words(error)}") from None
        waits = [asyncio.create_task(event.wait()) for event in (events.up, events.down)]
        await asyncio.wait(waits, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if events.down.is_set() or not events.up.is_set():
            raise Unavailable(f"nobody answers by ZMQ at {endpoint}")

    def _hello(self, epoch: int) -> bytes:
        """The same once more, so that the peer knows which of its connections is this one."""
        hello = ring_pb2.Hello(sender=self._sender, epoch=epoch, protocol=PROTOCOL)
        return ring_pb2.CarryRequest(hello=hello).SerializeToString()


def endpoint_of(address: str, place: Endpoint) -> str:
    """Where to connect: what was reached by TCP names a port there, and only a unix socket's peer a path."""
    if address.startswith("unix:") != (place.path is not None):
        raise WireError(f"{address} named {'a path' if place.path else 'a port'}, which is not where it is")
    if place.path is not None:
        return f"ipc://{place.path}"
    host, _ = split_address(address)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{place.port}"
