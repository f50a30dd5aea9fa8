"""Where a request is answered: this process, processes of its own, or a master elsewhere.

Refuses to know how each of them works; it only chooses, and checks what can be checked in no time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from specsot.drafting import DraftMode, DraftOptions, TunerName
from specsot.errors import InvalidRequest, ModelError
from specsot.events import Numbered
from specsot.members import (
    KV_DTYPES,
    QUANTIZATIONS,
    CommMode,
    KvDtype,
    Layout,
    Overrides,
    Quantization,
    Range,
    Transport,
    TreeShape,
    WeightFormat,
)
from specsot.model.config import read_config
from specsot.model.hf_config import require_model_directory, require_torch
from specsot.params import DRAFTERS, Ask, DrafterName
from specsot.service.option import above_zero, layer_numbers, memory
from specsot.service.options import Dtype
from specsot_app.places import Place, check_stages, places_of
from specsot_app.presets import Preset
from specsot_app.ranges import ranges_of
from specsot_app.reaching import Reach

T = TypeVar("T")

Watch = Callable[[str, int, int], None]  # (what, how many of them are there, of how many)
Kind = Literal["embedded", "processes"]

DTYPES: tuple[Dtype, ...] = ("auto", "fp32", "bf16", "fp16")
FORMATS: tuple[WeightFormat, ...] = ("safetensors", "bin")
DEMO = Path("models/demo")
SOURCE = Path(__file__).resolve().parents[2]


class Fleet(Protocol):
    """Something that answers requests. Events of one request come in order, `Finished` last."""

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Closing the iterator early cancels the request."""
        ...

    async def cancel(self, request: str) -> Any: ...

    async def info(self) -> Any: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A fleet to open. `master` set: that one, and only `model` (a name) and `reach` matter besides.

    model None: the demo model, with its head. draft_model None: no drafter (but the demo's own), unless
    `drafter` needs none. drafter None: a head, where there is one.
    dtype, quantization, kv_cache_dtype: what the base computes in, and what its matrices and KV rows are held
    in. batch_invariant: on GPUs, what a row gets is the same in any company, bit for bit.
    kv_memory: for the KV pages of each member, such as "4G".
    draft_dtype, draft_quantization: of what drafts; draft_dtype None: the base's dtype.
    preset: what the settings were filled in from.
    stages: how many layer ranges. layers: which, such as "0:4,4:8".
    devices: where each of them is, "127.0.0.1#0,127.0.0.1#cpu"; the drafter is beside the last one.
    tree fixed: the largest tree in every lap, whether it pays or not.
    drafter_rope_theta, aux_layers: what the head's config says wrongly (specsot.members.Overrides).
    draft_mode ... blend: how is drafted (specsot.drafting.DraftOptions).
    transport, comm_mode: how members of several processes reach each other.
    """

    kind: Kind = "embedded"
    master: str | None = None
    model: str | None = None
    draft_model: str | None = None
    draft_format: WeightFormat = "safetensors"
    model_format: WeightFormat = "safetensors"
    drafter_rope_theta: float | None = None
    aux_layers: str | Sequence[int] | None = None
    dtype: Dtype = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KvDtype | None = None
    kv_memory: str | None = None
    batch_invariant: bool = False
    draft_dtype: Dtype | None = None
    draft_quantization: Quantization | None = None
    preset: Preset | None = None
    device: str = "cpu"
    stages: int | None = None
    layers: str | Sequence[str] | None = None
    devices: str | Sequence[str] | None = None
    drafter: DrafterName | None = None
    draft_mode: DraftMode | None = None
    draft_tokens: int | None = None
    draft_breadth: int | None = None
    draft_nodes: int | None = None
    draft_threshold: float | None = None
    tuner: TunerName = "measured"
    blend: bool = True
    transport: Transport | None = None
    comm_mode: CommMode | None = None
    layout: Layout = "batched"
    tree: Literal["tuned", "fixed"] = "tuned"
    reach: Reach = field(default_factory=Reach)


Opener = Callable[[Wanted], Coroutine[Any, Any, Fleet]]


@dataclass(frozen=True, slots=True)
class Models:
    """Model directories that exist, and who drafts. `layers`, `places`: of each stage, if chosen.

    draft: of what drafts, where that needs one. drafter None: a head, if there is one.
    """

    base: Path
    draft: Path | None
    layers: tuple[Range, ...] = ()
    drafter: DrafterName | None = None
    places: tuple[Place, ...] = ()

    @property
    def drafts(self) -> DrafterName:
        """Who does."""
        return self.drafter or ("none" if self.draft is None else "eagle")


def models_of(wanted: Wanted) -> Models:
    """The directories a local fleet loads. Raises ModelError, InvalidRequest."""
    require_torch()
    check_choices(wanted)
    if wanted.stages is not None and wanted.stages < 1:
        raise InvalidRequest(f"stages must be > 0, got {wanted.stages}", field="stages")
    for name, asked in (("transport", wanted.transport), ("comm_mode", wanted.comm_mode)):
        if asked and wanted.kind == "embedded":
            raise InvalidRequest(f"{name} {asked} is between processes: use --fleet processes", field=name)
    overrides_of(wanted)
    kv_memory_of(wanted)
    options_of(wanted)
    base = model_directory(wanted.model) if wanted.model else demo() / "base"
    layers = layers_of(wanted, base)
    return Models(base, draft_of(wanted), layers, wanted.drafter, places_here(wanted, len(layers)))


def check_choices(wanted: Wanted) -> None:
    """Raises InvalidRequest for a word that is none of those there are."""
    choices: Mapping[str, Sequence[str | None]] = {
        "dtype": DTYPES,
        "quantization": (*QUANTIZATIONS, None),
        "kv_cache_dtype": (*KV_DTYPES, None),
        "draft_dtype": (*DTYPES, None),
        "draft_quantization": (*QUANTIZATIONS, None),
        "model_format": FORMATS,
        "draft_format": FORMATS,
    }
    for name, known in choices.items():
        if (given := getattr(wanted, name)) not in known:
            listed = ", ".join(filter(None, known))
            raise InvalidRequest(f"{name} must be one of {listed}, got {given!r}", field=name)


def draft_of(wanted: Wanted) -> Path | None:
    """The directory of what drafts; the demo model brings a head. Raises ModelError, InvalidRequest."""
    if wanted.drafter not in (None, *DRAFTERS):
        known = ", ".join(DRAFTERS)
        raise InvalidRequest(f"drafter must be one of {known}, got {wanted.drafter!r}", field="drafter")
    if wanted.drafter in ("none", "ngram"):
        return None
    if wanted.draft_model:
        return model_directory(wanted.draft_model)
    if wanted.model is None and wanted.drafter != "model":
        return demo() / "eagle3"
    if wanted.drafter is None:
        return None
    raise InvalidRequest(f"drafter {wanted.drafter} needs a draft_model", field="draft_model")


def options_of(wanted: Wanted) -> DraftOptions:
    """How is drafted. Raises InvalidRequest."""
    usual = DraftOptions()
    threshold = usual.threshold if wanted.draft_threshold is None else wanted.draft_threshold
    options = DraftOptions(
        wanted.draft_mode,
        wanted.draft_tokens,
        wanted.draft_breadth,
        wanted.draft_nodes,
        threshold,
        wanted.tuner,
        wanted.blend,
    )
    if wanted.drafter in (None, "eagle"):
        options.shape()
    return options


def layers_of(wanted: Wanted, base: Path) -> tuple[Range, ...]:
    """The range of each stage, where they are chosen. Raises InvalidRequest."""
    if wanted.layers is None:
        return ()
    ranges = ranges_of(wanted.layers, read_config(base).layers)
    if wanted.stages not in (None, len(ranges)):
        raise InvalidRequest(f"layers are {len(ranges)} ranges, stages {wanted.stages}", field="layers")
    return ranges


def places_here(wanted: Wanted, ranges: int) -> tuple[Place, ...]:
    """Of each stage, all on this machine. Raises InvalidRequest."""
    from specsot_app.spreading import hosts_here

    places = places_of(wanted.devices) if wanted.devices else ()
    check_stages(ranges or wanted.stages, places)
    elsewhere = {place.host for place in places} - hosts_here(place.host for place in places)
    if elsewhere:
        told = f"devices name {', '.join(sorted(elsewhere))}, another machine"
        raise InvalidRequest(
            f"{told}: specsot serve --devices spreads a fleet, connect reaches it", "devices"
        )
    return places


def overrides_of(wanted: Wanted) -> Overrides:
    """What is known better than the head's config. Raises InvalidRequest."""
    theta, layers = wanted.drafter_rope_theta, wanted.aux_layers
    listed = layers if isinstance(layers, str) or layers is None else ",".join(map(str, layers))
    return Overrides(
        None if theta is None else _checked("drafter_rope_theta", above_zero, str(theta)),
        None if listed is None else _checked("aux_layers", layer_numbers, listed),
    )


def kv_memory_of(wanted: Wanted) -> int | None:
    """Bytes; None: as much as is usual. Raises InvalidRequest."""
    return None if wanted.kv_memory is None else _checked("kv_memory", memory, wanted.kv_memory)


def _checked(name: str, kind: Callable[[str], T], given: str) -> T:
    """As the services' own flags read it."""
    try:
        return kind(given)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from None


def public_name(wanted: Wanted) -> str:
    """What a model is called in answers; empty: after its directory."""
    return "" if wanted.model else "demo"


def model_directory(path: str) -> Path:
    """A directory with a config.json in it."""
    return require_model_directory(Path(path).expanduser())


def demo() -> Path:
    """The demo model, here or beside the source."""
    for folder in (DEMO, SOURCE / DEMO):
        if (folder / "base" / "config.json").is_file():
            return folder
    raise ModelError(
        f"the demo model comes with the repository, and {DEMO} is not here: give --model DIRECTORY"
    )


async def open_fleet(wanted: Wanted, watch: Watch | None = None) -> Fleet:
    """Raises Unavailable (no master there), ModelError, HeadMismatch.

    watch: hears what is there already, perhaps on another thread.
    """
    if wanted.master is not None:
        from specsot.transport.grpc_client import connect

        return await connect(wanted.master, tls=wanted.reach.tls, token=wanted.reach.token)
    if wanted.kind == "processes":
        from specsot_app.processes import ProcessFleet

        return await ProcessFleet.start(wanted, models_of(wanted), watch=watch)
    return await open_local(wanted, models_of(wanted), watch)


async def open_local(wanted: Wanted, models: Models, watch: Watch | None = None) -> Fleet:
    from specsot_app.local import KV_MEMORY, LocalFleet, LocalOptions
    from specsot_app.quiet_logs import quiet_logs

    quiet_logs()
    options = LocalOptions(
        model=models.base,
        name=public_name(wanted),
        draft_model=models.draft,
        draft_format=wanted.draft_format,
        model_format=wanted.model_format,
        overrides=overrides_of(wanted),
        dtype=wanted.dtype,
        quantization=wanted.quantization,
        kv_dtype=wanted.kv_cache_dtype or "auto",
        batch_invariant=wanted.batch_invariant,
        kv_memory=kv_memory_of(wanted) or KV_MEMORY,
        draft_dtype=wanted.draft_dtype,
        draft_quantization=wanted.draft_quantization,
        device=wanted.device,
        stages=wanted.stages or len(models.places) or None,
        layers=models.layers,
        devices=tuple(place.device for place in models.places),
        drafter=models.drafts,
        drafting=options_of(wanted),
        layout=wanted.layout,
        shape=TreeShape(fixed=wanted.tree == "fixed"),
    )
    return await LocalFleet.start(options, loaded=watch and adding_up(watch, read_config(models.base).layers))


def adding_up(watch: Watch, layers: int) -> Callable[[str, int], None]:
    """Every worker tells of its own layers; `watch` hears of all."""
    there: dict[str, int] = {}

    def loaded(worker: str, count: int) -> None:
        there[worker] = count
        watch("layers", min(sum(there.values()), layers), layers)

    return loaded
