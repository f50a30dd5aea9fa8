"""Lets only requests in whose bodies are small enough, come in time, and say that they are JSON.

Refuses to know what bodies mean. It stands before everything that reads them.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specsot_master.gateway.refusals import refusal

BODY_SECONDS = 30.0
PATIENCE = 4  # times the largest body, read before the line is cut
WITH_BODY = ("POST", "PUT", "PATCH")


class Intake:
    """largest: bytes of a body. seconds: until the whole body must be here."""

    def __init__(self, app: ASGIApp, largest: int, seconds: float = BODY_SECONDS) -> None:
        self._app, self._largest, self._seconds = app, largest, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in WITH_BODY:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(headers)
            body = await self._read(receive)
        except Refusing as refusing:
            await refusal(refusing.status, refusing.line, {"connection": "close"})(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check(self, headers: Headers) -> None:
        if not headers.get("transfer-encoding") and headers.get("content-length", "0") == "0":
            return  # no body, so no kind of one: whether the path wants it is not known here
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise Refusing(415, "the body must be application/json")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > PATIENCE * self._largest:
            raise self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None when the client went away meanwhile."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._collect(receive)
        except TimeoutError:
            raise Refusing(408, f"the body did not come within {self._seconds:g} seconds") from None

    async def _collect(self, receive: Receive) -> bytes | None:
        """What is too large is read on for a while, and dropped: clients listen when they have spoken."""
        body, size, more = bytearray(), 0, True
        while more and size <= PATIENCE * self._largest:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size <= self._largest:
                body += message.get("body", b"")
            more = message.get("more_body", False)
        if size > self._largest:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> Refusing:
        return Refusing(413, f"the body is larger than {self._largest} bytes")


class Refusing(Exception):
    """A status and a line for the client."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


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
