"""What comes into the engine, of its requests and its ring, and what follows from it: commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.core.frames import Order, Result
from specsot.errors import SpecsotError, TimedOut, Unavailable, WireError
from specsot_master.core import commands
from specsot_master.core.commands import Command
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
    seconds: float


@dataclass(frozen=True, slots=True)
class RingReady:
    """It is complete, or drafts again: who waits for that goes on."""


@dataclass(frozen=True, slots=True)
class RingLost:
    """It broke, and everything in it is gone. planned: for a better one, which takes moments."""

    reason: str
    planned: bool = False


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


def react(event: RequestEvent) -> Sequence[Command]:
    """What else happened to it, as far as its ring and the queue have nothing to do with it.

    Raises what a prompt could not be made for.
    """
    request = event.request
    unread = event.request.events
    match event:
        case EventsRead():
            return [commands.RenewLeases()]
        case ReaderLeft():
            return [commands.KeepRequest() if request.ask.resumable else commands.ForgetRequest()]
        case ReadingOverdue(position=position) if unread.has_reader and unread.unread:
            if unread.position != position:
                return [commands.WatchReader()]
            return [commands.CutReader(), *react(ReaderLeft(request))]
        case KeepingOver():
            return [commands.ForgetRequest(), commands.ReleaseRequest()]
        case DeadlinePassed():
            doing = "was answered" if request.begun else "waited for its turn"
            return [commands.FailRequest(TimedOut(f"the deadline passed while the request {doing}"))]
        case PromptMade(error=error) if error:
            raise error
        case _:
            return []


def failure_of(error: Exception, otherwise: SpecsotError) -> SpecsotError:
    """What a request ends with that met this error. otherwise: where a client should hear nothing of it."""
    if isinstance(error, WireError):  # of a member, never of the client
        return Unavailable(f"the ring lost its place in this answer: {error}")
    return error if isinstance(error, SpecsotError) else otherwise


def internal_error() -> SpecsotError:
    return SpecsotError("internal error; the master's log has the details")
