"""Runs one HTTP call: identifies its caller, and answers by server-sent events or by one response.

When the client disconnects, the call's requests are cancelled.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from specsot.core.info import ModelInfo
from specsot.errors import Cancelled, InvalidRequest
from specsot.events import Numbered
from specsot.params import Ask, Mode
from specsot.tasks import WaitLimit
from specsot.tracing import TRACEPARENT, caller, trace_of, well_formed
from specsot_master.engine import Caller
from specsot_master.engine.intake import THREAD_CHARACTERS
from specsot_master.grpc_api import checked_id
from specsot_master.http.errors import body_of, naming_fields
from specsot_master.http.middleware import OWNER
from specsot_master.http.unknown_fields import UnknownFields
from specsot_master.master import ServingState
from specsot_master.text import Text

# Threads. How many long texts are tokenized at the same time; two cores have a pool of six threads. Untuned.
MAX_LONG_TEXTS = 2

T = TypeVar("T")


async def merged_events(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, event) from several streams in the order of arrival; yield nothing for no
    streams. A single stream is read without reading ahead.

    At most one event per stream is read ahead. An error in one stream ends all streams; if a stream fails at
    once, the error is raised before any event of the others is yielded.

    streams: the streams, which are closed at the end.
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


def _has_ended(next_event: asyncio.Future[T]) -> bool:
    """Return True if a stream has ended: its next event is a StopAsyncIteration. Return False if there is an
    event.

    next_event: the finished task that has asked the stream for its next event.

    Raises the stream's error.
    """
    error = next_event.exception()
    if error is not None and not isinstance(error, StopAsyncIteration):
        raise error
    return error is not None


async def _close_streams(
    next_events: list[asyncio.Future[T]], streams: Sequence[AsyncGenerator[T, None]]
) -> None:
    """Cancel the reading of further events, then close all streams. The errors and events of cancelled
    readings are dropped.

    next_events: the unfinished tasks that have asked streams for their next events.
    streams: all streams, ended or not.

    Raises what the closing of a stream raises.
    """
    for task in next_events:
        task.cancel()
    await asyncio.gather(*next_events, return_exceptions=True)
    for stream in streams:
        await stream.aclose()


log = structlog.get_logger()

# Seconds. A client that takes longer to read what is sent is disconnected. Untuned.
STALL_SECONDS = 30.0
# Seconds. A stream that is silent for so long sends a ping, so that proxies, which close silent connections
# after 60 s, keep it open. Precedent: vLLM and llama.cpp.
PING_SECONDS: Final = 10.0
# A comment in server-sent events, which every client skips.
PING: Final = b": ping\n\n"
# The event that ends a stream in OpenAI's API.
DONE = b"data: [DONE]\n\n"
# Writes a chunk in a tenth of the time that `json` takes. Chunks hold JSON values only.
ENCODER: Final = msgspec.json.Encoder()

# The JSON objects of a streamed answer.
Chunks = AsyncGenerator[dict[str, Any], None]


class ClientStalled(Exception):
    """Raised when the client has not read for STALL_SECONDS."""


@dataclass(frozen=True, slots=True)
class EventStyle:
    """How one API writes server-sent events, pings and errors in a stream.

    named: True if each event has a name, which is its chunk's `type`.
    last: The bytes that follow the last event; b"" for none.
    ping: The bytes that are sent during silence.
    fault: Returns the chunk by which an error is reported within the stream.
    """

    named: bool = False
    last: bytes = DONE
    ping: bytes = PING
    fault: Callable[[Exception], dict[str, Any]] = body_of

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as the bytes of one event; text is UTF-8, not escaped to ASCII.

            # {"type":"ping"} with `named` set -> b'event: ping\\ndata: {"type":"ping"}\\n\\n'

        chunk: a JSON object; it needs the member "type" if `named` is set.
        """
        name = f"event: {chunk['type']}\n".encode() if self.named else b""
        return b"%bdata: %b\n\n" % (name, ENCODER.encode(chunk))


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of some work. If the client disconnects first, the work is cancelled.

    request: the HTTP request of the client.
    work: a coroutine or future.

    Raises Cancelled if the client disconnects, and what the work raises.
    """
    return await _until_disconnect(request.receive, work)


async def begin_stream(
    request: Request,
    chunks: Chunks,
    headers: dict[str, str],
    style: EventStyle = EventStyle(),
    ping_every: float = PING_SECONDS,
) -> ServerSentEvents:
    """Return a response that sends chunks as server-sent events.

    Errors before the first chunk are raised here, while the HTTP status can still report them; the chunks are
    then closed. If no chunk has come after `ping_every` seconds, the response begins anyway, because a client
    or a proxy would close a connection that stays silent; later errors become events.

    request: the HTTP request of the client.
    chunks: the JSON objects to send, one per event.
    headers: further headers of the response.
    style: how the API writes events, errors and pings.
    ping_every: seconds of silence before a ping.

    Raises Cancelled if the client disconnects before the first chunk, the errors of the first chunk, and
    StopAsyncIteration if there is none.
    """
    first = asyncio.ensure_future(anext(chunks))
    try:
        await unless_disconnected(request, asyncio.wait({first}, timeout=ping_every))
        if first.done():
            first.result()
    except BaseException:
        await _cancel(first)
        await chunks.aclose()
        raise
    return ServerSentEvents(first, chunks, headers, STALL_SECONDS, style, ping_every)


async def _cancel(future: asyncio.Future[Any]) -> None:
    """Cancel a future and wait until it has ended, because a generator that still runs cannot be closed. Its
    result or error is ignored.

    future: the future or task, which may have ended already.
    """
    future.cancel()
    await asyncio.gather(future, return_exceptions=True)


class ServerSentEvents(Response):
    """A response that sends one event per chunk, an event for an error, and pings during silence."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[dict[str, Any]],
        further_chunks: Chunks,
        headers: dict[str, str],
        stall_seconds: float,
        style: EventStyle = EventStyle(),
        ping_every: float = PING_SECONDS,
    ) -> None:
        """Prepare the response. Proxies are told not to buffer or cache the response.

        first: the first chunk, which may not have come yet.
        further_chunks: the chunks after the first one; closed at the end of the response.
        headers: further headers of the response.
        stall_seconds: seconds after which a client that does not read is disconnected.
        style: how the API writes events, errors and pings.
        ping_every: seconds of silence before a ping.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = further_chunks
        self._stall = stall_seconds
        self._writing = style
        self._ping_every = ping_every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application. If the client disconnects or stops reading, end quietly;
        its requests are cancelled, because the chunks are closed. A client that stopped reading is logged.

        scope: what the server knows of the call; unused.
        receive: receives the client's ASGI messages.
        send: sends an ASGI message to the client.
        """
        try:
            await _until_disconnect(receive, self._send_response(send))
        except Cancelled:
            pass  # The client has disconnected, so there is no one to answer.
        except ClientStalled:
            log.warning("a client stopped reading", seconds=self._stall)

    async def _send_response(self, send: Send) -> None:
        """Send the whole response: head, events, and the last bytes of the style. The chunks are closed in
        every case.

        send: sends an ASGI message to the client.

        Raises ClientStalled if the client does not read.
        """
        outlet = _EventWriter(send, self._stall)
        async with aclosing(self._rest):
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async with outlet.pinging(self._writing.ping, self._ping_every):
                    await self._send_chunks(outlet)
                await send({"type": "http.response.body", "body": self._writing.last})
            finally:
                await _cancel(self._first)

    async def _send_chunks(self, writer: _EventWriter) -> None:
        """Send all chunks; if one of them raises an error, send the error as the last event. A ping is sent
        first if the first chunk has not come yet.

        writer: writes the bytes of events to the client.
        """
        writing = self._writing
        if not self._first.done():
            await writer.write(writing.ping)
        try:
            await writer.write(writing.event(await self._first))
            async for chunk in self._rest:
                await writer.write(writing.event(chunk))
        except Exception as error:
            await writer.write(writing.event(writing.fault(error)))


class _EventWriter:
    """Writes server-sent events to a client, which must keep reading."""

    def __init__(self, send: Send, stall_seconds: float) -> None:
        """Create a writer that has written nothing.

        send: sends an ASGI message to the client.
        stall_seconds: seconds for which one write may wait for the client.
        """
        self._send = send
        self._limit = WaitLimit(stall_seconds)
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()

    async def write(self, event: bytes) -> None:
        """Write an event. The write may wait for the client at most `stall_seconds`; then the block of
        `pinging` ends with ClientStalled.

        event: the bytes of one event.
        """
        await self._limit.wait(self._send_bytes(event))

    def _send_bytes(self, event: bytes) -> Awaitable[None]:
        """Note the time of this write, and return the awaitable that sends the bytes; it returns None once
        the server has taken them.

        event: the bytes of one event.
        """
        self._written = self._loop.time()
        return self._send({"type": "http.response.body", "body": event, "more_body": True})

    @asynccontextmanager
    async def pinging(self, ping: bytes, interval: float) -> AsyncGenerator[None]:
        """During the block, send a ping after each interval of silence, to keep the connection open. The
        context yields None. Pings stop at the end of the block.

        ping: the bytes of a ping.
        interval: seconds without a write before a ping.

        Raises ClientStalled if a write within the block waited too long.
        """
        pings = asyncio.ensure_future(self._ping(ping, interval))
        try:
            async with self._limit:
                yield
        except TimeoutError:
            if not self._limit.passed:
                raise
            raise ClientStalled from None
        finally:
            await _cancel(pings)

    async def _ping(self, ping: bytes, interval: float) -> None:
        """Send a ping whenever nothing was written for an interval. Runs until cancelled. Every write, and a
        ping itself, restarts the interval.

        ping: the bytes of a ping.
        interval: seconds without a write before a ping.
        """
        while True:
            await asyncio.sleep(self._written + interval - self._loop.time())
            if self._loop.time() - self._written >= interval:
                await self._send_bytes(ping)


async def _until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of some work. If the client disconnects first, the work is cancelled. When it
    returns, neither the work nor the reading of the client's messages runs any more. Work that is done when
    the client disconnects keeps its result.

    receive: receives the client's ASGI messages.
    work: a coroutine or future.

    Raises Cancelled if the client disconnects, and what the work raises.
    """
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
    """Return once the client has disconnected; other messages are ignored.

    receive: receives the client's ASGI messages.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


# The header by which a client limits the seconds of its call.
TIMEOUT = "x-request-timeout"
# The header with the client's own id of a call, and with ours in the response.
REQUEST_ID = "x-request-id"
# Seconds. A shorter timeout of a call is taken for a mistake, and refused.
MIN_TIMEOUT_SECONDS = 0.001


class Requests(Protocol):
    """The entry point of requests, as HTTP endpoints see it: the engine's in the same process
    (`RequestCounter`), or the one of an API process (`RemoteRequests`).
    """

    def generate(
        self, ask: Ask, caller: Caller, /, *, join_text: bool = False
    ) -> AsyncGenerator[Numbered, None]:
        """Return the events of a new request, whose last one is Finished. Closing the generator cancels the
        request.

        ask: what the client asks for.
        caller: who asks: the request id that the call has, its name for fairness, its time limit, and the
            owner.
        join_text: True to join pieces of answer text that wait for the client.

        The generator raises the errors of `Engine.open` and of the request's events.
        """

    def cancel(self, request_id: str, owner: str = "") -> object:
        """Cancel a request; the text so far becomes its answer. Nothing happens if no such request of this
        owner waits or runs.

        request_id: the id under which the request was opened.
        owner: the owner of the caller's token; "" for a caller without a token.
        """


@dataclass(frozen=True, slots=True)
class HttpContext:
    """What all HTTP endpoints share: the entry point of requests, the model, and the options of the server.

    counter: Runs requests.
    model: Name and limits of the model.
    text: The model's tokenizer and chat template.
    state: Returns the present state of the master. Raises Unavailable if the engine has ended.
    figures: Returns the metrics in Prometheus' text format. Raises Unavailable if the engine has ended.
    began: When the master started, in seconds since 1970.
    mode: The mode of requests that name none, from OpenAI's clients.
    ping_every: Seconds of silence in a stream before a ping.
    unknown: Checks unknown fields of bodies, and logs each of them once.
    long_texts: Limits how many long texts are processed at the same time.
    """

    counter: Requests
    model: ModelInfo
    text: Text
    state: Callable[[], Awaitable[ServingState]]
    figures: Callable[[], Awaitable[bytes]]
    began: int
    mode: Mode = "direct"
    ping_every: float = PING_SECONDS
    unknown: UnknownFields = field(default_factory=UnknownFields)
    long_texts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LONG_TEXTS))

    async def in_thread(self, characters: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread and return its result.

        characters: the length of the text that is processed. Long texts wait for each other; those below
            THREAD_CHARACTERS do not wait.
        work: the function that is run, which must not use the event loop.
        arguments: its positional arguments.

        Raises what the function raises.
        """
        async with nullcontext() if characters < THREAD_CHARACTERS else self.long_texts:
            return await asyncio.to_thread(work, *arguments)


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One HTTP call, which may make several requests.

    id: The call's id, which the master drew; the call's requests have ids that begin with it.
    caller: The client, its credential's owner and its timeout.
    headers: Headers of the response, by name.
    """

    id: str
    caller: Caller
    headers: dict[str, str]

    def callers(self, count: int) -> list[Caller]:
        """Return the caller of each request of this call: the client, with the id of that request; an empty
        list for no request.

        count: how many requests the call makes.
        """
        ids = [self.id if n == 0 else f"{self.id}-{n}" for n in range(count)]
        return [replace(self.caller, request=id) for id in ids]


def call_of(request: Request) -> HttpCall:
    """Return the call that an HTTP request makes, with a new id, and bind its ids to the log's context. The
    client of the queue is the owner of the token, or else the host. The response's x-request-id is the
    client's own id, or ours without one.

    The client's own x-request-id is used in logs only: proxies keep it when they repeat a call, so several
    calls may share one.

    request: the HTTP request of the client.

    Raises InvalidRequest for an invalid header; an invalid trace context is ignored.
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
    """Return a client's host in the form of gRPC's peers, so that both ports count one client per host.

        # host "10.0.0.7" -> "ipv4:10.0.0.7"    host "::1" -> "ipv6:%5B::1%5D"

    request: the HTTP request; "ipv4:" is returned if the server does not know the client's address.
    """
    host = request.client.host if request.client else ""
    return f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"


def timeout_of(header: str | None) -> float | None:
    """Return the seconds of the header x-request-timeout, or None without one. NaN and infinity are refused,
    too.

    header: the value of the header.

    Raises InvalidRequest if it is not a number from MIN_TIMEOUT_SECONDS to 1e9.
    """
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
