"""Status that a master reports: models, members, pages, requests and steps; amounts of memory in words."""

from __future__ import annotations

from dataclasses import dataclass

from specsot._version import __version__
from specsot.members import PROTOCOL, Kind, Range


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that requests can name.

    name: the name by which requests ask for the model.
    fingerprint: hash of the model's files, equal on all members of its ring.
    layers: number of decoder layers.
    max_positions: length of the model's context, in tokens.
    plan_style: how the model plans: "list", "markers" or "tags". Empty if unknown.
    no_chat_template: True if the model's files hold no chat template. Conversations are then rendered in a
        simple default form.
    """

    name: str
    fingerprint: str
    layers: int
    max_positions: int
    plan_style: str = ""
    no_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A worker or drafter that has joined the fleet. A field that is empty or 0 is unknown.

    kind: "worker" or "drafter".
    name: the member's name.
    address: the address where other members reach the member.
    fingerprint: fingerprint of the member's base model.
    layers: the member's layer range in the present epoch, or None if it has none.
    host: the machine on which the member runs.
    gpu: the GPU on which the member runs.
    is_standby: True if the present epoch runs without the member.
    replica: number of the ring to which the member belongs, if the master has several; otherwise None.
    device: name of the GPU or the processor that computes.
    memory: bytes for weights and KV pages.
    dtype: what the member computes in, and how its weights are rounded, such as "bfloat16, int8 weights".
    weights: bytes of weights that a step reads of the member's layers.
    min_seconds: seconds to read these weights at the speed at which the member copies memory.
    head: what a drafter drafts with: the name of its draft head, or of the checkpoint with its MTP layer.
        Empty for a drafter that reads no features, and for a worker.
    """

    kind: Kind
    name: str
    address: str
    fingerprint: str
    layers: Range | None = None
    host: str = ""
    gpu: str = ""
    is_standby: bool = False
    replica: int | None = None
    device: str = ""
    memory: int = 0
    dtype: str = ""
    weights: int = 0
    min_seconds: float = 0.0
    head: str = ""


@dataclass(frozen=True, slots=True)
class PagesInfo:
    """KV pages of the present epoch.

    total: number of pages.
    free: number of pages that no running request needs.
    rows: positions per page.
    kept: number of pages that hold cached beginnings of prompts. Many of these pages count as free too.
    """

    total: int
    free: int
    rows: int
    kept: int = 0


@dataclass(frozen=True, slots=True)
class RequestsInfo:
    """Numbers of requests: at this moment, and since the master started.

    waiting: requests in the queue.
    running: requests in the ring.
    writing: sequences that the running requests have open.
    kept: ended requests that clients may still read again.
    refused: requests that were rejected for lack of room since the master started.
    ended: (reason, number of requests) since the master started. The reason is a reason of `Finished`, or the
        name of an error.
    prompt_tokens: prompt tokens of all requests that entered the ring.
    cached_tokens: those prompt tokens whose KV the ring had already.
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
class StepsInfo:
    """The ring's steps (forward passes) since the master started, and the newest.

    steps: number of steps since the master started.
    tokens: number of tokens that these steps generated.
    per_second: steps per second in the last seconds. 0 while no step runs.
    tokens_per_step: generated tokens per step in the last seconds. 0 while no step runs.
    rows_per_step: tokens in the batch per step in the last seconds. 0 while no step runs.
    stages: compute seconds of a step in each stage, in stage order. Empty before the first step.
    """

    steps: int = 0
    tokens: int = 0
    per_second: float = 0.0
    tokens_per_step: float = 0.0
    rows_per_step: float = 0.0
    stages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """The state of one of several rings of a master.

    number: number of the ring.
    epoch: number of the ring's present epoch. 0 if there is none.
    ready: True if requests can run in the ring.
    waiting_for: one line for each thing that the ring is missing. Empty if `ready`.
    pages: KV pages of the ring's present epoch, or None if there is no epoch.
    steps: figures of the ring's steps. None if unknown.
    requests: figures of the requests in the ring. None if unknown.
    plan: which member of the ring runs which layers, and how fast a sequence is expected to decode, in words.
    """

    number: int
    epoch: int = 0
    ready: bool = False
    waiting_for: tuple[str, ...] = ()
    pages: PagesInfo | None = None
    steps: StepsInfo | None = None
    requests: RequestsInfo | None = None
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Info:
    """The state of a master.

    models: the models that requests can name.
    members: the workers and drafters that have joined.
    epoch: number of the present epoch. With several rings, the newest epoch.
    ready: True if requests can run. With several rings, True as soon as one of them is complete.
    waiting_for: one line for each thing that is missing. Empty if `ready`, unless there are several rings,
        whose missing things are all listed.
    pages: KV pages of the present epoch, or None if there is no epoch. With several rings, their sum.
    steps: figures of the ring's steps, or of the steps of all rings together.
    requests: figures of the requests, in all rings together.
    version: version of the master.
    protocol: version of the protocol between members.
    plan: which member runs which layers, and how fast a sequence is expected to decode without drafts, in
        words.
    replicas: the rings, if the master has several; otherwise empty.
    """

    models: tuple[ModelInfo, ...] = ()
    members: tuple[MemberInfo, ...] = ()
    epoch: int = 0
    ready: bool = False
    waiting_for: tuple[str, ...] = ()
    pages: PagesInfo | None = None
    steps: StepsInfo | None = None
    requests: RequestsInfo | None = None
    version: str = __version__
    protocol: int = PROTOCOL
    plan: str = ""
    replicas: tuple[ReplicaInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """The response to a request to distribute the layers anew.

    changed: False if the ring runs the best known distribution already.
    epoch: number of the epoch that runs `plan`.
    plan: the distribution in words.
    """

    changed: bool
    epoch: int
    plan: str


def memory_in_words(size: float) -> str:
    """Return a number of bytes in words: 1.5 * 2**30 becomes "1.5 GiB", and 512 becomes "512 B".

    size: number of bytes.

    Units go up to TiB. A number below 100 has one decimal, except of bytes; one from 100 on has none.
    """
    value = float(size)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{value:.1f} {units[0]}"
