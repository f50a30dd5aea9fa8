"""Serves HTTP by uvicorn in the master's event loop, with limits on heads and on stalled connections."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from h11._writers import ChunkedWriter
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specsot.tasks import start
from specsot.transport.security import PLAIN, Tls, secured_context
from specsot_master.http.calls import STALL_SECONDS
from specsot_master.http.errors import refusal
from specsot_master.http.listener import bind

# Bytes of a request's head. Untuned.
HEADER_BYTES = 32 << 10
# Seconds within which the head of a request must arrive; the first one's count from connecting. Untuned.
HEADER_SECONDS = 15.0
# Seconds for which a connection may wait for its next request. Untuned.
IDLE_SECONDS = 30
# Connections at the same time. Untuned.
MAX_CONNECTIONS = 1024

# The header that ends a connection after the response.
_CLOSE = {"connection": "close"}
# The header that forbids browsers to guess a response's media type.
_NOSNIFF = (b"x-content-type-options", b"nosniff")
# What is wrong with a head, by the HTTP status of the refusal.
_MESSAGES = {
    400: "this is no HTTP/1.1 request",
    431: f"the head of the request is larger than {HEADER_BYTES} bytes",
    505: "only HTTP/1.1 is supported",
    501: "only the transfer-encoding chunked is supported",
}


class HttpServer:
    """A running HTTP server, which can be closed."""

    def __init__(
        self,
        app: ASGIApp,
        tls: Tls = PLAIN,
        address: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Serve an application in the background until the server is closed by `close`.

        app: the ASGI application.
        tls: the certificate and key of the server; by default plain HTTP.
        address: host:port on which it listens; port 0 stands for any free port. With None it has no port of
            its own. The attribute `port` holds the port, or 0.
        max_connections: how many connections are served at the same time; further ones are answered 503.

        Raises Unavailable if the address cannot be used, and InvalidRequest for bad certificates; each
        message is a single line.
        """
        secured = secured_context(tls)
        listeners = [bind(address)] if address else []
        self._settings = _settings(HeadCheck(app), max_connections)
        self._settings.load()
        self._settings.ssl = secured
        self._server = _EmbeddedServer(self._settings)
        self._serving = start(self._server.serve(sockets=listeners))
        self.port: int = listeners[0].getsockname()[1] if listeners else 0

    async def close(self, grace_seconds: float) -> None:
        """Accept no further connections, and cancel responses that are not complete in time. Return when the
        server has ended. A time of 0 cancels them at once.

        grace_seconds: seconds for which responses may continue.
        """
        self._settings.timeout_graceful_shutdown = grace_seconds  # pyrefly: ignore[bad-assignment]
        self._server.should_exit = True
        await self._serving


class HandedConnections(HttpServer):
    """An HTTP server without a port of its own: it serves connections that another process has accepted."""

    def __init__(
        self,
        app: ASGIApp,
        tls: Tls,
        max_connections: int,
        on_connection_lost: Callable[[], object],
    ) -> None:
        """Start a server without connections.

        app: the ASGI application.
        tls: the certificate and key of the server; PLAIN for plain HTTP.
        max_connections: how many connections are served at the same time; further ones are answered 503.
        on_connection_lost: called once for each connection that was taken, when it has ended.

        Raises InvalidRequest for bad certificates.
        """
        super().__init__(app, tls, max_connections=max_connections)
        self._on_lost = on_connection_lost

    async def take(self, connected: socket.socket) -> None:
        """Serve a connection; return once it is set up, or has failed, as in its TLS handshake.

        connected: the accepted socket, which this server closes.
        """
        connected.setblocking(False)
        # As uvicorn creates the protocol of a connection of its own.
        create_protocol = partial(
            _HandedConnection,
            self._on_lost,
            config=self._settings,
            server_state=self._server.server_state,
            app_state={},
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                create_protocol, connected, ssl=self._settings.ssl
            )
        except OSError:
            connected.close()
            self._on_lost()


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the process, which has further servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle no signals during the block. The context yields None."""
        yield


class HeadCheck:
    """Middleware that refuses invalid heads of requests.

    Refused are other versions of HTTP, too large heads, and heads with two lengths of the body. A HEAD
    request is passed on as GET; uvicorn omits the body of the response. Every response forbids browsers to
    guess its media type.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Check heads before an application gets the requests.

        app: the ASGI application that gets the accepted requests.
        """
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or answer with a refusal if its head is invalid. Other calls
        than HTTP requests are passed on unchanged. An absolute URL in the request line is split into path and
        Host header first. A HEAD request is passed on as GET.

        scope: what the server knows of the request.
        receive: receives the client's ASGI messages.
        send: sends an ASGI message to the client.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _in_origin_form(scope)
        if (refused := _refused_head(scope)) is not None:
            await refused(scope, receive, _sniffless(send))
        else:
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, receive, _sniffless(send))


# A URL with its host, as it may stand in a request line.
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE)


def _in_origin_form(scope: Scope) -> Scope:
    """Return the scope of a request with an absolute URL in its request line, split into path and Host
    header. Return other scopes as they are. An URL without a path has the path "/".

    The URL's host replaces the Host header (RFC 9112, 3.2.2). uvicorn takes the whole URL for the path:
        # "GET http://a.example/v1/models", Host b -> path "/v1/models", Host a.example

    scope: the ASGI scope of an HTTP request.
    """
    found = _ABSOLUTE.fullmatch(scope["raw_path"])
    if not found:
        return scope
    host = found[1]
    path = found[2] or b"/"
    others = [pair for pair in scope["headers"] if pair[0] != b"host"]
    headers = [(b"host", host), *others]
    return {**scope, "path": unquote(path.decode("ascii")), "raw_path": path, "headers": headers}


def _refused_head(scope: Scope) -> Response | None:
    """Return the response that refuses a head, or None for a valid one. Two lengths of the body are refused
    because they let one request hide in another (RFC 9112, 6.1). The status is 505 for another version than
    1.0 and 1.1, 431 for more than HEADER_BYTES, and 400 for two lengths; the connection is closed after each.

    scope: the ASGI scope of an HTTP request.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(a) + len(b) + 4 for a, b in headers)
    if scope["http_version"] not in ("1.0", "1.1"):
        return refusal(505, _MESSAGES[505], _CLOSE)
    if size > HEADER_BYTES:
        return refusal(431, _MESSAGES[431], _CLOSE)
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return refusal(400, "content-length and transfer-encoding cannot be used together", _CLOSE)
    return None


def _sniffless(send: Send) -> Send:
    """Return an ASGI `send` that adds the header `x-content-type-options: nosniff` to responses. A header of
    this name that the application sets is replaced.

    send: the `send` that gets the messages.
    """

    def send_on(message: Message) -> Awaitable[None]:
        """Send a message on; the first message of a response gets the header. The awaitable returns None.

        message: an ASGI message of the application.
        """
        if message["type"] == "http.response.start":
            others = [pair for pair in message.get("headers", ()) if pair[0] != _NOSNIFF[0]]
            message = {**message, "headers": [*others, _NOSNIFF]}
        return send(message)

    return send_on


class _StreamingConnection(h11.Connection):
    """An HTTP connection that writes the pieces of a chunked body without h11's state machine, whose state
    they do not change, because that takes less time.
    """

    def send(self, event: Any) -> Any:
        r"""Return the bytes of an event; see `h11.Connection.send`. Return b"" for a piece without bytes,
        which would end the body. Events other than pieces of a chunked body are written by h11.

        # Data(b"hello") within a chunked body -> b"5\r\nhello\r\n"

        event: an event of h11.
        """
        chunked = self.our_state is h11.SEND_BODY and isinstance(self._writer, ChunkedWriter)
        if type(event) is not h11.Data or not chunked:
            return super().send(event)
        return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""


class _TimedConnection(H11Protocol):
    """An HTTP connection that is cut if its client stalls.

    The client stalls if the rest of a head does not arrive, or the rest of a body after its response is
    complete, or if the client no longer reads. The first two have HEADER_SECONDS; the kernel watches the
    third.
    """

    # The timer that cuts the connection; set while the client owes the rest of a head or body.
    _owing: asyncio.TimerHandle | None = None

    def __init__(self, *settings: Any, **more: Any) -> None:
        """Create a connection, as uvicorn does for each client.

        settings: the positional arguments of uvicorn's H11Protocol.
        more: its keyword arguments.
        """
        super().__init__(*settings, **more)
        self.conn = _StreamingConnection(h11.SERVER, HEADER_BYTES)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head. The kernel is told to end the connection if the client no longer
        acknowledges bytes.

        transport: the connection's transport.
        """
        super().connection_made(transport)
        _limit_stalls(transport.get_extra_info("socket"))
        self._watch(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, as the connection has ended.

        exc: why it ended, or None.
        """
        self._watch(False)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived, then start or stop the timer."""
        super().handle_events()
        self._watch(self._owed())

    def on_response_complete(self) -> None:
        """Continue with the connection after a complete response, then start or stop the timer."""
        super().on_response_complete()
        self._watch(self._owed())

    def _owed(self) -> bool:
        """Return True if the client owes the rest of a head, or of a body whose response is complete. A
        connection without any byte of a next request owes nothing.
        """
        ours, theirs = self.conn.our_state, self.conn.their_state
        if theirs is h11.IDLE:
            return bool(self.conn.trailing_data[0])
        return theirs is h11.SEND_BODY and ours in (h11.DONE, h11.MUST_CLOSE)

    def _watch(self, is_owed: bool) -> None:
        """Start the timer if the client owes something, else stop it; arriving bytes do not restart it. After
        HEADER_SECONDS the connection is cut.

        is_owed: True if the client owes the rest of a head or body.
        """
        if is_owed and self._owing is None:
            self._owing = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        elif not is_owed and self._owing is not None:
            self._owing.cancel()
            self._owing = None

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refuses, in the same format as all other errors. uvicorn calls this method
        while it handles the parser's error, from which the status is taken. The connection is closed. If a
        response has begun already, nothing is sent.

        msg: uvicorn's own message, which is not used.
        """
        status = getattr(sys.exception(), "error_status_hint", 400)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = refusal(status, _MESSAGES.get(status, _MESSAGES[400]), _CLOSE)
            headers = [*response.raw_headers, _NOSNIFF]
            self._write(h11.Response(status_code=status, headers=headers, reason=b"Refused"))
            self._write(h11.Data(data=bytes(response.body)))
            self._write(h11.EndOfMessage())
        self.transport.close()

    def _write(self, event: h11.Event) -> None:
        """Send an event of the HTTP protocol to the client.

        event: an event of h11, such as the head of a response.
        """
        self.transport.write(self.conn.send(event) or b"")


class _HandedConnection(_TimedConnection):
    """A connection that another process has accepted, and that reports its end."""

    def __init__(self, on_lost: Callable[[], object], **settings: Any) -> None:
        """Create a connection.

        on_lost: called when the connection has ended.
        settings: the keyword arguments of uvicorn's H11Protocol.
        """
        super().__init__(**settings)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection.

        exc: why it ended, or None.
        """
        super().connection_lost(exc)
        self._on_lost()


def _settings(app: ASGIApp, max_connections: int) -> uvicorn.Config:
    """Return uvicorn's settings; the process's own log takes the place of uvicorn's.

    app: the ASGI application.
    max_connections: how many connections are served at the same time; further ones are answered 503.
    """
    return uvicorn.Config(
        app,
        loop="none",
        http=_TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        workers=1,
        limit_concurrency=max_connections,
        timeout_keep_alive=IDLE_SECONDS,
    )


def _limit_stalls(connection: socket.socket) -> None:
    """Let the kernel end the connection if sent bytes stay unacknowledged for STALL_SECONDS. Nothing happens
    on a system that cannot do so.

    connection: the socket of an accepted connection.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))
