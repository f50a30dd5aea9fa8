"""One request's events on their way to the client that reads them.

Refuses to know what events mean. It holds what is unread; how much that may be is up to the leases.
"""

from __future__ import annotations

import asyncio

from specsot.errors import Cancelled, InvalidRequest, SpecsotError
from specsot.events import Numbered

MAX_KEPT_EVENTS = 16_384  # of a resumable request: more than 5,000 tokens of text, some megabytes


class EventBuffer:
    """Many pushes, one reader at a time. keeps: so many events that were read stay, so that another may read
    them again.
    """

    def __init__(self, keeps: int = 0) -> None:
        self.keeps = keeps
        self._events: dict[int, Numbered] = {}
        self._first = self._end = self._next = 0
        self._reader: BufferReader | None = None
        self._news = asyncio.Event()
        self._over = False
        self._error: SpecsotError | None = None

    @property
    def unread(self) -> int:
        return self._end - self._next

    @property
    def position(self) -> int:
        """Offset of the event that is read next."""
        return self._next

    @property
    def error(self) -> SpecsotError | None:
        """What it was ended with."""
        return self._error

    @property
    def listening(self) -> bool:
        """Somebody reads."""
        return self._reader is not None

    def push(self, event: Numbered) -> None:
        self._events[self._end] = event
        self._end += 1
        self._trim()
        self._news.set()

    def end(self, error: SpecsotError | None = None) -> None:
        """Nothing follows; the reader gets what is unread first, then `error` if there is one."""
        if not self._over:
            self._over, self._error = True, error
            self._news.set()

    def read(self, offset: int = 0) -> BufferReader:
        """Read on from `offset`, instead of whoever reads now. Raises InvalidRequest (not that far yet, or no
        longer kept), and what it was ended with before it came that far.
        """
        if self._error is not None and offset > self._end:
            raise self._error
        if offset < self._first:
            raise InvalidRequest(
                f"resume_offset {offset} is too far back: events from {self._first} on are kept",
                field="resume_offset",
            )
        if not 0 <= offset <= self._end:
            raise InvalidRequest(
                f"resume_offset {offset} is ahead: there are {self._end} events", field="resume_offset"
            )
        if self._reader is not None:
            self._reader.cut(Cancelled("another call reads on here"))
        self._reader, self._next = BufferReader(self), offset
        return self._reader

    def leave(self, reader: BufferReader) -> bool:
        """This one reads no more; whether it was the one who read."""
        if self._reader is not reader:
            return False
        self._reader = None
        return True

    def cut(self, error: SpecsotError) -> None:
        """Whoever reads gets `error` instead of the next event; what nobody can read any more is gone."""
        if self._reader is not None:
            self._reader.cut(error)
            self._reader = None
        if not self.keeps:
            self._events.clear()
            self._first = self._next = self._end

    async def take(self, reader: BufferReader) -> Numbered | None:
        """The next event, None at the end. Raises the error it was ended with, or the reader was cut with."""
        while reader.error is None and self._next == self._end:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._news.clear()
            await self._news.wait()
        if reader.error is not None:
            raise reader.error
        event = self._events[self._next]
        self._next += 1
        self._trim()
        return event

    def _trim(self) -> None:
        """What was read goes, the oldest first, as far as it is more than is kept."""
        while self._first < self._next and len(self._events) > self.keeps:
            del self._events[self._first]
            self._first += 1

    def wake(self) -> None:
        self._news.set()


class BufferReader:
    """One call's place in a feed."""

    def __init__(self, feed: EventBuffer) -> None:
        self._feed = feed
        self.error: SpecsotError | None = None

    async def next(self) -> Numbered | None:
        return await self._feed.take(self)

    def cut(self, error: SpecsotError) -> None:
        self.error = error
        self._feed.wake()
