"""Links over ZMQ: sockets with limits, heartbeats and keys, the sending end, a host of receiving sockets.

Peers negotiate over gRPC first, and then connect to the endpoint that was named there. A process has a single
ZMQ context. A socket serves one link and is never connected twice.
"""

from __future__ import annotations

import asyncio
import os
import socket as sockets_of_the_system
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from specsot.errors import Refused, Unavailable, WireError
from specsot.members import Kind
from specsot.tasks import start
from specsot.transport.grpc_channel import DIAL_SECONDS, HANDSHAKE, LINK, RING_BYTES, Keepalive
from specsot.transport.grpc_links import negotiate
from specsot.transport.grpc_server import split_address
from specsot.transport.link_ends import Endpoint, Peer, Receiver, SendingEnd, hello_of
from specsot.transport.links import Inbox
from specsot.transport.security import PLAIN, Tls
from specsot.transport.wire.schema import parse
from specsot.transport.wires import Places, Wire
from specsot.v1 import ring_pb2

Socket = zmq.asyncio.Socket

# Messages of at most 1 MiB. Bounds the ZMQ queue of each end; more messages wait in the link's own queue.
# Untuned.
MOST_WAITING = 16
# Bytes. Length of a CURVE key in Z85 encoding.
KEY_BYTES = 40
FAILURES = (
    zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, which is created for one link and never stored.

    public: the public key, in Z85 encoding.
    secret: the secret key, in Z85 encoding.
    """

    public: bytes
    secret: bytes

    @classmethod
    def made(cls) -> Keys:
        """Return a new key pair."""
        return cls(*zmq.curve_keypair())


def checked_key(key: bytes) -> bytes:
    """Return a peer's public key. Raises WireError if its length is wrong."""
    if len(key) != KEY_BYTES:
        raise WireError(f"a CURVE key has {KEY_BYTES} bytes, got {len(key)}")
    return key


@dataclass(frozen=True, slots=True)
class Guest:
    """The check that libzmq runs before a CURVE handshake succeeds: only one peer may connect.

    key: the peer's public key.
    """

    key: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether `key` may connect. The name of the method is given by pyzmq."""
        return key == self.key


class Sockets:
    """Creates sockets. The ZMQ context is created with the first one."""

    def __init__(self, keepalive: Keepalive | None = None, largest: int = RING_BYTES) -> None:
        self._keepalive = keepalive or LINK
        self._largest = largest
        self._context: zmq.asyncio.Context | None = None
        self._authenticator: AsyncioAuthenticator | None = None

    def sending(self, own: Keys | None = None, there: bytes = b"") -> Socket:
        """Return a socket that sends.

        own: CURVE keys of this end. None for ipc, which the operating system protects.
        there: public CURVE key of the receiving end.
        """
        socket = self._made(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        # A broken link is lost, because frames are never sent again, so the socket must not reconnect.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if own:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, checked_key(there))
        return socket

    def receiving(self, place: str, own: Keys | None = None, guest: bytes = b"") -> Socket:
        """Return a socket that receives.

        place: a name for the socket, with which `forget` is called later.
        own: CURVE keys of this end. None for ipc, which the operating system protects.
        guest: public CURVE key of the only peer that may connect.
        """
        socket = self._made(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        if own:
            self._ask_for(place, Guest(guest))
            socket.setsockopt(zmq.ZAP_DOMAIN, place.encode())
            # Connections are rejected if the authenticator does not run.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        return socket

    def forget(self, place: str) -> None:
        """Remove the key check of a socket that is closed."""
        if self._authenticator:
            self._authenticator.credentials_providers.pop(place, None)

    def close(self) -> None:
        if self._authenticator:
            self._authenticator.stop()
        if self._context:
            self._context.destroy(linger=0)
        self._authenticator = self._context = None

    def _made(self, kind: int) -> Socket:
        """Create a socket whose end sends heartbeats, and whose connection ends if the peer is silent."""
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._largest)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._keepalive.every * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._keepalive.answer * 1000))
        socket.setsockopt(zmq.TCP_MAXRT, int(self._keepalive.patience * 1000))
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _ask_for(self, place: str, guest: Guest) -> None:
        if self._authenticator is None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
        self._authenticator.configure_curve_callback(place, guest)


class SocketEvents:
    """Follows the connection of a socket.

    Over TCP, other hosts may try to connect to a receiving end; `only` names the descriptor of the peer's
    connection. At a receiving end, only disconnections after `up` count: before that, descriptors of other
    connections are closed, whose numbers the peer's connection may get, and other failures have no
    descriptor.

    up: set once the connection is open.
    down: set once the connection is closed, or could not be opened.
    """

    def __init__(self, socket: Socket, sending: bool) -> None:
        self._socket = socket
        self._ours = None if sending else -1
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self._ended: set[int] = set()
        self._monitor: Socket = socket.get_monitor_socket(FAILURES | zmq.Event.HANDSHAKE_SUCCEEDED)
        self._following = start(self._follow(self._monitor), lambda _: self.down.set())

    def only(self, descriptor: int) -> None:
        """Name the descriptor of the peer's connection, whose end sets `down`."""
        self._ours = descriptor
        if descriptor in self._ended:
            self.down.set()

    def close(self) -> None:
        """Close the socket and its monitor, which pyzmq would leave open. Unsent messages are dropped."""
        self._following.cancel()
        self.down.set()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        self._monitor.close(linger=0)

    async def _follow(self, monitor: Socket) -> None:
        while True:
            news = recv_monitor_message(monitor)
            assert isinstance(news, Awaitable)
            message = await news
            if message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.up.set()
            elif self._ours is None:
                self.down.set()
            elif message["event"] == zmq.Event.DISCONNECTED and self.up.is_set():
                self._end(int(message["value"]))

    def _end(self, descriptor: int) -> None:
        self._ended.add(descriptor)
        if descriptor == self._ours:
            self.down.set()


def event_in_words(error: zmq.ZMQError) -> str:
    """Return the reason of a ZMQ error in words."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


class ZmqWire(Wire):
    """The sending socket of one link as a `Wire`."""

    def __init__(self, socket: Socket, events: SocketEvents) -> None:
        self._socket = socket
        self._events = events

    async def write(self, data: bytes) -> None:
        try:
            await self._socket.send(data, copy=False)
        except zmq.ZMQError as error:
            raise Unavailable(f"the connection has ended: {event_in_words(error)}") from None

    async def finish(self) -> None:
        """Do nothing: the goodbye message already declares the end."""

    async def wait_closed(self) -> None:
        await self._events.down.wait()

    async def hang_up(self) -> None:
        self._events.close()


class ZmqDialer:
    """Opens links over ZMQ in the name of `sender`. If a link breaks, `Lost` is put into the inbox, if
    any.
    """

    def __init__(self, sender: str, sockets: Sockets, inbox: Inbox | None = None, tls: Tls = PLAIN) -> None:
        self._sender = sender
        self._sockets = sockets
        self._inbox = inbox
        self._tls = tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> SendingEnd:
        """See `Dialer.dial`.

        Raises Unavailable if the peer cannot be reached, Refused if it has another protocol version, and
        WireError if its answer is invalid.
        """
        keys = None if address.startswith("unix:") else Keys.made()
        shown = keys.public if keys else b""
        name, place = await negotiate(address, self._sender, epoch, shown, kind, tls=self._tls)
        endpoint = endpoint_of(address, place)
        socket = self._sockets.sending(keys, place.key)
        events = SocketEvents(socket, sending=True)
        wire = ZmqWire(socket, events)
        try:
            await self._connect(socket, events, endpoint)
            # The hello was sent over gRPC already. This one tells the peer which of its connections is this
            # link.
            hello = ring_pb2.CarryRequest(hello=hello_of(self._sender, epoch))
            await wire.write(hello.SerializeToString())
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
        await asyncio.wait(waits, timeout=DIAL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if events.down.is_set() or not events.up.is_set():
            raise Unavailable(f"nobody answers by ZMQ at {endpoint}")


def endpoint_of(address: str, place: Endpoint) -> str:
    """Return the ZMQ endpoint to connect to.

    address: where the peer was reached over gRPC. A peer at a TCP address must name a port, a peer at a unix
        socket a path; otherwise WireError is raised.
    """
    if address.startswith("unix:") != (place.path is not None):
        raise WireError(f"{address} named {'a path' if place.path else 'a port'}, which is not where it is")
    if place.path is not None:
        return f"ipc://{place.path}"
    host, _ = split_address(address)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{place.port}"


class ZmqHost:
    """The receiving ends of a member's links over ZMQ.

    If the member listens at a unix socket, links connect to paths that are private to its user. Otherwise,
    links connect to ports of the same host, and CURVE admits only the peer's key.
    """

    def __init__(self, listen: str, inbox: Inbox, sockets: Sockets, patience: float = DIAL_SECONDS) -> None:
        self._listen = listen
        self._inbox = inbox
        self._sockets = sockets
        self._patience = patience
        beside = Path(listen.removeprefix("unix:")).parent if listen.startswith("unix:") else None
        self._places = Places("links", beside)
        self._links: set[asyncio.Task[None]] = set()

    async def expect(self, peer: Peer, key: bytes) -> Endpoint:
        """Open an endpoint for one link from this peer, whose public key is `key`.

        Raises WireError if the key is invalid, Overloaded if there are too many links, and Unavailable if the
        socket cannot be bound.
        """
        place = self._places.take(nearby := self._listen.startswith("unix:"))
        try:
            if nearby:
                socket = self._sockets.receiving(place.name)
                return Endpoint(path=self._settle(place, peer, socket, f"ipc://{place}"))
            guest, keys, interface = checked_key(key), Keys.made(), await self._interface()
            socket = self._sockets.receiving(place.name, keys, guest)
            bound = self._settle(place, peer, socket, f"tcp://{interface}:*")
            return Endpoint(port=int(bound.rpartition(":")[2]), key=keys.public)
        except BaseException:
            self._places.give_back(place)
            raise

    def _settle(self, place: Path, peer: Peer, socket: Socket, endpoint: str) -> str:
        """Bind the socket, start its link, and return the bound path, or the bound address with its port."""
        events = SocketEvents(socket, sending=False)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            events.close()
            self._sockets.forget(place.name)
            raise Unavailable(f"cannot listen at {endpoint}: {event_in_words(error)}") from None
        link = start(self._attend(place, socket, events, Receiver(peer, self._inbox)))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0").removeprefix("ipc://")

    async def _attend(self, place: Path, socket: Socket, events: SocketEvents, receiver: Receiver) -> None:
        """Receive one link from the peer's connection to its end.

        A peer that does not connect in time notices that by its own timeout.
        """
        try:
            async with asyncio.timeout(self._patience):
                await _welcome(socket, events)
            with receiver:
                await self._listen_to(socket, events, receiver)
        except (TimeoutError, WireError, Refused):
            pass  # The receiver has reported the error, and the peer notices that the connection is closed.
        finally:
            events.close()
            self._sockets.forget(place.name)
            self._places.give_back(place)

    async def _listen_to(self, socket: Socket, events: SocketEvents, receiver: Receiver) -> None:
        """Receive until the goodbye, or until the connection has ended and all its messages are read."""
        reading = asyncio.create_task(_read(socket, receiver))
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
        self._places.close()

    async def _interface(self) -> str:
        """Return the address of `listen` in numbers, as ZMQ needs it."""
        host, _ = split_address(self._listen)
        found: list[Any] = await asyncio.get_running_loop().getaddrinfo(
            host or "0.0.0.0", None, type=sockets_of_the_system.SOCK_STREAM
        )
        address = str(found[0][4][0])
        return f"[{address}]" if ":" in address else address


async def _welcome(socket: Socket, events: SocketEvents) -> None:
    """Receive the hello, which tells which of the socket's connections is the peer's."""
    frame = await socket.recv(copy=False)
    if not _request(frame).HasField("hello"):
        raise WireError("the first message must be hello")
    events.only(frame.get(zmq.SRCFD))


async def _read(socket: Socket, receiver: Receiver) -> None:
    while not receiver.over:
        receiver.receive(_request(await socket.recv(copy=False)))


async def _drain(socket: Socket, events: SocketEvents) -> None:
    """Wait until the connection has ended and all its messages are read."""
    await events.down.wait()
    while await socket.poll(0):  # noqa: ASYNC110 - ZMQ tells by no event that a queue is empty
        await asyncio.sleep(0)


def _request(frame: zmq.Frame) -> ring_pb2.CarryRequest:
    if frame.more:
        raise WireError("a message of several parts")
    return parse(ring_pb2.CarryRequest, frame.bytes)
