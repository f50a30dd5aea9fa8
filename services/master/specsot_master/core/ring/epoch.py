"""One epoch of a ring: who may join, what each member is configured to do, who is ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    """Of epochs to come: each is larger than all before, and than any that a member has heard of."""

    def __init__(self, after: int = 0) -> None:
        self._newest = after

    def __next__(self) -> int:
        self._newest += 1
        return self._newest

    def pass_over(self, epoch: int) -> None:
        """A member has heard of this one: of a master whose clock was ahead of ours."""
        self._newest = max(self._newest, epoch)


def check_joining(joining: Registration, members: Sequence[Registration], config: RingConfig) -> None:
    """Raise Refused, naming both values, if `joining` cannot belong to this ring.

    A member that it replaces is not counted.
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
    """The same as an answer."""
    try:
        check_joining(joining, members, config)
    except Refused:
        return False
    return True


def with_one_gpu(joining: Registration, members: Sequence[Registration]) -> Registration:
    """Of the GPUs it can run on it gets the one that fewest others have."""
    taken = Counter(member.gpus[0] for member in members if member.gpus)
    return replace(joining, gpus=tuple(sorted(joining.gpus, key=lambda gpu: taken[gpu])[:1]))


def configurations_of(
    epoch: int, members: Sequence[Registration], stages: tuple[Stage, ...], config: RingConfig
) -> dict[str, Configuration]:
    """Every member's Configuration for a new epoch. Raises Refused where KV memory is too little."""
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
        curve=lap_curve(members, stages),
        transport=config.transport,
        comm_mode=config.comm_mode,
        hop_dtype=config.hop_dtype,
    ).with_drafters(tuple(DrafterPlace(one.name, one.address) for one in drafters))
    names = [member.name for member in (*stages, *drafters)]
    gpus = {member.name: next(iter(member.gpus), None) for member in members}
    return {name: replace(ring, you=name, gpu=gpus[name]) for name in names}


def rejoin_configuration(
    ring: Configuration, name: str, members: Sequence[Registration], config: RingConfig
) -> Configuration | None:
    """What a drafter is told that joins a ring that goes on meanwhile; None where it must be another ring for
    this one.
    """
    try:
        formed = configurations_of(ring.epoch, members, ring.stages, config).get(name)
    except Refused:
        return None
    if formed is None or replace(formed, you=ring.you, gpu=ring.gpu).with_drafters(ring.drafters) != ring:
        return None
    return formed


def count_pages(
    members: Sequence[Registration],
    stages: Sequence[Stage],
    drafters: Sequence[Registration],
    config: RingConfig,
) -> int:
    """The same number everywhere: what the tightest stage or drafter can hold. Raises Refused if none.

    The last stage holds the features that it keeps for the drafters in the same memory.
    """
    granted = {member.name: member for member in members}
    row = {stage.name: granted[stage.name].row_bytes * len(stage.layers) for stage in stages}
    head = drafters[0].head if drafters else None
    if head:
        last = stages[-1].name
        row[last] += head.width * granted[last].number_bytes
    page_rows = page_rows_of(members, stages, config)
    room = [granted[name].kv_bytes // (size * page_rows) for name, size in row.items()]
    room += [one.kv_bytes // (one.row_bytes * page_rows) for one in drafters if one.row_bytes]
    most = config.max_pages if config.page_rows else config.max_pages * CPU_PAGE_ROWS // page_rows
    pages = min(*room, most)
    if pages < 2:
        raise Refused(f"KV memory holds {pages} pages of {page_rows} rows; at least 2 are needed")
    return pages


def page_rows_of(members: Sequence[Registration], stages: Sequence[Stage], config: RingConfig) -> int:
    """Rows of a page: a GPU's kernels read pieces of whole pages, and more of them side by side."""
    names = {stage.name for stage in stages}
    on_gpu = any(member.gpus for member in members if member.name in names)
    return config.page_rows or (GPU_PAGE_ROWS if on_gpu else CPU_PAGE_ROWS)


def count_drafters(members: Sequence[Registration]) -> int:
    return sum(member.kind == "drafter" for member in members)


def without_failed_drafters(
    members: Sequence[Registration], failed: Collection[str]
) -> Sequence[Registration]:
    """All members but the drafters that failed, where another one can draft."""
    able = [member for member in members if member.kind == "worker" or member.name not in failed]
    return able if count_drafters(able) else members


def without_smallest_drafter(members: Sequence[Registration]) -> Sequence[Registration]:
    """All members but the drafter that holds the fewest positions."""
    drafters = [member for member in members if member.kind == "drafter"]
    smallest = min(drafters, key=lambda one: one.kv_bytes / max(one.row_bytes, 1))
    return [member for member in members if member is not smallest]


def tree_shape_of(drafter: Registration | None, config: RingConfig) -> TreeShape:
    """How large trees may be: as the drafter can make them, or as was wished; whole where either says so."""
    own = drafter.shape if drafter else None
    return replace(own, fixed=own.fixed or config.shape.fixed) if own else config.shape


def lap_curve(members: Sequence[Registration], stages: Sequence[Stage]) -> Curve:
    """Seconds per rows of a whole lap: each stage's measured layer times its number of layers."""
    curves = {member.name: dict(member.curve) for member in members}
    sizes = set.intersection(*(set(curves[stage.name]) for stage in stages))
    return tuple(
        (rows, sum(curves[stage.name][rows] * len(stage.layers) for stage in stages))
        for rows in sorted(sizes)
    )


def _check_identity(joining: Registration, members: Sequence[Registration], config: RingConfig) -> None:
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
                f"{member.kind} {member.name}{host} is already here at {member.address}: "
                "give every process an address of its own (--advertise)"
            )
        if member.name == joining.name:
            raise Occupied(f"a member named {joining.name} is already here, at {member.address}")


def _check_drafter(joining: Registration, members: Sequence[Registration], config: RingConfig) -> None:
    """Several drafters are one in all that the stages know of them: the head that they fuse features for, how
    large trees may be, and what a request may ask for.
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
    for worker in workers:
        if worker.quantization != joining.quantization:
            own, other = (one.quantization or "none" for one in (joining, worker))
            raise Refused(f"{joining.name} has quantization {own}, {worker.name} {other}: all must agree")


def _check_range(joining: Registration, workers: Sequence[Registration], config: RingConfig) -> None:
    layers = joining.layers
    if layers is None:
        return
    if not 0 <= layers.first < layers.last <= config.model_layers:
        raise Refused(f"layers {layers} do not lie within 0:{config.model_layers}")
    for worker in workers:
        if worker.layers and layers.first < worker.layers.last and worker.layers.first < layers.last:
            raise Occupied(f"layers {layers} overlap {worker.layers} of {worker.name}")


@dataclass(slots=True)
class TapRecord:
    """Slices of a draft head that stages have of earlier epochs: over a slow link they take long to send.

    held: by stage. head: whose; the process of a drafter.
    """

    held: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    head: tuple[object, ...] = ()

    def lacking(
        self, plan: Mapping[str, Configuration], members: Sequence[Registration]
    ) -> Mapping[str, Configuration]:
        """The same plan, in which a stage that has all its slices hears of no taps, and the first drafter of
        those that it must send. The others have the same head, and send none.
        """
        drafters = [one for one in members if one.kind == "drafter" and one.name in plan]
        drafter = drafters[0] if drafters else None
        if drafter is None or drafter.head is None:
            return plan
        head = drafter.head
        ring = plan[drafter.name]
        process = (drafter.name, drafter.address, drafter.began, head)
        if process != self.head or not drafter.began:
            self.head = process
            self.held = {}
        needed = {stage.name: ring.taps_of(stage) for stage in ring.stages}
        known = {one for one, taps in needed.items() if one in self.held and taps <= self.held[one]}
        self.held = {one: taps for one, taps in self.held.items() if one in known or one not in needed}
        lacking = tuple(tap for tap in head.taps if ring.tapping(tap).name not in known)
        told = dict(plan) | {one: replace(plan[one], head=replace(head, taps=())) for one in known}
        told |= {one.name: replace(ring, you=one.name, gpu=plan[one.name].gpu, head=None) for one in drafters}
        told[drafter.name] = replace(ring, head=replace(head, taps=lacking) if lacking else None)
        return told

    def note(self, told: Configuration) -> None:
        """A member is ready; a stage has its slices."""
        stage = next((stage for stage in told.stages if stage.name == told.you), None)
        if stage and told.head and told.drafter:
            self.held.setdefault(stage.name, told.taps_of(stage))


@dataclass(slots=True)
class Epoch:
    """One object for whichever is the newest; number and stages outlast its end.

    failed: could not take part, since a ring was last complete.
    """

    number: int = 0
    stages: Stages = ()
    failed: set[str] = field(default_factory=set[str])
    _plan: dict[str, Configuration] = field(default_factory=dict[str, Configuration])  # empty after its end
    _ready: set[str] = field(default_factory=set[str])
    _progress: dict[str, Progress] = field(default_factory=dict[str, Progress])
    # Drafters that join the running epoch, and are not ready yet, with what they were told.
    _joining: dict[str, Configuration] = field(default_factory=dict[str, Configuration])
    _taps: TapRecord = field(default_factory=TapRecord)

    def __contains__(self, name: str) -> bool:
        """It takes part, ready or not."""
        return name in self._plan

    @property
    def formed(self) -> bool:
        return bool(self._plan)

    @property
    def not_ready(self) -> list[str]:
        return [name for name in self._plan if name not in self._ready]

    @property
    def unfinished(self) -> list[str]:
        """Of the slow ones those who have not done their own part: the others wait for them."""
        told = [(name, self._progress.get(name)) for name in self.not_ready]
        return [name for name, one in told if one is None or one.done < one.total]

    @property
    def progress_text(self) -> str:
        """Of the slow ones, in words."""
        told = [(name, self._progress.get(name)) for name in self.not_ready]
        return ", ".join(f"{name} {_in_words(one)}" for name, one in told)

    @property
    def waiting_text(self) -> str:
        """Who is not ready, and how far those are who have said so and are still at it."""
        told = [(name, self._progress.get(name)) for name in self.not_ready]
        at_it = {name: f" ({_in_words(one)})" for name, one in told if one and one.done < one.total}
        return ", ".join(name + at_it.get(name, "") for name, _ in told)

    def record_progress(self, name: str, progress: Progress) -> bool:
        """It has got so far. Whether that is news."""
        news = name in self._plan and self._progress.get(name) != progress
        if news:
            self._progress[name] = progress
        return news

    @property
    def ring(self) -> Configuration | None:
        """What every member was told; None while somebody is not ready."""
        return next(iter(self._plan.values())) if self._plan and not self.not_ready else None

    @property
    def running(self) -> dict[str, Range]:
        return {stage.name: stage.layers for stage in self.stages} if self._plan else {}

    @property
    def busy(self) -> Collection[str]:
        return [*self._plan, *self._joining]

    @property
    def settled(self) -> Collection[str]:
        """Members for which no other epoch would be better: those of this one, and drafters that failed in
        it while others draft.
        """
        return [*self.busy, *(self.failed if self.ring and self.ring.drafters else ())]

    def begin(
        self, number: int, members: Sequence[Registration], stages: Stages, config: RingConfig
    ) -> Mapping[str, Configuration | StandBy]:
        """Become the next one, after the end of this one. Raises Refused where KV memory is too little."""
        self.number = number
        self._plan = configurations_of(number, members, stages, config)
        self.stages = stages
        self._ready.clear()
        self._progress.clear()
        spare = [one.name for one in members if one.kind == "worker" and one.name not in self._plan]
        return {**self._taps.lacking(self._plan, members), **dict.fromkeys(spare, StandBy(number))}

    def forget(self, name: str) -> None:
        """It is gone, or may come back as another process."""
        self._taps.held.pop(name, None)

    def end(self) -> list[str]:
        names = list(self._plan)
        self._plan = {}
        self._joining = {}
        return names

    def mark_ready(self, name: str) -> Mapping[str, Rejoined]:
        """It is ready. Where it is a drafter that joins the running epoch, the last stage, which has all
        features, is to send them to it.
        """
        self._ready.add(name)
        if name in self._plan:
            self._taps.note(self._plan[name])
        told = self._joining.pop(name, None)
        if told is None or self.ring is None:
            return {}
        (own,) = (place for place in told.drafters if place.name == name)
        self._plan[name] = told
        self._set_drafters((*self.ring.drafters, own))
        return {told.stages[-1].name: Rejoined(self.number, own.address, name)}

    def remove_drafter(self, name: str) -> Mapping[str, DrafterLost] | None:
        """Go on without a drafter of the running epoch. Returns who is to be told: the last stage, where the
        drafter took part. None where it was no drafter of a running epoch.
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
        """Drafters may join a running epoch, which they disturb no more than their loss did. One that stands
        by, as it has less memory than the ring was formed for, does not count against the others.
        """
        drafters = [one.name for one in members if one.kind == "drafter"]
        orders = dict[str, Configuration]()
        for name in drafters:
            if self.ring is None or name in (*self.busy, *self.failed):
                continue
            present = [one for one in members if one.kind == "worker" or one.name in (*self.busy, name)]
            if told := rejoin_configuration(self.ring, name, present, config):
                self._joining[name] = told
                self._ready.discard(name)
                orders[name] = replace(told, head=None)  # the stages have their taps
        return orders

    def _set_drafters(self, places: tuple[DrafterPlace, ...]) -> None:
        self._plan = {one: plan.with_drafters(places) for one, plan in self._plan.items()}


def _in_words(progress: Progress | None) -> str:
    if progress is None:
        return "not begun"
    fetched = f" ({memory_in_words(progress.fetched)} fetched)" if progress.fetched else ""
    return f"{progress.done} of {progress.total}{fetched}"


def member_infos(
    members: Collection[Registration], running: Mapping[str, Range], spare: Collection[str]
) -> tuple[MemberInfo, ...]:
    """Everybody, with the layers each runs now or was started with."""
    return tuple(
        MemberInfo(
            one.kind,
            one.name,
            one.address,
            one.fingerprint,
            running.get(one.name, one.layers),
            one.host,
            next(iter(one.gpus), ""),
            one.name in spare,
            device=one.device,
            memory=one.memory or 0,
            dtype=", ".join(filter(None, (one.dtype, one.quantization))),
            weights=(weights := read_bytes(one, running.get(one.name, one.layers))),
            least_seconds=weights / speed if (speed := _copy_speed(one, members)) else 0.0,
        )
        for one in members
    )


def _copy_speed(member: Registration, members: Collection[Registration]) -> int:
    """The best that was measured of the same memory: what else ran may have held one measurement up."""
    here = (one for one in members if one.host and (one.host, one.device) == (member.host, member.device))
    return max((one.copy_speed for one in here), default=member.copy_speed)
