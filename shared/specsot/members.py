"""Messages between members and the master: registrations, configurations, readiness, losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specsot.core.run_ahead import MAX_PASSES
from specsot.params import DrafterName
from specsot.service.option_table import ABOVE_ZERO, LAYER_NUMBERS, POSITIVE, counted, is_word, option

# Version of the protocol. Raised when two versions of the services cannot form one ring.
PROTOCOL = 1

# The sender's name of the master's messages. No member may have this name.
MASTER = "master"

# What a member of the fleet is.
Kind = Literal["worker", "drafter"]
# How attention reads a batch: "packed" reads the sequences one by one, "batched" reads sequences whose pages
# are consecutive as one product, padded to equal numbers of rows.
Layout = Literal["packed", "batched"]
# How messages travel between members. "direct" uses NCCL or gloo for rows, see specsot.transport.nccl_links.
Transport = Literal["grpc", "zmq", "direct"]
# Type of the hidden states that travel between stages. With "int8", they are rounded to 8 bits.
HopDtype = Literal["auto", "int8"]
# With "ring", the drafter is connected to the last stage only, and its messages to stage 0 travel along with
# the frames.
CommMode = Literal["p2p", "ring"]
# "bin" is pytorch_model.bin, loaded as weights only.
WeightFormat = Literal["safetensors", "bin"]
# How weight matrices are stored. The type in which a member computes is independent of it.
Quantization = Literal["int8", "int4", "fp8"]
# What --quantization accepts: a form, or "none" to keep floats even where a form is the default.
QuantizationChoice = Literal["none", "int8", "int4", "fp8"]
# The type in which KV rows are stored. "auto" is the type in which the member computes.
KvDtype = Literal["auto", "int8"]
# The forms of quantized matrices.
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4", "fp8")
# (tokens in the batch, seconds), by ascending tokens.
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Layers first .. last - 1 of the base model; written "first:last".

    first: number of the first layer.
    last: number of the layer after the last one.
    """

    first: int
    last: int

    def __str__(self) -> str:
        """Return the range as "first:last"."""
        return f"{self.first}:{self.last}"

    def __len__(self) -> int:
        """Number of layers in the range."""
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of EAGLE trees: how deep and wide they grow, and how many nodes are kept.

    The fields count as the published EAGLE code does, unlike the flags: `depth` does not count the first
    level, and `nodes` counts the root. `--draft-depth 8 --draft-nodes 23` are a depth of 7 and 24 nodes. The
    flags `--depth`, `--width`, `--nodes` and `--tree` of earlier versions count as the fields do.

    depth: number of expansions after the first.
    top_k: number of nodes that each expansion expands, and number of children of each.
    nodes: number of nodes that are kept of all candidates, the root included.
    fixed: True if every branch gets a tree of this shape, for reference tests. Otherwise the shape is the
        largest tree that the draft policy may choose, and nodes are distributed over branches by probability.
    """

    depth: int = option(
        7,
        "Maximum depth of draft trees: tokens on their longest path, without the root.",
        flag="draft-depth",
        kind=counted(-1),
    )
    top_k: int = option(4, "Children of each node of a draft tree.", flag="draft-breadth", kind=POSITIVE)
    nodes: int = option(
        24,
        "Maximum number of nodes in a draft tree, without its root.",
        flag="draft-nodes",
        kind=counted(1),
    )
    fixed: bool = option(
        False,
        "`measured`, `seed`: draft as much as the drafter's policy says; `fixed`: always the largest tree.",
        flag="tuner",
        kind=is_word("fixed", "measured", "seed"),
    )

    @property
    def slots(self) -> int:
        """Number of KV rows that a live sequence needs beyond its committed ones, in stages and drafter
        alike.

        The stages need a row per node. The drafter needs a row per candidate that it expands, `top_k` in each
        of `depth` + 1 expansions.
        """
        return max(self.nodes, self.top_k * (self.depth + 1)) + 1


@dataclass(frozen=True, slots=True)
class Overrides:
    """Corrections of a draft head's published config. None leaves a value to the config.

    rope_theta: base of the head's rotary positions.
    aux_layers: layers of the base model whose *input* the head fuses, ascending. The base model's number of
        layers stands for the output of its last layer.
    """

    rope_theta: float | None = option(
        None, "Rotary base of the head, if its config is wrong.", flag="drafter-rope-theta", kind=ABOVE_ZERO
    )
    aux_layers: tuple[int, ...] | None = option(
        None,
        "Layers of the base whose input the head reads, such as 2,16,29, if its config is wrong.",
        kind=LAYER_NUMBERS,
    )


# No correction of a head's config.
AS_PUBLISHED = Overrides()


@dataclass(frozen=True, slots=True)
class Head:
    """The properties of a draft head that the ring must know.

    taps: layers of the base model whose *input* the head fuses, ascending. With L layers, a tap at L is the
        output of the last layer.
    width: number of columns of the fused features.
    name: the head's directory, or its name on the hub. Empty if unknown.
    """

    taps: tuple[int, ...]
    width: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Sizes of a base model's weights, in bytes.

    layer: bytes of the model's largest layer.
    first: bytes of the part before the first layer, the embedding.
    last: bytes of the part after the last layer, the final norm and the lm_head.
    """

    layer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Registration:
    """The first message of a member to the master.

    kind: "worker" or "drafter".
    name: the member's name.
    address: the address where other members reach the member.
    fingerprint: fingerprint of the base model. A drafter names the base model against which it was loaded.
    model_layers: number of layers of the base model.
    max_positions: length of the base model's context.
    kv_bytes: bytes that the member grants to KV pages.
    row_bytes: KV bytes of one position: in one layer for a worker; in the whole head, its features included,
        for a drafter.
    layers: a worker's fixed layer range, or None if the master may choose.
    curve: measured (tokens, seconds): of one layer for a worker, of one level of a tree for a drafter.
    head: the draft head of a drafter, or None.
    protocol: version of the protocol.
    drafters: the proposers that a drafter offers. The first serves requests that name no drafter.
    shape: the largest trees of a drafter, or None to leave them to the master.
    host: the machine on which the member runs. Empty if unknown.
    gpus: ids of the GPUs on which a worker can run, its present or preferred GPU first.
    memory: bytes for weights and KV pages. None if unknown.
    weights: bytes that the base model's weights would take.
    rtt: seconds of a round trip to the master. None if not measured.
    began: start of the member's process, in nanoseconds since 1970. 0 if unknown.
    number_bytes: bytes of one number that the member computes with. 0 if unknown.
    quantization: how a worker's layers are rounded, in words. Empty if they are not. All workers of a ring
        must have the same value, because the model would otherwise differ between them.
    epoch: the newest epoch that the member has received. 0 if none.
    lends: True if the member has files of the base model that other members may fetch from it.
    device: name of the GPU, or of the processor with its cores. Empty if unknown.
    dtype: type of the numbers that the member computes with, such as "float32". Empty if unknown.
    copy_speed: bytes per second that the member reads and writes while it copies memory. 0 if not measured.
    hands_over: True if the member can send KV rows to another worker and receive KV rows.
    hidden_bytes: bytes of one token's hidden states between two layers. Every stage but the last logs them,
        so that the KV of a lost stage can be computed again from them. 0 if the member logs none.
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
    hidden_bytes: int = 0

    def follows(self, other: Registration) -> bool:
        """Return whether this registration is of the same process as `other`, or of its successor.

        A successor has the same kind, name and address and started later. A process on another machine does
        not count as the successor, because replicas that all advertise the name of their service differ only
        in their machines.

        other: the registration that the master knows already under the same name.

        False also if either start is unknown (0), and if `other` started later. A host that is unknown on
        either side counts as the same machine.
        """
        same = (self.kind, self.name, self.address) == (other.kind, other.name, other.address)
        moved = bool(self.host and other.host and self.host != other.host)
        return same and not moved and 0 < other.began <= self.began


@dataclass(frozen=True, slots=True)
class Stage:
    """A worker's place in the ring.

    name: the worker's name.
    address: the address where other members reach the worker.
    layers: the worker's layer range.
    """

    name: str
    address: str
    layers: Range


@dataclass(frozen=True, slots=True)
class DrafterPlace:
    """A drafter's place in the ring.

    name: the drafter's name.
    address: the address where other members reach the drafter.
    """

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The formation of one epoch, which the master sends to every member.

    epoch: number of the epoch.
    you: the receiving member's own name.
    stages: the workers of the ring, in stage order.
    pages: number of KV pages, the same on every member.
    page_rows: rows of a page.
    slots: KV rows that are reserved for each live sequence beyond its committed ones.
    rows: the largest number of tokens in a frame's batch.
    flight: the largest number of frames in flight.
    layout: how a batch is computed, "packed" or "batched".
    drafter: address of the first drafter, or None if there is none.
    head: the draft head whose features the stages fuse, and the taps whose slices of the `fc` weight they
        get. None if no features are fused, and in the message to a drafter that sends no slices.
    shape: the largest draft tree.
    draft_timeout: seconds that stage 0 waits for a tree before it sends the bonus token alone.
    curve: (tokens, seconds) of a whole step through the stages, for the drafter's policy.
    transport: how messages travel between members.
    comm_mode: which members are connected to each other.
    gpu: id of the GPU on which the member must run, or None if it has no GPU.
    hop_dtype: type of the hidden states between stages.
    drafters: every drafter of the ring, the first included. Empty if the master is of an older version.
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
    def overlapping_stages(self) -> int:
        """Return how many stages may compute at the same time: all of them, or 1 if they take turns, as one
        frame at a time is in flight.
        """
        return len(self.stages) if self.flight > 1 else 1

    @property
    def drafter_places(self) -> tuple[DrafterPlace, ...]:
        """Return the place of every drafter of the ring. If a drafter's name is unknown, its address serves
        as its name.
        """
        if self.drafters or self.drafter is None:
            return self.drafters
        return (DrafterPlace(self.drafter, self.drafter),)

    def with_drafters(self, places: tuple[DrafterPlace, ...]) -> Configuration:
        """Return the same configuration with these drafters, in this order. The first one's address becomes
        `drafter`.

        places: the drafters of the ring. Empty if there are none.
        """
        return replace(self, drafter=places[0].address if places else None, drafters=places)

    def tapping(self, layer: int) -> Stage:
        """Return the stage that runs a layer and so taps its input.

        For the tap after the last layer, which is the model's output, that is the last stage.

        layer: number of a layer, or the number of layers for the tap after the last one.
        """
        return next((stage for stage in self.stages if layer < stage.layers.last), self.stages[-1])

    def taps_of(self, stage: Stage) -> frozenset[int]:
        """Return the taps that a stage fuses: inputs of its own layers, and on the last stage the output.

        Empty without a head or without a drafter. Example: with the taps {2, 16, 32}, a first stage of layers
        0:16 fuses {2}, and a last stage of layers 16:32 fuses {16, 32}.

        stage: one of `stages`.
        """
        taps = self.head.taps if self.head and self.drafter else ()
        return frozenset(tap for tap in taps if self.tapping(tap) == stage)

    def width_at(self, layers: Range) -> int:
        """Return the columns of the features that a stage stores for the drafter.

        0 if it stores none, because it is not the last stage or no drafter reads features.

        layers: the stage's layer range.

        0 also for a layer range that is not exactly that of the last stage.
        """
        last = self.stages[-1].layers == layers
        return self.head.width if self.head and self.drafter and last else 0

    @property
    def drafted(self) -> bool:
        """True if the epoch was formed with a drafter, even if that drafter is missing at the moment."""
        return self.slots > 1

    @property
    def reserved_slots(self) -> int:
        """Number of KV slots that are kept free for every live sequence: for the nodes of its tree, and on a
        single stage for the tokens of a frame of several passes (`run_ahead`).
        """
        return max(self.slots, MAX_PASSES) if len(self.stages) == 1 else self.slots

    @property
    def drafted_for(self) -> Stage:
        """The stage to which the drafter sends its drafts.

        That is stage 0, or with `comm_mode` "ring" the last stage, which passes the drafts on.
        """
        return self.stages[-1 if self.comm_mode == "ring" else 0]


@dataclass(frozen=True, slots=True)
class Ready:
    """A member's answer to Configuration: its links are connected and its weights are loaded.

    The master starts the epoch once every member has answered.

    epoch: number of the epoch.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A member's report of its preparations for an epoch.

    epoch: number of the epoch.
    done: number of finished pieces of work. Once it equals `total`, the member waits for other members.
    total: number of all pieces of work.
    fetched: bytes of the model's files that the member has. Grows while it fetches files.
    layers: the layers that StandBy asked the member to load in advance and that it has loaded. If `done` is
        less than `total`, the member has no room for all of them.
    migrated: number of the HandOver whose rows have all arrived at the member. 0 if there is none.
    over: sequences of that HandOver that were closed in the meantime, so that no rows of them arrived.
    """

    epoch: int
    done: int
    total: int
    fetched: int = 0
    layers: Range | None = None
    migrated: int = 0
    over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Broken:
    """A member's message to the master that the epoch has failed.

    epoch: number of the epoch.
    reason: what failed.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Disband:
    """The master's order to end an epoch: the member drops all pages and waits for the next Configuration.

    epoch: number of the epoch.
    reason: why the epoch ends.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StandBy:
    """The master's message to a worker that is not in the ring, and may replace the next worker that is lost.

    epoch: number of the epoch that runs without the worker.
    layers: layers to load in advance, because a later epoch is likely to need them on this worker. None if
        there are none.
    """

    epoch: int
    layers: Range | None = None


@dataclass(frozen=True, slots=True)
class RowsOf:
    """KV rows first .. last - 1 of a sequence.

    sequence: id of the sequence.
    first: number of the first row.
    last: number of the row after the last one.
    """

    sequence: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """The master's order to migrate KV rows to the stages of the next epoch: while the present epoch
    continues, or after a stage was lost, before the next one begins. Or, with `copies`, to copy them to other
    stages of the present epoch in case that a stage is lost.

    Each giver sends the rows that it has to the takers that want them. Each taker reports in Progress when
    all its rows have arrived. Rows are numbered by what they belong to, here for a model of 28 layers:

        number 0..27    KV of the layer
        number 28       features that the last stage stores for a draft head
        number 28 + n   hidden states that enter layer n, as the stage before layer n has logged them

    Who keeps what if the second of three stages is lost, and its layers come to a worker d:

        givers a 0:10, c 19:28      takers a 0:10, d 10:19, c 19:28      lost 10:19
        a keeps 0..9 and 38 (its log), c keeps 19..27 and 28 (features)
        a sends d 38, from which d computes the KV of the layers 10..18

    The same if a has copies of 10..18:

        givers a 0:10, c 19:28, a 10:19      takers a 0:10, d 10:19, c 19:28      lost nothing
        a sends d 10..18

    epoch: number of the present epoch, or of the one that has ended.
    givers: the stages of that epoch. After a loss, those that are left; then every stage that was lost and
        whose rows are copied, with the name of the worker that has the copies.
    takers: the stages of the next epoch. With `copies` every worker of the present one, each with the layers
        of another stage.
    rows: the rows to migrate. With `copies` all sequences of which copies are kept, those without new rows
        with an empty range.
    number: number of the order, counted from 1.
    features: True if the features that the last stage stores for a draft head migrate too.
    hidden: True if logged hidden states migrate too.
    copies: True if the takers only keep the rows, and drop those of sequences that the order does not name.
    """

    epoch: int
    givers: tuple[Stage, ...]
    takers: tuple[Stage, ...]
    rows: tuple[RowsOf, ...]
    number: int = 0
    features: bool = False
    hidden: bool = False
    copies: bool = False

    @property
    def model_layers(self) -> int:
        """Number of layers of the model, which is also the number under which features travel. 0 if there are
        neither givers nor takers.
        """
        return max((stage.layers.last for stage in (*self.givers, *self.takers)), default=0)

    @property
    def lost(self) -> Range | None:
        """The layers that no giver has, whose KV must be computed again. None if there are none. If givers
        lie between them, their layers are included.
        """
        held = {layer for giver in self.givers for layer in range(giver.layers.first, giver.layers.last)}
        lost = [layer for layer in range(self.model_layers) if layer not in held]
        return Range(lost[0], lost[-1] + 1) if lost else None

    def given_by(self, giver: Stage) -> tuple[int, ...]:
        """Return the numbers of the rows that a giver has, ascending.

        giver: one of `givers`.
        """
        first, last = giver.layers.first, giver.layers.last
        if last < self.model_layers:
            return *range(first, last), *(self.model_layers + last,) * self.hidden
        return *range(first, last), *(last,) * self.features

    def needed_by(self, taker: Stage) -> tuple[int, ...]:
        """Return the numbers of the rows without which a taker cannot continue a sequence, ascending: the KV
        of its layers that are not lost, and, if the first lost layer is among its layers, the hidden states
        that enter that layer. Those that enter layer 0 are no rows: they follow from the tokens.

        taker: one of `takers`.
        """
        lost = self.lost or Range(0, 0)
        layers = range(taker.layers.first, taker.layers.last)
        kept = tuple(layer for layer in layers if not lost.first <= layer < lost.last)
        return *kept, *(self.model_layers + lost.first,) * (lost.first in layers and lost.first > 0)

    def taken_by(self, taker: Stage) -> tuple[int, ...]:
        """Return the numbers of the rows that a taker is sent, ascending: those that it needs, the features
        if it is the last stage, and the log of the hidden states that it passes on. The last two may be
        missing for a sequence.

        taker: one of `takers`.
        """
        last = taker.layers.last
        wanted = {*self.needed_by(taker), last if last == self.model_layers else self.model_layers + last}
        return tuple(sorted(wanted & self._given))

    @property
    def _given(self) -> set[int]:
        """The numbers of all rows that some giver has."""
        return {number for giver in self.givers for number in self.given_by(giver)}

    def giver_of(self, number: int) -> str:
        """Return the name of the giver that has rows; empty if no giver has them.

        number: what the rows belong to.
        """
        return next((giver.name for giver in self.givers if number in self.given_by(giver)), "")


@dataclass(frozen=True, slots=True)
class Rejoined:
    """The master's message to the last stage that a drafter joins the running epoch.

    The drafter joins for the first time, or again after it was lost. It knows no sequence, so that the last
    stage must send it all features.

    epoch: number of the epoch.
    address: address of the drafter.
    name: name of the drafter. Empty if the master is of an older version; the address then serves as the
        name.
    """

    epoch: int
    address: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The master's message to the last stage that a drafter of the running epoch is lost or gave up.

    The remaining drafters draft for its sequences from now on.

    epoch: number of the epoch.
    name: name of the drafter.
    """

    epoch: int
    name: str


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """A message that a member, or the master, is about to leave, after SIGTERM for example.

    reason: why the sender leaves, in words.
    """

    reason: str = "shutting down"


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of a member or of the master. It has no content."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A slice of the draft head's `fc` weight, which a drafter sends to the stage that taps `layer`.

    epoch: number of the epoch.
    layer: the layer whose input the slice multiplies.
    weight: [width, hidden_size] tensor, where `width` is the number of columns of the fused features.
    """

    epoch: int
    layer: int
    weight: object


@dataclass(frozen=True, slots=True)
class KvRows:
    """KV rows of a sequence in one layer, sent to the stage that runs the layer in the next epoch.

    epoch: number of the present epoch.
    sequence: id of the sequence.
    layer: number of the layer, or the number of features or of hidden states, see `HandOver`.
    first: number of the first row; the rows are first, first + 1, ....
    rows: [rows, width] tensor, where `width` is the number of elements of a row. None if no rows will arrive,
        because the sequence has ended or has no features.
    """

    epoch: int
    sequence: int
    layer: int
    first: int
    rows: object | None
