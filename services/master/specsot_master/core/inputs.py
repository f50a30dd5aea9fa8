"""What comes into the engine: what happened to its requests, and to its ring."""

from __future__ import annotations

from dataclasses import dataclass

from specsot.core.frames import Order, Result
from specsot_master.core.request import RequestState


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Of one request, told to the engine that runs it."""

    request: RequestState


@dataclass(frozen=True, slots=True)
class RequestArrived(RequestEvent):
    """It may wait for its turn. lacking: why there is no ring, where there is none."""

    lacking: str = ""


class RequestMoved(RequestEvent):
    """Another ring goes on with it."""


class RequestCancelled(RequestEvent):
    """Its client wants no more than is there."""


@dataclass(frozen=True, slots=True)
class PromptMade(RequestEvent):
    """A branch's prompt was made in a thread. error: why it could not be."""

    error: Exception | None


class EventsRead(RequestEvent):
    """Its client reads, perhaps after a pause."""


class ReaderLeft(RequestEvent):
    """Its client reads no more."""


@dataclass(frozen=True, slots=True)
class ReadingOverdue(RequestEvent):
    """An alarm: long ago there was something to read, and the next event was that of this offset."""

    position: int


class KeepingOver(RequestEvent):
    """An alarm: nobody came back to read it for as long as it is kept."""


class DeadlinePassed(RequestEvent):
    """An alarm: its client's time is over."""


@dataclass(frozen=True, slots=True)
class RingOverdue(RequestEvent):
    """An alarm: it has waited for a ring as long as requests do. lacking: why there was none."""

    lacking: str


@dataclass(frozen=True, slots=True)
class RingReady:
    """It is complete, or drafts again: who waits for that goes on."""


@dataclass(frozen=True, slots=True)
class RingLost:
    """It broke, and everything in it is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class OrderUnsent:
    """This one never came to the ring, which goes on."""

    order: Order


@dataclass(frozen=True, slots=True)
class MasterLeaving:
    """Nobody is served from now on; a master that reads the journal goes on with what is resumable."""

    reason: str


Opening = RingReady | RequestArrived | RequestMoved | PromptMade  # after these somebody may go on
RingEvent = Result | RingReady | RingLost
Input = RequestEvent | RingEvent | OrderUnsent | MasterLeaving
