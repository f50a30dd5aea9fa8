"""One epoch of a ring: who may join, how each member is configured, and which members are ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.core.info import MemberInfo, memory_in_words
from specsot.errors import Occupied, Refused
from specsot.members import (
    MASTER,
    PROTOCOL,
    Configuration,
    Curve,
    DrafterLost,
    DrafterPlace,
    Progress,
    Range,
    Registration,
    Rejoined,
    Stage,
    StandBy,
    TreeShape,
)
from specsot_master.core.ring.placement import CPU_PAGE_ROWS, GPU_PAGE_ROWS, Stages, read_bytes
from specsot_master.core.ring.ring_state import RingConfig


class EpochNumbers:
    """The source of epoch numbers. Each is larger than all numbers before it and than any number that a
    member has seen.
    """

    def __init__(self, newest_number: int = 0) -> None:
        """Begin after a number.

        newest_number: the largest number that must not be used any more; 0 to begin with 1.
        """
        self._newest = newest_number

    def __next__(self) -> int:
        """Return the next number."""
        self._newest += 1
        return self._newest

    def pass_over(self, seen_number: int) -> None:
        """Skip all numbers up to one that a member has seen; a smaller one than the newest skips nothing. The
        master that used it may have had a clock ahead of this one's.

        seen_number: the newest epoch number that the member knows; 0 if it knows none.
        """
        self._newest = max(self._newest, seen_number)


def check_joining(joining: Registration, members: Sequence[Registration], config: RingConfig) -> None:
    """Check that a member can belong to this ring; return nothing if it can. A drafter is checked against the
    other drafters; a worker against the other workers' quantization and layer ranges.

    A registered member that `joining` replaces is ignored: it has the same kind, name and address, and is the
    same process or an earlier one in its place.

    joining: what the new member says of itself.
    members: the registrations of the members that have joined.
    config: the options of the ring, with its model's fingerprint and number of layers.

    Raises Refused if it cannot, or Occupied, which is a Refused, if a member that has joined is in its way.
    The message names both conflicting values.
    """
    members = [member for member in members if not joining.follows(member)]
    _check_identity(joining, members, config)
    if joining.kind == "drafter":
        _check_drafter(joining, members, config)
    else:
        workers = [member for member in members if member.kind == "worker"]
        _check_rounding(joining, workers)
        _check_range(joining, workers, config)


def may_join(joining: Registration, members: Sequence[Registration], config: RingConfig) -> bool:
    """Return True if `check_joining` accepts the member. Nothing is changed or logged.

    joining: what the new member says of itself.
    members: the registrations of the members that have joined.
    config: the options of the ring, with its model's fingerprint and number of layers.
    """
    try:
        check_joining(joining, members, config)
    except Refused:
        return False
    return True


def with_one_gpu(joining: Registration, members: Sequence[Registration]) -> Registration:
    """Return the registration with one GPU: of the GPUs that the member could use, the one that the fewest
    other members have; among equals the first. A member without GPUs is returned as it is.

    joining: what the new member says of itself, with all GPUs that it could use.
    members: the registrations of the other members; the first GPU of each counts as taken.
    """
    taken = Counter(member.gpus[0] for member in members if member.gpus)
    return replace(joining, gpus=tuple(sorted(joining.gpus, key=lambda gpu: taken[gpu])[:1]))


def configurations_of(
    epoch: int, members: Sequence[Registration], stages: tuple[Stage, ...], config: RingConfig
) -> dict[str, Configuration]:
    """Return the Configuration of every member of a new epoch, by the member's name. They differ only in the
    receiver's name and GPU. Without drafters, or if the ring's options want none, there is one slot and no
    head. Frames in flight default to 1 for one stage, else to one more than there are stages.

    epoch: the number of the new epoch.
    members: the registrations of all members; those that are neither a stage nor a drafter get none.
    stages: the layer ranges of the epoch, with the worker of each, in ring order.
    config: the options of the ring.

    Raises Refused if there is too little KV memory.
    """
    drafters = [member for member in members if member.kind == "drafter"] if config.drafts else []
    drafter = drafters[0] if drafters else None
    shape = tree_shape_of(drafter, config)
    ring = Configuration(
        epoch=epoch,
        you="",
        stages=stages,
        pages=count_pages(members, stages, drafters, config),
        page_rows=page_rows_of(members, stages, config),
        slots=shape.slots if drafter else 1,
        rows=config.rows,
        flight=config.max_in_flight or (1 if len(stages) == 1 else len(stages) + 1),
        layout=config.layout,
        head=drafter.head if drafter else None,
        shape=shape,
        draft_timeout=config.draft_timeout,
        curve=step_curve(members, stages),
        transport=config.transport,
        comm_mode=config.comm_mode,
        hop_dtype=config.hop_dtype,
    ).with_drafters(tuple(DrafterPlace(one.name, one.address) for one in drafters))
    names = [member.name for member in (*stages, *drafters)]
    gpus = {member.name: next(iter(member.gpus), None) for member in members}
    return {name: replace(ring, you=name, gpu=gpus[name]) for name in names}


def rejoin_configuration(
    running: Configuration, name: str, members: Sequence[Registration], config: RingConfig
) -> Configuration | None:
    """Return the configuration with which a drafter joins the running ring, or None if that would require
    another ring: a ring formed anew with it must have the same configuration as the running one. Return None
    also if there is too little KV memory with it, or if it would take no part.

    running: the configuration of any member of the running ring.
    name: the drafter's name.
    members: the registrations of the workers, of the drafters in the ring, and of this drafter.
    config: the options of the ring.
    """
    try:
        formed = configurations_of(running.epoch, members, running.stages, config).get(name)
    except Refused:
        return None
    if (
        formed is None
        or replace(formed, you=running.you, gpu=running.gpu).with_drafters(running.drafters) != running
    ):
        return None
    return formed


def count_pages(
    members: Sequence[Registration],
    stages: Sequence[Stage],
    drafters: Sequence[Registration],
    config: RingConfig,
) -> int:
    """Return the number of KV pages, the same for all members: what the stage or drafter with the least room
    can hold, at most the configured number. Drafters that report 0 bytes per row do not bound the pages. A
    configured number that counts CPU pages is converted to pages of this ring's size.

    The last stage also keeps, in the same memory, the features of the newest tokens for the drafters. All
    other stages log a token's hidden states there, in addition to its KV.

        3 GiB, 16 KiB per layer and row, 24 layers, 256 rows a page -> 3 GiB / (24 * 16 KiB * 256) = 32 pages

    members: the registrations of all members.
    stages: the layer ranges of the epoch, with the worker of each; the last one is the last stage.
    drafters: the registrations of the drafters that take part; may be empty.
    config: the options of the ring, which bound the pages.

    Raises Refused if fewer than 2 pages fit.
    """
    granted = {member.name: member for member in members}
    row = {stage.name: granted[stage.name].row_bytes * len(stage.layers) for stage in stages}
    row |= {stage.name: row[stage.name] + granted[stage.name].hidden_bytes for stage in stages[:-1]}
    head = drafters[0].head if drafters else None
    if head:
        last = stages[-1].name
        ring_bytes = FEATURE_RING_ROWS * head.width * granted[last].number_bytes
        granted[last] = replace(granted[last], kv_bytes=max(granted[last].kv_bytes - ring_bytes, 0))
    page_rows = page_rows_of(members, stages, config)
    room = [granted[name].kv_bytes // (size * page_rows) for name, size in row.items()]
    room += [one.kv_bytes // (one.row_bytes * page_rows) for one in drafters if one.row_bytes]
    page_limit = config.max_pages if config.page_rows else config.max_pages * CPU_PAGE_ROWS // page_rows
    pages = min(*room, page_limit)
    if pages < 2:
        need = "at least 2 are needed (--kv-memory)"
        raise Refused(f"more KV memory: {pages} pages of {page_rows} rows fit, {need}")
    return pages


def page_rows_of(members: Sequence[Registration], stages: Sequence[Stage], config: RingConfig) -> int:
    """Return the KV slots per page: the configured number, else GPU_PAGE_ROWS if a stage has a GPU, else
    CPU_PAGE_ROWS. Pages are smaller if a GPU computes, because its kernels read whole pages, and read several
    of them in parallel.

    members: the registrations of all members.
    stages: the stages of the epoch.
    config: the options of the ring.
    """
    names = {stage.name for stage in stages}
    on_gpu = any(member.gpus for member in members if member.name in names)
    return config.page_rows or (GPU_PAGE_ROWS if on_gpu else CPU_PAGE_ROWS)


def count_drafters(members: Sequence[Registration]) -> int:
    """Return the number of drafters among these members; 0 if there are none.

    members: the registrations of workers and drafters.
    """
    return sum(member.kind == "drafter" for member in members)


def without_failed_drafters(
    members: Sequence[Registration], failed_names: Collection[str]
) -> Sequence[Registration]:
    """Return the members without the drafters that failed. If no other drafter is left, return all members.

    members: the registrations of all members.
    failed_names: names of members that could not take part in the last attempt.
    """
    able = [member for member in members if member.kind == "worker" or member.name not in failed_names]
    return able if count_drafters(able) else members


def without_smallest_drafter(members: Sequence[Registration]) -> Sequence[Registration]:
    """Return the members without the drafter that can hold the fewest positions.

    members: the registrations of all members, at least one of them a drafter.

    Raises ValueError if there is no drafter.
    """
    drafters = [member for member in members if member.kind == "drafter"]
    smallest = min(drafters, key=lambda one: one.kv_bytes / max(one.row_bytes, 1))
    return [member for member in members if member is not smallest]


def tree_shape_of(drafter: Registration | None, config: RingConfig) -> TreeShape:
    """Return the bounds of draft trees: the drafter's own, or the configured ones if there is no drafter. If
    either of them demands trees of a fixed shape, the trees have one.

    drafter: the registration of the ring's first drafter, or None without a drafter.
    config: the options of the ring.
    """
    drafter_shape = drafter.shape if drafter else None
    return (
        replace(drafter_shape, fixed=drafter_shape.fixed or config.shape.fixed)
        if drafter_shape
        else config.shape
    )


def step_curve(members: Sequence[Registration], stages: Sequence[Stage]) -> Curve:
    """Return the seconds of one step by tokens in its batch, as (tokens, seconds) in ascending order: each
    stage's measured layer time, times its number of layers, summed over the stages. Only batch sizes that all
    stages have measured appear; the result is empty if there are none. Workers that are no stage do not
    matter.

    members: the registrations of all members, with their measured curves.
    stages: the layer ranges of the ring, with the worker of each; at least one.
    """
    curves = {member.name: dict(member.curve) for member in members}
    sizes = set.intersection(*(set(curves[stage.name]) for stage in stages))
    return tuple(
        (rows, sum(curves[stage.name][rows] * len(stage.layers) for stage in stages))
        for rows in sorted(sizes)
    )


def _check_identity(joining: Registration, members: Sequence[Registration], config: RingConfig) -> None:
    """Check that the member's name, protocol version, model and address suit this ring. The name of the
    master itself, another protocol version and another model's fingerprint are refused. The first conflict
    that is found is reported.

    joining: what the new member says of itself.
    members: the registrations of the other members.
    config: the options of the ring, with its model's fingerprint.

    Raises Refused if the member cannot belong here, and Occupied if another member has its name or address.
    """
    if joining.name == MASTER:
        raise Refused(f"a {joining.kind} cannot be named {MASTER}")
    if joining.protocol != PROTOCOL:
        raise Refused(f"{joining.name} speaks protocol {joining.protocol}, this master {PROTOCOL}")
    if joining.fingerprint != config.fingerprint:
        raise Refused(
            f"{joining.name} has another model: fingerprint {joining.fingerprint}, here {config.fingerprint}"
        )
    for member in members:
        if member.address == joining.address:
            host = f" of host {member.host}" if member.host else ""
            raise Occupied(
                f"{member.kind} {member.name}{host} has joined already at {member.address}: "
                "give every process an address of its own (--advertise)"
            )
        if member.name == joining.name:
            raise Occupied(f"a member named {joining.name} has joined already, at {member.address}")


def _check_drafter(joining: Registration, members: Sequence[Registration], config: RingConfig) -> None:
    """Check that a drafter suits the ring and its other drafters: the stages treat several drafters as one,
    with one head, one tree shape and one set of drafter names. The first difference that is found is
    reported.

    joining: what the new drafter says of itself.
    members: the registrations of the other members.
    config: the options of the ring.

    Raises Refused if the ring uses no drafters, and Occupied if this one disagrees with another.
    """
    if not config.drafts:
        raise Refused("this ring runs without a drafter (--drafter none)")
    for member in (one for one in members if one.kind == "drafter"):
        facts = (
            ("head", joining.head, member.head),
            ("tree shape", joining.shape, member.shape),
            ("ways to draft", joining.drafters, member.drafters),
        )
        for fact, own, other in facts:
            if own != other:
                raise Occupied(
                    f"drafter {joining.name} has {fact} {own}, {member.name} {other}: all must agree"
                )


def _check_rounding(joining: Registration, workers: Sequence[Registration]) -> None:
    """Check that all workers use the same quantization; the first worker may use any. No quantization counts
    as one of its own.

    joining: what the new worker says of itself.
    workers: the registrations of the other workers.

    Raises Refused if this worker uses another one.
    """
    for worker in workers:
        if worker.quantization != joining.quantization:
            own, other = (one.quantization or "none" for one in (joining, worker))
            raise Refused(f"{joining.name} has quantization {own}, {worker.name} {other}: all must agree")


def _check_range(joining: Registration, workers: Sequence[Registration], config: RingConfig) -> None:
    """Check the range of layers that a worker was started with. A worker without a range is accepted. The
    range must have at least one layer. Ranges that only touch do not overlap.

    joining: what the new worker says of itself.
    workers: the registrations of the other workers.
    config: the options of the ring, with the model's number of layers.

    Raises Refused if the range lies outside the model, or parts layers that share keys and values, and
    Occupied if it overlaps another worker's range.
    """
    layers = joining.layers
    if layers is None:
        return
    if not 0 <= layers.first < layers.last <= config.model_layers:
        raise Refused(f"layers {layers} do not lie within 0:{config.model_layers}")
    start = config.model_layers - config.tail_layers
    if layers.first > start or start < layers.last < config.model_layers:
        raise Refused(
            f"layers {layers} part the layers {start}:{config.model_layers}, which share keys and values; "
            + (f"the model can be cut before layers 1 to {start}" if start else "the model cannot be cut")
        )
    for worker in workers:
        if worker.layers and layers.first < worker.layers.last and worker.layers.first < layers.last:
            raise Occupied(f"layers {layers} overlap {worker.layers} of {worker.name}")


@dataclass(slots=True)
class TapRecord:
    """Which slices of a draft head's `fc` weights the stages already have from earlier epochs. Over a slow
    link the slices take long to send, so they are sent once.

    held: by stage name, the layers for whose taps the stage has the slices; empty before the first epoch with
        a head.
    head: identifies the head, and the drafter process that sends its slices; () before the first one.
    """

    held: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    head: tuple[object, ...] = ()

    def with_missing_taps(
        self, configurations: Mapping[str, Configuration], members: Sequence[Registration]
    ) -> Mapping[str, Configuration]:
        """Return the configurations of an epoch, in which only missing slices are sent. `head` and `held` are
        updated; slices that must be sent again are no longer held.

        A stage that has all its slices is configured without taps. The first drafter is configured with the
        taps that it must send. Further drafters have the same head and send none. If the drafter process or
        its head has changed, all slices are missing. Without a drafter that has a head, the configurations
        are returned unchanged.

        configurations: the configuration of every member of the epoch, by name; the mapping itself is not
            changed.
        members: the registrations of all members.
        """
        drafters = [one for one in members if one.kind == "drafter" and one.name in configurations]
        drafter = drafters[0] if drafters else None
        if drafter is None or drafter.head is None:
            return configurations
        head = drafter.head
        ring = configurations[drafter.name]
        process = (drafter.name, drafter.address, drafter.began, head)
        if process != self.head or not drafter.began:
            self.head = process
            self.held = {}
        needed = {stage.name: ring.taps_of(stage) for stage in ring.stages}
        known = {one for one, taps in needed.items() if one in self.held and taps <= self.held[one]}
        self.held = {one: taps for one, taps in self.held.items() if one in known or one not in needed}
        lacking = tuple(tap for tap in head.taps if ring.tapping(tap).name not in known)
        reduced = dict(configurations) | {
            one: replace(configurations[one], head=replace(head, taps=())) for one in known
        }
        reduced |= {
            one.name: replace(ring, you=one.name, gpu=configurations[one.name].gpu, head=None)
            for one in drafters
        }
        reduced[drafter.name] = replace(ring, head=replace(head, taps=lacking) if lacking else None)
        return reduced

    def record_ready(self, configuration: Configuration) -> None:
        """Record that a member is ready: if it is a stage of an epoch with a head, it has its slices. For any
        other member nothing is recorded. What was recorded of a stage earlier in the epoch stays.

        configuration: the configuration that the member has followed.
        """
        stage = next((stage for stage in configuration.stages if stage.name == configuration.you), None)
        if stage and configuration.head and configuration.drafter:
            self.held.setdefault(stage.name, configuration.taps_of(stage))


@dataclass(slots=True)
class Epoch:
    """The newest epoch of a ring. One object serves all epochs in turn; `number` and `stages` stay after an
    epoch's end.

    number: the epoch's number; 0 before the first one.
    stages: the epoch's stages, in ring order; empty before the first epoch.
    failed: names of members that could not take part since a ring was last complete; the fleet adds and
        removes them.
    """

    number: int = 0
    stages: Stages = ()
    failed: set[str] = field(default_factory=set[str])
    # The configuration of every member of the epoch by name; empty after the epoch's end.
    _plan: dict[str, Configuration] = field(default_factory=dict[str, Configuration])
    # Names of the members that have reported that they are ready.
    _ready: set[str] = field(default_factory=set[str])
    # The last report of each member that is getting ready, by name.
    _progress: dict[str, Progress] = field(default_factory=dict[str, Progress])
    # Drafters that are joining the running epoch and are not ready yet, with their configurations.
    _joining: dict[str, Configuration] = field(default_factory=dict[str, Configuration])
    # Which slices of the draft head's weights the stages already have.
    _taps: TapRecord = field(default_factory=TapRecord)

    def __contains__(self, name: str) -> bool:
        """Return True if this member takes part in the epoch, ready or not."""
        return name in self._plan

    @property
    def formed(self) -> bool:
        """True if an epoch has started and not ended."""
        return bool(self._plan)

    @property
    def not_ready(self) -> list[str]:
        """Names of members that have not reported that they are ready; empty if all have, or if no epoch
        runs.
        """
        return [name for name in self._plan if name not in self._ready]

    @property
    def unfinished(self) -> list[str]:
        """Names of members that are not ready and have not finished their own loading; empty if all of them
        only wait for others.
        """
        return [name for name, one in self._reports.items() if one is None or one.done < one.total]

    @property
    def progress_text(self) -> str:
        """The progress of members that are not ready, in words; "" if all are ready."""
        return ", ".join(f"{name} {_in_words(one)}" for name, one in self._reports.items())

    @property
    def waiting_text(self) -> str:
        """The names of members that are not ready, with the progress of those that have reported it and are
        still loading; "" if all are ready.
        """
        reports = self._reports.items()
        at_it = {name: f" ({_in_words(one)})" for name, one in reports if one and one.done < one.total}
        return ", ".join(name + at_it.get(name, "") for name, _ in reports)

    @property
    def _reports(self) -> dict[str, Progress | None]:
        """The last report of each member that is not ready, by name; None for a member that sent none."""
        return {name: self._progress.get(name) for name in self.not_ready}

    def record_progress(self, name: str, progress: Progress) -> bool:
        """Record a member's progress. Return True if it differs from the last report; False for a repeated
        report or a member that does not take part. A report that differs replaces the last one.

        name: the member's name.
        progress: how much of its own part the member has done.
        """
        news = name in self._plan and self._progress.get(name) != progress
        if news:
            self._progress[name] = progress
        return news

    @property
    def ring(self) -> Configuration | None:
        """A configuration that all members share, apart from the receiver's name and GPU. None while some
        member is not ready, or if no epoch runs.
        """
        return next(iter(self._plan.values())) if self._plan and not self.not_ready else None

    @property
    def running(self) -> dict[str, Range]:
        """The layer range of every stage by name; empty without a formed epoch."""
        return {stage.name: stage.layers for stage in self.stages} if self._plan else {}

    @property
    def busy_names(self) -> Collection[str]:
        """Names of members of the epoch, and of drafters that are joining it; empty if no epoch runs."""
        return [*self._plan, *self._joining]

    @property
    def settled_names(self) -> Collection[str]:
        """Names of members that give no reason to form another epoch: the members of this one, and drafters
        that failed while another one drafts.
        """
        return [*self.busy_names, *(self.failed if self.ring and self.ring.drafters else ())]

    def begin(
        self, number: int, members: Sequence[Registration], stages: Stages, config: RingConfig
    ) -> Mapping[str, Configuration | StandBy]:
        """Begin the next epoch, after the end of this one. Return the message for each worker and drafter, by
        name: its Configuration, or StandBy for a worker without a range. What was reported of the last
        epoch's members, ready or in progress, is forgotten. If Refused is raised, only `number` has changed.

        number: the number of the new epoch.
        members: the registrations of all members.
        stages: the layer ranges of the new epoch, with the worker of each, in ring order.
        config: the options of the ring.

        Raises Refused if there is too little KV memory.
        """
        self.number = number
        self._plan = configurations_of(number, members, stages, config)
        self.stages = stages
        self._ready.clear()
        self._progress.clear()
        spare = [one.name for one in members if one.kind == "worker" and one.name not in self._plan]
        return {**self._taps.with_missing_taps(self._plan, members), **dict.fromkeys(spare, StandBy(number))}

    def forget(self, name: str) -> None:
        """Forget what is known of a member that has left, as another process may come back under its name. An
        unknown name is ignored.

        name: the member's name.
        """
        self._taps.held.pop(name, None)

    def end(self) -> list[str]:
        """End the epoch and return the names of its members; empty if no epoch runs. Drafters that were
        joining are not among them, and no longer join. `number` and `stages` keep their values.
        """
        names = list(self._plan)
        self._plan = {}
        self._joining = {}
        return names

    def mark_ready(self, name: str) -> Mapping[str, Rejoined]:
        """Record that a member is ready. If it is a drafter that joins the running epoch, return the message
        for the last stage, by the stage's name: the stage then sends the drafter all features it has. Else
        return an empty mapping. The joined drafter then takes part in the epoch, in every member's
        configuration. The mapping is also empty for a drafter that became ready after the epoch ended or
        while another member is not ready.

        name: the member's name.
        """
        self._ready.add(name)
        if name in self._plan:
            self._taps.record_ready(self._plan[name])
        configuration = self._joining.pop(name, None)
        if configuration is None or self.ring is None:
            return {}
        (own_place,) = (place for place in configuration.drafters if place.name == name)
        self._plan[name] = configuration
        self._set_drafters((*self.ring.drafters, own_place))
        return {configuration.stages[-1].name: Rejoined(self.number, own_place.address, name)}

    def remove_drafter(self, name: str) -> Mapping[str, DrafterLost] | None:
        """Continue the running epoch without a drafter. Return the message for the last stage, by the stage's
        name; an empty mapping if the drafter was still joining. Return None, and change nothing, if the name
        is not that of a drafter in a running epoch. The other members' configurations then no longer have the
        drafter.

        name: the drafter's name.
        """
        if self._joining.pop(name, None):
            return {}
        if not (self.ring and name in self._plan and name not in self.running):
            return None
        remaining = tuple(place for place in self.ring.drafters if place.name != name)
        del self._plan[name]
        self._set_drafters(remaining)
        return {self.stages[-1].name: DrafterLost(self.number, name)}

    def rejoin_drafter(
        self, members: Sequence[Registration], config: RingConfig
    ) -> Mapping[str, Configuration]:
        """Return the configurations with which further drafters join the running epoch, by name; empty if
        there are none, or if no epoch runs.

        A drafter that joins does not disturb a running epoch. A drafter is left on standby if the ring would
        need another configuration for it, for example because it has less memory; it does not keep other
        drafters from joining.

        members: the registrations of all members; drafters that take part, that are joining or that failed
            are passed over.
        config: the options of the ring.
        """
        drafters = [one.name for one in members if one.kind == "drafter"]
        orders = dict[str, Configuration]()
        for name in drafters:
            if self.ring is None or name in (*self.busy_names, *self.failed):
                continue
            present = [one for one in members if one.kind == "worker" or one.name in (*self.busy_names, name)]
            if configuration := rejoin_configuration(self.ring, name, present, config):
                self._joining[name] = configuration
                self._ready.discard(name)
                # The stages have their slices of the head already, so the drafter sends none.
                orders[name] = replace(configuration, head=None)
        return orders

    def _set_drafters(self, drafters: tuple[DrafterPlace, ...]) -> None:
        """Put the drafters into every member's configuration.

        drafters: name and address of each drafter that takes part; may be empty.
        """
        self._plan = {one: plan.with_drafters(drafters) for one, plan in self._plan.items()}


def _in_words(progress: Progress | None) -> str:
    """Return a member's progress in words, such as "12 of 24 (1.2 GiB fetched)"; "not started" if it has
    reported none.

    progress: the member's last report, or None.
    """
    if progress is None:
        return "not started"
    fetched = f" ({memory_in_words(progress.fetched)} fetched)" if progress.fetched else ""
    return f"{progress.done} of {progress.total}{fetched}"


def member_infos(
    members: Collection[Registration], running_ranges: Mapping[str, Range], standby_names: Collection[str]
) -> tuple[MemberInfo, ...]:
    """Return information about every member for status pages, with the layers that it runs now or was started
    with. Unknown figures are 0, and an unknown GPU is "". `min_seconds` is the time to read the member's
    weights once at its memory's measured speed, and 0.0 if that was not measured.

    members: the registrations of all members.
    running_ranges: the layers of each stage of the running epoch, by name; empty without one.
    standby_names: names of the members that stand by.
    """
    return tuple(
        MemberInfo(
            one.kind,
            one.name,
            one.address,
            one.fingerprint,
            running_ranges.get(one.name, one.layers),
            one.host,
            next(iter(one.gpus), ""),
            one.name in standby_names,
            device=one.device,
            memory=one.memory or 0,
            dtype=", ".join(filter(None, (one.dtype, one.quantization))),
            weights=(weights := read_bytes(one, running_ranges.get(one.name, one.layers))),
            min_seconds=weights / speed if (speed := _copy_speed(one, members)) else 0.0,
            head=one.head.name if one.head else "",
        )
        for one in members
    )


def _copy_speed(member: Registration, members: Collection[Registration]) -> int:
    """Return the best copy speed that was measured for a member's memory, in bytes per second; 0 if none was.
    Other processes may have slowed a single measurement down, so the members of one host and device are
    compared. A member without a known host is compared with no other.

    member: the registration of the member.
    members: the registrations of all members.
    """
    same_memory = (
        one for one in members if one.host and (one.host, one.device) == (member.host, member.device)
    )
    return max((one.copy_speed for one in same_memory), default=member.copy_speed)
