"""What a stranger can make large, at the endpoints themselves; what requests may hold is tested elsewhere."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specsot.params import MAX_BIASES, MAX_MESSAGES, MAX_STOP_IDS, MAX_STOPS, MAX_TOOLS
from specsot.service.telemetry import READER_SECONDS
from specsot.transport.grpc_channel import (
    CLIENT_STREAMS,
    HANDSHAKE_SECONDS,
    HELD_BYTES,
    MAX_STREAMS,
    METADATA_BYTES,
    PUBLIC_BYTES,
    RING_BYTES,
    Terms,
)
from specsot.transport.grpc_server import open_server
from specsot.v1 import master_pb2, master_pb2_grpc
from specsot_master.http.middleware import (
    BASE_BYTES,
    BODY_SECONDS,
    LARGE_BYTES,
    MAX_BODIES_BYTES,
    POSITION_BYTES,
)
from specsot_master.http.server import HEADER_BYTES, HEADER_SECONDS, MAX_CONNECTIONS
from tests.conftest import REPOSITORY
from tests.http.house import served
from tests.rpc.test_serve import ATTACH

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("method", ["Cancel", "Generate"])
async def test_a_message_that_unpacks_to_more_than_allowed(method: str) -> None:
    """64 MiB in 64 KiB of gzip: refused by what it would become, and the endpoint lives."""
    endpoint = await open_server("127.0.0.1:0", ATTACH, Terms(largest=1 << 20))
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}", options=options) as channel:
        call = channel.unary_unary(f"/specsot.v1.Master/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(64 << 20), compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub = master_pb2_grpc.MasterStub(channel)
        assert (await stub.Cancel(master_pb2.CancelRequest(request_id="x"))).cancelled
    await endpoint.close(0)


async def test_a_head_that_does_not_end() -> None:
    async with served() as house:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.endpoint.port)
        writer.write(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * HEADER_BYTES)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        writer.close()


@pytest.mark.parametrize(
    "row",
    [
        f"gRPC message | {PUBLIC_BYTES >> 20} MiB; within the ring {RING_BYTES >> 20} MiB a frame |",
        f"gRPC metadata | {METADATA_BYTES >> 10} KiB |",
        f"calls of one connection | {CLIENT_STREAMS} of a client, {MAX_STREAMS:,} between members |",
        f"time to begin a connection | {HANDSHAKE_SECONDS:g} s |",
        f"HTTP | head {HEADER_BYTES >> 10} KiB, body {PUBLIC_BYTES >> 20} MiB in {BODY_SECONDS:g} s, "
        f"{MAX_CONNECTIONS:,} connections; {HEADER_SECONDS:g} s for each head of a connection |",
        f"reader of metrics | {READER_SECONDS:g} s |",
        f"{HELD_BYTES >> 20} MiB of messages and {MAX_BODIES_BYTES >> 20} MiB of bodies;",
        f"bodies from {LARGE_BYTES >> 10} KiB |",
        f"body of a plain completion | {BASE_BYTES >> 10} KiB, and {POSITION_BYTES >> 10} KiB per position",
        f"{MAX_STOPS} stop strings, {MAX_STOP_IDS} stop tokens, {MAX_TOOLS} tools, {MAX_BIASES:,} biases, "
        f"{MAX_MESSAGES:,} messages",
    ],
)
def test_the_table_of_limits(row: str) -> None:
    assert row in (REPOSITORY / "docs" / "operations.md").read_text()
