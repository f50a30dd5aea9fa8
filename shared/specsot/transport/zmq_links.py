"""Links over ZMQ: sockets with limits, heartbeats and keys, the sending end, a host of receiving sockets.

Peers negotiate over gRPC first, and then connect to the endpoint that was named there. A process has a single
ZMQ context. A socket serves one link and is never connected twice.
"""

from __future__ import annotations

import asyncio
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
from specsot.transport.grpc_channel import DIAL_SECONDS, HANDSHAKE_SECONDS, LINK, RING_BYTES, Keepalive
from specsot.transport.grpc_links import negotiate
from specsot.transport.grpc_server import reason, split_address
from specsot.transport.link_ends import Peer, Receiver, SendingEnd, hello_of
from specsot.transport.links import Inbox
from specsot.transport.security import PLAIN, Tls
from specsot.transport.wire.schema import parse
from specsot.transport.wires import Places, Wire
from specsot.v1 import ring_pb2

Socket = zmq.asyncio.Socket

# Messages of at most 1 MiB. Bounds the ZMQ queue of each end; more messages wait in the link's own queue.
# Untuned.
MAX_WAITING = 16
# Bytes. Length of a CURVE key in Z85 encoding.
KEY_BYTES = 40
# The events after which a socket's connection is closed, or could not be opened.
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
    def generate(cls) -> Keys:
        """Return a new key pair."""
        return cls(*zmq.curve_keypair())


def checked_key(key: bytes) -> bytes:
    """Return a peer's public key unchanged. Raises WireError if its length is wrong.

    key: the key in Z85 encoding.
    """
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
        """Return whether a peer may connect: True only for the peer's key. The name of the method is given by
        pyzmq.

        domain: the socket's ZAP domain, which is not needed.
        key: the public key that the connecting peer has proved to own, in Z85 encoding.
        """
        return key == self.key


class Sockets:
    """Creates ZMQ sockets. The ZMQ context of the process is created with the first one."""

    def __init__(self, keepalive: Keepalive | None = None, largest: int = RING_BYTES) -> None:
        """Set the limits of all sockets that are created later.

        keepalive: when a silent connection counts as broken. None: `LINK`.
        largest: bytes of the largest message that is accepted.
        """
        self._keepalive = keepalive or LINK
        self._largest = largest
        self._context: zmq.asyncio.Context | None = None
        self._authenticator: AsyncioAuthenticator | None = None

    def sending(self, own_keys: Keys | None = None, peer_key: bytes = b"") -> Socket:
        """Return a socket that sends, not connected yet.

        own_keys: CURVE keys of this end. None for ipc, which the operating system protects.
        peer_key: public CURVE key of the receiving end; needed with `own_keys`. Raises WireError if its
            length is wrong.

        At most MAX_WAITING messages are queued in the socket. The socket never reconnects.
        """
        socket = self._new_socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MAX_WAITING)
        # A broken link is lost, because frames are never sent again, so the socket must not reconnect.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if own_keys:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own_keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own_keys.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, checked_key(peer_key))
        return socket

    def receiving(self, name: str, own_keys: Keys | None = None, peer_key: bytes = b"") -> Socket:
        """Return a socket that receives, not bound yet.

        name: a name for the socket, with which `forget` is called later.
        own_keys: CURVE keys of this end. None for ipc, which the operating system protects.
        peer_key: public CURVE key of the only peer that may connect.

        The peer's key is not checked for ipc. At most MAX_WAITING messages are queued in the socket.
        """
        socket = self._new_socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        if own_keys:
            self._admit_only(name, Guest(peer_key))
            socket.setsockopt(zmq.ZAP_DOMAIN, name.encode())
            # Connections are rejected if the authenticator does not run.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own_keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own_keys.secret)
        return socket

    def forget(self, name: str) -> None:
        """Remove the key check of a socket that is closed. Does nothing if there is none.

        name: the name with which the socket was created.
        """
        if self._authenticator:
            self._authenticator.credentials_providers.pop(name, None)

    def close(self) -> None:
        """Stop the key checks and drop the ZMQ context with all its sockets. Unsent messages are lost.

        May be called again, and does nothing if no socket was created. A socket that is created later gets a
        new context.
        """
        if self._authenticator:
            self._authenticator.stop()
        if self._context:
            self._context.destroy(linger=0)
        self._authenticator = self._context = None

    def _new_socket(self, kind: int) -> Socket:
        """Return a new socket whose end sends heartbeats, and whose connection ends if the peer is silent.

        kind: the ZMQ socket type, zmq.PUSH or zmq.PULL.

        The first call creates the ZMQ context. Unsent messages of the socket are dropped when it is closed.
        """
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._largest)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._keepalive.every * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._keepalive.answer * 1000))
        socket.setsockopt(zmq.TCP_MAXRT, int(self._keepalive.patience * 1000))
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _admit_only(self, name: str, guest: Guest) -> None:
        """Let only one peer connect to a socket. The first call starts the authenticator.

        name: the socket's name, which is also its ZAP domain.
        guest: checks the peer's key.

        All other peers fail in the handshake.
        """
        if self._authenticator is None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
        self._authenticator.configure_curve_callback(name, guest)


class SocketEvents:
    """Follows the connection of a ZMQ socket: whether it is open, and whether it has ended.

    Over TCP, other hosts may try to connect to a receiving end; `follow_only` names the descriptor of the
    peer's connection. At a receiving end, only disconnections after `up` count: before that, descriptors of
    other connections are closed, whose numbers the peer's connection may get, and other failures have no
    descriptor.

    up: set once the connection is open.
    down: set once the connection is closed, or could not be opened.
    """

    def __init__(self, socket: Socket, sending: bool) -> None:
        """Start to follow a socket.

        socket: the socket to follow.
        sending: True for a sending end, which has a single connection, so that any failure sets `down`.

        Starts a task that follows the socket, on the running event loop. If the task fails, `down` is set.
        """
        self._socket = socket
        self._ours = None if sending else -1
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self._ended: set[int] = set()
        self._monitor: Socket = socket.get_monitor_socket(FAILURES | zmq.Event.HANDSHAKE_SUCCEEDED)
        self._following = start(self._follow(self._monitor), lambda _: self.down.set())

    def follow_only(self, descriptor: int) -> None:
        """Name the descriptor of the peer's connection, whose end sets `down`; at once if it has ended
        already.

        descriptor: the connection's file descriptor, as ZMQ names it in messages and events.

        `up` does not change.
        """
        self._ours = descriptor
        if descriptor in self._ended:
            self.down.set()

    def close(self) -> None:
        """Close the socket and its monitor, which pyzmq would leave open. Unsent messages are dropped.

        Sets `down`. A socket that is closed already stays so.
        """
        self._following.cancel()
        self.down.set()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        self._monitor.close(linger=0)

    async def _follow(self, monitor: Socket) -> None:
        """Set `up` and `down` as the events of the socket arrive, without end.

        monitor: the socket's monitor, which delivers its events.

        At a sending end, any failure sets `down`. At a receiving end, only the end of the peer's connection
        does.
        """
        while True:
            pending_event = recv_monitor_message(monitor)
            assert isinstance(pending_event, Awaitable)
            message = await pending_event
            if message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.up.set()
            elif self._ours is None:
                self.down.set()
            elif message["event"] == zmq.Event.DISCONNECTED and self.up.is_set():
                self._end(int(message["value"]))

    def _end(self, descriptor: int) -> None:
        """Record that a connection has ended, and set `down` if it is the peer's.

        descriptor: the connection's file descriptor.
        """
        self._ended.add(descriptor)
        if descriptor == self._ours:
            self.down.set()


class ZmqWire(Wire):
    """The sending socket of one link as a `Wire`."""

    def __init__(self, socket: Socket, events: SocketEvents) -> None:
        """Wrap a connected socket.

        socket: the connected sending socket.
        events: the events of the same socket; closing them closes the socket.
        """
        self._socket = socket
        self._events = events

    async def write(self, data: bytes) -> None:
        """Send one message. Returns when ZMQ has queued it. Raises Unavailable if the connection has ended.

        data: the bytes of one CarryRequest.
        """
        try:
            await self._socket.send(data, copy=False)
        except zmq.ZMQError as error:
            raise Unavailable(f"the connection has ended: {reason(error)}") from None

    async def finish(self) -> None:
        """Do nothing: the goodbye message already declares the end."""

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        await self._events.down.wait()

    async def hang_up(self) -> None:
        """Close the socket. Unsent messages are dropped."""
        self._events.close()


class ZmqDialer:
    """Opens links over ZMQ in the name of one member. Puts `Lost` into its inbox, if any, if one breaks."""

    def __init__(self, sender: str, sockets: Sockets, inbox: Inbox | None = None, tls: Tls = PLAIN) -> None:
        """Create a dialer.

        sender: name of the dialing member.
        sockets: creates the sockets of the process.
        inbox: where `Lost` is put if a link breaks. None: the loss is not reported.
        tls: the TLS files of the dialing member, for the gRPC call that negotiates the link.

        Nothing is opened before `dial`.
        """
        self._sender = sender
        self._sockets = sockets
        self._inbox = inbox
        self._tls = tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> SendingEnd:
        """Open a link to a member over ZMQ, after negotiating it over gRPC, and return its sending end.

        address: the member's address, host:port or unix:path.
        epoch: number of the epoch to which the link belongs.
        kind: what the member must be, "worker" or "drafter".

        Raises Unavailable if the peer cannot be reached, Refused if it has another protocol version, and
        WireError if its answer is invalid.

        Over a unix address, the link is not encrypted, because the operating system protects it. Raises
        Refused also if the peer accepts no ZMQ links. The socket is closed before an error is raised.
        """
        keys = None if address.startswith("unix:") else Keys.generate()
        public_key = keys.public if keys else b""
        place = await negotiate(address, self._sender, epoch, public_key, kind, tls=self._tls)
        endpoint = endpoint_of(address, place)
        socket = self._sockets.sending(keys, place.key)
        events = SocketEvents(socket, sending=True)
        wire = ZmqWire(socket, events)
        try:
            await self._connect(socket, events, endpoint)
            # The hello was sent over gRPC already. This one identifies the connection of
            # this link to the peer.
            hello = ring_pb2.CarryRequest(hello=hello_of(self._sender, epoch))
            await wire.write(hello.SerializeToString())
        except BaseException:
            events.close()
            raise
        return SendingEnd(wire, place.name, epoch, self._inbox)

    async def _connect(self, socket: Socket, events: SocketEvents, endpoint: str) -> None:
        """Connect a socket and wait until the connection is open. Raises Unavailable if it does not open in
        time.

        socket: the sending socket.
        events: the events of the socket.
        endpoint: the ZMQ endpoint, tcp://host:port or ipc://path.

        Raises Unavailable also for an invalid endpoint and for a connection that fails, such as by its key.
        The wait is at most DIAL_SECONDS.
        """
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise Unavailable(f"cannot connect to {endpoint}: {reason(error)}") from None
        waits = [asyncio.create_task(event.wait()) for event in (events.up, events.down)]
        await asyncio.wait(waits, timeout=DIAL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if events.down.is_set() or not events.up.is_set():
            raise Unavailable(f"no ZMQ peer answers at {endpoint}")


def endpoint_of(address: str, endpoint: ring_pb2.MeetResponse) -> str:
    """Return the ZMQ endpoint to connect to: tcp://host:port or ipc://path.

    address: where the peer was reached over gRPC. A peer at a TCP address must name a port, a peer at a unix
        socket a path; otherwise WireError is raised.
    endpoint: the endpoint that the peer named.

    An IPv6 host is in brackets in the result. Raises Unavailable for an address that is neither unix:path nor
    host:port.
    """
    if address.startswith("unix:") != endpoint.HasField("path"):
        raise WireError(
            f"{address} named {'a path' if endpoint.path else 'a port'}, which is not where it is"
        )
    if endpoint.HasField("path"):
        return f"ipc://{endpoint.path}"
    host, _ = split_address(address)
    return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.port}"


class ZmqHost:
    """The receiving ends of a member's links over ZMQ.

    If the member listens at a unix socket, links connect to paths that are private to its user. Otherwise,
    links connect to ports of the same host, and CURVE admits only the peer's key.
    """

    def __init__(
        self, listen: str, inbox: Inbox, sockets: Sockets, timeout_seconds: float = DIAL_SECONDS
    ) -> None:
        """Create a host without links.

        listen: the address on which the member's gRPC server listens.
        inbox: where received messages are put.
        sockets: creates the sockets of the process.
        timeout_seconds: seconds to wait for a peer to connect to its endpoint.

        For a unix address, paths of links are in a private folder next to the path of `listen`; otherwise the
        system's directory for temporary files is used.
        """
        self._listen = listen
        self._inbox = inbox
        self._sockets = sockets
        self._timeout_seconds = timeout_seconds
        parent = Path(listen.removeprefix("unix:")).parent if listen.startswith("unix:") else None
        self._places = Places("links", parent)
        self._links: set[asyncio.Task[None]] = set()

    async def expect(self, peer: Peer, key: bytes) -> ring_pb2.MeetResponse:
        """Open and return an endpoint for one link from this peer.

        peer: the peer that will connect.
        key: the peer's public CURVE key. Empty over a unix socket.

        Raises WireError if the key is invalid, Overloaded if there are too many links, and Unavailable if the
        socket cannot be bound.

        Raises OSError if the host of `listen` is unknown. The name is freed before an error is raised.
        """
        place = self._places.allocate(nearby := self._listen.startswith("unix:"))
        try:
            if nearby:
                socket = self._sockets.receiving(place.name)
                return ring_pb2.MeetResponse(path=self._settle(place, peer, socket, f"ipc://{place}"))
            guest, keys, interface = checked_key(key), Keys.generate(), await self._interface()
            socket = self._sockets.receiving(place.name, keys, guest)
            bound = self._settle(place, peer, socket, f"tcp://{interface}:*")
            return ring_pb2.MeetResponse(port=int(bound.rpartition(":")[2]), key=keys.public)
        except BaseException:
            self._places.free(place)
            raise

    def _settle(self, place: Path, peer: Peer, socket: Socket, endpoint: str) -> str:
        """Bind the socket, start its link, and return the bound path, or the bound address with its port.

        place: the allocated name, which is freed when the link ends.
        peer: the peer that will connect.
        socket: the receiving socket.
        endpoint: the ZMQ endpoint to bind, with "*" for any free port.

        Raises Unavailable if the socket cannot be bound.

        The link is received in a task. If binding fails, the socket is closed.
        """
        events = SocketEvents(socket, sending=False)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            events.close()
            self._sockets.forget(place.name)
            raise Unavailable(f"cannot listen at {endpoint}: {reason(error)}") from None
        link = start(self._attend(place, socket, events, Receiver(peer, self._inbox)))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0").removeprefix("ipc://")

    async def _attend(self, place: Path, socket: Socket, events: SocketEvents, receiver: Receiver) -> None:
        """Receive one link from the peer's connection to its end.

        A peer that does not connect in time notices that by its own timeout.

        place: the allocated name of the socket, which is freed at the end.
        socket: the bound socket, which is closed at the end.
        events: the events of the socket.
        receiver: gets the messages.

        An invalid or forbidden message ends the link; the receiver puts `Lost` into the inbox. If the peer
        does not connect in time, or its first message is no hello, nothing is put into the inbox.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await _read_hello(socket, events)
            with receiver:
                await self._receive_all(socket, events, receiver)
        except (TimeoutError, WireError, Refused):
            pass  # The receiver has reported the error, and the peer notices that the connection is closed.
        finally:
            events.close()
            self._sockets.forget(place.name)
            self._places.free(place)

    async def _receive_all(self, socket: Socket, events: SocketEvents, receiver: Receiver) -> None:
        """Receive until the goodbye, or until the connection has ended and all its messages are read.

        socket: the bound socket.
        events: the events of the socket.
        receiver: gets the messages.

        Raises WireError or Refused if a message is invalid or not allowed.

        Reading and waiting stop before this returns or raises.
        """
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
        """End all links and delete their sockets.

        Errors of the links are ignored. Each link that is cut is reported as lost by its receiver.
        """
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        self._places.close()

    async def _interface(self) -> str:
        """Return the address of `listen` in numbers, as ZMQ needs it; that of all interfaces if `listen`
        names no host. Raises OSError if the host is unknown.

        An IPv6 address is in brackets. If the host has several addresses, the first one is returned.
        """
        host, _ = split_address(self._listen)
        found: list[Any] = await asyncio.get_running_loop().getaddrinfo(
            host or "0.0.0.0", None, type=sockets_of_the_system.SOCK_STREAM
        )
        address = str(found[0][4][0])
        return f"[{address}]" if ":" in address else address


async def _read_hello(socket: Socket, events: SocketEvents) -> None:
    """Receive the hello, which identifies the peer among the socket's connections.

    socket: the bound socket.
    events: the events of the socket, which follow only that connection from now on.

    Raises WireError if the first message is no hello.

    Raises WireError also if the message cannot be decoded. Waits without limit.
    """
    frame = await socket.recv(copy=False)
    if not _request(frame).HasField("hello"):
        raise WireError("the first message must be hello")
    events.follow_only(frame.get(zmq.SRCFD))


async def _read(socket: Socket, receiver: Receiver) -> None:
    """Pass on messages until the peer has sent its goodbye. Raises WireError or Refused for an invalid
    message.

    socket: the bound socket.
    receiver: gets the messages.
    """
    while not receiver.over:
        receiver.receive(_request(await socket.recv(copy=False)))


async def _drain(socket: Socket, events: SocketEvents) -> None:
    """Wait until the connection has ended and all its messages are read.

    socket: the bound socket.
    events: the events of the socket.

    Messages that arrive later are not waited for. The messages are read by another task.
    """
    await events.down.wait()
    while await socket.poll(0):  # noqa: ASYNC110 - ZMQ has no event for an empty queue
        await asyncio.sleep(0)


def _request(frame: zmq.Frame) -> ring_pb2.CarryRequest:
    """Return the message of a ZMQ frame. Raises WireError if it has several parts or cannot be decoded.

    frame: the received frame.
    """
    if frame.more:
        raise WireError("the message has several parts, where one is allowed")
    return parse(ring_pb2.CarryRequest, frame.bytes)
