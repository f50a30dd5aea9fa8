"""Links over ZMQ: the sending end, and a host that opens a receiving socket for each peer.

Peers meet over gRPC first, and then connect to the endpoint named there.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import socket as sockets_of_the_system
import tempfile
from pathlib import Path
from typing import Any

import zmq

from specsot.errors import Overloaded, Refused, Unavailable, WireError
from specsot.members import PROTOCOL, Kind
from specsot.tasks import start
from specsot.transport.grpc_channel import DIAL_SECONDS
from specsot.transport.grpc_links import Endpoint, Peer, Receiver, SendingEnd, negotiate
from specsot.transport.grpc_server import reason, split_address
from specsot.transport.links import Inbox
from specsot.transport.security import PLAIN, Tls
from specsot.transport.wire.schema import parse
from specsot.transport.zmq_sockets import Keys, Socket, SocketEvents, Sockets, checked_key, event_in_words
from specsot.v1 import ring_pb2


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


MOST_LINKS = 256  # to one member at once


class ZmqHost:
    """Where members of this machine meet it at a unix socket, places are paths that only its user may enter;
    elsewhere they are ports of the same host, and CURVE lets the expected key in alone.
    """

    def __init__(self, listen: str, inbox: Inbox, sockets: Sockets, patience: float = DIAL_SECONDS) -> None:
        self._listen, self._inbox, self._sockets, self._patience = listen, inbox, sockets, patience
        self._folder: str | None = None
        self._numbers = itertools.count()
        self._links: set[asyncio.Task[None]] = set()

    async def expect(self, peer: Peer, key: bytes) -> Endpoint:
        """A place for one link. Raises WireError, Overloaded, Unavailable."""
        if len(self._links) >= MOST_LINKS:
            raise Overloaded(f"{len(self._links)} links come in already, {MOST_LINKS} are allowed")
        name = f"link-{next(self._numbers)}"
        if self._listen.startswith("unix:"):
            return self._settle(name, peer, None, f"ipc://{self._path()}/{name}")
        self._sockets.guests.admit(name, checked_key(key))
        return self._settle(name, peer, Keys.made(), f"tcp://{await self._interface()}:*")

    def _settle(self, name: str, peer: Peer, keys: Keys | None, endpoint: str) -> Endpoint:
        socket = self._sockets.receiving(name, keys)
        events = SocketEvents(socket, sending=False)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            events.close()
            self._sockets.forget(name)
            raise Unavailable(f"cannot listen at {endpoint}: {event_in_words(error)}") from None
        link = start(self._attend(name, socket, events, Receiver(peer, self._inbox)))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        if keys is None:
            return Endpoint(path=bound.decode().rstrip("\0").removeprefix("ipc://"))
        return Endpoint(port=int(bound.decode().rstrip("\0").rpartition(":")[2]), key=keys.public)

    async def _attend(self, name: str, socket: Socket, events: SocketEvents, ear: Receiver) -> None:
        """One link, from its peer's coming to its end. Who never comes is told by its own patience."""
        try:
            async with asyncio.timeout(self._patience):
                await _welcome(socket, events)
            with ear:
                await self._listen_to(socket, events, ear)
        except (TimeoutError, WireError, Refused):
            pass  # the ear has told; the peer hears it by our hanging up
        finally:
            events.close()
            self._sockets.forget(name)

    async def _listen_to(self, socket: Socket, events: SocketEvents, ear: Receiver) -> None:
        """Until goodbye, or the end of the connection and of all that came before it."""
        reading = asyncio.create_task(_read(socket, ear))
        ending = asyncio.create_task(_drain(socket, events))
        try:
            await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            ending.cancel()

    async def close(self) -> None:
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self) -> str:
        """A folder beside the unix socket, for this user alone. Raises Unavailable."""
        if self._folder is None:
            beside = Path(self._listen.removeprefix("unix:")).parent
            try:
                self._folder = tempfile.mkdtemp(prefix="zmq-", dir=beside)
            except OSError as error:
                raise Unavailable(f"no place for links in {beside}: {reason(error)}") from None
        return self._folder

    async def _interface(self) -> str:
        """The address of `listen`, as ZMQ wants it: numbers."""
        host, _ = split_address(self._listen)
        found: list[Any] = await asyncio.get_running_loop().getaddrinfo(
            host or "0.0.0.0", None, type=sockets_of_the_system.SOCK_STREAM
        )
        address = str(found[0][4][0])
        return f"[{address}]" if ":" in address else address


async def _welcome(socket: Socket, events: SocketEvents) -> None:
    """The peer's first word tells which connection is its own."""
    frame = await socket.recv(copy=False)
    if not _request(frame).HasField("hello"):
        raise WireError("the first message must be hello")
    events.only(frame.get(zmq.SRCFD))


async def _read(socket: Socket, ear: Receiver) -> None:
    while not ear.over:
        ear.hear(_request(await socket.recv(copy=False)))


async def _drain(socket: Socket, events: SocketEvents) -> None:
    """Returns when the connection has ended and everything that came over it is read."""
    await events.down.wait()
    while await socket.poll(0):  # noqa: ASYNC110 - ZMQ tells by no event that a queue is empty
        await asyncio.sleep(0)


def _request(frame: zmq.Frame) -> ring_pb2.CarryRequest:
    if frame.more:
        raise WireError("a message of several parts")
    return parse(ring_pb2.CarryRequest, frame.bytes)
