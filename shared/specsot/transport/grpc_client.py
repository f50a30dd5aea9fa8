"""A client of a master over gRPC: ask, watch events, cancel, show the ring. The same values as in-process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import grpc

from specsot.core.info import Info, Rebalanced
from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Finished, Numbered
from specsot.params import Ask
from specsot.transport.grpc_channel import DIAL_SECONDS, PUBLIC_BYTES, Keepalive, reach
from specsot.transport.grpc_status import peer_errors
from specsot.transport.security import PLAIN, Tls, exposed
from specsot.transport.wire.events import decode_event, decode_info, decode_rebalanced, encode_ask
from specsot.v1 import master_pb2, master_pb2_grpc


async def connect(
    address: str, patience: float = DIAL_SECONDS, tls: Tls = PLAIN, token: str | None = None
) -> MasterClient:
    """token: what the master wants to be shown. It never leaves this machine in the clear.

    Raises Unavailable when no master is there, InvalidRequest (certificates, a token without TLS).
    """
    if token is not None and tls.ca is None and exposed(address):
        raise InvalidRequest(f"a token would travel to {address} in the clear: give --tls-ca", field="tls_ca")
    return MasterClient(await reach(address, patience, PUBLIC_BYTES, tls, keepalive=Keepalive()), token)


class MasterClient:
    """Any number of requests over one channel. Raises what the master raised."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None = None) -> None:
        self._channel = channel
        self._master = master_pb2_grpc.MasterStub(channel)
        self._shown = () if token is None else (("authorization", f"Bearer {token}"),)

    def generate(
        self, ask: Ask, request_id: str = "", timeout: float | None = None
    ) -> AsyncIterator[Numbered]:
        """Events of one request, `Finished` last. Closing the iterator early cancels the request, unless it
        is resumable.

        timeout: seconds it may take.
        """
        return self._read(encode_ask(ask, request_id), timeout)

    async def _read(
        self, request: master_pb2.GenerateRequest, timeout: float | None
    ) -> AsyncIterator[Numbered]:
        call = self._master.Generate(request, timeout=timeout, metadata=(*self._shown, *outgoing()))
        last = None
        try:
            with peer_errors():
                async for message in call:
                    last = decode_event(message)
                    yield last
        finally:
            call.cancel()
        if last is None or not isinstance(last.event, Finished):
            raise Unavailable("the master ended the stream before the request was finished")

    async def cancel(self, request: str) -> bool:
        """Whether such a request was running."""
        wanted = master_pb2.CancelRequest(request_id=request)
        with peer_errors():
            return (await self._master.Cancel(wanted, metadata=self._shown)).cancelled

    async def info(self) -> Info:
        with peer_errors():
            response = await self._master.GetInfo(master_pb2.GetInfoRequest(), metadata=self._shown)
        return decode_info(response)

    async def rebalance(self) -> Rebalanced:
        """Share the layers out anew; where requests run, that takes until rows are handed over. The new epoch
        may not be complete yet. Raises Unavailable, Refused.
        """
        with peer_errors():
            response = await self._master.Rebalance(master_pb2.RebalanceRequest(), metadata=self._shown)
        return decode_rebalanced(response)

    async def close(self) -> None:
        await self._channel.close()


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata for a call: the context of the program around us, if it traces with OpenTelemetry."""
    api = sys.modules.get("opentelemetry.propagate")
    carrier: dict[str, str] = {}
    if api is not None:
        api.inject(carrier)
    return tuple(carrier.items())
