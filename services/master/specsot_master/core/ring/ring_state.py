"""Inputs of the engine and its ring: options, the ring's state, the caller of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from specsot.core.frames import Order
from specsot.errors import Unavailable
from specsot.members import CommMode, Curve, HopDtype, Layout, Transport, TreeShape
from specsot.params import DrafterName, HeadImportance, HeadWindows, PlanStyle
from specsot.service.option_table import POSITIVE, SECONDS, Tier, option


@dataclass(frozen=True, slots=True)
class RingState:
    """A complete ring.

    pages:  KV pages of `page_rows` rows that every stage has.
    slots:  KV rows a live sequence needs beyond its committed ones. rows: of a frame, at most.
    max_positions: the model's context, in tokens.
    drafters: who can be asked to propose, the first for those who name none.
    curve: compute seconds of a lap by its rows, as the stages measured it.
    kept: by sequence of an epoch before, how many first KV rows of it every stage has.
    """

    epoch: int
    pages: int
    page_rows: int
    slots: int
    max_positions: int
    has_drafter: bool = False
    drafters: tuple[DrafterName, ...] = ()
    rows: int = 512
    curve: Curve = ()
    kept: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and for how long.

    request: the id it gives its request, None for one that is drawn here.
    client:  requests of one client share fairly with those of others.
    timeout: seconds the request may take, waiting included; None for as long as it needs.
    owner:   who alone may resume and cancel it; "" for whoever knows its id.
    """

    request: str | None = None
    client: str = ""
    timeout: float | None = None
    owner: str = ""


ANYBODY = Caller()


class Ring(Protocol):
    """Stage 0, as far as the master is concerned. Results come back through `Engine.handle`."""

    def state(self) -> RingState | None:
        """None while the ring is not complete."""
        ...

    async def order(self, order: Order) -> None:
        """Hand an order to stage 0, in the order of the calls. Raises Unavailable."""
        ...

    def waiting_for(self) -> str:
        """What the ring lacks, in words."""
        ...


def require_ring(ring: Ring) -> RingState:
    """The complete ring. Raises Unavailable, saying what is missing."""
    state = ring.state()
    if state is None:
        raise Unavailable(f"the ring is not complete: waiting for {ring.waiting_for()}")
    return state


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the master treats requests.

    model:  the name it serves; requests may leave it out. vocabulary: how many tokens it chooses from.
    heads, importance: what was measured for the model's heads, if it was.
    recurrent: some layers read every row before, whatever others see.
    lease:  positions granted at a time.
    aging:  seconds of waiting that raise a request by one priority, up to the highest that waits.
    retry_after: seconds after which a refused caller may try again, while nothing better is known.
    """

    HEADING: ClassVar[str] = "Requests"
    TIER: ClassVar[Tier] = "expert"

    model: str = ""
    vocabulary: int = 2**31
    heads: HeadWindows | None = None
    importance: HeadImportance | None = None
    recurrent: bool = False
    live: int = option(
        64,
        "Maximum number of requests in the ring at once.",
        flag="max-requests",
        aliases=("max-num-seqs", "parallel"),
        tier="common",
        kind=POSITIVE,
    )
    queue: int = option(
        256, "Maximum number of queued requests; further ones are refused.", flag="max-queue", kind=POSITIVE
    )
    lease: int = 256
    plan_style: PlanStyle = option(
        "auto",
        "Format of plans: a numbered list, which any model can write, or the markers or the fork and join "
        "tags that some are trained on; auto: as the specsot.json of the model's directory says, else tags "
        "if its tokenizer has them as tokens.",
    )
    prefix_cache: bool = option(True, "Cache the KV of prompt prefixes in the ring.")
    unread: int = option(
        1024, "Events that a client may leave unread before its request pauses.", kind=POSITIVE
    )
    unread_for: float = option(
        60.0, "Seconds after which a client that reads nothing is disconnected.", kind=SECONDS
    )
    keep_for: float = option(
        60.0, "Seconds for which a resumable request is kept without a reader.", kind=SECONDS
    )
    keep: int = option(64, "Maximum number of finished resumable requests kept.", kind=POSITIVE)
    aging: float = 10.0
    retry_after: float = 1.0
    repair_for: float = option(
        30.0,
        "Seconds for which requests wait when their ring breaks, or has become too small for them.",
        kind=SECONDS,
    )


@dataclass(frozen=True, slots=True)
class RingOptions:
    """What a master makes of its members. conduct: how requests are treated; its model and vocabulary are
    read from the model's directory.
    """

    HEADING: ClassVar[str] = "Ring"
    TIER: ClassVar[Tier] = "expert"

    name: str = option(
        "",
        "Public name of the model.",
        flag="served-model-name",
        aliases=("alias",),
        former=("name",),
        tier="common",
        unset="the directory's name",
    )
    workers: int = option(
        1, "Number of workers that share the layers, unless they have --layers.", kind=POSITIVE
    )
    replicas: int = option(
        1,
        "Complete rings, each with workers and a drafter of its own.",
        aliases=("data-parallel-size",),
        kind=POSITIVE,
    )
    max_stages: int | None = option(
        None,
        "Maximum number of workers that share the layers after a rebalance, and when a faster one joins.",
        kind=POSITIVE,
        unset="all that help; --workers when one joins",
    )
    placement: Literal["measured", "even"] = option(
        "measured", "How layers are shared: by measured speed, or evenly."
    )
    take_over_after: float = option(
        0.5, "Seconds that a lost worker has to come back before the others share its layers.", kind=SECONDS
    )  # whose link broke is back at once, a process that starts again not within two
    drafter: DrafterName = option(
        "eagle", "`none`, or any other value to use the drafter that joins the ring."
    )
    page_rows: int | None = option(
        None,
        "Positions per KV page.",
        aliases=("block-size",),
        kind=POSITIVE,
        unset="64 where a GPU computes, else 256",
    )
    rows: int = option(
        512,
        "Maximum number of rows in one frame. While nobody writes, prompts may take frames of 2,048 rows "
        "where one GPU runs all layers, unless this is below 512.",
        aliases=("max-num-batched-tokens",),
        kind=POSITIVE,
    )
    max_in_flight: int | None = option(
        None,
        "Maximum number of frames under way in a ring: 1 where its members compute with the same cores.",
        kind=POSITIVE,
        unset="1 over one stage, else stages + 1",
    )
    shape: TreeShape = field(default_factory=TreeShape)
    layout: Layout = option("batched", "Layout of branches in a frame.", flag="branch-layout")
    draft_timeout: float = option(1.0, "Seconds that stage 0 waits for a draft tree.", kind=SECONDS)
    transport: Transport = option("grpc", "Transport between members.")
    comm_mode: CommMode = option(
        "p2p",
        "`p2p`: results and features go directly to the members that need them. `ring`: stages talk "
        "only to neighbours, and the drafter to the last stage.",
    )
    hop_dtype: HopDtype = option(
        "auto",
        "Data type of the hidden rows that stages send each other: `int8` takes a quarter or half of the "
        "bytes, and changes what is written.",
    )
    conduct: EngineConfig = field(default_factory=EngineConfig)

    @property
    def drafts(self) -> bool:
        return self.drafter != "none"


@dataclass(frozen=True, slots=True)
class RingConfig(RingOptions):
    """The same for one model. max_pages: no more pages than this are ever used, however much memory there is;
    of CPU_PAGE_ROWS rows, where page_rows is None. drafter_grace: seconds in which the first ring waits for a
    drafter, once it has its workers: one that comes after them would have it formed twice.
    """

    fingerprint: str = ""
    model_layers: int = 0
    max_pages: int = 4096
    drafter_grace: float = 0.0
