"""`specsot.v1.Master`: requests in, numbered events out.

Refuses to know how an answer comes about. A client that goes away ends its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from grpc.aio import ServicerContext

from specsot.errors import Cancelled, InvalidRequest, Unavailable
from specsot.events import Numbered
from specsot.info import Info, Rebalanced
from specsot.params import Ask
from specsot.rpc.bearer import shown
from specsot.rpc.tokens import Tokens
from specsot.v1 import master_pb2, master_pb2_grpc
from specsot.wire.events import encode_event
from specsot.wire.info import encode_info, encode_rebalanced
from specsot.wire.requests import decode_ask, has_words, resumes
from specsot_master.conductor import Caller

LONGEST_ID = 128


class Leader(Protocol):
    """What this door needs of the desk."""

    def generate(self, ask: Ask, caller: Caller) -> AsyncGenerator[Numbered, None]: ...

    def resume(
        self, request_id: str, offset: int, ask: Ask | None, caller: Caller
    ) -> AsyncGenerator[Numbered, None]: ...

    def cancel(self, request_id: str, owner: str = "") -> bool: ...


class MasterService(master_pb2_grpc.MasterServicer):
    """`info` tells how the ring stands at the moment it is called. `rebalance` forms it anew.

    patience: seconds one event may wait for a client that does not read. tokens: what clients show; who shows
    one owns what it asked for.
    """

    def __init__(
        self,
        leader: Leader,
        info: Callable[[], Info],
        patience: float = 60.0,
        rebalance: Callable[[], Rebalanced] | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self._leader, self._info, self._patience = leader, info, patience
        self._rebalance, self._tokens = rebalance, tokens
        self._positions: int | None = None

    async def Generate(
        self,
        request: master_pb2.GenerateRequest,
        context: ServicerContext[master_pb2.GenerateRequest, master_pb2.GenerateEvent],
    ) -> None:
        """Written, not yielded: gRPC raises in a blocked write, but never closes a generator in time."""
        async with aclosing(self._events(request, context)) as events:
            async for numbered in events:
                await self._write(context, encode_event(numbered))

    async def Cancel(
        self,
        request: master_pb2.CancelRequest,
        context: ServicerContext[master_pb2.CancelRequest, master_pb2.CancelResponse],
    ) -> master_pb2.CancelResponse:
        if not request.request_id:
            raise InvalidRequest("request_id must be given", field="request_id")
        cancelled = self._leader.cancel(request.request_id, self._owner(context))
        return master_pb2.CancelResponse(cancelled=cancelled)

    async def GetInfo(
        self,
        request: master_pb2.GetInfoRequest,
        context: ServicerContext[master_pb2.GetInfoRequest, master_pb2.GetInfoResponse],
    ) -> master_pb2.GetInfoResponse:
        return encode_info(self._info())

    async def Rebalance(
        self,
        request: master_pb2.RebalanceRequest,
        context: ServicerContext[master_pb2.RebalanceRequest, master_pb2.RebalanceResponse],
    ) -> master_pb2.RebalanceResponse:
        if self._tokens:
            self._tokens.check_admin(shown(context.invocation_metadata()))
        if self._rebalance is None:
            raise Unavailable("there is no ring here")
        return encode_rebalanced(self._rebalance())

    def _events(
        self,
        request: master_pb2.GenerateRequest,
        context: ServicerContext[master_pb2.GenerateRequest, master_pb2.GenerateEvent],
    ) -> AsyncGenerator[Numbered, None]:
        """Of a new request, or the rest of a known one."""
        id, owner = checked_id(request.request_id), self._owner(context)
        caller = Caller(id, owner or client_of(context.peer()), context.time_remaining(), owner)
        if resumes(request):
            ask = self._ask_of(request) if has_words(request) else None
            return self._leader.resume(request.request_id, request.resume_offset, ask, caller)
        return self._leader.generate(self._ask_of(request), caller)

    def _owner(self, context: ServicerContext[Any, Any]) -> str:
        return self._tokens.owner(shown(context.invocation_metadata())) if self._tokens else ""

    def _ask_of(self, request: master_pb2.GenerateRequest) -> Ask:
        """Raises InvalidRequest, at once for what no model here can hold."""
        if self._positions is None:  # models do not change, and telling all of a fleet takes a while
            self._positions = max((model.max_positions for model in self._info().models), default=None)
        return decode_ask(request) if self._positions is None else decode_ask(request, self._positions)

    async def _write(
        self,
        context: ServicerContext[master_pb2.GenerateRequest, master_pb2.GenerateEvent],
        event: master_pb2.GenerateEvent,
    ) -> None:
        """gRPC takes in some megabytes before a write waits for the client."""
        try:
            async with asyncio.timeout(self._patience):
                await context.write(event)
        except TimeoutError:
            raise Cancelled(f"nothing was read for {self._patience:g} s") from None


def checked_id(text: str) -> str | None:
    """A caller's own id, None for none. Raises InvalidRequest."""
    if len(text) > LONGEST_ID or not text.isprintable():
        raise InvalidRequest(
            f"request_id must be at most {LONGEST_ID} printable characters", field="request_id"
        )
    return text or None


def client_of(peer: str) -> str:
    """gRPC's "ipv4:10.0.0.7:51234" without the port: one client, however many connections."""
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer
