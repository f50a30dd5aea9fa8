"""What happened in one run, in the order in which it happened: the clients' side, the ring's, the faults.

Refuses to judge; the checker does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from specsot.events import Numbered
from specsot.params import Ask


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's first call. timeout: seconds it gave. twin: the call is made twice. refused: it must be."""

    request: str
    ask: Ask
    timeout: float | None = None
    twin: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """The client reads on from an event."""

    request: str
    offset: int


@dataclass(frozen=True, slots=True)
class Got:
    request: str
    numbered: Numbered


@dataclass(frozen=True, slots=True)
class Stopped:
    """The client cancelled."""

    request: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The client is done with it. error: the class of what its last call ended with. left: by itself."""

    request: str
    error: str | None = None
    message: str = ""
    left: bool = False


@dataclass(frozen=True, slots=True)
class Hurt:
    """A fault. kind: kill, freeze, cut, leave, hang (compute alone), vanish (without a word; the next process
    is there at once); restart and, with a journal, revive of the master; stall (its loop), slow (its
    compute), pause (of everybody at once); poison (it died of a request); lie (of a drafter, all the time).
    whom: "worker-1", "drafter", "worker-0 worker-1", "master". lasts: seconds.
    """

    kind: str
    whom: str
    lasts: float = 0.0


@dataclass(frozen=True, slots=True)
class Looked:
    """Long after a fault that lasts: whether the epoch goes on in which it happened."""

    whom: str
    unnoticed: bool


@dataclass(frozen=True, slots=True)
class Formed:
    """A member of this life (`name#n`) was configured."""

    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Worked:
    """A member computed a frame, or a part of one."""

    member: str
    epoch: int
    number: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Lapped:
    """The master took a result."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Stage 0 was told to open a sequence with so many prompt tokens of its own."""

    epoch: int
    sequence: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Stage 0 was told to close a sequence."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Limited:
    """Stage 0 was told how much of a prefix is to be computed. interrupted: less than its prompt, because no
    request needs the rest.
    """

    epoch: int
    sequence: int
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Composed:
    """Stage 0 sent a frame. budget: rows that it may have. begun: sequences whose prompt ends in it."""

    epoch: int
    number: int
    budget: int
    begun: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """Somebody calls somebody else lost. by: the master or a member."""

    whom: str
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Complained:
    """A member says that its epoch cannot go on."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Strayed:
    """A member's stream lives, and the master does not know the member."""

    member: str


@dataclass(frozen=True, slots=True)
class Doubled:
    """A request is in several rings."""

    request: str
    rings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The ring is not there, though nobody hurts it any more. lacking: what the master waits for."""

    lacking: str


@dataclass(frozen=True, slots=True)
class Rested:
    """At the end, with nobody asking: what is left that should not be, by name."""

    left: tuple[tuple[str, int], ...]


Seen = Opened | Closed | Limited | Composed | Missed | Complained | Strayed | Doubled | Incomplete
Entry = Asked | Resumed | Got | Stopped | Ended | Hurt | Looked | Formed | Worked | Lapped | Rested | Seen
History = list[tuple[float, Entry]]  # (seconds, what)


class Recorder:
    """Writes down, until the run is over; `seen` is the history."""

    def __init__(self) -> None:
        self.seen: History = []
        self.over = False

    def note(self, entry: Entry) -> None:
        if not self.over:
            self.seen.append((asyncio.get_running_loop().time(), entry))
