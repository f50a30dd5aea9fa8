"""The gRPC services: `specsot.v1.Master` for clients and `specsot.v1.Fleet` for workers and drafters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

from grpc.aio import ServicerContext

from specsot.core.info import Info, Rebalanced
from specsot.errors import Cancelled, InvalidRequest, Overloaded, Refused, Unavailable, WireError
from specsot.events import Numbered
from specsot.members import PROTOCOL, Beat, Broken, Configuration, MemberLeaving, Ready, Registration
from specsot.params import MAX_TOKENS
from specsot.tasks import WaitLimit
from specsot.transport.grpc_channel import PUBLIC_BYTES, Terms, check_role, names_of
from specsot.transport.grpc_server import GrpcServer, open_server, shown
from specsot.transport.heartbeat import Heartbeat, SilenceTimer
from specsot.transport.links import SendQueue
from specsot.transport.security import Tokens
from specsot.transport.unix_links import UnixHost, is_here
from specsot.transport.wire.events import (
    decode_ask,
    encode_event,
    encode_info,
    encode_rebalanced,
    has_words,
    resumes,
)
from specsot.transport.wire.members import decode_upward, encode_downward
from specsot.transport.wire.schema import parse
from specsot.v1 import fleet_pb2, fleet_pb2_grpc, master_pb2, master_pb2_grpc
from specsot_master.core.limits import MAX_ID_CHARACTERS
from specsot_master.engine import Caller
from specsot_master.master import RequestCounter
from specsot_master.members import Membership, TurnedAway

Context = ServicerContext[Any, Any]
JoinRequests = AsyncIterator[fleet_pb2.JoinRequest]


class MasterService(master_pb2_grpc.MasterServicer):
    """`info` reports the ring's state when it is called. `rebalance` forms it anew.

    patience: seconds one event may wait for a client that does not read. tokens: what clients show; who shows
    one owns what it asked for.
    """

    def __init__(
        self,
        requests: RequestCounter,
        info: Callable[[], Info],
        patience: float = 60.0,
        rebalance: Callable[[], Awaitable[Rebalanced]] | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self._requests = requests
        self._info = info
        self._patience = patience
        self._rebalance = rebalance
        self._tokens = tokens
        self._positions = max((model.max_positions for model in info().models), default=MAX_TOKENS + 1)

    async def Generate(self, request: master_pb2.GenerateRequest, context: Context) -> None:
        """Written, not yielded: gRPC raises in a blocked write, but never closes a generator in time. It
        takes in some megabytes before a write waits for the client.
        """
        writing = WaitLimit(self._patience)
        try:
            async with aclosing(self._events(request, context)) as events, writing:
                async for numbered in events:
                    await writing.wait(context.write(encode_event(numbered)))
        except TimeoutError:
            if not writing.passed:
                raise
            raise Cancelled(f"nothing was read for {self._patience:g} s") from None

    async def Cancel(self, request: master_pb2.CancelRequest, context: Context) -> master_pb2.CancelResponse:
        if not request.request_id:
            raise InvalidRequest("request_id must be given", field="request_id")
        cancelled = self._requests.cancel(request.request_id, self._owner(context))
        return master_pb2.CancelResponse(cancelled=cancelled)

    async def GetInfo(
        self, request: master_pb2.GetInfoRequest, context: Context
    ) -> master_pb2.GetInfoResponse:
        return encode_info(self._info())

    async def Rebalance(
        self, request: master_pb2.RebalanceRequest, context: Context
    ) -> master_pb2.RebalanceResponse:
        if self._tokens:
            self._tokens.check_admin(shown(context.invocation_metadata()))
        if self._rebalance is None:
            raise Unavailable("there is no ring here")
        return encode_rebalanced(await self._rebalance())

    def _events(
        self, request: master_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[Numbered, None]:
        """Of a new request, or the rest of a known one."""
        id = checked_id(request.request_id)
        owner = self._owner(context)
        caller = Caller(id, owner or client_of(context.peer()), context.time_remaining(), owner)
        offset = request.resume_from if resumes(request) else None
        ask = decode_ask(request, self._positions) if offset is None or has_words(request) else None
        return self._requests.generate(ask, caller, offset)

    def _owner(self, context: Context) -> str:
        return self._tokens.owner(shown(context.invocation_metadata())) if self._tokens else ""


def checked_id(text: str) -> str | None:
    """A caller's own id, None for none. Raises InvalidRequest."""
    if len(text) > MAX_ID_CHARACTERS or not text.isprintable():
        raise InvalidRequest(
            f"request_id must be at most {MAX_ID_CHARACTERS} printable characters", field="request_id"
        )
    return text or None


def client_of(peer: str) -> str:
    """gRPC's "ipv4:10.0.0.7:51234" without the port: one client, however many connections."""
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer


class Downlink:
    """The master's end of a member's stream. `send` takes Configuration, Disband, Open, Close, Lease.

    busy: the member was told to get ready, and has not said that it is.
    closed: by the master. What still comes up this stream is nobody's then, nor is its end.
    """

    def __init__(self) -> None:
        self.outbox: SendQueue[fleet_pb2.JoinResponse] = SendQueue()
        self.busy = self.closed = False

    async def send(self, message: Any) -> None:
        self.busy |= isinstance(message, Configuration)
        response = encode_downward(message)
        self.outbox.put(response, response.ByteSize())

    async def close(self) -> None:
        self.closed = True
        self.outbox.finish()


class _Ear:
    """Hears what a member says once it is registered: by its stream, and by a unix socket if there is one.
    It is lost when both have ended, or when one brings what does not decode.
    """

    over = False

    def __init__(self, members: Membership, name: str, downlink: Downlink) -> None:
        self._members = members
        self._name = name
        self._downlink = downlink
        self._ways = 0
        self.watch: SilenceTimer | None = None

    def hear(self, data: bytes) -> None:
        self.take(parse(fleet_pb2.JoinRequest, data))

    def take(self, request: fleet_pb2.JoinRequest) -> None:
        """Raises WireError."""
        if self.watch:
            self.watch.reset()
        message = decode_upward(request)
        downlink = self._downlink
        downlink.busy &= not isinstance(message, Ready | Broken)
        if not isinstance(message, Beat) and not downlink.closed:
            self._members.on_message(self._name, message, downlink)

    def __enter__(self) -> _Ear:
        self._ways += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ways -= 1
        if isinstance(error, WireError):
            self._downlink.outbox.lose(f"it sent what does not decode: {error}")
        elif not self._ways:
            self._downlink.outbox.lose("its link broke")


class FleetService(fleet_pb2_grpc.FleetServicer):
    """nearby: members of this machine are offered unix sockets."""

    def __init__(
        self,
        members: Membership,
        pulse: Heartbeat | None = None,
        turned_away: TurnedAway | None = None,
        nearby: bool = False,
    ) -> None:
        self._members = members
        self._pulse = pulse or Heartbeat()
        self._turned_away = turned_away or TurnedAway()
        self._nearby = UnixHost() if nearby else None
        self._downlinks: set[Downlink] = set()
        self._lenders: dict[Downlink, Registration] = {}
        self._closing = False

    async def ListLenders(
        self, request: fleet_pb2.ListLendersRequest, context: Context
    ) -> fleet_pb2.ListLendersResponse:
        check_role(names_of(context), request.name, "worker", "drafter")
        lenders = list(self._lenders.values())
        return fleet_pb2.ListLendersResponse(
            fingerprint=lenders[0].fingerprint if lenders else "", addresses=[one.address for one in lenders]
        )

    async def Join(self, request_iterator: JoinRequests, context: Context) -> None:
        registration = await _first_message(request_iterator)
        if self._closing:
            raise Unavailable("the master is shutting down")
        check_role(names_of(context), registration.name, registration.kind)
        downlink = Downlink()
        ear = _Ear(self._members, registration.name, downlink)
        joined = await self._joined(ear, context)
        downlink.outbox.put(joined, joined.ByteSize())
        try:
            await self._members.join(registration, downlink)
        except Refused as error:
            self._turned_away.note(registration, error)
            raise
        self._turned_away.forget(registration)
        self._downlinks.add(downlink)
        if registration.lends and registration.kind == "worker":
            self._lenders[downlink] = registration
        try:
            await self._attend(registration, request_iterator, ear, downlink, context)
        finally:
            self._downlinks.discard(downlink)
            self._lenders.pop(downlink, None)
            if not downlink.closed:
                reason = downlink.outbox.lost or "its link broke"
                self._members.on_disconnect(registration.name, reason, downlink)

    async def close(self) -> None:
        """Let every member go, in good order; nobody is missed any more, and nobody comes."""
        self._closing = True
        for downlink in list(self._downlinks):
            with suppress(Unavailable):
                await downlink.send(MemberLeaving())
            await downlink.close()
        if self._nearby:
            await self._nearby.close()

    async def _joined(self, ear: _Ear, context: Context) -> fleet_pb2.JoinResponse:
        joined = fleet_pb2.Joined(protocol=PROTOCOL, heartbeat=self._pulse.every, silence=self._pulse.silence)
        if self._nearby and is_here(unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")):
            with suppress(Overloaded, Unavailable):
                joined.socket = await self._nearby.expect(lambda: ear)
        return fleet_pb2.JoinResponse(joined=joined)

    async def _attend(
        self,
        registration: Registration,
        requests: JoinRequests,
        ear: _Ear,
        downlink: Downlink,
        context: Context,
    ) -> None:
        """Both directions, until either ends. Raises WireError for what does not decode."""
        silence = self._pulse.silence
        outbox = downlink.outbox
        told = f"silent for {silence:g} s"
        compiles = bool(registration.gpus)  # kernels of a GPU at any time: the lock is held for seconds
        watch = SilenceTimer(silence, lambda: outbox.lose(told), lambda: downlink.busy or compiles)
        ear.watch = watch
        hearing = asyncio.create_task(_receive(ear, requests))
        try:
            await outbox.write_all(context.write, encode_downward(Beat()), self._pulse.every)
            if hearing.done():
                hearing.result()
        finally:
            watch.stop()
            hearing.cancel()


async def _receive(ear: _Ear, requests: JoinRequests) -> None:
    """Raises WireError."""
    with ear:
        async for request in requests:
            ear.take(request)


async def _first_message(requests: JoinRequests) -> Registration:
    request = await anext(requests, None)
    message = None if request is None else decode_upward(request)
    if not isinstance(message, Registration):
        raise WireError("the first message must be register")
    return message


MASTER_SERVICE = "specsot.v1.Master"
FLEET_SERVICE = "specsot.v1.Fleet"
_TERMS = Terms(PUBLIC_BYTES)


async def open_master_port(
    listen: str, master: MasterService, fleet: FleetService | None, terms: Terms = _TERMS
) -> GrpcServer:
    """ "specsot.v1.Master" serves when somebody reports a complete ring. fleet None: members come in
    elsewhere, as they must where they or clients show who they are: gRPC for Python asks everybody at a port
    for a certificate, or nobody.
    """
    services = {MASTER_SERVICE: partial(master_pb2_grpc.add_MasterServicer_to_server, master)}
    if fleet is not None:
        services |= {FLEET_SERVICE: partial(fleet_pb2_grpc.add_FleetServicer_to_server, fleet)}
    door = await open_server(listen, services, terms)
    if fleet is not None:
        await door.report(FLEET_SERVICE, True)
    return door


async def open_fleet_port(listen: str, fleet: FleetService, terms: Terms) -> GrpcServer:
    """For members alone, who are taken at once."""
    door = await open_server(
        listen, {FLEET_SERVICE: partial(fleet_pb2_grpc.add_FleetServicer_to_server, fleet)}, terms
    )
    await door.report(FLEET_SERVICE, True)
    return door
