"""Links between members over gRPC: the `Ring.Carry` stream, and the handshake that negotiates other links.

As other links are negotiated over gRPC, TLS of the gRPC connection also protects their endpoints and keys.
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
from specsot.transport.unix_links import UnixHost, UnixWire, is_local_socket, reach_nearby
from specsot.transport.wires import Wire
from specsot.v1 import ring_pb2, ring_pb2_grpc

SERVICE = "specsot.v1.Ring"
# The service under which a member is listed and reports its health, in addition to SERVICE.
ROLE_SERVICES: Mapping[Kind, str] = {"worker": "specsot.v1.Worker", "drafter": "specsot.v1.Drafter"}
# Key of the initial metadata in which a member sends its name.
NAME_KEY = "specsot-name"

_Call = StreamUnaryCall[bytes, ring_pb2.CarryResponse]


class GrpcWire(Wire):
    """The sending side of one `Ring.Carry` stream as a `Wire`."""

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
        # gRPC may report the result of the last write only after the stream's end, so wait for that write
        # too.
        async with self._writing:
            pass

    async def hang_up(self) -> None:
        await self._channel.close()


class GrpcDialer:
    """Opens links over gRPC in the name of `sender`. If a link breaks, `Lost` is put into the inbox, if any.

    Messages to a member of the same machine and user travel over a unix socket if that member offers one.
    """

    def __init__(
        self, sender: str, inbox: Inbox | None = None, patience: float = DIAL_SECONDS, tls: Tls = PLAIN
    ) -> None:
        self._sender = sender
        self._inbox = inbox
        self._patience = patience
        self._tls = tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> SendingEnd:
        """See `Dialer.dial`.

        Raises Unavailable if the peer cannot be reached, Refused if it has another protocol version.
        """
        channel = await reach(address, self._patience, tls=self._tls, name=kind)
        try:
            if is_local_socket(address) and (nearby := await self._connect(channel, address, epoch)):
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
        """Connect to the peer's unix socket. Return the connection and the peer's name.

        Returns None if the peer offers no socket to this member; if the peer rejects the member, the stream
        that is opened next reports why.
        """
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
                await call  # The peer rejected the hello; this raises its error.
        return call, str(metadata.get(NAME_KEY, address))


class RingService(ring_pb2_grpc.RingServicer):
    """The receiving end of every link to this member, which puts decoded messages into the member's inbox."""

    def __init__(
        self,
        inbox: Inbox,
        name: str = "",
        host: LinkHost | None = None,
        rows: RowsHost | None = None,
        nearby: bool = False,
    ) -> None:
        """name: name of this member.

        host: receives links that other sockets carry, or None if there are none.
        rows: receives hidden states by separate channels, or None if there are none.
        nearby: True if members of this machine are offered unix sockets. `close` must then be called.
        """
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
        """Receive the messages of one link until the peer's goodbye or the stream's end."""
        peer = check_hello(await _first_word(request_iterator), context)
        # The receiver is entered before the peer is answered, so that a loss from then on is noticed.
        with self._receiver(peer) as receiver:
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
        """Open an endpoint for a link or a channel that gRPC does not carry.

        Raises Refused if this member offers no such endpoint.
        """
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
        """Receive messages of a peer. At the end, the peer's channel for hidden states is closed too."""
        try:
            with Receiver(
                peer, self._inbox, self._rows.take if self._rows else refuse_rows_elsewhere
            ) as receiver:
                yield receiver
        finally:
            if self._rows:
                self._rows.part(peer)


async def _first_word(requests: AsyncIterator[ring_pb2.CarryRequest]) -> ring_pb2.Hello:
    """Return the hello, which must be the first message. Raises WireError if it is not."""
    request = await anext(requests, None)
    if request is None or not request.HasField("hello"):
        raise WireError("the first message must be hello")
    return request.hello


def encode_endpoint(name: str, place: Endpoint) -> ring_pb2.MeetResponse:
    """Return the response that names an endpoint. name: name of the member that opened the endpoint."""
    return ring_pb2.MeetResponse(name=name, port=place.port, path=place.path, key=place.key)


async def negotiate(
    address: str, sender: str, epoch: int, key: bytes, kind: Kind, tls: Tls = PLAIN, rows: bool = False
) -> tuple[str, Endpoint]:
    """Ask a member for the endpoint of a link that gRPC does not carry. Return the member's name and the
    endpoint.

    key: public key of this end, for links with encryption of their own.
    kind: the kind of member that its certificate must name.
    rows: True to ask for the endpoint of a channel for hidden states, of a link that is open already.

    Raises Unavailable if the member cannot be reached, Refused if it does not offer such links, and WireError
    if its answer is invalid.
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
    """Call `Ring.Meet`. Raises the error that the peer raised."""
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
