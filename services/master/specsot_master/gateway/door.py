"""Opens the master's HTTP door, and closes it in order: uvicorn as a guest of the master's own life.

Refuses to know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from specsot.errors import Unavailable
from specsot.rpc.serve import reason, split_address
from specsot.rpc.tls import PLAIN, Tls, secured_context
from specsot.tasks import start
from specsot_master.gateway.streams import STALL

HEADER_BYTES = 32 << 10
HEADER_SECONDS = 15.0  # until a new connection must have said what it wants
IDLE_SECONDS = 30  # a connection may wait for its next request
MOST_CONNECTIONS = 1024


class HttpDoor:
    """A server that is open. `port` is the real one."""

    def __init__(self, server: _Guest, serving: asyncio.Task[None], port: int) -> None:
        self._server, self._serving, self.port = server, serving, port

    async def close(self, grace: float) -> None:
        """No new connections; answers under way have `grace` seconds, then they are cancelled."""
        self._server.config.timeout_graceful_shutdown = grace  # pyright: ignore[reportAttributeAccessIssue]
        self._server.should_exit = True
        await self._serving


async def open_http_door(listen: str, app: ASGIApp, tls: Tls = PLAIN) -> HttpDoor:
    """Serve at host:port.

    Raises, in one line, Unavailable when the address cannot be had, InvalidRequest for bad certificates.
    """
    secured = secured_context(tls)
    listener = _bind(listen)
    settings = _settings(app)
    settings.load()
    settings.ssl = secured
    server = _Guest(settings)
    serving = start(server.serve(sockets=[listener]))
    return HttpDoor(server, serving, listener.getsockname()[1])


class _Guest(uvicorn.Server):
    """Signals belong to the process, not to one of its doors."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Impatient(H11Protocol):
    """Cuts connections that never ask for anything, and those whose client takes no byte any more."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        _limit_stalls(transport.get_extra_info("socket"))
        self._opening = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._opening.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        if self.cycle is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.transport.abort()


def _settings(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=_Impatient,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # what matters is told through the process's own log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        workers=1,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )


def _bind(listen: str) -> socket.socket:
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen at {listen}: {reason(error)}") from None
    listener.setblocking(False)
    return listener


def _limit_stalls(connection: socket.socket) -> None:
    """Let the kernel end what a stalled client leaves behind, where it can."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL * 1000))
