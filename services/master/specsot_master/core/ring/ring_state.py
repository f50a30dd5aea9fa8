"""Inputs of the engine and its ring: options, the state of the ring, and the caller of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, Protocol

from specsot.core.frames import Order
from specsot.errors import Unavailable
from specsot.members import CommMode, Curve, HopDtype, Layout, Transport, TreeShape
from specsot.params import DrafterName, HeadImportance, HeadWindows, PlanStyle
from specsot.service.option_table import POSITIVE, SECONDS, Tier, option
from specsot_master.core.plans.router import Decision


@dataclass(frozen=True, slots=True)
class RingState:
    """The state of a complete ring: its sizes and limits, as the engine needs them.

    epoch: the number of the ring's epoch.
    pages: number of KV pages that every stage has.
    page_rows: KV slots per page.
    slots: KV slots that a live sequence needs beyond its committed tokens, for draft nodes.
    max_positions: the model's context, in tokens.
    has_drafter: True if a drafter takes part.
    drafters: the drafters that a client may name; the first one is the default, and empty without a drafter.
    rows: the maximum number of tokens in one frame.
    curve: seconds of compute of one step by tokens in its batch, as the stages measured them, as (tokens,
        seconds) in ascending order; empty if they measured nothing in common.
    on_gpus: True if every stage computes on a GPU.
    kept: by the id of a sequence of the previous epoch, how many of its first KV rows every stage still has;
        empty if nothing was migrated.
    replays: True if a stage was lost with its part of these rows, so that frames with `replay` compute it
        again.
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
    on_gpus: bool = False
    kept: Mapping[int, int] = field(default_factory=dict[int, int])
    replays: bool = False


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What takes the longest before a request is answered directly, computed by an API process.

    tokens: the tokens of the conversation, as the model's chat template renders it.
    decision: what the router's rules say of the last question.
    """

    tokens: tuple[int, ...]
    decision: Decision


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request: who asks, and for how long it waits.

    request: the id that the client chose, or None to draw one.
    client: the client's name, by which places are shared fairly between clients; "" for a caller without a
        name.
    timeout: seconds that the request may take, waiting included; None for no limit.
    owner: the only caller that may resume and cancel the request; "" if every caller that knows the
        request's id may.
    prepared: what an API process has computed for a direct answer already; None to let the engine do so.
    """

    request: str | None = None
    client: str = ""
    timeout: float | None = None
    owner: str = ""
    prepared: PreparedPrompt | None = None


# A caller without a name, a time limit or an owner.
ANONYMOUS = Caller()


class Ring(Protocol):
    """Stage 0 and the state of its ring, as the engine sees them. Results come back through
    `Engine.handle`.
    """

    def state(self) -> RingState | None:
        """Return the state of the ring, or None while the ring is not complete."""

    async def order(self, order: Order) -> None:
        """Send an order to stage 0. Orders arrive in the order of the calls.

        order: an instruction for the sequencer, such as opening or closing a sequence.

        Raises Unavailable if no ring is complete.
        """

    def waiting_for(self) -> str:
        """Return what the ring lacks, in words; "" if it is complete."""


def require_ring(ring: Ring) -> RingState:
    """Return the state of the complete ring.

    ring: stage 0 as the engine sees it.

    Raises Unavailable, which says what is missing, if the ring is not complete.
    """
    state = ring.state()
    if state is None:
        raise Unavailable(f"the ring is not complete: waiting for {ring.waiting_for()}")
    return state


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the master treats requests.

    model: the public name of the model; a request may leave it out. Set from the model's directory; "" before
        that.
    vocabulary: the number of token ids that the model has. Set from the model's directory.
    heads: the measured attention window of every head, or None if it was not measured.
    importance: the measured importance of every KV head, or None if it was not measured.
    allows_policies: False if windows and pruning are refused; see `ModelConfig.allows_policies`.
    transformers: True if layers run through Transformers' own code, which cannot turn queries a second time
        for the sinks of windows, so that windows are refused.
    lease: positions granted per lease: how far a sequence may decode before the master renews.
    aging: seconds of waiting that raise a request's priority by one, up to the highest one that waits.
    retry_after: seconds after which a refused client may try again, until a rate of departures is known.
    live: the maximum number of requests in the ring at once.
    queue: the maximum number of requests that wait; further ones are refused.
    plan_style: how the model plans; "auto" decides by the files of the model's directory.
    prefix_cache: True to cache the KV of prompt prefixes in the ring.
    unread: events that a client may leave unread before its request pauses.
    unread_for: seconds after which a client that reads nothing is disconnected.
    keep_for: seconds for which a resumable request is kept without a reader.
    keep: the maximum number of finished resumable requests that are kept.
    repair_for: seconds for which requests wait when their ring breaks, or has become too small for them.
    """

    # The heading of these options in the help text.
    HEADING: ClassVar[str] = "Requests"
    # Options without a tier of their own are listed only in the full help.
    TIER: ClassVar[Tier] = "expert"

    model: str = ""
    vocabulary: int = 2**31
    heads: HeadWindows | None = None
    importance: HeadImportance | None = None
    allows_policies: bool = True
    transformers: bool = False
    live: int = option(
        64,
        "Maximum number of requests in the ring at once.",
        flag="max-requests",
        tier="common",
        kind=POSITIVE,
    )
    queue: int = option(
        256, "Maximum number of queued requests; further ones are refused.", flag="max-queue", kind=POSITIVE
    )
    lease: int = 256
    plan_style: PlanStyle = option(
        "auto",
        "Format of plans: a numbered list, the markers of the plan language, which the master writes for "
        "models that were not trained on them, or the fork and join tags that some are trained on; auto: as "
        "the specsot.json of the model's directory says, else tags if its tokenizer has them as tokens.",
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


# Seconds. How long the first ring waits for a drafter once its workers have joined, since processes that are
# started together do not join at the same moment. Untuned.
DRAFTER_WAIT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class RingOptions:
    """How a master forms rings of its members.

    shape: the bounds of draft trees, unless the drafter has bounds of its own.
    conduct: how requests are treated. Its model and vocabulary are read from the model's directory.
    name: the public name of the model; "" for that of its directory.
    workers: how many workers share the layers, unless they were started with layers of their own.
    replicas: how many complete rings there are.
    max_stages: the maximum number of workers that share the layers after a rebalance; None for all that help.
    placement: "measured" shares the layers by measured speed, "even" evenly.
    take_over_after: seconds that a lost worker has to come back before the others share its layers.
    copy_kv: whether every stage's KV is copied to another stage; "auto" for workers that share one machine
        and compute on its CPU.
    drafter: "none" for no drafter; any other name uses the drafter that joins the ring.
    page_rows: KV slots per page; None for GPU_PAGE_ROWS where a GPU computes, else CPU_PAGE_ROWS.
    rows: the maximum number of tokens in one frame.
    max_in_flight: the maximum number of frames under way in a ring; None for 1 over one stage, else stages +
        1.
    layout: how the branches of a request are laid out in a frame.
    draft_timeout: seconds that stage 0 waits for a draft tree.
    transport: how members are connected.
    comm_mode: whether results and features go directly to the members that need them, or from neighbour to
        neighbour.
    hop_dtype: the data type of the hidden rows that stages send each other.
    """

    # The heading of these options in the help text.
    HEADING: ClassVar[str] = "Ring"
    # Options without a tier of their own are listed only in the full help.
    TIER: ClassVar[Tier] = "expert"

    name: str = option(
        "",
        "Public name of the model.",
        flag="served-model-name",
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
    )  # A worker whose link broke is back at once. A process that restarts needs more than two seconds.
    copy_kv: Literal["auto", "on", "off"] = option(
        "auto",
        "Keep a copy of every stage's KV at another stage, so that a repair need not compute it again; "
        "`auto`: where all workers compute on the CPU of one machine.",
    )
    drafter: DrafterName = option(
        "eagle", "`none`, or any other value to use the drafter that joins the ring."
    )
    drafter_wait: float = option(
        DRAFTER_WAIT_SECONDS,
        "Seconds that the first ring waits for a drafter once its workers have joined. A drafter that joins "
        "later has the ring formed again.",
        kind=SECONDS,
    )
    page_rows: int | None = option(
        None,
        "Positions per KV page.",
        kind=POSITIVE,
        unset="64 where a GPU computes, else 256",
    )
    rows: int = option(
        512,
        "Maximum number of rows in one frame. While no sequence decodes, prompts may take frames of 2,048 "
        "rows where one GPU runs all layers, unless this is below 512.",
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
        """True if the ring uses a drafter, whichever it is."""
        return self.drafter != "none"


@dataclass(frozen=True, slots=True)
class RingConfig(RingOptions):
    """The options of one ring, with what is known of its model.

    fingerprint: the fingerprint of the model, which all members must share; "" only as a default.
    model_layers: the number of the model's layers.
    tail_layers: how many of the last layers one stage must hold, because they share keys and values; at least
        1.
    embeds_everywhere: True if every stage has the embedding, because layers have per-layer inputs; False if
        the first stage alone has it.
    max_pages: the maximum number of KV pages that are used, however much memory there is. If `page_rows` is
        None, it counts pages of CPU_PAGE_ROWS rows.
    drafter_grace: seconds that the first ring waits for a drafter once it has its workers, as a drafter that
        joins later would have the ring formed twice.
    """

    fingerprint: str = ""
    model_layers: int = 0
    tail_layers: int = 1
    embeds_everywhere: bool = False
    max_pages: int = 4096
    drafter_grace: float = 0.0
