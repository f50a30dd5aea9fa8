"""From who has joined to a ring: who is refused, what is missing, or the next epoch's plan.

Pure. Refuses to know links, clocks and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from specsot.errors import Refused
from specsot.members import (
    PROTOCOL,
    CommMode,
    Configuration,
    Curve,
    Layout,
    Range,
    Registration,
    Stage,
    Transport,
    TreeShape,
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the operator asked of the ring.

    workers: how many share the layers when they bring no ranges of their own.
    max_pages: no more pages than this are ever used, however much memory there is.
    """

    fingerprint: str
    model_layers: int
    workers: int = 1
    drafter: bool = True
    page_rows: int = 256
    max_pages: int = 4096
    rows: int = 512
    layout: Layout = "batched"
    shape: TreeShape = field(default_factory=TreeShape)
    draft_timeout: float = 1.0
    transport: Transport = "grpc"
    comm_mode: CommMode = "p2p"


def check(joining: Registration, members: Sequence[Registration], wishes: Wishes) -> None:
    """Raise Refused, naming both values, if `joining` cannot belong to this ring."""
    _check_identity(joining, members, wishes)
    if joining.kind == "drafter":
        _check_drafter(members, wishes)
    else:
        _check_range(joining, [member for member in members if member.kind == "worker"], wishes)


def missing(members: Sequence[Registration], wishes: Wishes) -> str | None:
    """What the ring still waits for, in words; None when an epoch can begin."""
    workers = [member for member in members if member.kind == "worker"]
    if any(worker.layers for worker in workers):
        holes = _holes([worker.layers for worker in workers if worker.layers], wishes.model_layers)
        spare = sum(worker.layers is None for worker in workers)
        uncovered = holes[spare:]
        return None if not uncovered else "a worker for layers " + ", ".join(map(str, uncovered))
    lacking = wishes.workers - len(workers)
    return None if lacking <= 0 else f"{lacking} of {wishes.workers} workers"


def form(epoch: int, members: Sequence[Registration], wishes: Wishes) -> dict[str, Configuration]:
    """Every member's Configuration for a new epoch; call only when nothing is `missing`."""
    stages = assign(members, wishes)
    drafter = next((member for member in members if member.kind == "drafter"), None)
    drafter = drafter if wishes.drafter else None
    shape = shape_of(drafter, wishes)
    ring = Configuration(
        epoch=epoch,
        you="",
        stages=stages,
        pages=count_pages(members, stages, drafter, wishes),
        page_rows=wishes.page_rows,
        slots=shape.slots if drafter else 1,
        rows=wishes.rows,
        flight=1 if len(stages) == 1 else len(stages) + 1,
        layout=wishes.layout,
        drafter=drafter.address if drafter else None,
        head=drafter.head if drafter else None,
        shape=shape,
        draft_timeout=wishes.draft_timeout,
        curve=lap_curve(members, stages),
        transport=wishes.transport,
        comm_mode=wishes.comm_mode,
    )
    names = [stage.name for stage in stages] + ([drafter.name] if drafter else [])
    return {name: replace(ring, you=name) for name in names}


def assign(members: Sequence[Registration], wishes: Wishes) -> tuple[Stage, ...]:
    """Ranges that workers brought stay theirs; holes go to the others in the order they joined.

    Without any brought range the layers are cut evenly; earlier stages take the odd ones, since the
    last one has the head of the model to run too.
    """
    workers = [member for member in members if member.kind == "worker"]
    fixed = [worker for worker in workers if worker.layers]
    free = [worker for worker in workers if not worker.layers]
    holes = _holes([worker.layers for worker in fixed if worker.layers], wishes.model_layers)
    ranges = holes if fixed else _even(wishes.model_layers, wishes.workers)
    given = [Stage(worker.name, worker.address, worker.layers) for worker in fixed if worker.layers]
    given += [Stage(worker.name, worker.address, layers) for worker, layers in zip(free, ranges)]
    return tuple(sorted(given, key=lambda stage: stage.layers.first))


def count_pages(
    members: Sequence[Registration], stages: Sequence[Stage], drafter: Registration | None, wishes: Wishes
) -> int:
    """The same number everywhere: what the tightest stage or the drafter can hold. Raises Refused if none."""
    granted = {member.name: member for member in members}
    room = [
        granted[stage.name].kv_bytes // (granted[stage.name].row_bytes * len(stage.layers) * wishes.page_rows)
        for stage in stages
    ]
    if drafter and drafter.row_bytes:
        room.append(drafter.kv_bytes // (drafter.row_bytes * wishes.page_rows))
    pages = min(*room, wishes.max_pages)
    if pages < 2:
        raise Refused(f"KV memory holds {pages} pages of {wishes.page_rows} rows; at least 2 are needed")
    return pages


def shape_of(drafter: Registration | None, wishes: Wishes) -> TreeShape:
    """How large trees may be: as the drafter can make them, or as was wished; whole where either says so."""
    own = drafter.shape if drafter else None
    return replace(own, fixed=own.fixed or wishes.shape.fixed) if own else wishes.shape


def lap_curve(members: Sequence[Registration], stages: Sequence[Stage]) -> Curve:
    """Seconds per rows of a whole lap: each stage's measured layer times its number of layers."""
    curves = {member.name: dict(member.curve) for member in members}
    sizes = set.intersection(*(set(curves[stage.name]) for stage in stages))
    return tuple(
        (rows, sum(curves[stage.name][rows] * len(stage.layers) for stage in stages))
        for rows in sorted(sizes)
    )


def _check_identity(joining: Registration, members: Sequence[Registration], wishes: Wishes) -> None:
    if joining.protocol != PROTOCOL:
        raise Refused(f"{joining.name} speaks protocol {joining.protocol}, this master {PROTOCOL}")
    if joining.fingerprint != wishes.fingerprint:
        raise Refused(
            f"{joining.name} has another model: fingerprint {joining.fingerprint}, here {wishes.fingerprint}"
        )
    if any(member.name == joining.name for member in members):
        raise Refused(f"a member named {joining.name} is already here")


def _check_drafter(members: Sequence[Registration], wishes: Wishes) -> None:
    if not wishes.drafter:
        raise Refused("this ring runs without a drafter (--drafter none)")
    for member in members:
        if member.kind == "drafter":
            raise Refused(f"a drafter is already here: {member.name} at {member.address}")


def _check_range(joining: Registration, workers: Sequence[Registration], wishes: Wishes) -> None:
    layers = joining.layers
    if layers is None:
        if missing(workers, wishes) is None:
            raise Refused(f"every layer has its worker already; {joining.name} is one too many")
        return
    if not 0 <= layers.first < layers.last <= wishes.model_layers:
        raise Refused(f"layers {layers} do not lie within 0:{wishes.model_layers}")
    for worker in workers:
        if worker.layers and layers.first < worker.layers.last and worker.layers.first < layers.last:
            raise Refused(f"layers {layers} overlap {worker.layers} of {worker.name}")


def _holes(ranges: Sequence[Range], layers: int) -> list[Range]:
    """What the ranges leave uncovered of 0 .. layers - 1."""
    holes: list[Range] = []
    reached = 0
    for taken in sorted(ranges, key=lambda one: one.first):
        if taken.first > reached:
            holes.append(Range(reached, taken.first))
        reached = max(reached, taken.last)
    return holes + ([Range(reached, layers)] if reached < layers else [])


def _even(layers: int, parts: int) -> list[Range]:
    """Cut 0 .. layers - 1 into contiguous ranges whose sizes differ by at most one."""
    size, odd = divmod(layers, parts)
    cuts = [0]
    for part in range(parts):
        cuts.append(cuts[-1] + size + (part < odd))
    return [Range(first, last) for first, last in pairwise(cuts)]
