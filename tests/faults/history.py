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
    """A client's first call. timeout: seconds it gave."""

    request: str
    ask: Ask
    timeout: float | None = None


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
    is there at once); restart and, with a journal, revive of the master.
    whom: "worker-1", "drafter", "worker-0 worker-1", "master".
    """

    kind: str
    whom: str


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
    """A member computed a frame."""

    member: str
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Lapped:
    """The master took a result."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Rested:
    """At the end, with nobody asking: what is left that should not be, by name."""

    left: tuple[tuple[str, int], ...]


Entry = Asked | Resumed | Got | Stopped | Ended | Hurt | Looked | Formed | Worked | Lapped | Rested
History = list[tuple[float, Entry]]  # (seconds, what)


class Recorder:
    """Writes down; `seen` is the history."""

    def __init__(self) -> None:
        self.seen: History = []

    def note(self, entry: Entry) -> None:
        self.seen.append((asyncio.get_running_loop().time(), entry))
