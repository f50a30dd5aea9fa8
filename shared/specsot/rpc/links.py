"""Links between members over gRPC: `Ring.Carry`, one stream per direction.

Refuses to know what the messages mean. A stream that ends without `goodbye` is lost at both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc.aio import AioRpcError, ServicerContext, StreamUnaryCall

from specsot.errors import Refused, Unavailable, WireError
from specsot.links import Inbox, Lost
from specsot.members import PROTOCOL, Kind
from specsot.rpc.credentials import Role, check_role, names_of
from specsot.rpc.dial import PATIENCE, reach
from specsot.rpc.outbox import Outbox
from specsot.rpc.statuses import error_of
from specsot.rpc.tls import PLAIN, Tls
from specsot.v1 import ring_pb2, ring_pb2_grpc
from specsot.wire.carry import CarryReader, encode_carry
from specsot.wire.checks import named

SERVICE = "specsot.v1.Ring"
NAME_KEY = "specsot-name"  # initial metadata: who answered
SPEAKERS: dict[str, Role] = {  # who says what, by the field of a message
    "frame": "worker",
    "result": "worker",
    "features": "worker",
    "drafts": "drafter",
    "tap": "drafter",
}
FAREWELL = 2.0  # seconds a closing link has to deliver what is still in it

_Call = StreamUnaryCall[bytes, ring_pb2.CarryResponse]


class GrpcLink:
    """The sending end. `send` encodes and returns; one task writes in order."""

    def __init__(
        self, channel: grpc.aio.Channel, call: _Call, peer: str, epoch: int, inbox: Inbox | None
    ) -> None:
        self._channel, self._call, self._peer, self._epoch, self._inbox = channel, call, peer, epoch, inbox
        self._outbox: Outbox[bytes] = Outbox()
        self._closing = False
        self._writer = asyncio.create_task(self._write())
        call.add_done_callback(lambda _: self._ended())

    async def send(self, message: Any) -> None:
        self._outbox.check()
        for request in encode_carry(message):
            self._put(request)

    def _put(self, request: ring_pb2.CarryRequest) -> None:
        data = request.SerializeToString()
        self._outbox.put(data, len(data))

    async def close(self) -> None:
        """Deliver what waits, say goodbye, hang up. Never waits long, never raises."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(Unavailable, TimeoutError, AioRpcError, asyncio.InvalidStateError):
            self._put(ring_pb2.CarryRequest(goodbye=ring_pb2.Goodbye()))
            self._outbox.finish()
            async with asyncio.timeout(FAREWELL):
                await self._writer
                await self._call
        self._outbox.lose("the link is closed")
        self._writer.cancel()
        await self._channel.close()

    async def _write(self) -> None:
        """A failed write ends the call too, and `_ended` tells why."""
        with contextlib.suppress(AioRpcError, asyncio.InvalidStateError):
            await self._outbox.write_all(self._call.write)
            if self._outbox.lost is None:
                await self._call.done_writing()
            else:
                self._call.cancel()

    def _ended(self) -> None:
        if self._closing:
            return
        self._outbox.lose(f"the link to {self._peer} broke")
        if self._inbox is not None:
            self._inbox.put(self._peer, Lost(self._peer, str(self._outbox.lost), self._epoch))


class GrpcDialer:
    """Dials in the name of `sender`. With an inbox, a link that breaks is told there as Lost."""

    def __init__(
        self, sender: str, inbox: Inbox | None = None, patience: float = PATIENCE, tls: Tls = PLAIN
    ) -> None:
        self._sender, self._inbox, self._patience, self._tls = sender, inbox, patience, tls

    async def dial(self, address: str, epoch: int, kind: Kind = "worker") -> GrpcLink:
        """Raises Unavailable (nobody there), Refused (a peer of another protocol)."""
        channel = await reach(address, self._patience, tls=self._tls, name=kind)
        try:
            call, peer = await self._greet(channel, address, epoch)
        except BaseException:
            await channel.close()
            raise
        return GrpcLink(channel, call, peer, epoch, self._inbox)

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
    """The receiving end of every link to this member: decoded messages go to its inbox."""

    def __init__(self, inbox: Inbox, name: str = "") -> None:
        self._inbox, self.name = inbox, name

    def attach(self, server: grpc.aio.Server) -> None:
        ring_pb2_grpc.add_RingServicer_to_server(self, server)

    async def Carry(
        self,
        request_iterator: AsyncIterator[ring_pb2.CarryRequest],
        context: ServicerContext[ring_pb2.CarryRequest, ring_pb2.CarryResponse],
    ) -> ring_pb2.CarryResponse:
        hello = await _first_word(request_iterator)
        names = names_of(context)
        check_role(names, hello.sender, "worker", "drafter")
        await context.send_initial_metadata(((NAME_KEY, self.name),))
        reason = "its link broke"
        try:
            if await self._deliver(hello.sender, names, request_iterator):
                reason = ""
        except WireError as error:
            reason = f"it sent what does not decode: {error}"
            raise
        except Refused as error:
            reason = str(error)
            raise
        finally:
            if reason:
                self._inbox.put(hello.sender, Lost(hello.sender, reason, hello.epoch))
        return ring_pb2.CarryResponse()

    async def _deliver(
        self, sender: str, names: frozenset[str] | None, requests: AsyncIterator[ring_pb2.CarryRequest]
    ) -> bool:
        """Put messages into the inbox until goodbye (True) or the end (False).

        names: in the sender's certificate, where it must show one. Raises Refused for what it may not say.
        """
        reader = CarryReader()
        async for request in requests:
            if request.HasField("goodbye"):
                return True
            check_role(names, sender, SPEAKERS.get(request.WhichOneof("message") or "", "worker"))
            message = reader.read(request)
            if message is not None:
                self._inbox.put(sender, message)
        return False


async def _first_word(requests: AsyncIterator[ring_pb2.CarryRequest]) -> ring_pb2.Hello:
    request = await anext(requests, None)
    if request is None or not request.HasField("hello"):
        raise WireError("the first message must be hello")
    hello = request.hello
    named(hello.sender, "a sender's name")
    if hello.protocol != PROTOCOL:
        raise Refused(f"{hello.sender} speaks protocol {hello.protocol}, this member {PROTOCOL}")
    return hello
