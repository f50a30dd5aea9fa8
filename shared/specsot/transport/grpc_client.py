"""A client of a master over gRPC: requests, their events, cancelling, status. The values are those
in-process.
"""

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
from specsot.transport.wire.events import INFO, REBALANCED, decode_event, encode_ask
from specsot.v1 import master_pb2, master_pb2_grpc


async def connect(
    address: str, timeout_seconds: float = DIAL_SECONDS, tls: Tls = PLAIN, token: str | None = None
) -> MasterClient:
    """Connect to a master, and return a client for it.

    address: the master's address, host:port or unix:path.
    timeout_seconds: seconds to wait for the connection.
    tls: the TLS files; with a CA, the connection uses TLS.
    token: the bearer token to send, or None. It is never sent to another machine without TLS.

    Raises Unavailable if the master cannot be reached, InvalidRequest if TLS files are invalid or if a token
    would be sent without TLS.

    The caller must close the client.
    """
    if token is not None and tls.ca is None and exposed(address):
        raise InvalidRequest(
            f"the token would be sent to {address} unencrypted: give --tls-ca", field="tls_ca"
        )
    return MasterClient(
        await reach(address, timeout_seconds, PUBLIC_BYTES, tls, keepalive=Keepalive()), token
    )


class MasterClient:
    """Sends any number of requests over one channel. All methods raise the errors that the master raised."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None = None) -> None:
        """Create a client on a channel.

        channel: a connected channel, which `close` closes.
        token: the bearer token to send with every call, or None.
        """
        self._channel = channel
        self._master = master_pb2_grpc.MasterStub(channel)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def generate(
        self, ask: Ask, request_id: str = "", timeout: float | None = None
    ) -> AsyncIterator[Numbered]:
        """Yield the events of one request, `Finished` last.

        Closing the iterator early cancels the request, unless the request is resumable.

        ask: the request.
        request_id: id of the request. Empty: the master chooses one.
        timeout: seconds that the request may take. None: no limit.

        Raises the error that the master raised, TimedOut if the request takes longer than `timeout`, and
        Unavailable if the stream ends without `Finished`.
        """
        return self._read(encode_ask(ask, request_id), timeout)

    async def _read(
        self, request: master_pb2.GenerateRequest, timeout: float | None
    ) -> AsyncIterator[Numbered]:
        """Send a request and yield its events.

        request: the encoded request.
        timeout: seconds that the request may take. None: no limit.

        Raises the error that the master raised, and Unavailable if the stream ends without `Finished`.

        The call is cancelled at the master if the caller stops iterating. A call that exceeds `timeout`
        raises the error of its status.
        """
        call = self._master.Generate(request, timeout=timeout, metadata=(*self._metadata, *trace_metadata()))
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
        """Cancel a request. Return whether it was running: False if it has ended, and for an unknown id.

        request: id of the request.

        Raises the error that the master raised, and Unavailable if it cannot be reached.
        """
        message = master_pb2.CancelRequest(request_id=request)
        with peer_errors():
            return (await self._master.Cancel(message, metadata=self._metadata)).cancelled

    async def info(self) -> Info:
        """Return the state of the master. Raises Unavailable if it cannot be reached.

        Other errors of the master, such as for a missing token, are raised as they are.
        """
        with peer_errors():
            response = await self._master.GetInfo(master_pb2.GetInfoRequest(), metadata=self._metadata)
        return INFO.decode(response)

    async def rebalance(self) -> Rebalanced:
        """Distribute the layers anew, and return the distribution. While requests run, this waits until their
        KV rows are migrated.

        The new epoch may not be complete yet when this returns. Raises Unavailable if there is no complete
        ring, and Refused if the layers cannot be distributed anew.
        """
        with peer_errors():
            response = await self._master.Rebalance(master_pb2.RebalanceRequest(), metadata=self._metadata)
        return REBALANCED.decode(response)

    async def close(self) -> None:
        """Close the channel; requests that still run are cancelled, unless they are resumable."""
        await self._channel.close()


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return a call's metadata: the trace context of the calling program, or nothing if it does not use
    OpenTelemetry.

    The result is () without OpenTelemetry and if no trace is active.
    """
    api = sys.modules.get("opentelemetry.propagate")
    carrier: dict[str, str] = {}
    if api is not None:
        api.inject(carrier)
    return tuple(carrier.items())
