"""Event streams to clients: one reader per request, resuming, limits for slow readers.

A resumable request outlives its reader for a while, running or over; any other one ends with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

from specsot.events import Numbered
from specsot_master.core.inputs import EventsRead, KeepingOver, ReaderLeft, ReadingOverdue
from specsot_master.core.request import Clock, Reader, RequestState, Timer
from specsot_master.core.ring.ring_state import EngineConfig
from specsot_master.journal import RequestJournal


class LoopClock:
    """The event loop's own time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def later(self, seconds: float, act: Callable[[], object], /) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, act)


class Subscription(Reader, AsyncIterator[Numbered]):
    """One call's reading of one request. Closing it ends a request that is not resumable."""

    def __init__(self, subscriptions: Subscriptions, request: RequestState) -> None:
        self._subscriptions = subscriptions
        self._request = request
        self._news: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._news and not self._news.done():
            self._news.set_result(None)

    async def __anext__(self) -> Numbered:
        """Raises Cancelled (cut off), and what ended the request."""
        events = self._request.events
        while not (events.unread or events.over or self.error):
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if (event := events.take(self)) is None:
            raise StopAsyncIteration
        if securing := self._subscriptions.on_read(self._request):
            await securing
        return event

    async def aclose(self) -> None:
        request = self._request
        if request.events.detach(self):
            request.clear_alarms(ReadingOverdue)
            request.home.handle(ReaderLeft(request))


class Subscriptions:
    """Of all rings of a master. journal: nobody sees what a master after this one would not know."""

    def __init__(self, config: EngineConfig, clock: Clock, journal: RequestJournal) -> None:
        self._config = config
        self._clock = clock
        self._journal = journal
        self._finished: dict[str, RequestState] = {}

    @property
    def kept(self) -> int:
        """Requests that are over and may still be read."""
        return len(self._finished)

    def find(self, id: str) -> RequestState | None:
        """One that is over and kept."""
        return self._finished.get(id)

    def subscribe(self, request: RequestState, offset: int) -> Subscription:
        """Its events from `offset` on, to be closed by who reads them. Raises InvalidRequest, and what ended
        the request before it came that far.
        """
        reader = Subscription(self, request)
        request.events.attach(reader, offset)
        request.clear_alarms(KeepingOver)
        request.home.handle(EventsRead(request))  # it may have been paused while nobody read
        return reader

    def on_read(self, request: RequestState) -> Awaitable[None] | None:
        """An event was read. Returns what to wait for until it would survive a restart."""
        if request.events.unread == self._config.unread - 1:  # it may have been paused until now
            request.home.handle(EventsRead(request))
        return self._journal.secure(request) if request.ask.resumable else None

    def on_event(self, request: RequestState) -> None:
        if request.events.has_reader and not request.has_alarm(ReadingOverdue):
            self.watch(request)

    def watch(self, request: RequestState) -> None:
        """Look again, a while from now, whether anything was read."""
        event = ReadingOverdue(request, request.events.position)
        request.set_alarm(event, self._clock, self._config.unread_for)

    def on_end(self, request: RequestState) -> None:
        """It has ended; its last events may still be unread."""
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
        """Nobody reads a resumable request; whoever wants it has this long to come back."""
        if not request.forgotten:
            request.set_alarm(KeepingOver(request), self._clock, self._config.keep_for)

    def release(self, request: RequestState) -> None:
        """Once: from then on its id may be another's."""
        if request.forgotten:
            return
        request.forgotten = True
        if self._finished.get(request.id) is request:
            del self._finished[request.id]
        self._journal.forget(request.id)
        request.clear_alarms(KeepingOver)

    def _next_to_go(self) -> RequestState:
        """The oldest of the client that has most, so that nobody's answers go for another's."""
        places = Counter(one.client for one in self._finished.values())
        return max(self._finished.values(), key=lambda one: places[one.client])
