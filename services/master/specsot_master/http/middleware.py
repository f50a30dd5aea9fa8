"""Checks before any endpoint: bearer token, Host header (DNS rebinding), size, time and kind of bodies.

Health and the status page need no token; metrics, the ring and the API document do.
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
from specsot_master.http.errors import refusal, response_of, shape_at
from specsot_master.http.json_bodies import LARGE_BYTES

OPEN_PATHS = frozenset({"/", "/health", "/ping"})
OWNER = "specsot.owner"  # in a call's scope: whose token it shows


class BearerCheck:
    """Middleware: a request without a valid bearer token is answered 401."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except Unauthenticated as error:
            await response_of(error, shape_at(scope["path"]))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return
        headers = Headers(scope=scope)
        keys = [f"Bearer {key}" for key in headers.getlist("x-api-key")]  # as Anthropic's clients show it
        shown = headers.getlist("authorization") or keys
        scope[OWNER] = self._tokens.owner(shown[0] if len(shown) == 1 else None)


MISDIRECTED = 421


class HostCheck:
    """names: what it is called, beside localhost and this machine's own name."""

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        own = socket.gethostname()
        self._app = app
        self._names = {name.lower() for name in ("localhost", own, own.partition(".")[0], *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if host and not self._owns(host_of(host)):
            told = f"this server is not known as {brief(host_of(host))}: --http-names names those that it has"
            await refusal(MISDIRECTED, told)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _owns(self, name: str) -> bool:
        return name in self._names or is_address(name)


def host_of(host: str) -> str:
    """A Host header without its port, in small letters."""
    named, colon, port = host.rpartition(":")
    with_port = colon and port.isdecimal() and (":" not in named or named.endswith("]"))
    return (named if with_port else host).lower().rstrip(".")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


BODY_SECONDS = 30.0  # seconds in which a body must have arrived; not measured
BODIES_BYTES = 256 << 20  # bytes of all bodies held at a time: 32 of the largest; not measured
# Bytes of a plain completion's body: for all else, and for each position; not measured.
BASE_BYTES = 256 << 10
POSITION_BYTES = 1 << 10
RETRY_SECONDS = 1.0  # seconds after which another body may be gone; not measured
# Times the largest body that is read and dropped before the connection is cut; not measured.
MAX_READ_FACTOR = 4
SMALL_BYTES = 64 << 20  # of BODIES_BYTES for bodies up to LARGE_BYTES alone, one a connection; not measured
WITH_BODY = ("POST", "PUT", "PATCH")


class BodyLimits:
    """largest: bytes of a body at a path. seconds: until the whole body must be here. budget: bytes of all
    bodies whose requests are not over yet.
    """

    def __init__(
        self,
        app: ASGIApp,
        largest: Callable[[str], int],
        seconds: float = BODY_SECONDS,
        budget: int = BODIES_BYTES,
    ) -> None:
        self._app = app
        self._largest = largest
        self._seconds = seconds
        self._left = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in WITH_BODY:
            await self._app(scope, receive, send)
            return
        held = _HeldBody(self._largest(scope["path"]))
        try:
            self._check(Headers(scope=scope), held.most)
            body = await self._read(receive, held)
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        except BodyRefused as refusing:
            await refusal(refusing.status, refusing.line, {"connection": "close"})(scope, receive, send)
        except Overloaded as full:
            response = response_of(full, shape_at(scope["path"]))
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        finally:
            self._give_back(held)

    def _check(self, headers: Headers, most: int) -> None:
        if not headers.get("transfer-encoding") and headers.get("content-length", "0") == "0":
            return  # no body, so no kind of one: whether the path wants it is not known here
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise BodyRefused(415, "the body must be application/json")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise BodyRefused(
                415, f"the body must come as it is, not as {coding[:40]}: leave content-encoding out"
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_READ_FACTOR * most:
            raise _too_large(most)

    async def _read(self, receive: Receive, held: _HeldBody) -> bytes | None:
        """The whole body; None when the client went away meanwhile."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._collect(receive, held)
        except TimeoutError:
            raise BodyRefused(408, f"the body did not come within {self._seconds:g} seconds") from None

    async def _collect(self, receive: Receive, held: _HeldBody) -> bytes | None:
        """What is refused is read on for a while, and dropped: clients listen when they have spoken."""
        body = bytearray()
        size = 0
        more = True
        full: Overloaded | None = None
        while more and size <= MAX_READ_FACTOR * held.most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= held.most and full is None:
                try:
                    self._hold(held, len(message.get("body", b"")))
                    body += message.get("body", b"")
                except Overloaded as error:
                    full = error
                    self._give_back(held)
                    body.clear()
            more = message.get("more_body", False)
        if size > held.most:
            raise _too_large(held.most)
        if full:
            raise full
        return bytes(body)

    def _hold(self, held: _HeldBody, more: int) -> None:
        """What has come counts, not what was announced: that costs nobody anything. Raises Overloaded."""
        kept = SMALL_BYTES if held.bytes + more > LARGE_BYTES else 0
        if more > self._left - kept:
            raise Overloaded("the bodies of other requests fill the memory for them", RETRY_SECONDS)
        self._left -= more
        held.bytes += more

    def _give_back(self, held: _HeldBody) -> None:
        self._left += held.bytes
        held.bytes = 0


@dataclass(slots=True)
class _HeldBody:
    """The body of one request. most: bytes it may have. bytes: that it has."""

    most: int
    bytes: int = 0


def largest_of(positions: int) -> Callable[[str], int]:
    """Bytes of a body by path. positions: of the model: what plain completions are about, at most 128 prompts
    of so many ids, is no larger.
    """

    def largest(path: str) -> int:
        if path != "/v1/completions":
            return PUBLIC_BYTES
        return min(PUBLIC_BYTES, BASE_BYTES + POSITION_BYTES * positions)

    return largest


def _too_large(most: int) -> BodyRefused:
    return BodyRefused(413, f"the body is larger than {most} bytes")


class BodyRefused(Exception):
    """A body that is not read on. status: of HTTP; line: why, for the client."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status = status
        self.line = line


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever comes: in the end, that the client went away."""
    told = False

    async def next_message() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
