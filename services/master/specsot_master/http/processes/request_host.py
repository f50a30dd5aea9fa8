"""Runs the requests of one API process in the engine, and sends it all events of a step in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from specsot.errors import SpecsotError
from specsot.tasks import start
from specsot.tracing import caller as calling_trace
from specsot_master.engine.event_stream import Subscription
from specsot_master.http.processes.link import EngineLink
from specsot_master.http.processes.messages import (
    END,
    FAILURE,
    CancelRequest,
    CloseRequest,
    Entries,
    Entry,
    OpenRequest,
    PauseStream,
    Query,
    Reply,
    ToEngine,
    encode_error,
    encode_event,
)
from specsot_master.master import RequestCounter, RequestObserver, ServingState

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _HostedStream:
    """The events of one request of an API process.

    number: The number that the API process gave to the stream.
    join_text: True to join pieces of answer text that wait to be sent.
    over: Set once `_read` has added the end of the events, or the error that ended them, to the entries.
    task: Runs the request; None before it is started.
    events: The events of the request; None until the engine has accepted the request.
    observers: Observe each event before it is sent.
    is_paused: True while the API process wants no further events.
    """

    number: int
    join_text: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    events: Subscription | None = None
    observers: list[RequestObserver] = field(default_factory=list["RequestObserver"])
    is_paused: bool = False

    def release(self) -> None:
        """Forget the request, which has ended. The request, its events and its task refer to each other. If
        they stayed for the garbage collector, it would stop all streams for 50 ms after 250 requests
        (measured with 64 clients).
        """
        self.task = None
        if self.events:
            self.events.on_news = None
        self.events = None
        self.observers = []


class RequestHost:
    """Runs the requests of one API process.

    The results of one step wake many streams within one iteration of the event loop. The next iteration sends
    the events of all of them in one message (`_send_news`), without waking a task per stream.
    """

    def __init__(
        self,
        requests: RequestCounter,
        state: Callable[[], ServingState],
        metrics: Callable[[], bytes],
    ) -> None:
        """Create a host without requests; `link` must be set before a message is handled.

        requests: the entry point of requests.
        state: returns the present state of the master.
        metrics: returns the metrics in Prometheus' text format.
        """
        self._requests = requests
        self._state = state
        self._metrics = metrics
        self._streams: dict[int, _HostedStream] = {}
        self._news: dict[_HostedStream, None] = {}
        self._failures: list[Entry] = []
        self._is_sending_soon = False
        self.link: EngineLink[ToEngine] | None = None

    def handle(self, message: ToEngine) -> None:
        """Handle a message of the API process. One that names an unknown stream is ignored, because the
        stream may have ended before the message arrived.

        message: any message of an API process. A query is answered at once; a message of a class that is
            not handled here is ignored.
        """
        match message:
            case OpenRequest():
                self._open(message)
            case CloseRequest(number):
                if stream := self._streams.pop(number, None):
                    self._stop(stream)
            case PauseStream(number, is_paused):
                if stream := self._streams.get(number):
                    stream.is_paused = is_paused
                    self._mark(stream)
            case CancelRequest(request, owner):
                self._requests.cancel(request, owner)
            case Query(number, subject):
                value = self._state() if subject == "state" else self._metrics()
                self._send(Reply(number, value))
            case _:
                pass

    def close(self) -> None:
        """Cancel all requests of the API process, because it has ended."""
        for stream in self._streams.values():
            self._stop(stream)
        self._streams.clear()

    def on_unblocked(self) -> None:
        """Send what has waited while the API process was slow."""
        self._send_soon()

    def _open(self, message: OpenRequest) -> None:
        """Start a request in the background.

        message: the request, with the number of its stream.
        """
        stream = _HostedStream(message.stream, message.join_text)
        self._streams[stream.number] = stream
        stream.task = start(self._run(stream, message))

    def _stop(self, stream: _HostedStream) -> None:
        """Cancel a request; nothing more of it is sent.

        stream: the stream of the request, which was removed from the streams.
        """
        self._news.pop(stream, None)
        if stream.task:
            stream.task.cancel()

    async def _run(self, stream: _HostedStream, message: OpenRequest) -> None:
        """Run a request until all of its events are sent. An error of the engine is sent as the stream's end;
        one that is no SpecsotError is logged, and sent without its message.

        stream: the stream of the request.
        message: the request.
        """
        calling_trace.set(message.trace)
        structlog.contextvars.bind_contextvars(**message.log_fields)
        try:
            async with self._requests.opened(message.ask, message.caller) as (events, observers):
                stream.events = events
                stream.observers = observers
                events.on_news = lambda: self._mark(stream)
                self._mark(stream)
                await stream.over.wait()
        except SpecsotError as error:
            self._fail(stream, error)
        except Exception as error:
            log.error("a call failed", exc_info=error)
            self._fail(stream, SpecsotError("internal error"))
        finally:
            if self._streams.get(stream.number) is stream:
                del self._streams[stream.number]
            stream.release()

    def _fail(self, stream: _HostedStream, error: SpecsotError) -> None:
        """End a stream that the engine has not accepted, or whose request could not be closed. The stream
        ends with the error, unless `_read` has already added its end or its error.

        stream: the stream.
        error: what the API process raises.
        """
        self._news.pop(stream, None)
        if not stream.over.is_set():
            self._failures.append((stream.number, 0, FAILURE, encode_error(error)))
            self._send_soon()

    def _mark(self, stream: _HostedStream) -> None:
        """Note that there is something to send of a stream, unless the API process wants nothing of it.

        stream: a stream whose request runs.
        """
        if not stream.is_paused:
            self._news[stream] = None
            self._send_soon()

    def _send_soon(self) -> None:
        """Send all news in the next iteration of the event loop, after the result of a step was handled. What
        an API process reads too slowly waits in the buffers of the requests, which then pause.
        """
        blocked = self.link is not None and self.link.blocked
        if not (self._is_sending_soon or blocked):
            self._is_sending_soon = True
            asyncio.get_running_loop().call_soon(self._send_news)

    def _send_news(self) -> None:
        """Send the unread events of all streams that have some in one message."""
        self._is_sending_soon = False
        entries = self._failures
        self._failures = []
        streams = self._news
        self._news = {}
        for stream in streams:
            if not stream.is_paused and not stream.over.is_set():
                self._read(stream, entries)
        if entries:
            self._send(Entries(entries))

    def _read(self, stream: _HostedStream, entries: list[Entry]) -> None:
        """Append the unread events of a stream, and its end if it has ended. An error of the events is
        appended as the stream's failure. Nothing is appended before the engine has accepted the request.

        stream: a stream whose request runs.
        entries: the entries of the next message.
        """
        events = stream.events
        if events is None:
            return
        try:
            while (numbered := events.pop()) is not None:
                if stream.join_text:
                    numbered = events.join(numbered)
                for observer in stream.observers:
                    observer.on_event(numbered.event)
                entries.append(encode_event(stream.number, numbered))
            if events.ended:
                entries.append((stream.number, 0, END, None))
                stream.over.set()
        except SpecsotError as error:
            entries.append((stream.number, 0, FAILURE, encode_error(error)))
            stream.over.set()

    def _send(self, message: object) -> None:
        """Send a message to the API process.

        message: an object of one of the classes of `messages`.
        """
        if self.link is not None:
            self.link.send(message)
