"""`specsot.v1.Master`: requests in, numbered events out.

Refuses to know how an answer comes about. A client that goes away ends its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from grpc.aio import ServicerContext

from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Numbered
from specsot.info import Info
from specsot.params import Ask
from specsot.v1 import master_pb2, master_pb2_grpc
from specsot.wire.events import encode_event
from specsot.wire.info import encode_info
from specsot.wire.requests import decode_ask

LONGEST_ID = 128


class Leader(Protocol):
    """What this door needs of the conductor."""

    def generate(
        self, ask: Ask, request_id: str | None = None, client: str = "", timeout: float | None = None
    ) -> AsyncGenerator[Numbered, None]: ...

    def cancel(self, request_id: str) -> bool: ...


class MasterService(master_pb2_grpc.MasterServicer):
    """`info` tells how the ring stands at the moment it is called."""

    def __init__(self, leader: Leader, info: Callable[[], Info]) -> None:
        self._leader, self._info = leader, info
        self._running, self._draining = 0, False
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def Generate(
        self,
        request: master_pb2.GenerateRequest,
        context: ServicerContext[master_pb2.GenerateRequest, master_pb2.GenerateEvent],
    ) -> None:
        """Written, not yielded: gRPC raises in a blocked write, but never closes a generator in time."""
        if self._draining:
            raise Unavailable("the master is shutting down")
        ask, request_id = decode_ask(request), checked_id(request.request_id)
        client, timeout = client_of(context.peer()), context.time_remaining()
        self._enter()
        try:
            async with aclosing(self._leader.generate(ask, request_id, client, timeout)) as events:
                async for numbered in events:
                    await context.write(encode_event(numbered))
        finally:
            self._leave()

    async def Cancel(
        self,
        request: master_pb2.CancelRequest,
        context: ServicerContext[master_pb2.CancelRequest, master_pb2.CancelResponse],
    ) -> master_pb2.CancelResponse:
        if not request.request_id:
            raise InvalidRequest("request_id must be given", field="request_id")
        return master_pb2.CancelResponse(cancelled=self._leader.cancel(request.request_id))

    async def GetInfo(
        self,
        request: master_pb2.GetInfoRequest,
        context: ServicerContext[master_pb2.GetInfoRequest, master_pb2.GetInfoResponse],
    ) -> master_pb2.GetInfoResponse:
        return encode_info(self._info())

    async def drain(self, grace: float) -> bool:
        """Refuse new requests; whether those that run ended by themselves within `grace` seconds."""
        self._draining = True
        try:
            async with asyncio.timeout(grace):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    def _enter(self) -> None:
        self._running += 1
        self._quiet.clear()

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._quiet.set()


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
