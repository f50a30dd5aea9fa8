"""Reads the JSON of request bodies: quickly, and large bodies one after the other.

A body of 8 MiB keeps the event loop from everything else for up to half a second. So requests with large
bodies take turns, and after each of them the loop belongs to others for as long as the body took.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

# Bytes. Smaller bodies are read at once: they take milliseconds. Untuned.
LARGE_BYTES: Final = 64 << 10


def read_json(body: bytes) -> Any:
    """Return the value that a body is, as `json.loads` does, for which msgspec stands in.

    msgspec takes a third of the time for numbers and half for objects. It refuses what strict JSON does not
    have (NaN, halves of UTF-16 characters, a byte order mark); whether that is accepted, and how it is
    refused, is for `json` to say. Raises ValueError (JSONDecodeError, UnicodeDecodeError), RecursionError.
    """
    try:
        return msgspec.json.decode(body)
    except ValueError:
        return json.loads(body)


class ReadingTurns:
    """Locks for requests with large bodies: those of one size class take turns.

    A size class is a factor of four, so that a body of 100 KiB waits for others of its kind, but not for
    those of megabytes.
    """

    def __init__(self) -> None:
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def read(self, body: bytes) -> Any:
        """Return the value of a body. Raises what `read_json` raises."""
        if len(body) < LARGE_BYTES:
            return read_json(body)
        loop = asyncio.get_running_loop()
        async with self._locks[len(body).bit_length() // 2]:
            begun = loop.time()
            try:
                return read_json(body)
            finally:
                await asyncio.sleep(loop.time() - begun)


class JsonRequest(Request):
    """A request whose body is read by the turns of its application."""

    async def json(self) -> Any:
        turns: ReadingTurns = self.app.state.reading_turns
        return await turns.read(await self.body())


class JsonRoute(APIRoute):
    """A route whose handler is given a `JsonRequest`. Its application needs `take_turns`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read


def take_turns(app: FastAPI) -> None:
    app.state.reading_turns = ReadingTurns()
