"""What follows from what a client does, or time: commands."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.errors import SpecsotError, TimedOut, Unavailable, WireError
from specsot_master.core import commands, inputs
from specsot_master.core.commands import Command


def react(event: inputs.RequestEvent) -> Sequence[Command]:
    """What else happened to it, as far as its ring and the queue have nothing to do with it.

    Raises what a prompt could not be made for.
    """
    request, unread = event.request, event.request.events
    match event:
        case inputs.EventsRead():
            return [commands.RenewLeases()]
        case inputs.ReaderLeft():
            return [commands.KeepRequest() if request.ask.resumable else commands.ForgetRequest()]
        case inputs.ReadingOverdue(position=position) if unread.has_reader and unread.unread:
            if unread.position != position:
                return [commands.WatchReader()]
            return [commands.CutReader(), *react(inputs.ReaderLeft(request))]
        case inputs.KeepingOver():
            return [commands.ForgetRequest(), commands.ReleaseRequest()]
        case inputs.DeadlinePassed():
            doing = "was answered" if request.begun else "waited for its turn"
            return [commands.FailRequest(TimedOut(f"the deadline passed while the request {doing}"))]
        case inputs.PromptMade(error=error) if error:
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
