"""The inputs of the engine, from clients, alarms and the ring, and the commands that follow from them."""

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
    """Base class of inputs that concern one request. Such an input is handled by the engine that runs the
    request.

    request: the request that the input concerns.
    """

    request: RequestState


@dataclass(frozen=True, slots=True)
class RequestArrived(RequestEvent):
    """Input: a request enters this engine's queue, as a new one, from another ring, or from the journal.

    lacking: why there is no ring, in words; "" if there is one.
    """

    lacking: str = ""


class RequestMoved(RequestEvent):
    """Input: another ring has taken the request over."""


class RequestCancelled(RequestEvent):
    """Input: the client cancelled the request. The text so far becomes its answer."""


@dataclass(frozen=True, slots=True)
class PromptMade(RequestEvent):
    """Input: a thread has finished building a branch's prompt.

    error: why the prompt could not be built, or None.
    """

    error: Exception | None


class EventsRead(RequestEvent):
    """Input: the client has read events, perhaps after a pause."""


class ReaderLeft(RequestEvent):
    """Input: the client has disconnected."""


@dataclass(frozen=True, slots=True)
class ReadingOverdue(RequestEvent):
    """Input, from an alarm: the time in which a client must read something has passed.

    position: offset of the next unread event when the alarm was set. If the offset has not changed, the
        client has read nothing since.
    """

    position: int


class KeepingOver(RequestEvent):
    """Input, from an alarm: the time in which a client could resume the request has passed."""


class DeadlinePassed(RequestEvent):
    """Input, from an alarm: the client's timeout has passed."""


@dataclass(frozen=True, slots=True)
class RingOverdue(RequestEvent):
    """Input, from an alarm: the request has waited for a ring for as long as requests may.

    lacking: why there was no ring.
    seconds: how long the request has waited.
    """

    lacking: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RingReady:
    """Input: the ring is complete, or has a drafter again. Requests that waited for the ring continue."""


@dataclass(frozen=True, slots=True)
class RingLost:
    """Input: the ring broke. All KV in it is lost.

    reason: why the ring broke.
    planned: True if the master ended the epoch to form a better ring, which takes moments.
    """

    reason: str
    planned: bool = False


@dataclass(frozen=True, slots=True)
class OrderUnsent:
    """Input: the link could not deliver an order to stage 0. The ring itself still runs.

    order: the order that stage 0 did not receive.
    """

    order: Order


@dataclass(frozen=True, slots=True)
class MasterLeaving:
    """Input: the master shuts down. All requests end; a later master that reads the journal continues those
    that are resumable.

    reason: the error message that clients receive.
    """

    reason: str


# Inputs after which a waiting request, sequence or branch may be able to start.
UnblockingInput = RingReady | RequestArrived | RequestMoved | PromptMade
# Inputs that come from the ring.
RingEvent = Result | RingReady | RingLost
# Everything that `Engine.handle` takes.
Input = RequestEvent | RingEvent | OrderUnsent | MasterLeaving


def react(event: RequestEvent) -> Sequence[Command]:
    """Return the commands that follow from an event which touches neither the ring nor the queue; an empty
    list for any other event. If a client has read something since a `ReadingOverdue` was set, or has nothing
    to read, the client is not disconnected. EventsRead gives RenewLeases. ReaderLeft gives KeepRequest for a
    resumable request, else DropRequest. ReadingOverdue with a reader and unread events gives WatchReader if
    something was read meanwhile; else CutReader and what ReaderLeft gives. KeepingOver gives DropRequest and
    ReleaseRequest, and DeadlinePassed fails the request with TimedOut.

    event: an input that concerns one request.

    Raises the error of a `PromptMade` event that has one.
    """
    request = event.request
    events = event.request.events
    match event:
        case EventsRead():
            return [commands.RenewLeases()]
        case ReaderLeft():
            return [commands.KeepRequest() if request.ask.resumable else commands.DropRequest()]
        case ReadingOverdue(position=position) if events.has_reader and events.unread:
            if events.position != position:
                return [commands.WatchReader()]
            return [commands.CutReader(), *react(ReaderLeft(request))]
        case KeepingOver():
            return [commands.DropRequest(), commands.ReleaseRequest()]
        case DeadlinePassed():
            doing = "was answered" if request.entered_ring else "waited for its turn"
            return [commands.FailRequest(TimedOut(f"the deadline passed while the request {doing}"))]
        case PromptMade(error=error) if error:
            raise error
        case _:
            return []


def failure_of(error: Exception, default_error: SpecsotError) -> SpecsotError:
    """Return the error that ends a request in which an exception was raised.

    A WireError becomes Unavailable, because a member caused it and never the client. Other SpecsotErrors are
    returned unchanged. Of any other exception the client must not see details, so `default_error` is
    returned.

    error: the exception that was raised.
    default_error: what the client receives for an exception that is no SpecsotError.
    """
    if isinstance(error, WireError):
        return Unavailable(f"the ring reported an impossible result for this request: {error}")
    return error if isinstance(error, SpecsotError) else default_error


def internal_error() -> SpecsotError:
    """Return the error that clients receive for a fault of the master. Its message has no details; the log
    has them.
    """
    return SpecsotError("internal error; the master's log has the details")
