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

# The service of every member, under which its links are opened.
SERVICE = "specsot.v1.Ring"
# The service under which a member is listed and reports its health, in addition to SERVICE.
ROLE_SERVICES: Mapping[Kind, str] = {"worker": "specsot.v1.Worker", "drafter": "specsot.v1.Drafter"}
# Key of the initial metadata in which a member sends its name.
NAME_KEY = "specsot-name"

_Call = StreamUnaryCall[bytes, ring_pb2.CarryResponse]


class GrpcWire(Wire):
    """The sending side of one `Ring.Carry` stream as a `Wire`."""

    def __init__(self, channel: grpc.aio.Channel, call: _Call) -> None:
        """Wrap an open stream.

        channel: the channel of the call, which `hang_up` closes.
        call: the open stream, whose hello was answered. Its end is what `wait_closed` waits for.
        """
        self._channel = channel
        self._call = call
        self._over = asyncio.Event()
        self._writing = asyncio.Lock()
        call.add_done_callback(lambda _: self._over.set())

    async def write(self, data: bytes) -> None:
        """Write one message to the stream. Raises Unavailable if the stream has ended.

        data: the bytes of one CarryRequest.

        Returns when there is room for more, not when the message has arrived. Concurrent calls write one
        after another.
        """
        async with self._writing:
            try:
                await self._call.write(data)
            except (AioRpcError, asyncio.InvalidStateError):
                raise Unavailable("the stream has ended") from None

    async def finish(self) -> None:
        """End this direction of the stream; does nothing if the stream has ended."""
        with contextlib.suppress(AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def wait_closed(self) -> None:
        """Wait until the stream has ended and its last write has returned.

        Never raises because of the stream's end, however it ended.
        """
        await self._over.wait()
        # gRPC may report the result of the last write only after the stream's end, so wait for that write
        # too.
        async with self._writing:
            pass

    async def hang_up(self) -> None:
        """Close the channel, and so the stream."""
        await self._channel.close()


class GrpcDialer:
    """Opens links over gRPC in the name of one member. Puts `Lost` into its inbox, if any, if one breaks.

    Messages to a member of the same machine and user travel over a unix socket if that member offers one.
    """

    def __init__(
        self, sender: str, inbox: Inbox | None = None, timeout_seconds: float = DIAL_SECONDS, tls: Tls = PLAIN
    ) -> None:
        """Create a dialer, which opens nothing yet.

        sender: name of the dialing member.
        inbox: where `Lost` is put if a link breaks. None: the loss is not reported.
        timeout_seconds: seconds to wait for a connection, and then again for the answer to a hello.
        tls: the TLS files of the dialing member.
        """
        self._sender = sender
        self._inbox = inbox
        self._timeout_seconds = timeout_seconds
        self._tls = tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> SendingEnd:
        """Open a link to a member over gRPC, or over a unix socket if the member offers one on this machine,
        and return its sending end.

        address: the member's address, host:port or unix:path.
        epoch: number of the epoch to which the link belongs.
        kind: what the member must be, "worker" or "drafter".

        Raises Unavailable if the peer cannot be reached, Refused if it has another protocol version.

        Raises Refused also if the peer rejects this member for another reason, such as its certificate, and
        InvalidRequest if TLS files are invalid. The socket is used only if `address` is of this machine.
        """
        channel = await reach(address, self._timeout_seconds, tls=self._tls, name=kind)
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

        Returns None if the peer offers no socket to this member, or the socket cannot be reached or does not
        exist on this machine; no error is raised. If the peer rejects the member, the stream that is opened
        next reports why.

        channel: a connected channel to the peer.
        address: the peer's address, which serves as its name if it does not tell one.
        epoch: number of the epoch to which the link belongs.
        """
        request = ring_pb2.MeetRequest(hello=hello_of(self._sender, epoch), nearby=True)
        with contextlib.suppress(SpecsotError):
            response = await _meet(channel, request, self._timeout_seconds)
            if wire := await reach_nearby(response.socket):
                return wire, response.name or address
        return None

    async def _greet(self, channel: grpc.aio.Channel, address: str, epoch: int) -> tuple[_Call, str]:
        """Open a stream and send the hello. Return the stream and the peer's name.

        channel: a connected channel to the peer.
        address: the peer's address, which serves as its name if it does not tell one.
        epoch: number of the epoch to which the link belongs.

        Raises the error with which the peer rejects the hello (Refused or WireError), and Unavailable if it
        does not answer in time.
        """
        carry = channel.stream_unary(
            f"/{SERVICE}/Carry", response_deserializer=ring_pb2.CarryResponse.FromString
        )
        call: _Call = carry()
        hello = ring_pb2.CarryRequest(hello=hello_of(self._sender, epoch)).SerializeToString()
        async with greeting(call, hello, f"{address} does not answer a hello", self._timeout_seconds):
            metadata = dict(await call.initial_metadata())
            if NAME_KEY not in metadata:
                await call  # The peer rejected the hello; this raises its error.
        return call, str(metadata.get(NAME_KEY, address))


class RingService(ring_pb2_grpc.RingServicer):
    """The receiving end of every link to this member, which puts decoded messages into the member's inbox.

    name: name of this member, which its responses contain.
    """

    def __init__(
        self,
        inbox: Inbox,
        name: str = "",
        host: LinkHost | None = None,
        rows: RowsHost | None = None,
        nearby: bool = False,
    ) -> None:
        """Create the service, which must be attached to a server.

        inbox: where received messages are put.
        name: name of this member, which may be set later; responses contain it.
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
        """End the links over unix sockets. Links over gRPC end with the server."""
        if self._nearby:
            await self._nearby.close()

    def attach(self, server: grpc.aio.Server) -> None:
        """Serve the calls of `specsot.v1.Ring` on a server that was not started yet.

        server: the server.
        """
        ring_pb2_grpc.add_RingServicer_to_server(self, server)

    def attach_role(self, kind: Kind, server: grpc.aio.Server) -> None:
        """Serve the same calls under the service name of the member's kind, see ROLE_SERVICES.

        kind: "worker" or "drafter".
        server: the server, which was not started yet.
        """
        if kind == "worker":
            ring_pb2_grpc.add_WorkerServicer_to_server(self, server)
        else:
            ring_pb2_grpc.add_DrafterServicer_to_server(self, server)

    async def Carry(
        self,
        request_iterator: AsyncIterator[ring_pb2.CarryRequest],
        context: ServicerContext[ring_pb2.CarryRequest, ring_pb2.CarryResponse],
    ) -> ring_pb2.CarryResponse:
        """Receive the messages of one link until the peer's goodbye or the stream's end, then return an empty
        response.

        request_iterator: the peer's messages, a hello first.
        context: context of the call.

        Raises WireError or Refused, which become the call's status, if the hello or a message is invalid or
        not allowed.

        Without a goodbye, including after an error, `Lost` is put into the inbox at the end. Messages after a
        goodbye are not read.
        """
        peer = check_hello(await _read_hello(request_iterator), context)
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
        """Open an endpoint for a link or a channel that gRPC does not carry, and return where it is.

        request: the peer's hello, and which kind of endpoint it needs.
        context: context of the call.

        A request for hidden states gets the endpoint of a channel, one for a nearby link the path of a unix
        socket, and any other request an endpoint of `host`.

        Raises Refused if this member offers no such endpoint, or does not accept the hello; WireError for an
        invalid name or key; Overloaded if too many endpoints are open; Unavailable if the endpoint cannot be
        opened.
        """
        peer = check_hello(request.hello, context)
        if request.rows and self._rows is not None:
            endpoint = self._rows.expect(peer)
        elif request.nearby and self._nearby is not None:
            place = await self._nearby.expect(partial(self._receiver, peer))
            endpoint = ring_pb2.MeetResponse(socket=place)
        elif request.rows or request.nearby or self._host is None:
            raise Refused(f"{self.name} accepts links over gRPC only")
        else:
            endpoint = await self._host.expect(peer, request.key)
        endpoint.name = self.name
        return endpoint

    @contextlib.contextmanager
    def _receiver(self, peer: Peer) -> Generator[Receiver]:
        """Return a context manager that receives messages of a peer.

        At the end, the peer's channel for hidden states is closed too.

        peer: the peer whose hello was accepted.

        If the context ends without the peer's goodbye, `Lost` is put into the inbox. An error within the
        context is raised unchanged. Without a host for hidden states, a frame that announces separate ones
        raises WireError.
        """
        try:
            with Receiver(
                peer, self._inbox, self._rows.attach_rows if self._rows else refuse_rows_elsewhere
            ) as receiver:
                yield receiver
        finally:
            if self._rows:
                self._rows.close_channel(peer)


async def _read_hello(requests: AsyncIterator[ring_pb2.CarryRequest]) -> ring_pb2.Hello:
    """Return the hello, which must be the first message. Raises WireError if it is not, or if there is no
    message.

    requests: the peer's messages.

    The hello is removed from `requests`. Waits without limit for a message.
    """
    request = await anext(requests, None)
    if request is None or not request.HasField("hello"):
        raise WireError("the first message must be hello")
    return request.hello


async def negotiate(
    address: str, sender: str, epoch: int, key: bytes, kind: Kind, tls: Tls = PLAIN, rows: bool = False
) -> ring_pb2.MeetResponse:
    """Ask a member for the endpoint of a link that gRPC does not carry. Return the endpoint, with the
    member's name: a port of the member's host, or a path of this machine.

    address: the member's address, host:port or unix:path.
    sender: name of this member.
    epoch: number of the epoch to which the link belongs.
    key: public key of this end, for links with encryption of their own; otherwise b"".
    kind: the kind of member that its certificate must name.
    tls: the TLS files of this member.
    rows: True to ask for the endpoint of a channel for hidden states, of a link that is open already.

    Raises Unavailable if the member cannot be reached, Refused if it does not offer such links, and WireError
    if its answer is invalid.

    The name is `address` if the member gives none. Raises InvalidRequest if TLS files are invalid, and any
    other error that the member raised.
    """
    channel = await reach(address, tls=tls, name=kind)
    try:
        request = ring_pb2.MeetRequest(hello=hello_of(sender, epoch), key=key, rows=rows)
        endpoint = await _meet(channel, request, DIAL_SECONDS)
    finally:
        await channel.close()
    if endpoint.WhichOneof("place") not in ("port", "path"):
        raise WireError(f"{endpoint.name} names no endpoint for a link")
    endpoint.name = endpoint.name or address
    return endpoint


async def _meet(
    channel: grpc.aio.Channel, request: ring_pb2.MeetRequest, timeout_seconds: float
) -> ring_pb2.MeetResponse:
    """Call `Ring.Meet` and return its response.

    channel: a connected channel to the peer.
    request: the request.
    timeout_seconds: seconds to wait for the response.

    Raises the error that the peer raised, and TimedOut if no response arrives in time.
    """
    with peer_errors():
        return await ring_pb2_grpc.RingStub(channel).Meet(request, timeout=timeout_seconds)
