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
from typing import Final

import torch

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.hub import shapes_on_hub, snapshot_of
from specsot.checkpoint.mtp import has_mtp
from specsot.checkpoint.resolving import describe_model, name_of_model
from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.core.info import memory_in_words
from specsot.errors import InvalidRequest, Refused
from specsot.members import QUANTIZATIONS, Configuration, Quantization, Range, Registration, Stage
from specsot.params import MODELLESS
from specsot_app.core.device_choice import KvMemory
from specsot_app.core.device_map import HostDevice, PlannedPlace, check_stages, parse_planned
from specsot_app.fleet.options import FleetOptions, drafter_for, layers_of, local_hosts, models_of, named_head
from specsot_drafter.heads.checkpoint import Checkpoint
from specsot_drafter.memory import DraftMemory, eagle_memory, model_memory, mtp_memory
from specsot_drafter.proposers.lm import beam_shape, read_small
from specsot_master.core.ring.epoch import configurations_of
from specsot_master.core.ring.placement import CPU_PAGE_ROWS, Throughput, hop_seconds, next_stages
from specsot_master.core.ring.ring_state import RingConfig
from specsot_model.device_speed import copy_speed
from specsot_model.linear import NAMES, resolve_dtype
from specsot_model.loaded_parts import measured_range, open_shapes
from specsot_model.memory_fit import WeightForm, free_on, weights_of
from specsot_model.stored_form import as_published, published_of
from specsot_model.weights import SINGLE, has_files
from specsot_worker.memory import LayerMemory

# The host of this machine.
HERE = "127.0.0.1"
# Fraction. How much KV pages take by default of what weights and graphs leave free on a GPU. The rest is for
# what libraries allocate while a ring runs, and for other programs. Untuned.
KV_SHARE: Final = 0.8
# Bytes. What a CUDA context takes of a GPU, in each process that computes there. Untuned.
CONTEXT_BYTES: Final = 600 << 20


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One planned worker, in bytes.

    place: Host and device of the worker, such as "127.0.0.1#0".
    layers: Layer range of the worker, such as "0:14".
    weights: Bytes of the weights of its layers.
    kv: Bytes of its KV pages.
    graphs: Bytes of its CUDA graphs; 0 on a CPU.
    drafter: Bytes of the drafter on the same device, its KV included; 0 without one.
    read: Bytes of weights that a step of one row reads.
    room: Free bytes before loading; None if unknown.
    bandwidth: Bytes a second that the device's memory can read; None if unknown.
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

    model: Name of the model.
    layers: Number of its layers.
    context: Maximum number of positions of a sequence.
    held: The form of the weights, in words.
    weights: Bytes of all layers.
    forms: Bytes of all layers in other forms, by form.
    stages: The workers in ring order.
    positions: KV positions of all sequences together.
    page_rows: Positions of a page.
    draft: Name of the draft head or model; empty if no model drafts.
    draft_own: Bytes of the drafter's own weights.
    draft_borrowed: Bytes of the drafter's copies of the base model's weights.
    tokens_per_second: Prediction for one sequence without drafts; None if no bandwidth is known.
    text_only: True if the model also reads images, but only its text is served.
    transformers: True if the layers run through Transformers' own code, without CUDA graphs.
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
    transformers: bool = False

    @property
    def lacking(self) -> dict[str, int]:
        """Return the missing bytes by device. Devices with enough room, or whose free memory is unknown, are
        left out.

        The needs of all stages at the same place are added. Without a lacking device, the result is empty.
        """
        rooms = {stage.place: stage.room for stage in self.stages if stage.room is not None}
        needs = Counter[str]()
        for stage in self.stages:
            needs[stage.place] += stage.need
        return {place: needs[place] - room for place, room in rooms.items() if needs[place] > room}


def plan_fleet(options: FleetOptions) -> FleetPlan:
    """Return how the fleet would be placed, and what each device would hold.

    InvalidRequest is also raised without a model, for a number of places that differs from the number of
    stages, for a place on another machine without its memory, and for a drafter that lacks its model. If the
    layers can be placed but a device still lacks memory, nothing is raised: `FleetPlan.lacking` names the
    device. An MTP layer of the model counts as the drafter if no other one is named.

    options: Options of the fleet; only the config and the headers of its weight files are read.
    Raises Refused if layers do not fit, with the sizes in words; ModelError; InvalidRequest.
    """
    model = options.model
    if model is None:
        raise InvalidRequest("a model is needed: a directory, a GGUF file, or owner/name on the hub", "model")
    base = describe_model(model)
    options = replace(options, draft_model=named_head(options) or options.draft_model)
    if options.draft_model:
        options = replace(options, drafter=drafter_for(options, describe_model(options.draft_model)))
    config = read_config(base)
    draft_model = options.draft_model or model
    if options.drafter in (None, "mtp") and has_mtp(describe_model(draft_model), config):
        options = replace(options, drafter="mtp", draft_model=draft_model)
    ranges = layers_of(options, base)
    places = [_with_measured(place) for place in _planned_places(options, len(ranges))]
    check_stages(len(ranges) or options.stages, [place.place for place in places])
    shapes = open_shapes(base, config, options.model_format == "bin", options.stored_form)
    loaded_options = [as_published(replace(options, device=place.place.device), base) for place in places]
    layer_memory = [LayerMemory(options_of_place, config, shapes) for options_of_place in loaded_options]
    draft_memory = _draft_memory(loaded_options[-1], layer_memory[-1])
    workers = [
        _worker_registration(number, place, memory, ranges[number] if ranges else None)
        for number, (place, memory) in enumerate(zip(places, layer_memory))
    ]
    workers[-1] = _without_drafter_memory(workers[-1], draft_memory)
    ring = RingConfig(
        workers=len(places),
        model_layers=config.layers,
        tail_layers=config.tail,
        embeds_everywhere=config.layer_input_size > 0,
        drafter="none" if draft_memory is None else "eagle",
    )
    forms = _other_forms(base, layer_memory[0])
    stages = _placed_stages(workers, ring, forms)
    members = [*workers, _drafter_registration(draft_memory, options, config)] if draft_memory else workers
    formed = configurations_of(1, members, stages, ring)[stages[0].name]
    by_name = {worker.name: number for number, worker in enumerate(workers)}
    stage_plans: list[StagePlan] = []
    for stage in stages:
        number = by_name[stage.name]
        draft_here = draft_memory if number == len(places) - 1 else None
        stage_plans.append(_stage_plan(stage, places[number], layer_memory[number], formed, draft_here))
    return FleetPlan(
        model=name_of_model(base),
        layers=config.layers,
        context=config.max_positions,
        held=_form_in_words(base, layer_memory[0]),
        weights=layer_memory[0].weights(Range(0, config.layers)),
        forms=forms,
        stages=tuple(stage_plans),
        positions=formed.pages * formed.page_rows,
        page_rows=formed.page_rows,
        draft=_draft_name(options) if draft_memory else "",
        draft_own=draft_memory.own if draft_memory else 0,
        draft_borrowed=draft_memory.borrowed if draft_memory else 0,
        tokens_per_second=_speed(
            stage_plans, hop_seconds([workers[by_name[stage.name]] for stage in stages])
        ),
        text_only=config.text_of is not None,
        transformers=config.transformers is not None,
    )


def _draft_name(options: FleetOptions) -> str:
    """Return the name of the model that drafts, for users; "" if none is named.

    options: Options of the fleet.
    """
    if options.draft_model is None:
        return ""
    name = name_of_model(describe_model(options.draft_model))
    return f"the MTP layer of {name}" if options.drafts == "mtp" else name


def count_on_gpu(options: FleetOptions) -> int:
    """Return the bytes of GPU memory for one ring: all layers, KV pages, CUDA graphs, and the drafter.

    No GPU is queried; room for graphs is counted as on a GPU that is large enough.

    Without a drafter that is a model, nothing is added for drafting. The drafter's KV pages count as many
    bytes as those of the ring, unless it has a KV memory of its own.

    options: Options of the fleet.
    Raises ModelError, HeadMismatch, InvalidRequest.
    """
    layer_memory, draft_memory = _memory_on_gpu(options)
    kv_bytes = layer_memory.options.page_bytes
    draft_kv_bytes = kv_bytes if options.draft_kv_memory is None else options.draft_kv_memory
    drafter_bytes = draft_memory.weights + draft_memory.graphs + draft_kv_bytes if draft_memory else 0
    return (
        layer_memory.weights(Range(0, layer_memory.config.layers))
        + kv_bytes
        + _graphs_on_gpu(layer_memory, draft_memory)
        + drafter_bytes
    )


def kv_memory_on_gpus(
    options: FleetOptions, stages: int, free: int, num_gpus: int, num_rings: int, num_requests: int
) -> KvMemory:
    """Return the KV memory of each member of a fleet on GPUs: as much as the requests can use, and at most
    KV_SHARE of what weights, CUDA graphs and contexts and the drafter leave free. The rings share the GPUs
    evenly.

    One ring of one stage, 139 GiB free, 4 GiB of weights and graphs, 28 KiB a position, 64 requests of 32,768
    positions, of which a ring uses 2**20 -> 28 GiB; with 24 GiB free -> 16 GiB.

    options: Options of the fleet.
    stages: Number of layer ranges of a ring.
    free: Free bytes of each GPU.
    num_gpus: Number of GPUs that the fleet uses.
    num_rings: Number of rings.
    num_requests: Maximum number of requests in a ring at once.
    Raises ModelError, HeadMismatch, InvalidRequest. Without any room, the result has 0 positions.
    """
    layer_memory, draft_memory = _memory_on_gpu(options)
    config = layer_memory.config
    every = Range(0, config.layers)
    row = layer_memory.row_in(every)
    draft_row = draft_memory.row if draft_memory else 0
    fixed = layer_memory.weights(every) + stages * (
        _graphs_on_gpu(layer_memory, draft_memory) + CONTEXT_BYTES
    )
    if draft_memory:
        # With one stage, the drafter shares the worker's process.
        fixed += draft_memory.weights + draft_memory.graphs + CONTEXT_BYTES * (stages > 1)
    room = KV_SHARE * max(num_gpus * free - num_rings * fixed, 0)
    useful = min(num_requests * config.max_positions, RingConfig().max_pages * CPU_PAGE_ROWS)
    positions = min(int(room / (num_rings * (config.layers * row + draft_row))), useful)
    layers = -(-config.layers // stages)
    # The last stage keeps the newest tokens' features for the drafter in the same memory.
    width = draft_memory.head.width if draft_memory and draft_memory.head else 0
    features = FEATURE_RING_ROWS * width * layer_memory.dtype.itemsize
    return KvMemory(positions * layers * row + features, positions * draft_row, positions)


def _memory_on_gpu(options: FleetOptions) -> tuple[LayerMemory, DraftMemory | None]:
    """Return what counts the bytes of a ring's layers on a GPU, and the sizes of its drafter, or None if no
    model drafts.

    options: Options of the fleet.
    Raises ModelError, HeadMismatch, InvalidRequest.
    """
    models = models_of(replace(options, device="cpu"))
    on_gpu = replace(
        options, device="cuda", model=models.base, draft_model=models.draft, drafter=models.drafts
    )
    loaded_options = as_published(on_gpu, models.base)
    config = read_config(models.base)
    layer_memory = LayerMemory(
        loaded_options,
        config,
        open_shapes(models.base, config, loaded_options.model_format == "bin", loaded_options.stored_form),
    )
    return layer_memory, _draft_memory(loaded_options, layer_memory)


def _graphs_on_gpu(layer_memory: LayerMemory, draft_memory: DraftMemory | None) -> int:
    """Return the bytes of the CUDA graphs of all layers, as on a GPU that is large enough.

    layer_memory: Counts the bytes of the layers.
    draft_memory: Sizes of the drafter, whose head may have the layers sum up features; None: no model drafts.
    """
    width = draft_memory.head.width if draft_memory and draft_memory.head else 0
    return layer_memory.graphs(True, width, Range(0, layer_memory.config.layers))


def _planned_places(options: FleetOptions, ranges: int) -> tuple[PlannedPlace, ...]:
    """Return one place for each stage: those of --devices, else this machine's --device; stages on GPUs are
    counted through cuda:0, cuda:1 and so on.

    A device "cuda:1" without --devices is used by every stage; "cuda" gives stage 0 cuda:0, stage 1 cuda:1
    and so on, and begins again if this machine has fewer GPUs than stages. Without ranges and `stages` there
    is one place.

    options: Options of the fleet.
    ranges: Number of layer ranges that were chosen; 0 if none were.
    """
    if options.devices:
        return parse_planned(options.devices)
    kind, _, number = options.device.partition(":")
    stages = ranges or options.stages or 1
    num_gpus = torch.cuda.device_count() or stages
    names = [f"cuda:{number or stage % num_gpus}" if kind == "cuda" else kind for stage in range(stages)]
    return tuple(PlannedPlace(HostDevice(HERE, name)) for name in names)


def _with_measured(planned: PlannedPlace) -> PlannedPlace:
    """Return the place with free memory and bandwidth of this machine's device, measured unless they were
    given.

    The free memory of a CPU is counted as well as that of a GPU. A given bandwidth is kept.

    planned: The place as the user described it. If its memory is given, it is returned unchanged.
    Raises InvalidRequest for a place on another machine without its memory.
    """
    place = planned.place
    if planned.memory is not None:
        return planned
    if not local_hosts([place.host]):
        message = f"devices: {place} is another machine; state its free memory: {place}=24G"
        raise InvalidRequest(message, field="devices")
    return PlannedPlace(place, free_on(place.device), planned.bandwidth or copy_speed(place.device))


def _worker_registration(
    stage: int, planned: PlannedPlace, layer_memory: LayerMemory, layers: Range | None
) -> Registration:
    """Return the registration with which a worker at this place would join the master.

    Its measured curve is replaced by the time that reading a step's weights takes; it has none if the
    bandwidth is unknown.

    The memory is None if it is unknown; otherwise it is the free memory without what CUDA graphs take, at
    least 0.

    stage: Number of the place in ring order, which becomes the worker's name.
    planned: The place, with its memory and bandwidth, as far as they are known.
    layer_memory: Counts the bytes of layers, KV pages and graphs.
    layers: The worker's layer range; None: the master decides.
    """
    on_gpu = planned.place.device != "cpu"
    config = layer_memory.config
    speed = planned.bandwidth
    free_memory = planned.memory
    return Registration(
        kind="worker",
        name=f"{stage}",
        address=str(planned.place),
        fingerprint="",
        model_layers=config.layers,
        max_positions=config.max_positions,
        kv_bytes=layer_memory.options.page_bytes,
        row_bytes=layer_memory.row_in(layers),
        layers=layers,
        curve=((1, layer_memory.read(measured_range(config)) / speed),) if speed else (),
        host=planned.place.host,
        gpus=(str(planned.place),) if on_gpu else (),
        memory=None
        if free_memory is None
        else max(free_memory - layer_memory.graphs(on_gpu, 0, layers, free_memory), 0),
        weights=layer_memory.parts,
        number_bytes=layer_memory.dtype.itemsize,
    )


def _without_drafter_memory(worker: Registration, draft_memory: DraftMemory | None) -> Registration:
    """Return the worker with less free memory: that of the drafter on its device is subtracted. Unchanged
    without a drafter, or if the free memory is unknown.

    The result's memory is at least 0.

    worker: Registration of the last worker, on whose device the drafter runs.
    draft_memory: Sizes of the drafter; None: no model drafts.
    """
    if draft_memory is None or worker.memory is None:
        return worker
    return replace(worker, memory=max(worker.memory - draft_memory.weights - draft_memory.graphs, 0))


def _drafter_registration(
    draft_memory: DraftMemory, options: FleetOptions, config: ModelConfig
) -> Registration:
    """Return the registration with which the drafter would join the master. A drafter without an EAGLE head
    has no tree shape.

    draft_memory: Sizes of the drafter.
    options: Options of the fleet.
    config: Config of the base model.
    """
    return Registration(
        kind="drafter",
        name="drafter",
        address="drafter",
        fingerprint="",
        model_layers=config.layers,
        max_positions=config.max_positions,
        kv_bytes=options.page_bytes,
        row_bytes=draft_memory.row,
        head=draft_memory.head,
        shape=options.drafting.shape() if draft_memory.head else None,
    )


def _draft_memory(options: FleetOptions, layer_memory: LayerMemory) -> DraftMemory | None:
    """Return the sizes of the drafter: weights, graphs and bytes per KV row. Return None if no model drafts.

    A drafter of MODELLESS gives None even if a draft model is named. Without a draft model any other drafter
    raises InvalidRequest. A small language model ("model") is counted with its beam, a head or an MTP layer
    with its tree.

    options: Options of the fleet, with the device of the last place.
    layer_memory: Sizes of the layers at the last place, whose weight files the head may borrow from.
    Raises ModelError, HeadMismatch, InvalidRequest.
    """
    if options.drafts in MODELLESS:
        return None
    if options.draft_model is None:
        raise InvalidRequest(f"drafter {options.drafts} needs a draft_model", field="draft_model")
    folder = describe_model(options.draft_model)
    bin_too = options.draft_format == "bin"
    quantization = options.drafter_quantization
    weight_form = WeightForm.on_device(
        options.device,
        resolve_dtype(options.drafter_dtype, options.device, quantization).itemsize,
        quantization,
    )
    on_gpu = options.device != "cpu"
    if options.drafts == "model":
        draft_config = read_small(folder)
        beam = beam_shape(options.drafting)
        return model_memory(
            open_shapes(folder, draft_config, bin_too), draft_config, weight_form, beam, on_gpu
        )
    tree = options.drafting.shape() or RingConfig().shape
    if options.drafts == "mtp":
        return mtp_memory(folder, layer_memory.config, weight_form, tree, on_gpu)
    head = open_head(folder, bin_too)
    return eagle_memory(
        head, layer_memory.files, layer_memory.config, weight_form, tree, on_gpu, options.overrides
    )


def open_head(folder: Path, bin_too: bool) -> Checkpoint:
    """Return a head opened for its shapes alone. Of a head on the hub only the file's header is fetched.

    Any other head is opened from its files.

    folder: The head's folder.
    bin_too: True: also read pytorch_model.bin.
    """
    if snapshot_of(folder) is None or has_files(folder, bin_too):
        return Checkpoint.open(folder, bin_too)
    shapes = shapes_on_hub(folder / SINGLE)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return Checkpoint.held(tensors, read_json(folder / "config.json"), str(folder))


def _placed_stages(
    workers: Sequence[Registration], ring_config: RingConfig, forms: dict[str, int]
) -> tuple[Stage, ...]:
    """Return the stages in ring order, placed as the master would.

    If the ring is incomplete, Refused says what it lacks. Without other forms, the error has no sizes of
    them.

    workers: Registrations of the planned workers.
    ring_config: Config of the ring.
    forms: Bytes of all layers by other forms of weights, which the error names.
    Raises Refused, with the sizes of other forms if layers do not fit.
    """
    try:
        stages = next_stages(workers, ring_config)
    except Refused as error:
        sizes = ", ".join(f"{memory_in_words(size)} in {form}" for form, size in forms.items())
        raise Refused(f"{error}; all layers take {sizes}" if sizes else str(error)) from None
    if isinstance(stages, str):
        raise Refused(f"the ring lacks {stages}")
    return stages


def _stage_plan(
    stage: Stage,
    planned: PlannedPlace,
    layer_memory: LayerMemory,
    configuration: Configuration,
    draft_memory: DraftMemory | None,
) -> StagePlan:
    """Return a placed stage with its bytes.

    `drafter` includes the drafter's KV of all positions, and is 0 without a drafter.

    stage: The stage that the master's placement returned.
    planned: The place at which it runs.
    layer_memory: Counts the bytes of its layers.
    configuration: Configuration of the ring, with its number of pages.
    draft_memory: Sizes of the drafter on the same device; None: no drafter runs there.
    """
    rows = configuration.pages * configuration.page_rows
    width = configuration.head.width if configuration.head else 0
    return StagePlan(
        place=str(planned.place),
        layers=str(stage.layers),
        weights=layer_memory.weights(stage.layers),
        kv=layer_memory.pages(configuration, stage.layers),
        graphs=layer_memory.graphs(planned.place.device != "cpu", width, stage.layers),
        drafter=draft_memory.weights + draft_memory.graphs + rows * draft_memory.row if draft_memory else 0,
        read=layer_memory.read(stage.layers),
        room=planned.memory,
        bandwidth=planned.bandwidth,
    )


def _speed(stages: Sequence[StagePlan], hops: float) -> float | None:
    """Return tokens a second if a step only reads the weights and passes the stages; None if a stage's
    bandwidth is unknown.

    stages: The planned stages of the ring.
    hops: Seconds that a step takes between the stages.
    """
    seconds = [stage.read / stage.bandwidth for stage in stages if stage.bandwidth]
    is_complete = len(seconds) == len(stages)
    return (
        Throughput(tuple(stage.place for stage in stages), tuple(seconds), hops).tokens_per_second
        if is_complete
        else None
    )


def _form_in_words(base: Path, layer_memory: LayerMemory) -> str:
    """Return the form of the weights in words: "bf16", "int8, computed in bf16", or, for a model that was
    published in fewer bits, the published form and what is done with it.

    The words for a published form P are "P, as they are in KIND, computed in bf16" if the quantization KIND
    holds the weights, else "P, decoded to bf16".

    base: Directory of the base model.
    layer_memory: Sizes of the layers, with the number format and quantization.
    """
    published = published_of(base)
    dtype_name = next(name for name, dtype in NAMES.items() if dtype == layer_memory.dtype)
    kind = layer_memory.options.stored_form
    return (
        f"{published}, {f'as they are in {kind}, computed in' if kind else 'decoded to'} {dtype_name}"
        if published
        else f"{kind}, computed in {dtype_name}"
        if kind
        else dtype_name
    )


def _other_forms(base: Path, layer_memory: LayerMemory) -> dict[str, int]:
    """Return the bytes of all layers in each other quantization; empty for a model that was published in
    fewer bits.

    The present quantization is left out; no quantization at all is not among the forms.

    base: Directory of the base model.
    layer_memory: Sizes of the layers, with the present form and the weight files.
    """
    if published_of(base):
        return {}
    all_layers = Range(0, layer_memory.config.layers)
    itemsize = layer_memory.dtype.itemsize
    quantizations: list[Quantization] = [
        kind for kind in QUANTIZATIONS if kind != layer_memory.options.stored_form
    ]
    device = layer_memory.options.device
    forms = {kind: WeightForm.on_device(device, itemsize, kind) for kind in quantizations}
    return {
        kind: weights_of(layer_memory.files, layer_memory.config, all_layers, form)
        for kind, form in forms.items()
    }
