"""What the plan of a request asks to be done: sequences to open and to close, events to send."""

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
class CloseSequence:
    """End the sequence of this ordinal, if it has not ended by itself."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request ends with this error; nothing follows."""

    error: SpecsotError


Command = (
    OpenScore | OpenAnswer | OpenSkeleton | OpenBranch | OpenPolish | CloseSequence | FailRequest | Numbered
)

# Why what a sequence wrote is over, as a client hears it.
REASON_OF_END = {
    End.STOP: Reason.STOP,
    End.GRAMMAR: Reason.STOP,
    End.LENGTH: Reason.LENGTH,
    End.CANCELLED: Reason.CANCELLED,
    End.FAILED: Reason.FAILED,
}
