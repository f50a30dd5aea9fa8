"""Commands: what the engine must do for a request, such as opening sequences and sending events."""

from __future__ import annotations

from dataclasses import dataclass

from specsot.core.frames import End
from specsot.core.skeleton import PlanRules, Point
from specsot.errors import SpecsotError
from specsot.events import Numbered, Reason


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """Command: open the sequence of a direct answer, with the chat prompt and ordinal 0.

    limit: the maximum number of tokens that the sequence may decode.
    """

    limit: int


@dataclass(frozen=True, slots=True)
class OpenScore:
    """Command: open a sequence with the router's score prompt and ordinal 0. The sequence decodes one
    token.
    """


@dataclass(frozen=True, slots=True)
class OpenSkeleton:
    """Command: open the sequence of the skeleton.

    limit: the maximum number of tokens that the sequence may decode.
    rules: what the plan may contain, such as its number of points.
    constrained: True if the last stage masks tokens so that the plan follows `rules`.
    ordinal: 0, or another ordinal if the direct answer is decoded at the same time and has ordinal 0.
    """

    limit: int
    rules: PlanRules
    constrained: bool
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class OpenBranch:
    """Command: open the branch that writes `point`. The branch's ordinal is the point's id.

    point: the point to write.
    points: all points of the plan, and the closing, which has no title.
    parents: the points that `point` needs, each with the text of its branch.
    budget: the maximum number of tokens that the branch may decode.
    introduction: the text before the first point, which all branches read; "" if there is none.
    excluded: ids of tokens that the branch must not begin with, because with each of them its text began like
        an earlier branch's; empty for none. Later in the branch these tokens are allowed.
    soft_limit: the tokens from which on the branch ends after a sentence, a list or a block; None if only
        an end token or the budget ends it.
    """

    point: Point
    points: tuple[Point, ...]
    parents: tuple[tuple[Point, str], ...]
    budget: int
    introduction: str = ""
    excluded: tuple[int, ...] = ()
    soft_limit: int | None = None


@dataclass(frozen=True, slots=True)
class OpenPolish:
    """Command: open the turn that rewrites the merged text, with ordinal 0.

    text: the merged text of all branches, without headings.
    limit: the maximum number of tokens that the sequence may decode.
    """

    text: str
    limit: int


@dataclass(frozen=True, slots=True)
class ReopenSequence:
    """Command: open a sequence again, because the ring that it ran in is gone.

    ordinal: 0 for the skeleton or the answer, else the id of the point that the sequence writes.
    """

    ordinal: int


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """Command: end a sequence. The command has no effect if the sequence has already ended.

    ordinal: 0 for the skeleton or the answer, else the id of the point that the sequence writes.
    """

    ordinal: int


@dataclass(frozen=True, slots=True)
class FailRequest:
    """Command: end the request with this error. No event follows.

    error: the error that the client receives.
    final: True if the journal records the error. If False, a later master that reads the journal continues
        the request.
    """

    error: SpecsotError
    final: bool = True


@dataclass(frozen=True, slots=True)
class EmptyCommand:
    """Base class of commands without fields."""


class RenewLeases(EmptyCommand):
    """Command: renew the leases that need it, unless the request's client has stopped reading."""


class DropRequest(EmptyCommand):
    """Command: remove everything that the request holds in the ring, because the request is over."""


class KeepRequest(EmptyCommand):
    """Command: keep a request that lost its reader for a limited time, in which a client may resume it."""


class ReleaseRequest(EmptyCommand):
    """Command: forget a request that can no longer be resumed. Another request may use its id from now on."""


class WatchReader(EmptyCommand):
    """Command: schedule another check of whether the client has read anything."""


class CutReader(EmptyCommand):
    """Command: disconnect the client, because it has stopped reading."""


# Commands that open a sequence for the first time.
Open = OpenScore | OpenAnswer | OpenSkeleton | OpenBranch | OpenPolish
# Commands about the client that reads, or does not read, the request's events.
ForReader = KeepRequest | ReleaseRequest | WatchReader | CutReader
# Commands that concern sequences in the ring.
InRing = Open | ReopenSequence | CloseSequence | RenewLeases
# Everything that a plan or an input may order; a `Numbered` sends its event to the client.
Command = InRing | Numbered | FailRequest | DropRequest | ForReader

# The reason that clients receive for each way in which a sequence ends.
REASON_OF_END = {
    End.STOP: Reason.STOP,
    End.GRAMMAR: Reason.STOP,
    End.LENGTH: Reason.LENGTH,
    End.CANCELLED: Reason.CANCELLED,
    End.FAILED: Reason.FAILED,
}
