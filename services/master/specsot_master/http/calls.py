"""One HTTP call: its caller, and the events of its requests, as server-sent events or as one response.

Work ends when its client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from specsot.core.event_json import plain_of
from specsot.core.info import ModelInfo
from specsot.errors import Cancelled, InvalidRequest
from specsot.events import Numbered
from specsot.members import Head
from specsot.params import Ask, Mode
from specsot.tasks import WaitLimit
from specsot.tracing import TRACEPARENT, caller, trace_of, well_formed
from specsot_master.engine import Caller
from specsot_master.engine.intake import THREAD_CHARACTERS
from specsot_master.grpc_api import checked_id
from specsot_master.http.errors import body_of, naming_fields
from specsot_master.http.middleware import OWNER
from specsot_master.http.unknown_fields import UnknownFields
from specsot_master.master import RequestCounter
from specsot_master.text import Text

MOST_LONG_TEXTS = 2  # in threads at a time, of which two cores have six; not measured

RequestEvents = AsyncGenerator[Numbered, None]
T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Events as they come, each with its stream's place; never more than one ahead of the reader.

    An error in one ends all. What is refused at once is refused before any event of the others is told.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for numbered in only:
                yield 0, numbered
        return
    waiting = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in done if _has_ended(task)]:
                del waiting[task]
            for task in sorted(done & waiting.keys(), key=waiting.__getitem__):
                place = waiting.pop(task)
                yield place, task.result()
                waiting[asyncio.ensure_future(anext(streams[place]))] = place
    finally:
        await _close_streams(list(waiting), streams)


def _has_ended(task: asyncio.Future[T]) -> bool:
    """Whether the stream behind it has ended. Raises what it ended with, if that is an error."""
    error = task.exception()
    if error is not None and not isinstance(error, StopAsyncIteration):
        raise error
    return error is not None


async def _close_streams(
    waiting: list[asyncio.Future[T]], streams: Sequence[AsyncGenerator[T, None]]
) -> None:
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for stream in streams:
        await stream.aclose()


log = structlog.get_logger()

STALL_SECONDS = 30.0  # seconds in which a client must read what is sent; not measured
# Seconds. A stream that is silent for so long sends a ping, so that proxies, which close silent connections
# after 60 s, keep it open. Precedent: vLLM and llama.cpp.
PING_SECONDS: Final = 10.0
PING: Final = b": ping\n\n"  # a comment of server-sent events, which every client skips
DONE = b"data: [DONE]\n\n"
WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=plain_of)

Chunks = AsyncGenerator[dict[str, Any], None]


class ClientStalled(Exception):
    """The client takes nothing any more."""


@dataclass(frozen=True, slots=True)
class EventStyle:
    """How one API writes server-sent events. named: each by its `type`. last: what follows them.
    ping: what is sent while there is nothing to say. fault: an error as an event.
    """

    named: bool = False
    last: bytes = DONE
    ping: bytes = PING
    fault: Callable[[Exception], dict[str, Any]] = body_of

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Text stays as it is, not escaped to ASCII."""
        name = f"event: {chunk['type']}\n".encode() if self.named else b""
        return name + b"data: " + WRITER.encode(chunk).encode() + b"\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result. When the client goes away first, the work is cancelled; raises Cancelled."""
    return await _until_disconnect(request.receive, work)


async def begin_stream(
    request: Request,
    chunks: Chunks,
    headers: dict[str, str],
    writing: EventStyle = EventStyle(),
    ping_every: float = PING_SECONDS,
) -> ServerSentEvents:
    """Return a response that sends `chunks`. What goes wrong before the first chunk is raised here, while
    the status can still say so; but after `ping_every` seconds the response begins without a chunk, since a
    client or a proxy would close a connection that stays silent.
    """
    first = asyncio.ensure_future(anext(chunks))
    try:
        await unless_gone(request, asyncio.wait({first}, timeout=ping_every))
        if first.done():
            first.result()
    except BaseException:
        await _drop(first)
        await chunks.aclose()
        raise
    return ServerSentEvents(first, chunks, headers, STALL_SECONDS, writing, ping_every)


async def _drop(future: asyncio.Future[Any]) -> None:
    """Cancel it, and wait until it has ended: a generator that still runs cannot be closed."""
    future.cancel()
    await asyncio.gather(future, return_exceptions=True)


class ServerSentEvents(Response):
    """One event a chunk; an error on the way is an event, too. Silences are broken by pings."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[dict[str, Any]],
        rest: Chunks,
        headers: dict[str, str],
        stall: float,
        writing: EventStyle = EventStyle(),
        ping_every: float = PING_SECONDS,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._stall = stall
        self._writing = writing
        self._ping_every = ping_every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self._tell(send))
        except Cancelled:
            pass  # nobody is there to hear it
        except ClientStalled:
            log.warning("a client stopped reading", seconds=self._stall)

    async def _tell(self, send: Send) -> None:
        outlet = _EventWriter(send, self._stall)
        async with aclosing(self._rest):
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async with outlet.pinging(self._writing.ping, self._ping_every):
                    await self._tell_chunks(outlet)
                await send({"type": "http.response.body", "body": self._writing.last})
            finally:
                await _drop(self._first)

    async def _tell_chunks(self, outlet: _EventWriter) -> None:
        writing = self._writing
        if not self._first.done():
            await outlet.write(writing.ping)
        try:
            await outlet.write(writing.event(await self._first))
            async for chunk in self._rest:
                await outlet.write(writing.event(chunk))
        except Exception as error:
            await outlet.write(writing.event(writing.fault(error)))


class _EventWriter:
    """The way to a client who must keep reading."""

    def __init__(self, send: Send, stall: float) -> None:
        self._send = send
        self._limit = WaitLimit(stall)
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()

    async def write(self, event: bytes) -> None:
        await self._limit.wait(self._put(event))

    def _put(self, event: bytes) -> Awaitable[None]:
        self._written = self._loop.time()
        return self._send({"type": "http.response.body", "body": event, "more_body": True})

    @asynccontextmanager
    async def pinging(self, ping: bytes, every: float) -> AsyncGenerator[None]:
        """Send a ping after each `every` seconds of silence meanwhile, so that no proxy takes the connection
        for dead. Raises ClientStalled.
        """
        pings = asyncio.ensure_future(self._ping(ping, every))
        try:
            async with self._limit:
                yield
        except TimeoutError:
            if not self._limit.passed:
                raise
            raise ClientStalled from None
        finally:
            await _drop(pings)

    async def _ping(self, ping: bytes, every: float) -> None:
        while True:
            await asyncio.sleep(self._written + every - self._loop.time())
            if self._loop.time() - self._written >= every:
                await self._put(ping)


async def _until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client went away")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


TIMEOUT = "x-request-timeout"
REQUEST_ID = "x-request-id"
MIN_TIMEOUT_SECONDS = 0.001  # seconds that a call may have; less is a mistake, not a deadline


@dataclass(frozen=True, slots=True)
class HttpContext:
    """healthy: whether requests are answered now. head: what drafts, if anything does.

    figures: for Prometheus, in its text format. began: seconds since 1970 when the master started.
    mode: of what OpenAI's clients ask, unless they say. ping_every: seconds of silence in a stream before a
    ping.
    """

    counter: RequestCounter
    model: ModelInfo
    text: Text
    healthy: Callable[[], bool]
    head: Callable[[], Head | None]
    figures: Callable[[], bytes]
    began: int
    mode: Mode = "direct"
    ping_every: float = PING_SECONDS
    unknown: UnknownFields = field(default_factory=UnknownFields)
    long_texts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_LONG_TEXTS))

    async def in_thread(self, characters: int, work: Callable[..., T], *given: Any) -> T:
        """What is done with so many characters; long texts wait for each other, not short ones for them."""
        async with nullcontext() if characters < THREAD_CHARACTERS else self.long_texts:
            return await asyncio.to_thread(work, *given)


@dataclass(frozen=True, slots=True)
class HttpCall:
    """id: of this call, drawn here. headers: of its answer."""

    id: str
    caller: Caller
    headers: dict[str, str]

    def generate(self, counter: RequestCounter, asks: Sequence[Ask]) -> list[RequestEvents]:
        """A stream for every ask. The first has the call's own id, further ones a number behind it."""
        return [counter.generate(ask, one) for ask, one in zip(asks, self.callers(len(asks)))]

    def callers(self, count: int) -> list[Caller]:
        ids = [self.id if n == 0 else f"{self.id}-{n}" for n in range(count)]
        return [replace(self.caller, request=id) for id in ids]


def call_of(request: Request) -> HttpCall:
    """The caller's own id is for logs alone: proxies keep it when they try again, so calls may share one.

    Raises InvalidRequest for headers that make no sense; a trace context that makes none is left alone.
    """
    caller.set(well_formed(request.headers.get(TRACEPARENT)))
    with naming_fields({"request_id": REQUEST_ID}):
        name = checked_id(request.headers.get(REQUEST_ID, "")) or ""
    id = secrets.token_hex(12)
    named = {"x_request_id": name} if name else {}
    bind_contextvars(request_id=id, trace_id=trace_of(caller.get()), **named)
    owner = str(request.scope.get(OWNER, ""))
    timeout = timeout_of(request.headers.get(TIMEOUT))
    return HttpCall(id, Caller(id, owner or client_of(request), timeout, owner), {REQUEST_ID: name or id})


def client_of(request: Request) -> str:
    """One host is one client, at whichever door: the same words as gRPC's peers."""
    host = request.client.host if request.client else ""
    return f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"


def timeout_of(header: str | None) -> float | None:
    """Seconds. Raises InvalidRequest."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not MIN_TIMEOUT_SECONDS <= seconds < 1e9:
        raise InvalidRequest(
            f"{TIMEOUT} must be a number of seconds, at least {MIN_TIMEOUT_SECONDS:g}", field=TIMEOUT
        )
    return seconds
