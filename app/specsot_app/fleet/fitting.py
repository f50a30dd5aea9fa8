"""Plans what fits where before anything is loaded: workers that do not exist yet, placed as a master places
them.

Bytes are counted by the same code with which workers and drafters count, from configs and headers of weight
files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.hub import shapes_on_hub, snapshot_of
from specsot.checkpoint.resolving import describe_model, name_of_model
from specsot.core.info import memory_in_words
from specsot.errors import InvalidRequest, Refused
from specsot.members import QUANTIZATIONS, Configuration, Quantization, Range, Registration, Stage
from specsot.params import MODELLESS
from specsot_app.core.device_map import HostDevice, PlannedPlace, check_stages, parse_planned
from specsot_app.fleet.options import FleetOptions, layers_of, local_hosts, models_of
from specsot_drafter.heads.checkpoint import Checkpoint
from specsot_drafter.memory import DraftMemory, eagle_memory, model_memory
from specsot_drafter.proposers.lm import beam_shape, read_small
from specsot_master.core.ring.epoch import configurations_of
from specsot_master.core.ring.placement import Throughput, next_stages
from specsot_master.core.ring.ring_state import RingConfig
from specsot_model.device_speed import copy_speed
from specsot_model.linear import NAMES, resolve_dtype
from specsot_model.loaded_parts import measured_range, open_shapes
from specsot_model.memory_fit import WeightForm, free_on, weights_of
from specsot_model.published import as_published, published_of
from specsot_model.weights import SINGLE, has_files
from specsot_worker.memory import LayerMemory

HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One planned worker, in bytes.

    place: its host and device.
    layers: its layer range.
    weights: weights of its layers.
    kv: KV pages.
    graphs: CUDA graphs.
    drafter: the drafter on the same device, its KV included.
    read: bytes of weights that a step of one row reads.
    room: free memory before loading; None if unknown.
    bandwidth: bytes a second of its memory; None if unknown.
    """

    place: str
    layers: str
    weights: int
    kv: int
    graphs: int
    drafter: int
    read: float
    room: int | None = None
    bandwidth: float | None = None

    @property
    def need(self) -> int:
        """Return all bytes that the stage takes."""
        return self.weights + self.kv + self.graphs + self.drafter


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet as it would be loaded.

    model: name of the model.
    layers: number of its layers.
    context: most positions of a sequence.
    held: the form of the weights, in words.
    weights: bytes of all layers.
    forms: bytes of all layers in other forms, by form.
    stages: the workers in ring order.
    positions: KV positions of all sequences together.
    page_rows: positions of a page.
    draft: name of the draft head or model; empty if no model drafts.
    draft_own: bytes of the drafter's own weights.
    draft_borrowed: bytes of the drafter's copies of the base model's weights.
    tokens_per_second: prediction for one sequence without drafts; None if no bandwidth is known.
    text_only: the model also reads images, but only its text is served.
    """

    model: str
    layers: int
    context: int
    held: str
    weights: int
    forms: dict[str, int]
    stages: tuple[StagePlan, ...]
    positions: int
    page_rows: int
    draft: str = ""
    draft_own: int = 0
    draft_borrowed: int = 0
    tokens_per_second: float | None = None
    text_only: bool = False

    @property
    def lacking(self) -> dict[str, int]:
        """Return the missing bytes by device; devices with enough room are left out."""
        rooms = {stage.place: stage.room for stage in self.stages if stage.room is not None}
        needs = Counter[str]()
        for stage in self.stages:
            needs[stage.place] += stage.need
        return {place: needs[place] - room for place, room in rooms.items() if needs[place] > room}


def plan_fleet(options: FleetOptions) -> FleetPlan:
    """Plan the fleet. Raises Refused, in words, if layers do not fit; ModelError; InvalidRequest."""
    if options.model is None:
        raise InvalidRequest("a model is needed: a directory, a GGUF file, or owner/name on the hub", "model")
    base = describe_model(options.model)
    config = read_config(base)
    ranges = layers_of(options, base)
    places = [_completed(place) for place in _places(options, len(ranges))]
    check_stages(len(ranges) or options.stages, [place.place for place in places])
    shapes = open_shapes(base, config, options.model_format == "bin", options.quantization)
    here = [as_published(replace(options, device=place.place.device), base) for place in places]
    counted = [LayerMemory(own, config, shapes) for own in here]
    draft = _draft_memory(here[-1], counted[-1])
    workers = [
        _worker(number, place, memory, ranges[number] if ranges else None)
        for number, (place, memory) in enumerate(zip(places, counted))
    ]
    workers[-1] = _beside(workers[-1], draft)
    ring = RingConfig(
        workers=len(places), model_layers=config.layers, drafter="none" if draft is None else "eagle"
    )
    forms = _forms(base, counted[0])
    stages = _placed(workers, ring, forms)
    members = [*workers, _drafter(draft, options, config)] if draft else workers
    formed = configurations_of(1, members, stages, ring)[stages[0].name]
    by_name = {worker.name: number for number, worker in enumerate(workers)}
    told: list[StagePlan] = []
    for stage in stages:
        number = by_name[stage.name]
        beside = draft if number == len(places) - 1 else None
        told.append(_stage(stage, places[number], counted[number], formed, beside))
    return FleetPlan(
        model=name_of_model(base),
        layers=config.layers,
        context=config.max_positions,
        held=_held(base, counted[0]),
        weights=counted[0].weights(Range(0, config.layers)),
        forms=forms,
        stages=tuple(told),
        positions=formed.pages * formed.page_rows,
        page_rows=formed.page_rows,
        draft=name_of_model(describe_model(options.draft_model)) if draft and options.draft_model else "",
        draft_own=draft.own if draft else 0,
        draft_borrowed=draft.borrowed if draft else 0,
        tokens_per_second=_speed(told),
        text_only=config.text_of is not None,
    )


def count_on_gpu(options: FleetOptions) -> int:
    """Return the bytes of GPU memory for one ring: all layers, KV pages, CUDA graphs, and the drafter.

    No GPU is queried; room for graphs is counted as on a GPU that is large enough.
    Raises ModelError, HeadMismatch, InvalidRequest.
    """
    models = models_of(replace(options, device="cpu"))
    named = replace(
        options, device="cuda", model=models.base, draft_model=models.draft, drafter=models.drafts
    )
    own = as_published(named, models.base)
    config = read_config(models.base)
    counted = LayerMemory(
        own, config, open_shapes(models.base, config, own.model_format == "bin", own.quantization)
    )
    draft = _draft_memory(own, counted)
    whole = Range(0, config.layers)
    beside = own.page_bytes + draft.weights + draft.graphs if draft else 0
    width = draft.head.width if draft and draft.head else 0
    return counted.weights(whole) + own.page_bytes + counted.graphs(True, width, whole) + beside


def _places(options: FleetOptions, ranges: int) -> tuple[PlannedPlace, ...]:
    """Return one place for each stage: those of --devices, else this machine's --device."""
    if options.devices:
        return parse_planned(options.devices)
    kind, _, number = options.device.partition(":")
    names = [
        f"cuda:{number or stage}" if kind == "cuda" else kind
        for stage in range(ranges or options.stages or 1)
    ]
    return tuple(PlannedPlace(HostDevice(HERE, name)) for name in names)


def _completed(planned: PlannedPlace) -> PlannedPlace:
    """Return the place with the free memory of this machine's device, unless it was given.

    Raises InvalidRequest for a place on another machine without its memory.
    """
    place = planned.place
    if planned.memory is not None:
        return planned
    if not local_hosts([place.host]):
        said = f"devices: {place} is another machine; say what is free there: {place}=24G"
        raise InvalidRequest(said, field="devices")
    return PlannedPlace(place, free_on(place.device), planned.bandwidth or copy_speed(place.device))


def _worker(number: int, planned: PlannedPlace, counted: LayerMemory, layers: Range | None) -> Registration:
    """Return what a worker at this place would register with.

    Its measured curve is replaced by the time that reading a step's weights takes.
    """
    on_gpu = planned.place.device != "cpu"
    config = counted.config
    speed = planned.bandwidth
    free = planned.memory
    return Registration(
        kind="worker",
        name=f"{number}",
        address=str(planned.place),
        fingerprint="",
        model_layers=config.layers,
        max_positions=config.max_positions,
        kv_bytes=counted.options.page_bytes,
        row_bytes=counted.row_in(layers),
        layers=layers,
        curve=((1, counted.read(measured_range(config)) / speed),) if speed else (),
        host=planned.place.host,
        gpus=(str(planned.place),) if on_gpu else (),
        memory=None if free is None else max(free - counted.graphs(on_gpu, 0, layers, free), 0),
        weights=counted.parts,
        number_bytes=counted.dtype.itemsize,
    )


def _beside(worker: Registration, draft: DraftMemory | None) -> Registration:
    """Return the worker with less free memory: that of the drafter on its device is subtracted."""
    if draft is None or worker.memory is None:
        return worker
    return replace(worker, memory=max(worker.memory - draft.weights - draft.graphs, 0))


def _drafter(draft: DraftMemory, options: FleetOptions, config: ModelConfig) -> Registration:
    """Return what the drafter would register with."""
    return Registration(
        kind="drafter",
        name="drafter",
        address="drafter",
        fingerprint="",
        model_layers=config.layers,
        max_positions=config.max_positions,
        kv_bytes=options.page_bytes,
        row_bytes=draft.row,
        head=draft.head,
        shape=options.drafting.shape() if draft.head else None,
    )


def _draft_memory(options: FleetOptions, counted: LayerMemory) -> DraftMemory | None:
    """Return what the drafter takes, or None if no model drafts. Raises ModelError, HeadMismatch,
    InvalidRequest.
    """
    if options.drafts in MODELLESS:
        return None
    if options.draft_model is None:
        raise InvalidRequest(f"drafter {options.drafts} needs a draft_model", field="draft_model")
    folder = describe_model(options.draft_model)
    bin_too = options.draft_format == "bin"
    kind = options.drafter_quantization
    held = WeightForm.on_device(
        options.device, resolve_dtype(options.drafter_dtype, options.device, kind).itemsize, kind
    )
    on_gpu = options.device != "cpu"
    if options.drafts == "model":
        small = read_small(folder)
        beam = beam_shape(options.drafting)
        return model_memory(open_shapes(folder, small, bin_too), small, held, beam, on_gpu)
    head = open_head(folder, bin_too)
    tree = options.drafting.shape() or RingConfig().shape
    return eagle_memory(head, counted.files, counted.config, held, tree, on_gpu, options.overrides)


def open_head(folder: Path, bin_too: bool) -> Checkpoint:
    """Open a head for its shapes. Of a head on the hub only the file's header is fetched."""
    if snapshot_of(folder) is None or has_files(folder, bin_too):
        return Checkpoint.open(folder, bin_too)
    shapes = shapes_on_hub(folder / SINGLE)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return Checkpoint.held(tensors, read_json(folder / "config.json"), str(folder))


def _placed(workers: Sequence[Registration], ring: RingConfig, forms: dict[str, int]) -> tuple[Stage, ...]:
    """Place the layers as the master would. Raises Refused, with the sizes of other forms if layers do not
    fit.
    """
    try:
        found = next_stages(workers, ring)
    except Refused as error:
        less = ", ".join(f"{memory_in_words(size)} in {form}" for form, size in forms.items())
        raise Refused(f"{error}; all layers take {less}" if less else str(error)) from None
    if isinstance(found, str):
        raise Refused(f"the ring lacks {found}")
    return found


def _stage(
    stage: Stage,
    planned: PlannedPlace,
    counted: LayerMemory,
    formed: Configuration,
    draft: DraftMemory | None,
) -> StagePlan:
    """Return a placed stage with its bytes."""
    rows = formed.pages * formed.page_rows
    width = formed.head.width if formed.head else 0
    return StagePlan(
        place=str(planned.place),
        layers=str(stage.layers),
        weights=counted.weights(stage.layers),
        kv=counted.pages(formed, stage.layers),
        graphs=counted.graphs(planned.place.device != "cpu", width, stage.layers),
        drafter=draft.weights + draft.graphs + rows * draft.row if draft else 0,
        read=counted.read(stage.layers),
        room=planned.memory,
        bandwidth=planned.bandwidth,
    )


def _speed(stages: Sequence[StagePlan]) -> float | None:
    """Return tokens a second if a step only has to read the weights; None if a stage's bandwidth is
    unknown.
    """
    seconds = [stage.read / stage.bandwidth for stage in stages if stage.bandwidth]
    whole = len(seconds) == len(stages)
    return (
        Throughput(tuple(one.place for one in stages), tuple(seconds), 0.0).tokens_per_second
        if whole
        else None
    )


def _held(base: Path, counted: LayerMemory) -> str:
    """Return the form of the weights in words."""
    published = published_of(base)
    numbers = next(name for name, dtype in NAMES.items() if dtype == counted.dtype)
    kind = counted.options.quantization
    return (
        f"{published}, {f'as they are in {kind}, computed in' if kind else 'decoded to'} {numbers}"
        if published
        else f"{kind}, computed in {numbers}"
        if kind
        else numbers
    )


def _forms(base: Path, counted: LayerMemory) -> dict[str, int]:
    """Return the bytes of all layers in fewer bits; empty for a model that was published in fewer bits."""
    if published_of(base):
        return {}
    whole = Range(0, counted.config.layers)
    itemsize = counted.dtype.itemsize
    kinds: list[Quantization] = [kind for kind in QUANTIZATIONS if kind != counted.options.quantization]
    device = counted.options.device
    forms = {kind: WeightForm.on_device(device, itemsize, kind) for kind in kinds}
    return {kind: weights_of(counted.files, counted.config, whole, form) for kind, form in forms.items()}
