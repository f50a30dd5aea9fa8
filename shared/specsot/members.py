"""Messages between members and the master: registrations, configurations, readiness, losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specsot.params import DrafterName
from specsot.service.option_table import ABOVE_ZERO, LAYER_NUMBERS, POSITIVE, counted, is_word, option

PROTOCOL = 1  # raised when two versions of the services cannot form one ring

MASTER = "master"  # by this name its words arrive; nobody else may have it

Kind = Literal["worker", "drafter"]
Layout = Literal["packed", "batched"]
# What carries messages between members; direct: see specsot.transport.nccl_links.
Transport = Literal["grpc", "zmq", "direct"]
HopDtype = Literal["auto", "int8"]  # int8: hidden rows between stages are rounded to 8 bits
CommMode = Literal["p2p", "ring"]  # ring: the drafter speaks to the last stage alone, the rest rides along
WeightFormat = Literal["safetensors", "bin"]  # bin: pytorch_model.bin, read as weights only
Quantization = Literal["int8", "int4", "fp8"]  # of matrices as held; what is computed in is another thing
KvDtype = Literal["auto", "int8"]  # what KV rows are kept in; auto: what is computed in
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", "fp8")
Curve = tuple[tuple[int, float], ...]  # (rows, seconds), rows ascending


@dataclass(frozen=True, slots=True)
class Range:
    """Layers first .. last - 1 of the base model; written "first:last"."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How an EAGLE tree grows: `depth` expansions after the first, `top_k` wide, `nodes` kept.

    depth does not count the first level, and nodes counts the root: `--draft-depth 8 --draft-nodes 23` are a
    depth of 7 and 24 nodes here. fixed: this shape for every branch (reference tests); otherwise it is the
    largest tree that the draft policy may choose, and nodes are shared out over branches by probability.

    The flags `--depth`, `--width`, `--nodes` and `--tree` of earlier versions count as the fields do.
    """

    depth: int = option(
        7,
        "Maximum depth of draft trees: tokens on their longest path, without the root.",
        flag="draft-depth",
        aliases=("draft-tokens", "num-speculative-tokens"),
        kind=counted(-1),
        keywords={"depth": POSITIVE.read},
    )
    top_k: int = option(
        4, "Children of each node of a draft tree.", flag="draft-breadth", aliases=("width",), kind=POSITIVE
    )
    nodes: int = option(
        24,
        "Maximum number of nodes in a draft tree, without its root.",
        flag="draft-nodes",
        kind=counted(1),
        keywords={"nodes": POSITIVE.read},
    )
    fixed: bool = option(
        False,
        "`measured`, `seed`: draft as much as the drafter's policy says; `fixed`: always the largest tree.",
        flag="tuner",
        kind=is_word("fixed", "measured", "seed"),
        keywords={"tree": is_word("fixed", "tuned").read},
    )

    @property
    def slots(self) -> int:
        """KV rows one live sequence needs beyond its committed ones, in stages and drafter alike."""
        return max(self.nodes, self.top_k * (self.depth + 1)) + 1


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a user knows better than a draft head's published config. None leaves it to the config.

    rope_theta: base of the head's rotary positions.
    aux_layers: layers of the base whose *input* it fuses, ascending (the number of layers: last output).
    """

    rope_theta: float | None = option(
        None, "Rotary base of the head, if its config is wrong.", flag="drafter-rope-theta", kind=ABOVE_ZERO
    )
    aux_layers: tuple[int, ...] | None = option(
        None,
        "Layers of the base whose input the head reads, such as 2,16,29, if its config is wrong.",
        kind=LAYER_NUMBERS,
    )


AS_PUBLISHED = Overrides()


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head as the ring must know it.

    taps:  layers whose *input* it fuses, ascending (a tap at L is the last block's output).
    width: columns of the fused feature row.
    name:  of its directory, or on the hub; empty: nobody knows.
    """

    taps: tuple[int, ...]
    width: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Memory a base's weights take: of its largest layer, before the first one, behind the last one."""

    layer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Registration:
    """A member's first word.

    fingerprint: of the base model (a drafter names the base it was loaded against).
    layers:      a worker's fixed range, or None to be given one.
    model_layers: how many layers the base has.
    kv_bytes:    memory it grants to KV pages.
    row_bytes:   KV bytes of one position in one layer (for a drafter: in the whole head, its
                 feature row included).
    curve:       measured seconds per rows; of one layer for a worker, of one level for a drafter.
    drafters:    a drafter's backends, the first for those who name none.
    shape:       how large its trees may be; None: as the master would have them.
    host:        the machine it runs on; empty: nobody knows.
    gpus:        ids of those a worker can run on, the one it is on now or prefers first.
    memory:      bytes it has for weights and KV pages; None: nobody knows.
    weights:     what the base's would take of it.
    rtt:         seconds to the master and back; None: not measured.
    began:       when its process began, in nanoseconds since 1970; 0: nobody knows.
    number_bytes: of one number that it computes with; 0: nobody knows.
    epoch:       the newest that it has heard of; 0: none.
    lends:       it has files of the base model, from which others may take theirs.
    device:      what computes there: a GPU's name, or a processor's and its cores; empty: nobody knows.
    dtype:       of the numbers that it computes with, such as "float32"; empty: nobody knows.
    copy_speed:  bytes a second that it reads and writes while it copies memory; 0: not measured.
    hands_over:  it can hand KV rows over to another worker, and take them.
    quantization: in words, how a worker's part of the base is rounded; empty: it is not. One text comes from
                 one model, so all workers say the same.
    """

    kind: Kind
    name: str
    address: str
    fingerprint: str
    model_layers: int
    max_positions: int
    kv_bytes: int
    row_bytes: int
    layers: Range | None = None
    curve: Curve = ()
    head: Head | None = None
    protocol: int = PROTOCOL
    drafters: tuple[DrafterName, ...] = ()
    shape: TreeShape | None = None
    host: str = ""
    gpus: tuple[str, ...] = ()
    memory: int | None = None
    weights: WeightBytes | None = None
    rtt: float | None = None
    began: int = 0
    number_bytes: int = 0
    quantization: str = ""
    epoch: int = 0
    lends: bool = False
    device: str = ""
    dtype: str = ""
    copy_speed: int = 0
    hands_over: bool = False

    def follows(self, other: Registration) -> bool:
        """Whether it is of the same process, or of the next one in its place.

        A process on another machine is not the next one as long as the first one's link stands: replicas that
        all advertise the name of their service look alike otherwise.
        """
        same = (self.kind, self.name, self.address) == (other.kind, other.name, other.address)
        moved = bool(self.host and other.host and self.host != other.host)
        return same and not moved and 0 < other.began <= self.began


@dataclass(frozen=True, slots=True)
class Stage:
    """A worker's place in the ring. address: where other members reach it."""

    name: str
    address: str
    layers: Range


@dataclass(frozen=True, slots=True)
class DrafterPlace:
    """A drafter's name, and the address where other members reach it."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """One epoch, as every member hears it. `you` is the member's own name.

    pages:   KV pages of `page_rows` rows, the same number everywhere.
    slots:   KV rows counted per live sequence beyond its committed ones.
    rows:    row budget of one frame.
    flight:  frames in flight at most.
    draft_timeout: seconds stage 0 waits for a tree before it sends the bonus token alone.
    curve:   seconds per rows of one whole lap through the stages, for the drafter's tuner.
    head:    what the stages fuse for the drafter, and the taps whose slices travel for that: none to a stage
             that has its own of an earlier epoch. None where nothing is fused; to a drafter: it sends none.
    gpu:     the one of its own that this member is to run on; None: it has none.
    drafter: the address of the first drafter; None: there is none.
    drafters: every drafter of the ring, the first one included. A master of an older version leaves it empty.
    """

    epoch: int
    you: str
    stages: tuple[Stage, ...]
    pages: int
    page_rows: int
    slots: int
    rows: int = 512
    flight: int = 1
    layout: Layout = "batched"
    drafter: str | None = None
    head: Head | None = None
    shape: TreeShape = TreeShape()
    draft_timeout: float = 1.0
    curve: Curve = ()
    transport: Transport = "grpc"
    comm_mode: CommMode = "p2p"
    gpu: str | None = None
    hop_dtype: HopDtype = "auto"
    drafters: tuple[DrafterPlace, ...] = ()

    @property
    def drafter_places(self) -> tuple[DrafterPlace, ...]:
        """Every drafter of the ring. One of which only the address is known has it as its name."""
        if self.drafters or self.drafter is None:
            return self.drafters
        return (DrafterPlace(self.drafter, self.drafter),)

    def with_drafters(self, places: tuple[DrafterPlace, ...]) -> Configuration:
        """The same configuration with these drafters, in this order."""
        return replace(self, drafter=places[0].address if places else None, drafters=places)

    def tapping(self, layer: int) -> Stage:
        """Who runs this layer and so taps its input; the last stage taps what comes out, too."""
        return next((stage for stage in self.stages if layer < stage.layers.last), self.stages[-1])

    def taps_of(self, stage: Stage) -> frozenset[int]:
        """Taps this stage fuses: inputs of its own layers, and the last block's output on the last stage."""
        taps = self.head.taps if self.head and self.drafter else ()
        return frozenset(tap for tap in taps if self.tapping(tap) == stage)

    def width_at(self, layers: Range) -> int:
        """Columns of the features that the stage of these layers keeps for the drafter; 0: none."""
        last = self.stages[-1].layers == layers
        return self.head.width if self.head and self.drafter and last else 0

    @property
    def drafted(self) -> bool:
        """It was formed with a drafter, which may be away."""
        return self.slots > 1

    @property
    def drafted_for(self) -> Stage:
        """Whom the drafter sends its drafts: the first stage, or its neighbour, which passes them on."""
        return self.stages[-1 if self.comm_mode == "ring" else 0]


@dataclass(frozen=True, slots=True)
class Ready:
    """A member's answer to Configuration: links are up, weights are loaded. The barrier counts these."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A member gets ready: `done` of `total` pieces. With all of them done it waits for others.

    fetched: bytes of the model's files that it has; they grow while it fetches some.
    layers: that StandBy asked it to load ahead, which it has; with less than all of them done it has no room.
    handed: number of the HandOver whose rows it has, all that its next layers need; 0: of none.
    over: sequences among those that are closed, so that there is nothing of them.
    """

    epoch: int
    done: int
    total: int
    fetched: int = 0
    layers: Range | None = None
    handed: int = 0
    over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Broken:
    """A member tells the master that this epoch cannot go on, and why."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Disband:
    """The master ends an epoch: drop every page and wait for the next Configuration."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StandBy:
    """The ring runs without this worker, which takes the place of the next one that is lost.

    layers: to load ahead, as a later epoch is likely to need them here; this worker may run others now.
    """

    epoch: int
    layers: Range | None = None


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Rows first .. last - 1 of a sequence."""

    sequence: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Epoch `epoch`, of the givers, goes on; the next one is to be of the takers. Each giver sends KV rows of
    its layers to those who will run them; each taker says when it has all (Progress).

    number:   of this order, from 1 on.
    features: those that the last stage keeps for a draft head go, too, like a layer behind the last one.
    """

    epoch: int
    givers: tuple[Stage, ...]
    takers: tuple[Stage, ...]
    rows: tuple[RowsOf, ...]
    number: int = 0
    features: bool = False

    @property
    def model_layers(self) -> int:
        """How many there are; the number by which features go."""
        return self.givers[-1].layers.last if self.givers else 0

    def giver_of(self, layer: int) -> str:
        """Who runs this layer now."""
        return next((one.name for one in self.givers if layer < one.layers.last), self.givers[-1].name)

    def held_by(self, stage: Stage) -> Range:
        """Its layers, and the features where they are its own."""
        layers = stage.layers
        return Range(layers.first, layers.last + (self.features and layers.last == self.model_layers))


@dataclass(frozen=True, slots=True)
class Rejoined:
    """To the last stage: a drafter joins the running epoch at this address, for the first time or after it
    was lost. It knows nothing of what is being written, and must be told.

    name: the drafter's. Empty: the master is of an older version, and the address serves as its name.
    """

    epoch: int
    address: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """To the last stage: this drafter of the running epoch is lost, or gave up; its sequences belong to the
    others from now on.
    """

    epoch: int
    name: str


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """A member is about to go (SIGTERM), or the master is."""

    reason: str = "shutting down"


@dataclass(frozen=True, slots=True)
class Beat:
    """Either side is alive. Carries nothing."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A slice of the head's fc for the stage that runs `layer`: weight [width, H], from drafter to stage."""

    epoch: int
    layer: int
    weight: object


@dataclass(frozen=True, slots=True)
class KvRows:
    """KV rows first, first + 1, ... of a sequence in one layer, from whoever runs it in this epoch to whoever
    will in the next one: [rows, numbers of a row]. Behind the last layer, its features. None: the sequence is
    over, or has no features, and nothing comes of it.
    """

    epoch: int
    sequence: int
    layer: int
    first: int
    rows: object | None
