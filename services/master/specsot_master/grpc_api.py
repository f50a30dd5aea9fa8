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
from specsot.params import FORM_KINDS, MAX_TOKENS, STRUCTURAL_TAG, refuse
from specsot.tasks import WaitLimit
from specsot.transport.grpc_channel import PUBLIC_BYTES, Terms, check_role, names_of
from specsot.transport.grpc_server import GrpcServer, authorization_of, open_server
from specsot.transport.heartbeat import Heartbeat, SilenceTimer
from specsot.transport.links import SendQueue
from specsot.transport.security import Tokens
from specsot.transport.unix_links import UnixHost, is_local_socket
from specsot.transport.wire.events import (
    INFO,
    REBALANCED,
    decode_ask,
    encode_event,
    has_prompt,
    resumes,
)
from specsot.transport.wire.members import decode_upward, encode_downward
from specsot.transport.wire.schema import parse
from specsot.v1 import fleet_pb2, fleet_pb2_grpc, master_pb2, master_pb2_grpc
from specsot_master.core.limits import MAX_ID_CHARACTERS
from specsot_master.engine import Caller
from specsot_master.master import RequestCounter
from specsot_master.members import Membership, RefusedMembers

# What gRPC knows of one call: its metadata, deadline, and peer.
Context = ServicerContext[Any, Any]
# The stream of messages from one member.
JoinRequests = AsyncIterator[fleet_pb2.JoinRequest]


class MasterService(master_pb2_grpc.MasterServicer):
    """The gRPC service for clients: generate, cancel, state of the rings, rebalance."""

    def __init__(
        self,
        requests: RequestCounter,
        info: Callable[[], Info],
        write_seconds: float = 60.0,
        rebalance: Callable[[], Awaitable[Rebalanced]] | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Serve requests.

        requests: the entry point of requests.
        info: returns the present state of the rings; it is called once here, for the longest context of the
            models.
        write_seconds: seconds for which one event may wait for a client that does not read.
        rebalance: splits the layers anew, or None if there is no ring here.
        tokens: the valid client tokens, or None if clients need none; the holder of a token owns the requests
            made with it.
        """
        self._requests = requests
        self._info = info
        self._patience = write_seconds
        self._rebalance = rebalance
        self._tokens = tokens
        self._positions = max((model.max_positions for model in info().models), default=MAX_TOKENS + 1)

    async def Generate(self, request: master_pb2.GenerateRequest, context: Context) -> None:
        """Stream the events of a request. An event that waits longer than `write_seconds` for the client ends
        the call.

        Return once the last event was written; the call then ends.

        Events are written to the context instead of being yielded: when a client disconnects, gRPC raises in
        a blocked write, but closes a generator too late. gRPC buffers some megabytes before a write waits for
        the client.

        request: what the client asks for, or which request it resumes.
        context: the gRPC call.

        Raises Cancelled if one write waits for too long, and the errors of the request.
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
        """Cancel a request of this client. The response's `cancelled` is False if no such request of this
        client waits or runs.

        request: the id of the request.
        context: the gRPC call, whose token identifies the owner.

        Raises InvalidRequest if the id is missing, and what `_owner` raises for a wrong token.
        """
        if not request.request_id:
            raise InvalidRequest("request_id must be given", field="request_id")
        cancelled = self._requests.cancel(request.request_id, self._owner(context))
        return master_pb2.CancelResponse(cancelled=cancelled)

    async def GetInfo(
        self, request: master_pb2.GetInfoRequest, context: Context
    ) -> master_pb2.GetInfoResponse:
        """Return the present state of the rings.

        request: an empty message.
        context: the gRPC call.
        """
        return INFO.encode(self._info())

    async def Rebalance(
        self, request: master_pb2.RebalanceRequest, context: Context
    ) -> master_pb2.RebalanceResponse:
        """Split the layers anew over all workers. With several tokens, only an administrator's token may do
        so.

        request: an empty message.
        context: the gRPC call, whose token identifies the owner.

        Raises Forbidden for a token that is no administrator's, Unavailable without a ring or if it breaks
        meanwhile, and Refused if KV memory is too small.
        """
        if self._tokens:
            self._tokens.check_admin(authorization_of(context.invocation_metadata()))
        if self._rebalance is None:
            raise Unavailable("there is no ring here")
        return REBALANCED.encode(await self._rebalance())

    def _events(
        self, request: master_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[Numbered, None]:
        """Return the events of a new request, or the rest of a resumed one. `resume_from` of the message
        decides which; the events end with Finished, and closing them cancels a request that is not resumable.
        The owner of the token, or else the client's host, is the client in the queue.

        request: what the client asks for, or which request it resumes. When a request is resumed, it may
            leave out the prompt; then None is passed on in place of what it asks for.
        context: the gRPC call, with the client's address, token and deadline.

        Raises InvalidRequest for a request that cannot be decoded, for an id that is too long or not
        printable, and for a form of an internal kind; and what `_owner` raises.
        """
        id = checked_id(request.request_id)
        owner = self._owner(context)
        caller = Caller(id, owner or client_of(context.peer()), context.time_remaining(), owner)
        offset = request.resume_from if resumes(request) else None
        if request.form.WhichOneof("form") == STRUCTURAL_TAG:
            raise refuse(f"{STRUCTURAL_TAG} is internal; a form is one of {', '.join(FORM_KINDS)}")
        ask = decode_ask(request, self._positions) if offset is None or has_prompt(request) else None
        return self._requests.generate(ask, caller, offset)

    def _owner(self, context: Context) -> str:
        """Return the owner of the token with which a call was made; "" if no tokens are required.

        context: the gRPC call.

        Raises what `Tokens.owner` raises for a token that is missing or not valid.
        """
        return self._tokens.owner(authorization_of(context.invocation_metadata())) if self._tokens else ""


def checked_id(request_id: str) -> str | None:
    """Return a caller's own request id, or None for an empty one. An id may have at most MAX_ID_CHARACTERS
    characters.

    request_id: the id as it was received.

    Raises InvalidRequest if it is too long, or not printable.
    """
    if len(request_id) > MAX_ID_CHARACTERS or not request_id.isprintable():
        raise InvalidRequest(
            f"request_id must be at most {MAX_ID_CHARACTERS} printable characters", field="request_id"
        )
    return request_id or None


def client_of(peer: str) -> str:
    """Return gRPC's name of a peer without the port, so that all connections of a host are one client.

        # "ipv4:10.0.0.7:51234" -> "ipv4:10.0.0.7"    "unix:" -> "unix:"

    peer: gRPC's name of the client.
    """
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer


class Downlink:
    """The master's end of the stream to a member; sends it configurations and orders.

    The attribute `busy` is set while the member gets ready for an epoch, from its Configuration until it
    reports Ready or Broken. `closed` is set once the master has closed the stream; then messages that still
    arrive, and the end of the stream, are ignored.
    """

    def __init__(self) -> None:
        """Open a link with an empty queue."""
        self.outbox: SendQueue[fleet_pb2.JoinResponse] = SendQueue()
        self.busy = self.closed = False

    async def send(self, message: Any) -> None:
        """Queue a message to the member. A Configuration sets `busy`. Nothing is awaited: the queue is sent
        in the background.

        message: a message of the master to a member, such as Configuration, or an order to stage 0.

        Raises Unavailable if the link is lost or its queue is full.
        """
        self.busy |= isinstance(message, Configuration)
        response = encode_downward(message)
        self.outbox.put(response, response.ByteSize())

    async def close(self) -> None:
        """Send what is queued, then end the stream. A second call does nothing more."""
        self.closed = True
        self.outbox.finish()


class _MemberReceiver:
    """Receives the messages of a registered member, from its stream and from a unix socket if there is one.

    Each of the two enters this object as a context. The member is lost when both have ended, or when one of
    them delivers a message that does not decode.

    The attribute `watch` is the silence timer, which every message resets.
    """

    # Read by the unix socket's server; the receiver itself never ends the socket.
    over = False

    def __init__(self, members: Membership, name: str, downlink: Downlink) -> None:
        """Create a receiver for one member; no stream has entered it.

        members: gets the decoded messages.
        name: the member's name.
        downlink: the master's link to the member.
        """
        self._members = members
        self._name = name
        self._downlink = downlink
        self._ways = 0
        self.watch: SilenceTimer | None = None

    def receive_bytes(self, data: bytes) -> None:
        """Handle one encoded message of the unix socket.

        data: the bytes of a JoinRequest.

        Raises WireError if they do not decode.
        """
        self.take(parse(fleet_pb2.JoinRequest, data))

    def take(self, request: fleet_pb2.JoinRequest) -> None:
        """Handle one message, and pass it to the fleet unless it is a heartbeat. Messages that arrive after
        the master has closed the link are ignored. Every message restarts the silence timer. Ready and Broken
        end the time in which the member may be busy.

        request: the message as the member has sent it, decoded from protobuf.

        Raises WireError if its contents do not decode.
        """
        if self.watch:
            self.watch.reset()
        message = decode_upward(request)
        downlink = self._downlink
        downlink.busy &= not isinstance(message, Ready | Broken)
        if not isinstance(message, Beat) and not downlink.closed:
            self._members.on_message(self._name, message, downlink)

    def __enter__(self) -> _MemberReceiver:
        """Count one more way by which the member's messages arrive."""
        self._ways += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Count one way less; mark the link as lost if it was the last one, or if a message did not decode.
        The exception is raised further.

        kind: the class of the exception that ended the way, or None.
        error: the exception itself, or None; a WireError names the message that did not decode.
        trace: the traceback of the exception, or None.
        """
        self._ways -= 1
        if isinstance(error, WireError):
            self._downlink.outbox.lose(f"it sent a message that cannot be decoded: {error}")
        elif not self._ways:
            self._downlink.outbox.lose("its link broke")


class FleetService(fleet_pb2_grpc.FleetServicer):
    """The gRPC service for members: join a fleet, and find members that lend model files."""

    def __init__(
        self,
        members: Membership,
        heartbeat: Heartbeat | None = None,
        refused_members: RefusedMembers | None = None,
        with_unix_socket: bool = False,
    ) -> None:
        """Admit members.

        members: admits the members, and gets their messages.
        heartbeat: how often members send heartbeats, and how long they may be silent; None for the defaults.
        refused_members: where refusals are noted; None to note them nowhere else.
        with_unix_socket: True to offer a unix socket to members on this machine.
        """
        self._members = members
        self._pulse = heartbeat or Heartbeat()
        self._refused_members = refused_members or RefusedMembers()
        self._nearby = UnixHost() if with_unix_socket else None
        self._downlinks: set[Downlink] = set()
        self._lenders: dict[Downlink, Registration] = {}
        self._closing = False

    async def ListLenders(
        self, request: fleet_pb2.ListLendersRequest, context: Context
    ) -> fleet_pb2.ListLendersResponse:
        """Return the addresses of the workers that lend the model's files to others, with the model's
        fingerprint; no addresses if none lends. The fingerprint is "" then.

        request: the name of the member that asks.
        context: the gRPC call, whose certificate must be that of a worker or drafter of this name.

        Raises what `check_role` raises for a certificate of another name or role.
        """
        check_role(names_of(context), request.name, "worker", "drafter")
        lenders = list(self._lenders.values())
        return fleet_pb2.ListLendersResponse(
            fingerprint=lenders[0].fingerprint if lenders else "", addresses=[one.address for one in lenders]
        )

    async def Join(self, request_iterator: JoinRequests, context: Context) -> None:
        """Admit a member, and exchange messages with it until either side ends the stream. The first message
        of the member must be its registration. A refusal is noted for the master's status, and forgotten when
        the member joins. When the stream ends, the fleet is told of the loss, unless the master has closed
        the link.

        request_iterator: the messages of the member.
        context: the gRPC call.

        Raises Refused if the member does not belong to this fleet, Unavailable while the master shuts down,
        WireError if the first message is no registration or a message does not decode, and what `check_role`
        raises for a wrong certificate.
        """
        registration = await _first_message(request_iterator)
        if self._closing:
            raise Unavailable("the master is shutting down")
        check_role(names_of(context), registration.name, registration.kind)
        downlink = Downlink()
        receiver = _MemberReceiver(self._members, registration.name, downlink)
        joined = await self._joined(receiver, context)
        downlink.outbox.put(joined, joined.ByteSize())
        try:
            await self._members.join(registration, downlink)
        except Refused as error:
            self._refused_members.note(registration, error)
            raise
        self._refused_members.forget(registration)
        self._downlinks.add(downlink)
        if registration.lends and registration.kind == "worker":
            self._lenders[downlink] = registration
        try:
            await self._attend(registration, request_iterator, receiver, downlink, context)
        finally:
            self._downlinks.discard(downlink)
            self._lenders.pop(downlink, None)
            if not downlink.closed:
                reason = downlink.outbox.lost or "its link broke"
                self._members.on_disconnect(registration.name, reason, downlink)

    async def close(self) -> None:
        """Tell every member that the master leaves, and close all links. Later members are refused. A member
        whose queue is full or whose link is lost is passed over.
        """
        self._closing = True
        for downlink in list(self._downlinks):
            with suppress(Unavailable):
                await downlink.send(MemberLeaving())
            await downlink.close()
        if self._nearby:
            await self._nearby.close()

    async def _joined(self, receiver: _MemberReceiver, context: Context) -> fleet_pb2.JoinResponse:
        """Return the first response to a member, with a unix socket if the member runs on this machine. The
        socket's path is left out if no socket can be offered now.

        receiver: receives the messages of the unix socket.
        context: the gRPC call, which has the member's address.
        """
        joined = fleet_pb2.Joined(protocol=PROTOCOL, heartbeat=self._pulse.every, silence=self._pulse.silence)
        if self._nearby and is_local_socket(
            unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")
        ):
            with suppress(Overloaded, Unavailable):
                joined.socket = await self._nearby.expect(lambda: receiver)
        return fleet_pb2.JoinResponse(joined=joined)

    async def _attend(
        self,
        registration: Registration,
        requests: JoinRequests,
        receiver: _MemberReceiver,
        downlink: Downlink,
        context: Context,
    ) -> None:
        """Send and receive until either direction ends. The member counts as lost if it is silent for longer
        than the heartbeat allows. A member that gets ready for an epoch, or that has a GPU and may compile,
        is allowed more silence. Heartbeats are sent while nothing else is.

        registration: what the member reported about itself.
        requests: the further messages of the member.
        receiver: handles the messages.
        downlink: the master's link to the member, whose queue is sent.
        context: the gRPC call.

        Raises WireError for a message that does not decode.
        """
        silence = self._pulse.silence
        outbox = downlink.outbox
        reason = f"silent for {silence:g} s"
        # A member with a GPU may compile kernels at any time, and then holds its interpreter's lock for
        # seconds.
        compiles = bool(registration.gpus)
        watch = SilenceTimer(silence, lambda: outbox.lose(reason), lambda: downlink.busy or compiles)
        receiver.watch = watch
        receiving = asyncio.create_task(_receive(receiver, requests))
        try:
            await outbox.write_all(context.write, encode_downward(Beat()), self._pulse.every)
            if receiving.done():
                receiving.result()
        finally:
            watch.cancel()
            receiving.cancel()


async def _receive(receiver: _MemberReceiver, requests: JoinRequests) -> None:
    """Receive the messages of a member's stream until it ends.

    receiver: handles the messages.
    requests: the messages of the member, in order.

    Raises WireError for a message that does not decode.
    """
    with receiver:
        async for request in requests:
            receiver.take(request)


async def _first_message(requests: JoinRequests) -> Registration:
    """Return the registration with which a stream begins. Nothing after it is read.

    requests: the messages of the member.

    Raises WireError if the stream begins otherwise, or is empty.
    """
    request = await anext(requests, None)
    message = None if request is None else decode_upward(request)
    if not isinstance(message, Registration):
        raise WireError("the first message must be register")
    return message


# Full name of the gRPC service for clients, under which its health is reported.
MASTER_SERVICE = "specsot.v1.Master"
# Full name of the gRPC service for members, under which its health is reported.
FLEET_SERVICE = "specsot.v1.Fleet"
# For a port without TLS and tokens: only the size of a message is bounded.
_TERMS = Terms(PUBLIC_BYTES)


async def open_master_port(
    address: str, master: MasterService, fleet: FleetService | None, terms: Terms = _TERMS
) -> GrpcServer:
    """Open the port for clients, and return its server. Its health service reports `specsot.v1.Master` as set
    by the caller. The health of the service for members, if it is on this port, is reported as healthy at
    once.

    address: host:port, or the path of a unix socket.
    master: the service for clients.
    fleet: the service for members on the same port, or None if members have a port of their own. They need
        their own port if members show certificates or clients show tokens, because gRPC for Python requires
        certificates either from all connections of a port or from none.
    terms: sizes, TLS and tokens of the port.

    Raises Unavailable if the address cannot be used.
    """
    services = {MASTER_SERVICE: partial(master_pb2_grpc.add_MasterServicer_to_server, master)}
    if fleet is not None:
        services |= {FLEET_SERVICE: partial(fleet_pb2_grpc.add_FleetServicer_to_server, fleet)}
    endpoint = await open_server(address, services, terms)
    if fleet is not None:
        await endpoint.report(FLEET_SERVICE, True)
    return endpoint


async def open_fleet_port(address: str, fleet: FleetService, terms: Terms) -> GrpcServer:
    """Open a port for members only, and return its server. The port is reported as healthy at once.

    address: host:port, or the path of a unix socket.
    fleet: the service for members.
    terms: sizes and TLS of the port.

    Raises Unavailable if the address cannot be used.
    """
    endpoint = await open_server(
        address, {FLEET_SERVICE: partial(fleet_pb2_grpc.add_FleetServicer_to_server, fleet)}, terms
    )
    await endpoint.report(FLEET_SERVICE, True)
    return endpoint
