"""Links within one machine over a unix socket that only this user's processes can connect to.

The peers negotiate the socket over gRPC. A message travels as its length (4 bytes, little endian) and its
bytes: the message "abc" is the bytes 03 00 00 00 61 62 63. The compute thread writes a message without
waiting for the event loop; what the socket does not accept at once, the event loop writes later.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, cast

from google.protobuf.message import Message

from specsot.errors import Refused, Unavailable, WireError
from specsot.tasks import start
from specsot.transport.grpc_channel import DIAL_SECONDS, RING_BYTES
from specsot.transport.grpc_server import reason, split_address
from specsot.transport.wire.schema import require
from specsot.transport.wires import Places, Wire, is_private

# Bytes. The length that precedes each message.
LENGTH = 4
# Seconds. A backlog of messages is passed on for so long; then the event loop does other work, such as
# sending the new text of 64 clients to them. Untuned.
TURN_SECONDS: Final = 0.005


def is_local_socket(address: str) -> bool:
    """Return True if an address is a unix socket or an IP address of this machine. Return False for all other
    IP addresses, and for host names.

    An IP address belongs to this machine if a socket can be bound to it. Returns False for host names.

    address: host:port or unix:path. Raises Unavailable for anything else, such as an address without a port.

    The address of all interfaces and loopback addresses belong to this machine. Nothing is connected.
    """
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    with suppress(OSError, ValueError):
        family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            return True
    return False


class UnixWire(Wire):
    """A connected unix socket, which the compute thread writes to and the event loop waits for."""

    def __init__(self, connected: socket.socket) -> None:
        """Wrap a connected socket. Must be called on the event loop that waits for the socket.

        connected: the connected, non-blocking socket, which `hang_up` closes.
        """
        self._socket = connected
        self._lock = Lock()
        self._loop = asyncio.get_running_loop()
        # Number of coroutines that wait for the socket.
        self._waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def encode(self, request: Message) -> bytes:
        """Return a message as its length and its bytes.

        request: the protobuf message.
        """
        data = request.SerializeToString()
        return len(data).to_bytes(LENGTH, "little") + data

    def write_now(self, data: bytes) -> bytes:
        """Write as much as the socket accepts at once, from any thread, and return the rest: all of `data` if
        the socket accepts nothing now, b"" if it accepts everything.

        data: an encoded message. Raises Unavailable if the connection has ended.
        """
        # If the socket were closed meanwhile, its descriptor could belong to another file.
        with self._lock:
            try:
                return data[self._socket.send(data) :]
            except BlockingIOError:
                return data
            except OSError:
                raise Unavailable("the connection has ended") from None

    async def write(self, data: bytes) -> None:
        """Write everything. Raises Unavailable if the connection has ended.

        data: an encoded message, or the rest of one.

        Waits while the socket accepts nothing. Returns when the system has all bytes, not when the peer has
        read them.
        """
        try:
            with self._using():
                await self._loop.sock_sendall(self._socket, data)
        except OSError:
            raise Unavailable("the connection has ended") from None

    async def finish(self) -> None:
        """End this direction of the connection; does nothing if the connection has ended."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def wait_closed(self) -> None:
        """Wait until the peer has closed the connection. The peer never writes to this socket, so anything
        read is its end.

        Returns also if the connection broke.
        """
        with suppress(OSError), self._using():
            await self._loop.sock_recv(self._socket, 1)

    async def hang_up(self) -> None:
        """Close the connection at once, after all coroutines of this object have stopped using the socket.

        Data that the peer has not read yet may be lost. Operations that wait for the socket fail first.
        """
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        # The event loop must have forgotten the socket's descriptor before the descriptor is free.
        await self._idle.wait()
        with self._lock:
            self._socket.close()

    @contextmanager
    def _using(self) -> Generator[None]:
        """Return a context within which a coroutine waits for the socket, so that it is not closed meanwhile.

        Yields None.

        May be entered by several coroutines at once; `hang_up` waits for all of them.
        """
        self._waiting += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._idle.set()


async def reach_nearby(path: str) -> UnixWire | None:
    """Return a connection to the socket at a path that a peer named, or None.

    Returns None if that fails, or if the path is not private to this user.

    path: path of the unix socket.
    """
    with suppress(OSError):
        return await connect(Path(path)) if is_private(Path(path)) else None
    return None


async def connect(path: Path) -> UnixWire:
    """Connect to the socket at a path, and return the connection.

    path: path of the unix socket.

    Raises OSError if that fails.

    The socket is closed before the error is raised.
    """
    connected = socket.socket(socket.AF_UNIX)
    connected.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connected, str(path))
    except BaseException:
        connected.close()
        raise
    return UnixWire(connected)


class LinkReceiver(Protocol):
    """The interface of what receives the messages of one link.

    over: True once the peer has sent its goodbye.
    """

    over: bool

    def receive_bytes(self, data: bytes) -> None:
        """Receive one message. Raises WireError if it cannot be decoded, Refused if it is not allowed.

        data: the bytes of one CarryRequest.
        """
        ...


# Returns the context that receives the messages of one link.
MakeReceiver = Callable[[], AbstractContextManager[LinkReceiver]]


class _Incoming(asyncio.Protocol):
    """An incoming connection of one link over a unix socket.

    A message is passed on in the same iteration of the event loop in which its last byte arrives, without
    waking a task.
    """

    def __init__(self, connected: asyncio.Future[_Incoming]) -> None:
        """Create the protocol for one connection. Bytes that arrive before there is a receiver are buffered.

        connected: gets this connection as its result, unless another connection came before.
        """
        self._connected = connected
        self._data = bytearray()
        self._link_receiver: LinkReceiver | None = None
        self._loop = connected.get_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the result of the future `connected` to this connection. If another connection came before, or
        the future was cancelled, close this connection instead.

        transport: the connection, as asyncio made it.
        """
        self._transport = cast(asyncio.ReadTransport, transport)
        if self._connected.done():
            transport.close()
        else:
            self._connected.set_result(self)

    def data_received(self, data: bytes) -> None:
        """Buffer bytes, and pass on the messages that they complete once there is a receiver.

        data: the next bytes from the peer.
        """
        self._data += data
        if self._link_receiver:
            self._pass_on_messages(self._link_receiver)

    def connection_lost(self, exc: Exception | None) -> None:
        """End `attend`, because no more messages follow.

        exc: the error that ended the connection, or None.

        Complete messages that have arrived are passed on first.
        """
        if self._link_receiver:
            self._pass_on_messages(self._link_receiver, math.inf)
        self._end()

    async def attend(self, receiver: LinkReceiver) -> None:
        """Receive messages until the peer sends its goodbye or the connection ends.

        receiver: gets every complete message, including those that arrived before this call.

        Raises what the receiver raises, and WireError if a message is too long.
        """
        self._link_receiver = receiver
        self._pass_on_messages(receiver)
        await self._over

    def close(self) -> None:
        """Close the connection. Must be called only once the peer has connected."""
        self._transport.close()

    def _pass_on_messages(self, receiver: LinkReceiver, seconds: float = TURN_SECONDS) -> None:
        """Pass on the complete messages. An error of the receiver ends `attend` with that error.

        After `seconds`, the rest follows in the next iteration of the event loop, and the socket is not read
        until then, so that a backlog does not stop other work.

        receiver: gets the messages.
        seconds: how long messages may be passed on at once.

        A goodbye ends `attend` without an error, and messages after it are not passed on. An incomplete
        message stays in the buffer.
        """
        end = self._loop.time() + seconds
        try:
            while not self._over.done() and (message := self._pop_message()) is not None:
                receiver.receive_bytes(message)
                if receiver.over:
                    self._end()
                elif self._loop.time() >= end:
                    self._transport.pause_reading()
                    self._loop.call_soon(self._continue, receiver)
                    return
        except Exception as error:
            self._over.set_exception(error)

    def _continue(self, receiver: LinkReceiver) -> None:
        """Read from the socket again, and pass on the messages that are left.

        receiver: gets the messages.

        Does nothing if the link has ended meanwhile.
        """
        if not self._over.done():
            self._transport.resume_reading()
            self._pass_on_messages(receiver)

    def _pop_message(self) -> bytes | None:
        """Remove the next complete message from the buffer and return it, without its length in front. Return
        None if the buffer has no complete message.

        Raises WireError if its announced length exceeds RING_BYTES.
        """
        size = int.from_bytes(self._data[:LENGTH], "little")
        require(size <= RING_BYTES, f"a message of {size} bytes, {RING_BYTES} are allowed")
        if len(self._data) < LENGTH + size:
            return None
        message = bytes(memoryview(self._data)[LENGTH : LENGTH + size])
        del self._data[: LENGTH + size]
        return message

    def _end(self) -> None:
        """End `attend` without an error, unless it has ended."""
        if not self._over.done():
            self._over.set_result(None)


class UnixHost:
    """The receiving ends of a member's links over unix sockets."""

    def __init__(self) -> None:
        """Make a host without links. Its private folder is created with the first link."""
        self._places = Places("links")
        self._links = set[asyncio.Task[None]]()

    async def expect(self, make_receiver: MakeReceiver) -> str:
        """Open a socket for one link and return its path.

        make_receiver: called once the peer has connected; the context that it returns receives the messages.

        Raises Overloaded if there are too many links, Unavailable if the socket cannot be opened.

        The socket accepts one connection, within DIAL_SECONDS; the link is then received in the background.
        """
        place = self._places.allocate()
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[_Incoming] = loop.create_future()
        try:
            server = await loop.create_unix_server(lambda: _Incoming(connected), str(place))
        except BaseException as error:
            self._places.free(place)
            if isinstance(error, OSError):
                raise Unavailable(f"cannot listen at {place}: {reason(error)}") from None
            raise
        link = start(self._attend(make_receiver, place, server, connected))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        return str(place)

    async def close(self) -> None:
        """End all links and delete their sockets.

        Errors of the links are ignored. Each link that is cut is reported as lost by its receiver.
        """
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        self._places.close()

    async def _attend(
        self,
        make_receiver: MakeReceiver,
        place: Path,
        server: asyncio.Server,
        connected: asyncio.Future[_Incoming],
    ) -> None:
        """Receive one link from the peer's connection to its end. Gives up if no peer connects in time.

        make_receiver: returns the context that receives the messages.
        place: path of the socket, which is freed once the peer has connected.
        server: the listening server, which is closed at the same time.
        connected: gets the peer's connection.

        If no peer connects within DIAL_SECONDS, `make_receiver` is not called. No WireError or Refused is
        raised.
        """
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                incoming = await connected
        except TimeoutError:
            return
        finally:
            server.close()
            self._places.free(place)
        try:
            with make_receiver() as receiver:
                await incoming.attend(receiver)
        except (WireError, Refused):
            pass  # The receiver has reported the error, and the peer notices that the connection is closed.
        finally:
            incoming.close()
