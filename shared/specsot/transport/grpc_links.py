"""Links between members over gRPC: the `Ring.Carry` stream, its sending and receiving ends, and the handshake
by which members agree on a link that is not gRPC's.

Both ends serve every transport: the sender encodes at once and writes in order from a bounded queue, the
receiver checks what a peer may say. What protects members' gRPC protects the keys that the handshake names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import grpc
from grpc.aio import AioRpcError, ServicerContext, StreamUnaryCall

from specsot.core.frames import Frame
from specsot.errors import Refused, Unavailable, WireError
from specsot.members import MASTER, PROTOCOL, Kind
from specsot.tasks import start
from specsot.transport.grpc_channel import DIAL_SECONDS, Role, check_role, greeting, names_of, reach
from specsot.transport.grpc_status import peer_errors
from specsot.transport.links import Inbox, Lost, SendQueue
from specsot.transport.security import PLAIN, Tls
from specsot.transport.wire.carry import CarryReader, encode_carry
from specsot.transport.wire.schema import check_name
from specsot.transport.wire.tensors import Beside
from specsot.v1 import ring_pb2, ring_pb2_grpc

SERVICE = "specsot.v1.Ring"
NAME_KEY = "specsot-name"  # initial metadata: who answered

_Call = StreamUnaryCall[bytes, ring_pb2.CarryResponse]


class GrpcWire:
    """One stream, as a sending end wants it."""

    def __init__(self, channel: grpc.aio.Channel, call: _Call) -> None:
        self._channel, self._call, self._over = channel, call, asyncio.Event()
        call.add_done_callback(lambda _: self._over.set())

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except (AioRpcError, asyncio.InvalidStateError):
            raise Unavailable("the stream has ended") from None

    async def finish(self) -> None:
        with contextlib.suppress(AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def wait_closed(self) -> None:
        await self._over.wait()

    async def hang_up(self) -> None:
        await self._channel.close()


class GrpcDialer:
    """Dials in the name of `sender`. With an inbox, a link that breaks is told there as Lost."""

    def __init__(
        self, sender: str, inbox: Inbox | None = None, patience: float = DIAL_SECONDS, tls: Tls = PLAIN
    ) -> None:
        self._sender, self._inbox, self._patience, self._tls = sender, inbox, patience, tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> SendingEnd:
        """Raises Unavailable (nobody there), Refused (a peer of another protocol)."""
        channel = await reach(address, self._patience, tls=self._tls, name=kind)
        try:
            call, peer = await self._greet(channel, address, epoch)
        except BaseException:
            await channel.close()
            raise
        return SendingEnd(GrpcWire(channel, call), peer, epoch, self._inbox)

    async def _greet(self, channel: grpc.aio.Channel, address: str, epoch: int) -> tuple[_Call, str]:
        """Say hello and wait until it is accepted."""
        carry = channel.stream_unary(
            f"/{SERVICE}/Carry", response_deserializer=ring_pb2.CarryResponse.FromString
        )
        call: _Call = carry()
        hello = ring_pb2.CarryRequest(hello=hello_of(self._sender, epoch)).SerializeToString()
        async with greeting(call, hello, f"{address} does not answer a hello", self._patience):
            metadata = dict(await call.initial_metadata())
            if NAME_KEY not in metadata:
                await call  # refused: raises why
        return call, str(metadata.get(NAME_KEY, address))


class RingService(ring_pb2_grpc.RingServicer):
    """The receiving end of every link to this member: decoded messages go to its inbox.

    host: where links begin that are not gRPC's, if anywhere. rows: what receives rows beside frames.
    """

    def __init__(
        self, inbox: Inbox, name: str = "", host: LinkHost | None = None, rows: RowsHost | None = None
    ) -> None:
        self._inbox, self.name, self._host, self._rows = inbox, name, host, rows

    def attach(self, server: grpc.aio.Server) -> None:
        ring_pb2_grpc.add_RingServicer_to_server(self, server)

    async def Carry(
        self,
        request_iterator: AsyncIterator[ring_pb2.CarryRequest],
        context: ServicerContext[ring_pb2.CarryRequest, ring_pb2.CarryResponse],
    ) -> ring_pb2.CarryResponse:
        peer = check_hello(await _first_word(request_iterator), context)
        with self._receiver(peer) as receiver:  # entered first: who is told that it is linked can be lost
            await context.send_initial_metadata(((NAME_KEY, self.name),))
            async for request in request_iterator:
                receiver.receive(request)
                if receiver.over:
                    break
        return ring_pb2.CarryResponse()

    async def Meet(
        self,
        request: ring_pb2.MeetRequest,
        context: ServicerContext[ring_pb2.MeetRequest, ring_pb2.MeetResponse],
    ) -> ring_pb2.MeetResponse:
        peer = check_hello(request.hello, context)
        if request.rows and self._rows is not None:
            return encode_endpoint(self.name, self._rows.expect(peer))
        if request.rows or self._host is None:
            raise Refused(f"{self.name} takes links over gRPC alone")
        return encode_endpoint(self.name, await self._host.expect(peer, request.key))

    @contextlib.contextmanager
    def _receiver(self, peer: Peer) -> Generator[Receiver]:
        """Its channel for rows ends with the link."""
        try:
            with Receiver(
                peer, self._inbox, self._rows.take if self._rows else refuse_rows_elsewhere
            ) as receiver:
                yield receiver
        finally:
            if self._rows:
                self._rows.part(peer)


async def _first_word(requests: AsyncIterator[ring_pb2.CarryRequest]) -> ring_pb2.Hello:
    request = await anext(requests, None)
    if request is None or not request.HasField("hello"):
        raise WireError("the first message must be hello")
    return request.hello


# What those who are no workers may say, by the field of a message.
ALLOWED_SPEAKERS: dict[str, tuple[Role, ...]] = {
    "drafts": ("drafter", "worker"),  # a worker passes on what came from the drafter
    "tap": ("drafter", "worker"),
}


def hello_of(sender: str, epoch: int) -> ring_pb2.Hello:
    return ring_pb2.Hello(sender=sender, epoch=epoch, protocol=PROTOCOL)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who said hello. names: in its certificate, where it must show one."""

    name: str
    epoch: int
    names: frozenset[str] | None


def check_hello(hello: ring_pb2.Hello, context: Any) -> Peer:
    """context: of the call that brought it. Raises WireError, Refused."""
    check_name(hello.sender, "a sender's name")
    if hello.sender == MASTER:
        raise Refused(f"no peer is named {MASTER}")
    if hello.protocol != PROTOCOL:
        raise Refused(f"{hello.sender} speaks protocol {hello.protocol}, this member {PROTOCOL}")
    names = names_of(context)
    check_role(names, hello.sender, "worker", "drafter")
    return Peer(hello.sender, hello.epoch, names)


Take = Callable[[Peer, Any], Any]


def refuse_rows_elsewhere(peer: Peer, message: Any) -> Any:
    """Raises WireError: some are elsewhere, where nobody knows of any such place."""
    if isinstance(message, Frame) and any(
        isinstance(rows, Beside) for rows in (message.hidden, message.fused)
    ):
        raise WireError(f"frame {message.number} has its rows beside it, where no channel is")
    return message


class Receiver:
    """Puts what a peer says into the inbox, while it is entered; left without goodbye, the peer is lost."""

    def __init__(self, peer: Peer, inbox: Inbox, take: Take = refuse_rows_elsewhere) -> None:
        """take: what to make of a message whose rows are elsewhere."""
        self._peer, self._inbox, self._reader, self._take = peer, inbox, CarryReader(), take
        self.over = False  # it said goodbye

    def receive(self, request: ring_pb2.CarryRequest) -> None:
        """Raises WireError, and Refused for what it may not say."""
        if request.HasField("goodbye"):
            self.over = True
            return
        speakers = ALLOWED_SPEAKERS.get(request.WhichOneof("message") or "", ("worker",))
        check_role(self._peer.names, self._peer.name, *speakers)
        message = self._reader.read(request)
        if message is not None:
            self._inbox.put(self._peer.name, self._take(self._peer, message), self._peer.names)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.over:
            lost = Lost(self._peer.name, _reason(error), self._peer.epoch)
            self._inbox.put(self._peer.name, lost, self._peer.names)


def _reason(error: BaseException | None) -> str:
    match error:
        case WireError():
            return f"it sent what does not decode: {error}"
        case Refused():
            return str(error)
        case _:
            return "its link broke"


FAREWELL = 2.0  # seconds that a closing link has to deliver what is still in it; not measured


class Wire(Protocol):
    """One connection, from here to there."""

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises Unavailable once it has ended."""
        ...

    async def finish(self) -> None:
        """Nothing more will be written."""
        ...

    async def wait_closed(self) -> None:
        """Returns when the peer has hung up, or the connection broke."""
        ...

    async def hang_up(self) -> None: ...


class SendingEnd:
    """`send` encodes and returns; one task writes. A link that breaks is told to the inbox as Lost."""

    def __init__(
        self, wire: Wire, peer: str, epoch: int, inbox: Inbox | None, farewell: float = FAREWELL
    ) -> None:
        self._wire, self._peer, self._epoch, self._inbox = wire, peer, epoch, inbox
        self._farewell = farewell
        self._outbox: SendQueue[bytes] = SendQueue()
        self._closing = self._told = False
        self._writing = start(self._write(), self._fail)
        self._ending = start(self._end(), self._fail)

    async def send(self, message: Any) -> None:
        self._outbox.check()
        for request in encode_carry(message):
            self._put(request)

    def _put(self, request: ring_pb2.CarryRequest) -> None:
        data = request.SerializeToString()
        self._outbox.put(data, len(data))

    async def close(self) -> None:
        """Deliver what waits, say goodbye, wait until the peer hangs up. Never waits long, never raises."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(Unavailable):
            self._put(ring_pb2.CarryRequest(goodbye=ring_pb2.Goodbye()))
            self._outbox.finish()
            await self._deliver()
        self._outbox.lose("the link is closed")
        self._writing.cancel()
        self._ending.cancel()
        await self._wire.hang_up()

    async def _deliver(self) -> None:
        """Until the peer hangs up, or takes no more: what is large may take long on a narrow network."""
        before = None
        while before != self._outbox.waiting and not self._ending.done():
            before = self._outbox.waiting
            await asyncio.wait({self._ending}, timeout=self._farewell)

    async def _write(self) -> None:
        """A wire that fails here ends too, and `_end` tells why."""
        with contextlib.suppress(Unavailable):
            await self._outbox.write_all(self._wire.write)
            await (self._wire.finish() if self._outbox.lost is None else self._wire.hang_up())

    async def _end(self) -> None:
        await self._wire.wait_closed()
        self._lose(f"the link to {self._peer} broke")

    def _fail(self, error: BaseException) -> None:
        """What can be written no more is lost, whyever."""
        self._lose(f"the link to {self._peer} failed: {type(error).__name__}")

    def _lose(self, reason: str) -> None:
        if self._closing or self._told:
            return
        self._told = True
        self._outbox.lose(reason)
        if self._inbox is not None:
            self._inbox.put(self._peer, Lost(self._peer, str(self._outbox.lost), self._epoch))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port of the host that was asked, and the public key shown there; or a path of this machine."""

    port: int | None = None
    path: str | None = None
    key: bytes = b""


class LinkHost(Protocol):
    """Opens places for links to one member."""

    async def expect(self, peer: Peer, key: bytes) -> Endpoint:
        """A place for one link of this peer, who shows this public key. Raises WireError, Overloaded."""
        ...


class RowsHost(Protocol):
    """Receives what frames leave out, where links have channels for that."""

    def expect(self, peer: Peer) -> Endpoint:
        """A place for one channel of this peer. Raises Overloaded."""
        ...

    def take(self, peer: Peer, message: Any) -> Any:
        """A message by this peer, told where its rows are. Raises WireError: no channel is there."""
        ...

    def part(self, peer: Peer) -> None:
        """This peer's link is over."""
        ...


def encode_endpoint(name: str, place: Endpoint) -> ring_pb2.MeetResponse:
    return ring_pb2.MeetResponse(name=name, port=place.port, path=place.path, key=place.key)


async def negotiate(
    address: str,
    sender: str,
    epoch: int,
    key: bytes,
    kind: Kind,
    patience: float = DIAL_SECONDS,
    tls: Tls = PLAIN,
    rows: bool = False,
) -> tuple[str, Endpoint]:
    """The peer's name, and where it waits. rows: for the channel of a link that is open already.

    Raises Unavailable, Refused, WireError.
    """
    channel = await reach(address, patience, tls=tls, name=kind)
    try:
        request = ring_pb2.MeetRequest(hello=hello_of(sender, epoch), key=key, rows=rows)
        with peer_errors():
            response = await ring_pb2_grpc.RingStub(channel).Meet(request, timeout=patience)
    finally:
        await channel.close()
    return response.name or address, _endpoint(response)


def _endpoint(response: ring_pb2.MeetResponse) -> Endpoint:
    match response.WhichOneof("place"):
        case "port":
            return Endpoint(port=response.port, key=response.key)
        case "path":
            return Endpoint(path=response.path)
        case _:
            raise WireError(f"{response.name} names no place for a link")
