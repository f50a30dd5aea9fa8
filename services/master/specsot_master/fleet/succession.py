"""Who runs which layers next: those who ran them, their heirs, or everybody anew.

Pure. Refuses to know clocks: whether a lost worker may still come back is passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from specsot.errors import Refused, Unavailable
from specsot.members import Range, Registration, Stage
from specsot_master.fleet.placement import choose_stages, fits
from specsot_master.fleet.wishes import RingConfig

Stages = tuple[Stage, ...]


def next_stages(
    members: Sequence[Registration],
    wishes: RingConfig,
    before: Stages = (),
    patient: bool = True,
    failed: Collection[str] = (),
) -> Stages | str:
    """The next ring's stages; or what is missing, in words. Raises Refused where nobody has room.

    Ranges that workers brought are theirs, and each hole goes to one of the others. Else whoever is left of
    the ring `before` keeps its range (it is loaded), and those without one inherit what the lost ones ran.
    patient: for want of heirs it waits for the lost ones; otherwise those who are here share all layers.
    failed: could not take part the last time, and step back where somebody else can.
    """
    workers = [member for member in members if member.kind == "worker"]
    if any(worker.layers for worker in workers):
        return _with_brought_ranges(workers, wishes, before)
    if not before:
        lacking = wishes.workers - len(workers)
        if lacking > 0:
            return f"{lacking} of {wishes.workers} workers"
        return choose_stages(workers, wishes, wishes.workers)
    for passed_over in (failed, ()):
        heirs = _inherit([one for one in workers if one.name not in passed_over], before, wishes)
        if None not in heirs:
            return _stages(zip((stage.layers for stage in before), heirs))
    lost = f"{heirs.count(None)} of {len(before)} workers"
    if patient or not workers:
        return lost
    try:
        return choose_stages(workers, wishes, min(len(workers), len(before)))
    except Refused as error:
        return f"{lost}; without: {error}"


def could_form(
    members: Sequence[Registration], wishes: RingConfig, before: Stages, failed: Collection[str]
) -> bool:
    """Whether these make a ring as large as it was, or is to be."""
    try:
        return not isinstance(next_stages(members, wishes, before, failed=failed), str)
    except Refused:
        return False


def better_stages(
    members: Sequence[Registration], wishes: RingConfig, present: Stages, busy: Collection[str]
) -> Stages | None:
    """Stages of a better ring than the present one of the busy: with a drafter that came late, or with as
    many workers as were wished for, where it had to be formed of fewer.
    """
    spare = {member.kind for member in members if member.name not in busy}
    if wishes.drafter and "drafter" in spare:
        return present
    if len(present) < wishes.workers and "worker" in spare:
        try:
            more = next_stages(members, wishes)
        except Refused:  # who came late has no room for anything
            return None
        return None if isinstance(more, str) else more
    return None


def rebalanced_stages(members: Sequence[Registration], wishes: RingConfig) -> Stages:
    """Stages of as many workers as help. Raises Refused where they have no room, Unavailable for a hole."""
    workers = [member for member in members if member.kind == "worker"]
    if any(worker.layers for worker in workers):
        drawn = _with_brought_ranges(workers, wishes, ())
        if isinstance(drawn, str):
            raise Unavailable(f"the ring lacks {drawn}")
        return drawn
    least = min(wishes.workers, len(workers))
    return choose_stages(workers, wishes, least, wishes.max_stages or wishes.model_layers)


def _with_brought_ranges(workers: Sequence[Registration], wishes: RingConfig, before: Stages) -> Stages | str:
    """Brought ranges, and heirs for the rest."""
    fixed = [(worker.layers, worker) for worker in workers if worker.layers]
    holes = _holes([layers for layers, _ in fixed], wishes.model_layers)
    spare = [worker for worker in workers if worker.layers is None]
    heirs = _fill(holes, spare, [worker for _, worker in fixed], before, wishes)
    lacking = [str(hole) for hole, heir in zip(holes, heirs) if heir is None]
    if lacking:
        return "a worker for layers " + ", ".join(lacking)
    return _stages([*fixed, *zip(holes, heirs)])


def _inherit(
    workers: Sequence[Registration], before: Stages, wishes: RingConfig
) -> list[Registration | None]:
    """A worker for each stage of the ring before; None where there is none."""
    here = {worker.name: worker for worker in workers}
    kept = [here[stage.name] for stage in before if stage.name in here]
    spare = [worker for worker in workers if worker not in kept]
    holes = [stage.layers for stage in before if stage.name not in here]
    heirs = iter(_fill(holes, spare, kept, before, wishes))
    return [here[stage.name] if stage.name in here else next(heirs) for stage in before]


def _fill(
    holes: Sequence[Range],
    spare: Sequence[Registration],
    beside: Sequence[Registration],
    before: Stages,
    wishes: RingConfig,
) -> list[Registration | None]:
    """For each hole whoever ran it, else who joined first of those with room for it; or None."""
    had, left, placed = {stage.name: stage.layers for stage in before}, list(spare), list(beside)
    heirs: list[Registration | None] = []
    for hole in holes:
        able = (worker for worker in left if fits(worker, hole, placed, wishes))
        heir = min(
            able, key=lambda one: (had.get(one.name) != hole, had.get(one.name) in holes), default=None
        )
        heirs.append(heir)
        if heir is not None:
            left.remove(heir)
            placed.append(heir)
    return heirs


def _stages(taken: Iterable[tuple[Range, Registration | None]]) -> Stages:
    made = [Stage(worker.name, worker.address, layers) for layers, worker in taken if worker]
    return tuple(sorted(made, key=lambda stage: stage.layers.first))


def _holes(ranges: Sequence[Range], layers: int) -> list[Range]:
    """What the ranges leave uncovered of 0 .. layers - 1."""
    holes: list[Range] = []
    reached = 0
    for taken in sorted(ranges, key=lambda one: one.first):
        if taken.first > reached:
            holes.append(Range(reached, taken.first))
        reached = max(reached, taken.last)
    return holes + ([Range(reached, layers)] if reached < layers else [])
