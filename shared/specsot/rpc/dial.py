"""Opens channels to peers, and says in one line when nobody is there.

Refuses to know what is said over them. Waiting and trying again is the caller's business.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc import ChannelConnectivity as State

from specsot.errors import Unavailable
from specsot.rpc.credentials import channel_credentials
from specsot.rpc.failures import failure_in_words
from specsot.rpc.options import RING_BYTES, channel_options
from specsot.rpc.tls import PLAIN, Tls

DIAL_SECONDS = 5.0  # seconds until a peer that neither answers nor refuses counts as absent


def open_channel(
    address: str, largest: int = RING_BYTES, tls: Tls = PLAIN, name: str | None = None
) -> grpc.aio.Channel:
    """A channel that has not connected yet. name: see channel_options. Raises InvalidRequest (tls)."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=channel_options(largest))
    return grpc.aio.secure_channel(address, credentials, options=channel_options(largest, name))


async def reach(
    address: str,
    patience: float = DIAL_SECONDS,
    largest: int = RING_BYTES,
    tls: Tls = PLAIN,
    name: str | None = None,
) -> grpc.aio.Channel:
    """A connected channel. Raises Unavailable at the first refusal, or after `patience` seconds."""
    channel = open_channel(address, largest, tls, name)
    try:
        async with asyncio.timeout(patience):
            await _connected(channel, address)
    except TimeoutError:
        await channel.close()
        raise Unavailable(f"nobody answered at {address} within {patience:g} s") from None
    except BaseException:
        await channel.close()
        raise
    return channel


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not State.READY:
        if state in (State.TRANSIENT_FAILURE, State.SHUTDOWN):
            raise Unavailable(f"nobody answers at {address}{await _reason(channel)}")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def _reason(channel: grpc.aio.Channel) -> str:
    """Why it does not connect: only a call is told, and a call on such a channel fails at once."""
    try:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=1)
    except grpc.aio.AioRpcError as failure:
        return failure_in_words(failure.details() or "")
    return ""
