"""What is to be done for a request: sequences to open, to renew and to close, events to send, its end."""

from __future__ import annotations

from dataclasses import dataclass

from specsot.core.frames import End
from specsot.core.skeleton import PlanRules, Point
from specsot.errors import SpecsotError
from specsot.events import Numbered, Reason


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """Open a sequence with the chat prompt, ordinal 0, that may write `limit` tokens."""

    limit: int


@dataclass(frozen=True, slots=True)
class OpenScore:
    """Open the router's prompt, ordinal 0, that writes one token."""


@dataclass(frozen=True, slots=True)
class OpenSkeleton:
    """Open the skeleton, ordinal 0. `constrained`: the last stage holds it to `rules`."""

    limit: int
    rules: PlanRules
    constrained: bool


@dataclass(frozen=True, slots=True)
class OpenBranch:
    """Open the branch that writes `point`; its ordinal is the point's id.

    parents: the points it needs, with their texts.
    """

    point: Point
    points: tuple[Point, ...]
    parents: tuple[tuple[Point, str], ...]
    budget: int


@dataclass(frozen=True, slots=True)
class OpenPolish:
    """Open the turn that writes `text` anew, ordinal 0, that may write `limit` tokens."""

    text: str
    limit: int


@dataclass(frozen=True, slots=True)
class ReopenSequence:
    """Open the sequence of this ordinal again: the ring in which it wrote is gone."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """End the sequence of this ordinal, if it has not ended by itself."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request ends with this error; nothing follows. final: in a master that reads the journal, too."""

    error: SpecsotError
    final: bool = True


@dataclass(frozen=True, slots=True)
class PlainCommand:
    """One of which nothing else is to be said."""


class RenewLeases(PlainCommand):
    """Longer leases where they are needed, unless its client has stopped reading."""


class ForgetRequest(PlainCommand):
    """The request is over: nothing of it stays in the ring."""


class KeepRequest(PlainCommand):
    """Nobody reads it: whoever wants it has a while to come back."""


class ReleaseRequest(PlainCommand):
    """Nobody can come back to it, and its id may be another's."""


class WatchReader(PlainCommand):
    """Look again, a while from now, whether anything was read."""


class CutReader(PlainCommand):
    """Its client does not read: it is cut off."""


Open = OpenScore | OpenAnswer | OpenSkeleton | OpenBranch | OpenPolish
ForReader = KeepRequest | ReleaseRequest | WatchReader | CutReader
InRing = Open | ReopenSequence | CloseSequence | RenewLeases
Command = InRing | Numbered | FailRequest | ForgetRequest | ForReader

# Why what a sequence wrote is over, as a client hears it.
REASON_OF_END = {
    End.STOP: Reason.STOP,
    End.GRAMMAR: Reason.STOP,
    End.LENGTH: Reason.LENGTH,
    End.CANCELLED: Reason.CANCELLED,
    End.FAILED: Reason.FAILED,
}
