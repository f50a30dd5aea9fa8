"""Links between members over gRPC: `Ring.Carry`, one stream per direction.

Refuses to know what the messages mean. A stream that ends without `goodbye` is lost at both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator

import grpc
from grpc.aio import AioRpcError, ServicerContext, StreamUnaryCall

from specsot.errors import Refused, Unavailable, WireError
from specsot.links import Inbox
from specsot.members import PROTOCOL, Kind
from specsot.rpc.dial import DIAL_SECONDS, reach
from specsot.rpc.meeting import LinkHost, RowsHost, encode_endpoint
from specsot.rpc.peers import Peer, Receiver, check_hello
from specsot.rpc.sending import SendingEnd
from specsot.rpc.statuses import error_of
from specsot.rpc.tls import PLAIN, Tls
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

    async def ended(self) -> None:
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
        hello = ring_pb2.Hello(sender=self._sender, epoch=epoch, protocol=PROTOCOL)
        try:
            async with asyncio.timeout(self._patience):
                with contextlib.suppress(asyncio.InvalidStateError):  # refused before it was written
                    await call.write(ring_pb2.CarryRequest(hello=hello).SerializeToString())
                metadata = dict(await call.initial_metadata())
                if NAME_KEY not in metadata:
                    await call  # refused: raises why
        except TimeoutError:
            call.cancel()
            raise Unavailable(f"{address} does not answer a hello") from None
        except AioRpcError as failure:
            raise error_of(failure) from None
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
        await context.send_initial_metadata(((NAME_KEY, self.name),))
        with self._ear(peer) as ear:
            async for request in request_iterator:
                ear.hear(request)
                if ear.over:
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
    def _ear(self, peer: Peer) -> Generator[Receiver]:
        """Its channel ends with the link."""
        if self._rows is None:
            with Receiver(peer, self._inbox) as ear:
                yield ear
            return
        try:
            with Receiver(peer, self._inbox, self._rows.take) as ear:
                yield ear
        finally:
            self._rows.part(peer)


async def _first_word(requests: AsyncIterator[ring_pb2.CarryRequest]) -> ring_pb2.Hello:
    request = await anext(requests, None)
    if request is None or not request.HasField("hello"):
        raise WireError("the first message must be hello")
    return request.hello
