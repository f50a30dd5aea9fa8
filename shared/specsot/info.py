"""What a master tells of itself: models, members, the epoch, and what it still waits for.

Refuses to know transports, tensors, and how any of it came about.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot import __version__
from specsot.members import PROTOCOL, Kind, Range


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be asked for."""

    name: str
    fingerprint: str
    layers: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A worker or drafter that has joined. layers: its range in the present epoch, if it has one."""

    kind: Kind
    name: str
    address: str
    fingerprint: str
    layers: Range | None = None


@dataclass(frozen=True, slots=True)
class PagesInfo:
    """KV pages of the present epoch; `rows` positions each."""

    total: int
    free: int
    rows: int


@dataclass(frozen=True, slots=True)
class LapsInfo:
    """The ring's laps: how many since the master began and the tokens they brought, and the newest ones.

    per_second, tokens_per_lap, rows_per_lap: of the last seconds; 0 while nothing moves.
    stages: compute seconds of a lap in each stage, in stage order; empty before the first lap.
    """

    laps: int = 0
    tokens: int = 0
    per_second: float = 0.0
    tokens_per_lap: float = 0.0
    rows_per_lap: float = 0.0
    stages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Info:
    """How the ring stands. waiting_for: one line per missing thing, empty when `ready`."""

    models: tuple[ModelInfo, ...] = ()
    members: tuple[MemberInfo, ...] = ()
    epoch: int = 0
    ready: bool = False
    waiting_for: tuple[str, ...] = ()
    pages: PagesInfo | None = None
    laps: LapsInfo | None = None
    version: str = __version__
    protocol: int = PROTOCOL
