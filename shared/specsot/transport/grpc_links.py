"""Links between members over gRPC: the `Ring.Carry` stream, and the handshake by which they agree on other
links. What protects members' gRPC protects what the handshake names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Mapping
from functools import partial

import grpc
from grpc.aio import AioRpcError, ServicerContext, StreamUnaryCall

from specsot.errors import Refused, SpecsotError, Unavailable, WireError
from specsot.members import Kind
from specsot.transport.grpc_channel import DIAL_SECONDS, greeting, reach
from specsot.transport.grpc_status import peer_errors
from specsot.transport.link_ends import (
    Endpoint,
    LinkHost,
    Peer,
    Receiver,
    RowsHost,
    SendingEnd,
    check_hello,
    hello_of,
    refuse_rows_elsewhere,
)
from specsot.transport.links import Inbox
from specsot.transport.security import PLAIN, Tls
from specsot.transport.unix_links import UnixHost, UnixWire, is_here, reach_nearby
from specsot.transport.wires import Wire
from specsot.v1 import ring_pb2, ring_pb2_grpc

SERVICE = "specsot.v1.Ring"
# The service under which a member is listed and reports its health, in addition to SERVICE.
ROLE_SERVICES: Mapping[Kind, str] = {"worker": "specsot.v1.Worker", "drafter": "specsot.v1.Drafter"}
NAME_KEY = "specsot-name"  # initial metadata: who answered

_Call = StreamUnaryCall[bytes, ring_pb2.CarryResponse]


class GrpcWire(Wire):
    """One stream, as a sending end wants it."""

    def __init__(self, channel: grpc.aio.Channel, call: _Call) -> None:
        self._channel = channel
        self._call = call
        self._over = asyncio.Event()
        self._writing = asyncio.Lock()
        call.add_done_callback(lambda _: self._over.set())

    async def write(self, data: bytes) -> None:
        async with self._writing:
            try:
                await self._call.write(data)
            except (AioRpcError, asyncio.InvalidStateError):
                raise Unavailable("the stream has ended") from None

    async def finish(self) -> None:
        with contextlib.suppress(AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def wait_closed(self) -> None:
        await self._over.wait()
        async with self._writing:  # gRPC may tell what became of the last message after the stream's end
            pass

    async def hang_up(self) -> None:
        await self._channel.close()


class GrpcDialer:
    """Dials in the name of `sender`. With an inbox, a link that breaks is told there as Lost.

    To a member of this machine and user who offers that, messages go by a unix socket.
    """

    def __init__(
        self, sender: str, inbox: Inbox | None = None, patience: float = DIAL_SECONDS, tls: Tls = PLAIN
    ) -> None:
        self._sender = sender
        self._inbox = inbox
        self._patience = patience
        self._tls = tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> SendingEnd:
        """Raises Unavailable (nobody there), Refused (a peer of another protocol)."""
        channel = await reach(address, self._patience, tls=self._tls, name=kind)
        try:
            if is_here(address) and (nearby := await self._connect(channel, address, epoch)):
                await channel.close()
                return SendingEnd(*nearby, epoch, self._inbox)
            call, peer = await self._greet(channel, address, epoch)
        except BaseException:
            await channel.close()
            raise
        return SendingEnd(GrpcWire(channel, call), peer, epoch, self._inbox)

    async def _connect(
        self, channel: grpc.aio.Channel, address: str, epoch: int
    ) -> tuple[UnixWire, str] | None:
        """To its unix socket, and its name; None where it has none for us: why, the stream will tell."""
        request = ring_pb2.MeetRequest(hello=hello_of(self._sender, epoch), nearby=True)
        with contextlib.suppress(SpecsotError):
            response = await _meet(channel, request, self._patience)
            if wire := await reach_nearby(response.socket):
                return wire, response.name or address
        return None

    async def _greet(self, channel: grpc.aio.Channel, address: str, epoch: int) -> tuple[_Call, str]:
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
    nearby: members of this machine are offered unix sockets; then it is to be closed.
    """

    def __init__(
        self,
        inbox: Inbox,
        name: str = "",
        host: LinkHost | None = None,
        rows: RowsHost | None = None,
        nearby: bool = False,
    ) -> None:
        self._inbox = inbox
        self.name = name
        self._host = host
        self._rows = rows
        self._nearby = UnixHost() if nearby else None

    async def close(self) -> None:
        if self._nearby:
            await self._nearby.close()

    def attach(self, server: grpc.aio.Server) -> None:
        ring_pb2_grpc.add_RingServicer_to_server(self, server)

    def attach_role(self, kind: Kind, server: grpc.aio.Server) -> None:
        """Serve the same calls under the service name of the member's kind, see ROLE_SERVICES."""
        if kind == "worker":
            ring_pb2_grpc.add_WorkerServicer_to_server(self, server)
        else:
            ring_pb2_grpc.add_DrafterServicer_to_server(self, server)

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
        if request.nearby and self._nearby is not None:
            place = await self._nearby.expect(partial(self._receiver, peer))
            return ring_pb2.MeetResponse(name=self.name, socket=place)
        if request.rows or request.nearby or self._host is None:
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


def encode_endpoint(name: str, place: Endpoint) -> ring_pb2.MeetResponse:
    return ring_pb2.MeetResponse(name=name, port=place.port, path=place.path, key=place.key)


async def negotiate(
    address: str, sender: str, epoch: int, key: bytes, kind: Kind, tls: Tls = PLAIN, rows: bool = False
) -> tuple[str, Endpoint]:
    """The peer's name, and where it waits. rows: for the channel of a link that is open already.

    Raises Unavailable, Refused, WireError.
    """
    channel = await reach(address, tls=tls, name=kind)
    try:
        request = ring_pb2.MeetRequest(hello=hello_of(sender, epoch), key=key, rows=rows)
        response = await _meet(channel, request, DIAL_SECONDS)
        return response.name or address, _endpoint(response)
    finally:
        await channel.close()


async def _meet(
    channel: grpc.aio.Channel, request: ring_pb2.MeetRequest, patience: float
) -> ring_pb2.MeetResponse:
    """Raises what the peer raised."""
    with peer_errors():
        return await ring_pb2_grpc.RingStub(channel).Meet(request, timeout=patience)


def _endpoint(response: ring_pb2.MeetResponse) -> Endpoint:
    match response.WhichOneof("place"):
        case "port":
            return Endpoint(port=response.port, key=response.key)
        case "path":
            return Endpoint(path=response.path)
        case _:
            raise WireError(f"{response.name} names no place for a link")
