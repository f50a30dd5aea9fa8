"""What a master reports about itself: models, members, the epoch; and amounts of memory in words."""

from __future__ import annotations

from dataclasses import dataclass

from specsot._version import __version__
from specsot.members import PROTOCOL, Kind, Range


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be asked for. plan_style: "list", "markers" or "tags", as it plans.

    no_chat_template: its files hold none, so that conversations are written in a plain form.
    """

    name: str
    fingerprint: str
    layers: int
    max_positions: int
    plan_style: str = ""
    no_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A worker or drafter that has joined. layers: its range in the present epoch, if it has one.

    host, gpu: where it runs, as far as that is known. stands_by: the present epoch runs without it.
    replica: whose ring it belongs to, where there are several.
    device: what computes there. memory: bytes for weights and KV pages. dtype: "bfloat16, int8 weights".
    weights: bytes that a lap reads of its layers. least_seconds: for reading them, as fast as its memory is
    copied. Empty, or 0: nobody knows.
    """

    kind: Kind
    name: str
    address: str
    fingerprint: str
    layers: Range | None = None
    host: str = ""
    gpu: str = ""
    stands_by: bool = False
    replica: int | None = None
    device: str = ""
    memory: int = 0
    dtype: str = ""
    weights: int = 0
    least_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PagesInfo:
    """KV pages of the present epoch; `rows` positions each.

    free: those that nobody needs. kept: those that hold beginnings of prompts; many of them are free.
    """

    total: int
    free: int
    rows: int
    kept: int = 0


@dataclass(frozen=True, slots=True)
class RequestsInfo:
    """Requests of this moment, and since the master began.

    waiting: for their turn. running: in the ring, with `writing` sequences. kept: over, to be read again.
    refused: for lack of room. ended: (why, how many); why is a reason of Finished, or an error's name.
    prompt_tokens, cached_tokens: of requests that entered the ring; those it had already.
    """

    waiting: int = 0
    running: int = 0
    writing: int = 0
    kept: int = 0
    refused: int = 0
    ended: tuple[tuple[str, int], ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0


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
class ReplicaInfo:
    """One of several rings of a master; fields as in Info."""

    number: int
    epoch: int = 0
    ready: bool = False
    waiting_for: tuple[str, ...] = ()
    pages: PagesInfo | None = None
    laps: LapsInfo | None = None
    requests: RequestsInfo | None = None
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Info:
    """The state of a master. waiting_for: one line per missing thing, empty when `ready`.

    replicas: where it has several rings. Then it is ready as soon as one of them is complete, epoch is the
    newest one, figures are sums, and waiting_for tells of all.
    plan: who runs what, in words, and how fast one sequence should be written without drafts.
    """

    models: tuple[ModelInfo, ...] = ()
    members: tuple[MemberInfo, ...] = ()
    epoch: int = 0
    ready: bool = False
    waiting_for: tuple[str, ...] = ()
    pages: PagesInfo | None = None
    laps: LapsInfo | None = None
    requests: RequestsInfo | None = None
    version: str = __version__
    protocol: int = PROTOCOL
    plan: str = ""
    replicas: tuple[ReplicaInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """What came of a wish to share the layers out anew. changed False: `plan` is what runs already."""

    changed: bool
    epoch: int
    plan: str


def memory_in_words(size: float) -> str:
    """Bytes as "1.5 GiB"."""
    value = float(size)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{value:.1f} {units[0]}"
