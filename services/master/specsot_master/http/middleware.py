"""Checks every request before its endpoint: token, Host header, size, time and media type of the body.

Health checks and the status page need no token; metrics, the ring's state and the API document do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specsot.errors import Overloaded, Unauthenticated
from specsot.params import brief
from specsot.transport.grpc_channel import PUBLIC_BYTES
from specsot.transport.security import Tokens
from specsot_master.http.errors import body_format_at, refusal, response_of
from specsot_master.http.json_bodies import LARGE_BYTES

# Paths that need no token.
OPEN_PATHS = frozenset({"/", "/health", "/ping"})
# Key in the ASGI scope of a call: the owner of the token with which the call was made.
OWNER = "specsot.owner"


class BearerCheck:
    """Middleware that answers 401 to a request without a valid token, except at OPEN_PATHS."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        """Check requests before an application gets them.

        app: the ASGI application that gets the accepted requests.
        tokens: the valid client tokens, with their owners.
        """
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or answer 401. The answer has the error format of the
        endpoint.

        scope: what the server knows of the request; its owner is added under OWNER.
        receive: receives the client's ASGI messages.
        send: sends an ASGI message to the client.
        """
        try:
            self._check(scope)
        except Unauthenticated as error:
            await response_of(error, body_format_at(scope["path"]))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Note the owner of the request's token in its scope, under OWNER. Do nothing at OPEN_PATHS. The
        token may be in the header Authorization, or else in x-api-key; other calls than HTTP are not checked.

        scope: the ASGI scope of the request.

        Raises Unauthenticated if the request shows no valid token, or more than one.
        """
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return
        headers = Headers(scope=scope)
        # Anthropic's clients send their token in x-api-key.
        keys = [f"Bearer {key}" for key in headers.getlist("x-api-key")]
        shown = headers.getlist("authorization") or keys
        scope[OWNER] = self._tokens.owner(shown[0] if len(shown) == 1 else None)


# HTTP status of a request that is meant for another server.
MISDIRECTED = 421


class HostCheck:
    """Middleware that answers 421 to a request whose Host header names another server.

    This protects a server without tokens from web pages that let their own name resolve to this server's
    address (DNS rebinding). IP addresses, localhost and this machine's name are always accepted.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        """Accept IP addresses, localhost, this machine's name, and further names. This machine's name is
        accepted with and without its domain. Case does not matter.

        app: the ASGI application that gets the accepted requests.
        names: further host names of this server; empty for none.
        """
        hostname = socket.gethostname()
        self._app = app
        self._names = {name.lower() for name in ("localhost", hostname, hostname.partition(".")[0], *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or answer 421. A request without a Host header is passed on.
        Other calls than HTTP are passed on.

        scope: what the server knows of the request.
        receive: receives the client's ASGI messages.
        send: sends an ASGI message to the client.
        """
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        name = host_of(host)
        if host and not (name in self._names or is_address(name)):
            message = f"this server is not known as {brief(name)}: --http-names names those that it has"
            await refusal(MISDIRECTED, message)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def host_of(header: str) -> str:
    """Return a Host header in lower case, without its port and without a final dot. Of an IPv6 address
    without brackets nothing is cut off.

        # "Example.com:8000" -> "example.com"    "[::1]:8000" -> "[::1]"    "::1" -> "::1"

    header: the value of the Host header.
    """
    named, colon, port = header.rpartition(":")
    with_port = colon and port.isdecimal() and (":" not in named or named.endswith("]"))
    return (named if with_port else header).lower().rstrip(".")


def is_address(name: str) -> bool:
    """Return True if a host name is an IPv4 or IPv6 address, in brackets or not. Return False for "" and for
    names.

    name: the host name, without a port.
    """
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


# Seconds within which a body must arrive. Untuned.
BODY_SECONDS = 30.0
# Bytes of all bodies that are held at the same time: 32 of the largest. Untuned.
MAX_BODIES_BYTES = 256 << 20
# Bytes of the body of a text completion: the part that does not depend on the model. Untuned.
BASE_BYTES = 256 << 10
# Bytes of the body of a text completion per position of the model. Untuned.
POSITION_BYTES = 1 << 10
# Seconds after which a client may retry because another body may be gone. Untuned.
RETRY_SECONDS = 1.0
# A refused body is read and dropped up to this multiple of the largest allowed body; then the connection is
# cut. Untuned.
MAX_READ_FACTOR = 4
# Bytes of MAX_BODIES_BYTES that are reserved for bodies up to LARGE_BYTES; each connection has one body.
# Untuned.
SMALL_BYTES = 64 << 20
# Methods whose requests have a body.
WITH_BODY = ("POST", "PUT", "PATCH")


class BodyLimits:
    """Middleware that checks the size, time and media type of bodies, and bounds the memory for all."""

    def __init__(
        self,
        app: ASGIApp,
        largest_at: Callable[[str], int],
        body_seconds: float = BODY_SECONDS,
        budget_bytes: int = MAX_BODIES_BYTES,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        """Check bodies before an application gets them. A body is charged until its request has ended.

        app: the ASGI application that gets the accepted requests.
        largest_at: returns the maximum number of bytes of a body at a path.
        body_seconds: the time within which the whole body must arrive, in seconds.
        budget_bytes: the bytes of all bodies together whose requests have not ended.
        small_bytes: the part of the budget that is reserved for bodies up to LARGE_BYTES.
        """
        self._app = app
        self._largest = largest_at
        self._seconds = body_seconds
        self._left = budget_bytes
        self._small = small_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body of a request and pass the request on to the application, or answer with a refusal.
        Requests of methods without a body are passed on without being read; if the client disconnects,
        nothing is answered. The refusal closes the connection. The memory is given back when the application
        has ended.

        scope: what the server knows of the request.
        receive: receives the client's ASGI messages.
        send: sends an ASGI message to the client.
        """
        if scope["type"] != "http" or scope["method"] not in WITH_BODY:
            await self._app(scope, receive, send)
            return
        held = _HeldBody(self._largest(scope["path"]))
        try:
            self._check(Headers(scope=scope), held.max_bytes)
            body = await self._read(receive, held)
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        except BodyRefused as refusing:
            await refusal(*refusing.args, headers={"connection": "close"})(scope, receive, send)
        except Overloaded as full:
            response = response_of(full, body_format_at(scope["path"]))
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        finally:
            self._give_back(held)

    def _check(self, headers: Headers, max_bytes: int) -> None:
        """Check the media type, the encoding and the announced length of a body. Return nothing if they are
        accepted, or if the request has no body. The media type must be JSON, or end in "+json", and the body
        must not be encoded (415 for both). An announced length is refused (413) only if it exceeds
        MAX_READ_FACTOR times the maximum.

        headers: the headers of the request.
        max_bytes: the maximum number of bytes of the body.

        Raises BodyRefused for a wrong media type, an encoding, or a much too large announced length.
        """
        # A request without a body needs no media type; the endpoint decides whether it requires a body.
        if not headers.get("transfer-encoding") and headers.get("content-length", "0") == "0":
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise BodyRefused(415, "the body must be application/json")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise BodyRefused(
                415,
                f"the body must not be encoded as {coding[:40]}: leave content-encoding out",
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_READ_FACTOR * max_bytes:
            raise _too_large(max_bytes)

    async def _read(self, receive: Receive, held: _HeldBody) -> bytes | None:
        """Return the whole body, or None if the client has disconnected. A body counts as too slow if it has
        not arrived as a whole within the given seconds (status 408).

        receive: receives the client's ASGI messages.
        held: the account of this body's memory, to which its bytes are added.

        Raises BodyRefused if the body is too large or too slow, and Overloaded if the memory for bodies is
        full.
        """
        try:
            async with asyncio.timeout(self._seconds):
                return await self._collect(receive, held)
        except TimeoutError:
            raise BodyRefused(408, f"the body did not arrive within {self._seconds:g} seconds") from None

    async def _collect(self, receive: Receive, held: _HeldBody) -> bytes | None:
        """Return the whole body, or None if the client has disconnected. A body without room is dropped from
        then on, and refused once it has been read.

        The rest of a refused body is read and dropped, up to MAX_READ_FACTOR times the limit, because clients
        read the response only after they have sent the body.

        receive: receives the client's ASGI messages.
        held: the account of this body's memory, to which its bytes are added.

        Raises BodyRefused if the body is too large, and Overloaded if the memory for bodies is full.
        """
        body = bytearray()
        size = 0
        more = True
        full: Overloaded | None = None
        while more and size <= MAX_READ_FACTOR * held.max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= held.max_bytes and full is None:
                try:
                    self._hold(held, len(message.get("body", b"")))
                    body += message.get("body", b"")
                except Overloaded as error:
                    full = error
                    self._give_back(held)
                    body.clear()
            more = message.get("more_body", False)
        if size > held.max_bytes:
            raise _too_large(held.max_bytes)
        if full:
            raise full
        return bytes(body)

    def _hold(self, held: _HeldBody, num_bytes: int) -> None:
        """Charge bytes that have arrived to the budget; an announced length is not charged. A part of the
        budget is reserved for small bodies. Bodies of more than LARGE_BYTES may not use it.

        held: the account of the body's memory.
        num_bytes: how many bytes have arrived now.

        Raises Overloaded, and charges nothing, if the budget is used up.
        """
        reserved = self._small if held.bytes + num_bytes > LARGE_BYTES else 0
        if num_bytes > self._left - reserved:
            raise Overloaded(
                "the bodies of other requests fill the memory that is reserved for bodies", RETRY_SECONDS
            )
        self._left -= num_bytes
        held.bytes += num_bytes

    def _give_back(self, held: _HeldBody) -> None:
        """Return the bytes of a body to the budget. A second call has no effect.

        held: the account of the body's memory.
        """
        self._left += held.bytes
        held.bytes = 0


@dataclass(slots=True)
class _HeldBody:
    """The memory of one request's body.

    max_bytes: The maximum number of bytes of the body.
    bytes: The bytes of the body that are charged to the budget now; 0 before any has arrived.
    """

    max_bytes: int
    bytes: int = 0


def max_body_bytes(max_positions: int) -> Callable[[str], int]:
    """Return a function from a path to the maximum number of bytes of a body there. Text completions may have
    BASE_BYTES and POSITION_BYTES for each position, but at most PUBLIC_BYTES, which is the limit everywhere
    else.

    max_positions: the model's context in tokens, which bounds the bodies of text completions: at most 128
        prompts of so many ids.
    """

    def largest(path: str) -> int:
        """Return the maximum number of bytes of a body at a path: a smaller one for text completions than
        elsewhere.

        path: the path of the request's URL.
        """
        if path != "/v1/completions":
            return PUBLIC_BYTES
        return min(PUBLIC_BYTES, BASE_BYTES + POSITION_BYTES * max_positions)

    return largest


def _too_large(max_bytes: int) -> BodyRefused:
    """Return the refusal (413) of a body with more than so many bytes.

    max_bytes: the maximum, for the message.
    """
    return BodyRefused(413, f"the body is larger than {max_bytes} bytes")


class BodyRefused(Exception):
    """Raised for a body that is refused. Its arguments are the HTTP status and the message for the client."""


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that yields the body once, then the client's messages, such as its disconnect.

    body: the whole body, which has been read already.
    receive: receives the client's further ASGI messages.
    """
    is_sent = False

    async def next_message() -> Message:
        """Return the body at the first call, then the client's messages."""
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
