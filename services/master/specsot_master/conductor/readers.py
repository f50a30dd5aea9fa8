"""How clients read their requests: follows them, notices who has stopped, keeps what may be read again.

Refuses to know sequences and pages. A resumable request outlives its reader for a while, running or
over; any other one ends with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable

import structlog

from specsot.errors import Cancelled, InvalidRequest
from specsot.events import Numbered
from specsot.params import Ask
from specsot_master.conductor.clock import Clock
from specsot_master.conductor.feed import Reader
from specsot_master.conductor.live import LiveRequest
from specsot_master.conductor.notes import Notes
from specsot_master.conductor.ring import ConductorConfig

log = structlog.get_logger()

LEFT, UNREAD = "left", "unread"  # alarms


class Readers:
    """drop: ends a request, if it is not over yet. renew: it may go on, since its client reads again.
    notes: nobody sees what a master after this one would not know.
    """

    def __init__(
        self,
        config: ConductorConfig,
        clock: Clock,
        drop: Callable[[LiveRequest], None],
        renew: Callable[[LiveRequest], None],
        notes: Notes,
    ) -> None:
        self._config, self._clock, self._drop, self._renew = config, clock, drop, renew
        self._notes = notes
        self._shelf: dict[str, LiveRequest] = {}

    @property
    def kept(self) -> int:
        """Requests that are over and may still be read."""
        return len(self._shelf)

    def find(self, id: str) -> LiveRequest | None:
        """One that is over and kept."""
        return self._shelf.get(id)

    def follow(self, request: LiveRequest, offset: int) -> Events:
        """Its events from `offset` on, to be closed by who reads them. Raises InvalidRequest, and what ended
        the request before it came that far.
        """
        reader = request.feed.read(offset)
        request.alarms.clear(LEFT)
        self._renew(request)  # it may have been paused while nobody read
        return Events(self, request, reader)

    async def next_of(self, request: LiveRequest, reader: Reader) -> Numbered | None:
        """Once it would survive a restart; None at the end. Raises Cancelled (cut off), what ended it."""
        event = await reader.next()
        if event is not None:
            if request.feed.unread == self._config.unread - 1:  # it may have been paused until now
                self._renew(request)
            await self._notes.secure(request)
        return event

    def leave(self, request: LiveRequest, reader: Reader) -> None:
        """This one reads no more: a request that nobody may come back to ends with it."""
        if request.feed.leave(reader):
            self._left(request)

    def told(self, request: LiveRequest) -> None:
        """There is something to read."""
        if request.feed.listening and UNREAD not in request.alarms:
            self._watch(request)

    def pauses(self, request: LiveRequest) -> bool:
        """Too much is unread. What a client that is away misses is kept, as far as it can be."""
        feed = request.feed
        return feed.unread >= (self._config.unread if feed.listening else max(feed.keeps, 1))

    def over(self, request: LiveRequest) -> None:
        """It has ended; its last events may still be unread."""
        request.alarms.clear()
        if request.feed.listening and request.feed.unread:
            self._watch(request)
        if request.ask.resumable:
            self._shelf[request.id] = request
            while len(self._shelf) > self._config.keep:
                self._forget(self._next_to_go())
            if not request.feed.listening:
                self.set_aside(request)

    def set_aside(self, request: LiveRequest) -> None:
        """Nobody reads a resumable request; whoever wants it has this long to come back."""
        if request.forgotten:
            return
        request.alarms.set(LEFT, self._clock, self._config.keep_for, lambda: self._let_go(request))

    def clear(self) -> None:
        """Keep nothing."""
        for request in tuple(self._shelf.values()):
            self._forget(request)

    def _left(self, request: LiveRequest) -> None:
        request.alarms.clear(UNREAD)
        if request.ask.resumable:
            self.set_aside(request)
        else:
            self._drop(request)

    def _let_go(self, request: LiveRequest) -> None:
        self._drop(request)
        self._forget(request)

    def _next_to_go(self) -> LiveRequest:
        """The oldest of the client that has most, so that nobody's answers go for another's."""
        places = Counter(one.client for one in self._shelf.values())
        return max(self._shelf.values(), key=lambda one: places[one.client])

    def _forget(self, request: LiveRequest) -> None:
        """Once: from then on its id may be another's."""
        if request.forgotten:
            return
        request.forgotten = True
        if self._shelf.get(request.id) is request:
            del self._shelf[request.id]
        self._notes.forget(request.id)
        request.alarms.clear(LEFT)

    def _watch(self, request: LiveRequest) -> None:
        """Look again, a while from now, whether anything was read."""
        position, wait = request.feed.position, self._config.unread_for
        request.alarms.set(UNREAD, self._clock, wait, lambda: self._look(request, position))

    def _look(self, request: LiveRequest, position: int) -> None:
        feed = request.feed
        if not feed.listening or not feed.unread:
            return
        if feed.position != position:
            self._watch(request)
            return
        log.warning("the client does not read", **request.named, unread=feed.unread)
        feed.cut(Cancelled(f"nothing was read for {self._config.unread_for:g} s"))
        self._left(request)


class Events(AsyncIterator[Numbered]):
    """One call's reading of one request. Closing it ends a request that is not resumable."""

    def __init__(self, readers: Readers, request: LiveRequest, reader: Reader) -> None:
        self._readers, self._request, self._reader = readers, request, reader

    async def __anext__(self) -> Numbered:
        event = await self._readers.next_of(self._request, self._reader)
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        self._readers.leave(self._request, self._reader)


def check_same(request: LiveRequest, ask: Ask | None) -> None:
    """Raises InvalidRequest when a call names a request that is another's."""
    if ask is not None and ask != request.ask:
        raise InvalidRequest(
            f"request {request.id} is known, and asks for something else", field="request_id"
        )
