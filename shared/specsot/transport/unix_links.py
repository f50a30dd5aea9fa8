"""Links within one machine: a unix socket to which only processes of this user come, for what gRPC greeted.

A message travels as its length (4 bytes, little endian) and its bytes. Whoever computes writes it without
waiting for the event loop; what the socket does not take at once, the loop writes later.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Protocol

from google.protobuf.message import Message

from specsot.errors import Refused, Unavailable, WireError
from specsot.tasks import start
from specsot.transport.grpc_channel import DIAL_SECONDS, RING_BYTES
from specsot.transport.grpc_server import reason, split_address
from specsot.transport.wire.schema import require
from specsot.transport.wires import Places, Wire, is_private

LENGTH = 4  # bytes in front of each message


def is_here(address: str) -> bool:
    """A unix socket, or an IP address of this machine: no other can be bound."""
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
    """A connected socket that nobody waits for."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = Lock()
        self._loop = asyncio.get_running_loop()
        # coroutines that wait for the socket
        self._waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def encode(self, request: Message) -> bytes:
        data = request.SerializeToString()
        return len(data).to_bytes(LENGTH, "little") + data

    def write_now(self, data: bytes) -> bytes:
        with self._lock:  # who hangs up meanwhile would give its number to another file
            try:
                return data[self._socket.send(data) :]
            except BlockingIOError:
                return data
            except OSError:
                raise Unavailable("the connection has ended") from None

    async def write(self, data: bytes) -> None:
        try:
            with self._using():
                await self._loop.sock_sendall(self._socket, data)
        except OSError:
            raise Unavailable("the connection has ended") from None

    async def finish(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def wait_closed(self) -> None:
        """The peer says nothing here, but hangs up."""
        with suppress(OSError), self._using():
            await self._loop.sock_recv(self._socket, 1)

    async def hang_up(self) -> None:
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        await self._idle.wait()  # the loop must have forgotten the socket's number before that is free
        with self._lock:
            self._socket.close()

    @contextmanager
    def _using(self) -> Generator[None]:
        self._waiting += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._idle.set()


async def reach_nearby(place: str) -> UnixWire | None:
    """A connection to who waits there; None: nobody does, or the place is not this user's alone."""
    with suppress(OSError):
        return await connect(Path(place)) if is_private(Path(place)) else None
    return None


async def connect(place: Path) -> UnixWire:
    """Raises OSError."""
    connected = socket.socket(socket.AF_UNIX)
    connected.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connected, str(place))
    except BaseException:
        connected.close()
        raise
    return UnixWire(connected)


class Hearer(Protocol):
    """Hears what is said over one link. over: its peer said goodbye."""

    over: bool

    def hear(self, data: bytes) -> None:
        """One message. Raises WireError, Refused."""
        ...


Attending = Callable[[], AbstractContextManager[Hearer]]


class _Incoming(asyncio.Protocol):
    """A connection to us. Messages are heard in the turn of the loop that brings their last byte: no task is
    woken for that.
    """

    def __init__(self, came: asyncio.Future[_Incoming]) -> None:
        """came: is told of it, if it is the first one."""
        self._came = came
        self._data = bytearray()
        self._hearer: Hearer | None = None
        self._over: asyncio.Future[None] = came.get_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._came.done():
            transport.close()
        else:
            self._came.set_result(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._hearer:
            self._hear(self._hearer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    async def attend(self, hearer: Hearer) -> None:
        """Until it says goodbye or ends. Raises what the hearer raises, WireError."""
        self._hearer = hearer
        self._hear(hearer)
        await self._over

    def close(self) -> None:
        self._transport.close()

    def _hear(self, hearer: Hearer) -> None:
        try:
            while not self._over.done() and (message := self._whole_message()) is not None:
                hearer.hear(message)
                if hearer.over:
                    self._end()
        except Exception as error:
            self._over.set_exception(error)

    def _whole_message(self) -> bytes | None:
        size = int.from_bytes(self._data[:LENGTH], "little")
        require(size <= RING_BYTES, f"a message of {size} bytes, {RING_BYTES} are allowed")
        if len(self._data) < LENGTH + size:
            return None
        message = bytes(memoryview(self._data)[LENGTH : LENGTH + size])
        del self._data[: LENGTH + size]
        return message

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


class UnixHost:
    """The receiving ends of such links to one member."""

    def __init__(self) -> None:
        self._places = Places("links")
        self._links = set[asyncio.Task[None]]()

    async def expect(self, hearing: Attending) -> str:
        """The path of a socket for one link. hearing: who hears what its peer says, once it has come. Raises
        Overloaded, Unavailable.
        """
        place = self._places.take()
        loop = asyncio.get_running_loop()
        came: asyncio.Future[_Incoming] = loop.create_future()
        try:
            server = await loop.create_unix_server(lambda: _Incoming(came), str(place))
        except BaseException as error:
            self._places.give_back(place)
            if isinstance(error, OSError):
                raise Unavailable(f"cannot listen at {place}: {reason(error)}") from None
            raise
        link = start(self._attend(hearing, place, server, came))
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        return str(place)

    async def close(self) -> None:
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        self._places.close()

    async def _attend(
        self, hearing: Attending, place: Path, server: asyncio.Server, came: asyncio.Future[_Incoming]
    ) -> None:
        """One link, from its peer's coming to its end."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                incoming = await came
        except TimeoutError:
            return
        finally:
            server.close()
            self._places.give_back(place)
        try:
            with hearing() as hearer:
                await incoming.attend(hearer)
        except (WireError, Refused):
            pass  # the hearer has reported it; the peer learns it as we hang up
        finally:
            incoming.close()
