"""Event streams to clients: one reader per request, resuming, limits for slow readers.

A resumable request outlives its reader for a while, running or over; any other one ends with it.
"""

from __future__ import annotations

from collections import Counter

import structlog

from specsot.errors import Cancelled, InvalidRequest
from specsot.params import Ask
from specsot_master.core.ring import EngineConfig
from specsot_master.engine.request_journal import RequestJournal
from specsot_master.engine.request_state import Clock, RequestState, Subscription

log = structlog.get_logger()

READER_LEFT, UNREAD = "left", "unread"  # alarms


class Subscriptions:
    """Of all rings of a master. journal: nobody sees what a master after this one would not know."""

    def __init__(self, config: EngineConfig, clock: Clock, journal: RequestJournal) -> None:
        self._config, self._clock, self._journal = config, clock, journal
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
        request.timers.clear(READER_LEFT)
        _renew(request)  # it may have been paused while nobody read
        return reader

    async def on_read(self, request: RequestState) -> None:
        """An event was read. Return once it would survive a restart."""
        if request.events.unread == self._config.unread - 1:  # it may have been paused until now
            _renew(request)
        await self._journal.secure(request)

    def on_event(self, request: RequestState) -> None:
        """There is something to read."""
        if request.events.has_reader and UNREAD not in request.timers:
            self._watch(request)

    def is_paused(self, request: RequestState) -> bool:
        """Too much is unread. What a client that is away misses is kept, as far as it can be."""
        feed = request.events
        return feed.unread >= (self._config.unread if feed.has_reader else max(feed.keeps, 1))

    def on_end(self, request: RequestState) -> None:
        """It has ended; its last events may still be unread."""
        request.timers.clear()
        if request.events.has_reader and request.events.unread:
            self._watch(request)
        if request.ask.resumable:
            self._finished[request.id] = request
            while len(self._finished) > self._config.keep:
                self._forget(self._next_to_go())
            if not request.events.has_reader:
                self.start_keeping(request)

    def start_keeping(self, request: RequestState) -> None:
        """Nobody reads a resumable request; whoever wants it has this long to come back."""
        if request.forgotten:
            return
        request.timers.set(READER_LEFT, self._clock, self._config.keep_for, lambda: self._let_go(request))

    def clear(self) -> None:
        """Keep nothing."""
        for request in tuple(self._finished.values()):
            self._forget(request)

    def on_leave(self, request: RequestState) -> None:
        """Its reader reads no more: a request that nobody may come back to ends with it."""
        request.timers.clear(UNREAD)
        if request.ask.resumable:
            self.start_keeping(request)
        else:
            _drop(request)

    def _let_go(self, request: RequestState) -> None:
        _drop(request)
        self._forget(request)

    def _next_to_go(self) -> RequestState:
        """The oldest of the client that has most, so that nobody's answers go for another's."""
        places = Counter(one.client for one in self._finished.values())
        return max(self._finished.values(), key=lambda one: places[one.client])

    def _forget(self, request: RequestState) -> None:
        """Once: from then on its id may be another's."""
        if request.forgotten:
            return
        request.forgotten = True
        if self._finished.get(request.id) is request:
            del self._finished[request.id]
        self._journal.forget(request.id)
        request.timers.clear(READER_LEFT)

    def _watch(self, request: RequestState) -> None:
        """Look again, a while from now, whether anything was read."""
        position, wait = request.events.position, self._config.unread_for
        request.timers.set(UNREAD, self._clock, wait, lambda: self._look(request, position))

    def _look(self, request: RequestState, position: int) -> None:
        feed = request.events
        if not feed.has_reader or not feed.unread:
            return
        if feed.position != position:
            self._watch(request)
            return
        log.warning("the client does not read", **request.log_fields, unread=feed.unread)
        feed.disconnect(Cancelled(f"nothing was read for {self._config.unread_for:g} s"))
        self.on_leave(request)


def _drop(request: RequestState) -> None:
    if request.home:
        request.home.drop(request)


def _renew(request: RequestState) -> None:
    if request.home:
        request.home.renew(request)


def check_same_ask(request: RequestState, ask: Ask | None) -> None:
    """Raises InvalidRequest when a call names a request that is another's."""
    if ask is not None and ask != request.ask:
        raise InvalidRequest(
            f"request {request.id} is known, and asks for something else", field="request_id"
        )
