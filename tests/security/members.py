"""A member's endpoint, with an inbox behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specsot.transport.grpc_channel import Terms
from specsot.transport.grpc_links import SERVICE, RingService
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Inbox
from specsot.transport.security import Tls


@asynccontextmanager
async def listening(tls: Tls, inbox: Inbox | None = None) -> AsyncIterator[str]:
    """Its address."""
    ring = RingService(inbox or Inbox(), "there")
    endpoint = await open_server("127.0.0.1:0", {SERVICE: ring.attach}, Terms(tls=tls))
    try:
        yield f"127.0.0.1:{endpoint.port}"
    finally:
        await endpoint.close(0)
