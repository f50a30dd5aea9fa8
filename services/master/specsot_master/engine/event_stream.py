"""Delivers events to clients: one reader per request, resumption, timeouts for slow readers.

A resumable request, running or ended, is kept for a while after its reader has left. Any other request ends
when its reader leaves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from specsot.events import MergedText, Numbered
from specsot.transport.heartbeat import SilenceTimer
from specsot_master.core.inputs import EventsRead, KeepingOver, ReaderLeft, ReadingOverdue
from specsot_master.core.request import Clock, Reader, RequestState, Timer
from specsot_master.core.ring.ring_state import EngineConfig
from specsot_master.journal import RequestJournal


class LoopClock:
    """The clock of the running event loop, in seconds."""

    def now(self) -> float:
        """Return the loop's monotonic time in seconds."""
        return asyncio.get_running_loop().time()

    def later(self, seconds: float, callback: Callable[[], object], /) -> Timer:
        """Call a function after a delay, unless the returned timer is cancelled.

        seconds: the delay, from now.
        callback: called without arguments.
        """
        return asyncio.get_running_loop().call_later(seconds, callback)

    def later_while_running(self, seconds: float, callback: Callable[[], object], /) -> Timer:
        """Call a function once this event loop has run for so many seconds, unless the returned timer is
        cancelled.

        seconds: the delay. Time for which this process was stopped counts as an eighth of it at most.
        callback: called without arguments.
        """
        return SilenceTimer(seconds, callback)


class Subscription(Reader, AsyncIterator[Numbered]):
    """An asynchronous iterator over one request's events, for one call of a client. Closing the iterator ends
    the request, unless the request is resumable.
    """

    def __init__(self, subscriptions: Subscriptions, request: RequestState) -> None:
        """Create an iterator; `EventBuffer.attach` connects it to the events.

        subscriptions: notified of each event that was read.
        request: the request whose events are read.
        """
        self._subscriptions = subscriptions
        self._request = request
        self._news: asyncio.Future[None] | None = None
        # Called whenever an event, the end or an error has arrived; None for a reader that awaits events.
        self.on_news: Callable[[], None] | None = None

    def wake(self) -> None:
        """Call `on_news`, or resume the waiting call of `__anext__`, if there is one, because an event, the
        end or an error has arrived.
        """
        if self.on_news:
            self.on_news()
        elif self._news and not self._news.done():
            self._news.set_result(None)

    async def __anext__(self) -> Numbered:
        """Wait for the next event and return it; it then counts as read. Of a resumable request, the event is
        journaled first. If the wait for the journal is cancelled, the event counts as read all the same.

        Raises Cancelled if another call reads the request now or if this reader was too slow, the error that
        ended the request, and StopAsyncIteration after the last event.
        """
        events = self._request.events
        while not (events.unread or events.over or self.error):
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if (event := events.take(self)) is None:
            raise StopAsyncIteration
        if securing := self._subscriptions.on_read(self._request):
            await securing
        return event

    def pop(self) -> Numbered | None:
        """Return the next event, which then counts as read, or None if no event is unread now. Of a resumable
        request `__anext__` must be used, because each event is journaled before it is read.

        Raises what `__anext__` raises, except StopAsyncIteration; see `ended`.
        """
        numbered = self._request.events.take(self)
        if numbered is not None:
            self._subscriptions.on_read(self._request)
        return numbered

    @property
    def ended(self) -> bool:
        """True if all events were read and no further one follows."""
        return self._request.events.over and not self._request.events.unread

    def join(self, numbered: Numbered) -> Numbered:
        """Return an event that was just read, joined with the unread pieces of answer text directly after it;
        unchanged if it is no answer text, or if none follows. The joined pieces count as read.

        # read: MergedText "a"; unread: MergedText "b", MergedText "c", Finished -> MergedText "abc"

        The joined event has the number of its last piece. The events of a resumable request must not be
        joined, because each of them is journaled before it is read.

        numbered: the event that `__anext__` has returned, with its number.

        Raises the error of `EventBuffer.take` if this reader was cut off.
        """
        first = numbered.event
        buffer = self._request.events
        if not isinstance(first, MergedText):
            return numbered
        pieces = [first]
        while (following := buffer.peek(self)) and isinstance(following.event, MergedText):
            buffer.take(self)
            self._subscriptions.on_read(self._request)
            pieces.append(following.event)
            numbered = following
        return numbered if len(pieces) == 1 else Numbered(numbered.number, join_pieces(pieces))

    async def aclose(self) -> None:
        """Stop reading. The engine then cancels a request that is not resumable, and keeps a resumable one
        for a while. Nothing happens if another call has taken over the request's events.
        """
        request = self._request
        if request.events.detach(self):
            request.clear_alarms(ReadingOverdue)
            request.home.handle(ReaderLeft(request))


def join_pieces(pieces: Sequence[MergedText]) -> MergedText:
    """Return consecutive pieces of an answer as one piece, which begins at the offset of the first. The
    result has the logprobs of all pieces, and the sum of their tokens per step.

    pieces: pieces of one answer in order, at least one, each of which begins where the previous one ends.
    """
    return MergedText(
        pieces[0].offset,
        "".join(piece.text for piece in pieces),
        tuple(one for piece in pieces for one in piece.logprobs),
        sum(piece.step_tokens for piece in pieces),
    )


class Subscriptions:
    """Connects readers to requests, and keeps ended resumable requests; one instance serves all rings."""

    def __init__(self, config: EngineConfig, clock: Clock, journal: RequestJournal) -> None:
        """Create a store without ended requests.

        config: how long slow readers and unread requests are kept, and how many of them.
        clock: schedules the timeouts.
        journal: is asked to write what a client reads of a resumable request before the client gets it, so
            that a restarted master knows every event that a client has seen.
        """
        self._config = config
        self._clock = clock
        self._journal = journal
        self._finished: dict[str, RequestState] = {}

    @property
    def kept(self) -> int:
        """Number of requests that have ended and can still be read."""
        return len(self._finished)

    def find(self, id: str) -> RequestState | None:
        """Return the ended request of this id if it can still be read, else None.

        id: the id under which the request was opened.
        """
        return self._finished.get(id)

    def subscribe(self, request: RequestState, offset: int) -> Subscription:
        """Attach a new reader to a request; an earlier reader is cut off. Return the reader, which the caller
        must close. The request is no longer released for having no reader.

        # 10 events exist, of which 0 to 3 are no longer kept:
        # offset 4 -> events 4, 5, ...    offset 10 -> waits for the next event
        # offset 3 or 11 -> InvalidRequest

        request: the request, running or ended.
        offset: the number of the first event to read.

        Raises InvalidRequest for an offset outside of the kept events, or the error that ended the request if
        `offset` lies beyond its last event.
        """
        reader = Subscription(self, request)
        request.events.attach(reader, offset)
        request.clear_alarms(KeepingOver)
        # Leases are not renewed while too many events are unread, so the request may have been paused.
        request.home.handle(EventsRead(request))
        return reader

    def on_read(self, request: RequestState) -> Awaitable[None] | None:
        """Note that an event was read. Return an awaitable that ends when the journal holds the event, or
        None if no wait is needed. The engine renews the request's leases when the number of unread events
        falls below the configured bound. None is returned for a request that is not resumable.

        request: the request whose event was read.
        """
        # The number of unread events has just fallen below the limit, so leases may be renewed again.
        if request.events.unread == self._config.unread - 1:
            request.home.handle(EventsRead(request))
        return self._journal.secure(request) if request.ask.resumable else None

    def on_event(self, request: RequestState) -> None:
        """Start the timeout of a slow reader, if the request has a reader and no such timeout runs.

        request: the request, to whose buffer an event was added.
        """
        if request.events.has_reader and not request.has_alarm(ReadingOverdue):
            self.watch(request)

    def watch(self, request: RequestState) -> None:
        """Set an alarm after which the reader is cut off if it has not read any further event by then.

        request: the request, with a reader.
        """
        event = ReadingOverdue(request, request.events.position)
        request.set_alarm(event, self._clock, self._config.unread_for)

    def on_end(self, request: RequestState) -> None:
        """Handle the end of a request, whose last events may still be unread. A resumable request is kept; if
        there are too many of them, the fairest choice (`_next_to_go`) is released. All its alarms are
        cancelled first. A slow reader of unread events is still cut off after its time; a kept request
        without a reader is released after the configured time.

        request: the request that has ended.
        """
        request.clear_alarms()
        if request.events.has_reader and request.events.unread:
            self.watch(request)
        if request.ask.resumable:
            self._finished[request.id] = request
            while len(self._finished) > self._config.keep:
                self.release(self._next_to_go())
            if not request.events.has_reader:
                self.keep(request)

    def keep(self, request: RequestState) -> None:
        """Start the time for which a resumable request without a reader is kept. Nothing happens if the
        request was released already.

        request: the request, running or ended.
        """
        if not request.forgotten:
            request.set_alarm(KeepingOver(request), self._clock, self._config.keep_for)

    def release(self, request: RequestState) -> None:
        """Forget a kept request, in the journal too; afterwards another request may use its id. A second call
        does nothing. A request that still runs continues, but cannot be resumed.

        request: a resumable request, running or ended.
        """
        if request.forgotten:
            return
        request.forgotten = True
        if self._finished.get(request.id) is request:
            del self._finished[request.id]
        self._journal.forget(request.id)
        request.clear_alarms(KeepingOver)

    def _next_to_go(self) -> RequestState:
        """Return the oldest kept request of the client that has the most of them. At least one request is
        kept.

        # kept, oldest first: a1 b1 b2 a2 b3 -> client b has three, so b1 is returned
        """
        places = Counter(one.client for one in self._finished.values())
        return max(self._finished.values(), key=lambda one: places[one.client])
