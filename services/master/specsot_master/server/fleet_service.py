"""`specsot.v1.Fleet`: one long stream per member, adapted to whoever forms the ring.

Refuses to know how a ring is formed. A stream that ends, for whatever reason, is a member lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Protocol

from grpc.aio import ServicerContext

from specsot.errors import Unavailable, WireError
from specsot.links import Link
from specsot.members import PROTOCOL, Beat, Broken, Configuration, Leaving, Ready, Registration
from specsot.rpc.credentials import check_role, names_of
from specsot.rpc.outbox import Outbox
from specsot.rpc.pulse import Pulse, Vigil
from specsot.v1 import fleet_pb2, fleet_pb2_grpc
from specsot.wire.fleet import decode_upward, encode_downward


class FleetMembers(Protocol):
    """What this door needs of the fleet."""

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused."""
        ...

    def heard(self, name: str, message: object, by: Link | None = None) -> None:
        """by: its downlink. What comes by another one than the newest of this name is nobody's."""
        ...

    def lost(self, name: str, reason: str, by: Link | None = None) -> None: ...


class Downlink:
    """The master's end of a member's stream. `send` takes Configuration, Disband, Open, Close, Lease.

    busy: the member was told to get ready, and has not said that it is.
    closed: by the master. What still comes up this stream is nobody's then, nor is its end.
    """

    def __init__(self, outbox: Outbox[fleet_pb2.JoinResponse]) -> None:
        self._outbox, self.busy, self.closed = outbox, False, False

    async def send(self, message: Any) -> None:
        self.busy |= isinstance(message, Configuration)
        response = encode_downward(message)
        self._outbox.put(response, response.ByteSize())

    async def close(self) -> None:
        self.closed = True
        self._outbox.finish()


class FleetService(fleet_pb2_grpc.FleetServicer):
    def __init__(self, members: FleetMembers, pulse: Pulse | None = None) -> None:
        self._members, self._pulse = members, pulse or Pulse()
        joined = fleet_pb2.Joined(protocol=PROTOCOL, heartbeat=self._pulse.every, silence=self._pulse.silence)
        self._joined = fleet_pb2.JoinResponse(joined=joined)
        self._downlinks: set[Downlink] = set()
        self._closing = False

    async def Join(
        self,
        request_iterator: AsyncIterator[fleet_pb2.JoinRequest],
        context: ServicerContext[fleet_pb2.JoinRequest, fleet_pb2.JoinResponse],
    ) -> None:
        registration = await _first_message(request_iterator)
        if self._closing:
            raise Unavailable("the master is shutting down")
        check_role(names_of(context), registration.name, registration.kind)
        outbox: Outbox[fleet_pb2.JoinResponse] = Outbox()
        outbox.put(self._joined, self._joined.ByteSize())
        downlink = Downlink(outbox)
        await self._members.join(registration, downlink)
        self._downlinks.add(downlink)
        try:
            await self._attend(registration, request_iterator, outbox, downlink, context)
        finally:
            self._downlinks.discard(downlink)
            if not downlink.closed:
                self._members.lost(registration.name, outbox.lost or "its link broke", downlink)

    async def close(self) -> None:
        """Let every member go, in good order; nobody is missed any more, and nobody comes."""
        self._closing = True
        for downlink in list(self._downlinks):
            with suppress(Unavailable):
                await downlink.send(Leaving())
            await downlink.close()

    async def _attend(
        self,
        registration: Registration,
        requests: AsyncIterator[fleet_pb2.JoinRequest],
        outbox: Outbox[fleet_pb2.JoinResponse],
        downlink: Downlink,
        context: ServicerContext[fleet_pb2.JoinRequest, fleet_pb2.JoinResponse],
    ) -> None:
        """Both directions, until either ends. Raises WireError for what does not decode."""
        silence = self._pulse.silence
        told = f"silent for {silence:g} s"
        compiles = bool(registration.gpus)  # kernels of a GPU at any time: the lock is held for seconds
        watch = Vigil(silence, lambda: downlink.busy or compiles, lambda: outbox.lose(told))
        hearing = asyncio.create_task(self._hear(registration.name, requests, outbox, downlink, watch))
        try:
            await outbox.write_all(context.write, encode_downward(Beat()), self._pulse.every)
            if hearing.done():
                hearing.result()
        finally:
            watch.stop()
            hearing.cancel()

    async def _hear(
        self,
        name: str,
        requests: AsyncIterator[fleet_pb2.JoinRequest],
        outbox: Outbox[fleet_pb2.JoinResponse],
        downlink: Downlink,
        watch: Vigil,
    ) -> None:
        reason = "its link broke"
        try:
            async for request in requests:
                watch.heard()
                message = decode_upward(request)
                downlink.busy &= not isinstance(message, Ready | Broken)
                if not isinstance(message, Beat) and not downlink.closed:
                    self._members.heard(name, message, downlink)
        except WireError as error:
            reason = f"it sent what does not decode: {error}"
            raise
        finally:
            outbox.lose(reason)


async def _first_message(requests: AsyncIterator[fleet_pb2.JoinRequest]) -> Registration:
    request = await anext(requests, None)
    message = None if request is None else decode_upward(request)
    if not isinstance(message, Registration):
        raise WireError("the first message must be register")
    return message
