"""Placement of layers on workers: which of them become stages, with how many layers, by measured speed and
memory; and who takes over what a lost worker ran.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise, permutations

from specsot.core.cost_curve import CostCurve
from specsot.core.info import memory_in_words
from specsot.errors import Refused, Unavailable
from specsot.members import Range, Registration, Stage, WeightBytes
from specsot_master.core.ring.ring_state import RingConfig

# Rows of a page where a GPU computes, and elsewhere; no measurement recorded.
GPU_PAGE_ROWS = 64
CPU_PAGE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Throughput:
    """One sequence, one row a lap, nobody drafts. stages: seconds of each; hops: of all of them together."""

    names: tuple[str, ...]
    stages: tuple[float, ...]
    hops: float

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing was measured."""
        lap = sum(self.stages) + self.hops
        return 1 / lap if sum(self.stages) else None

    def __str__(self) -> str:
        """ "a 0:16 12.1 ms, b 16:32 13.0 ms, hops 0.4 ms: 39.2 tokens/s"."""
        if self.tokens_per_second is None:
            return ", ".join(self.names)
        parts = [f"{name} {in_ms(seconds)}" for name, seconds in zip(self.names, self.stages)]
        hops = [f"hops {in_ms(self.hops)}"] if self.hops else []
        return f"{', '.join([*parts, *hops])}: {self.tokens_per_second:.1f} tokens/s plainly"


def expected_throughput(stages: Sequence[Stage], members: Mapping[str, Registration]) -> Throughput:
    return Throughput(
        tuple(f"{stage.name} {stage.layers}" for stage in stages),
        tuple(_seconds(stage, members[stage.name], stage is stages[-1]) for stage in stages),
        _hops([members[stage.name] for stage in stages]),
    )


def head_cost_in_layers(worker: Registration) -> float:
    """How many layers the model's end costs: as many as it is large, for one row reads every weight once."""
    weights = worker.weights
    return weights.last / weights.layer if weights and weights.layer else 0.0


def _number_in(worker: Registration) -> float:
    """Of "worker-0" 0, so that it is the first stage; of who has none, behind those who have."""
    found = re.search(r"-(\d+)$", worker.name)
    return int(found[1]) if found else math.inf


def read_bytes(worker: Registration, layers: Range | None) -> int:
    """Of its weights that each lap reads: of the embedding before the first layer it takes a few rows."""
    if worker.weights is None or layers is None:
        return 0
    last = worker.weights.last if layers.last == worker.model_layers else 0
    return worker.weights.layer * len(layers) + last


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _seconds(stage: Stage, member: Registration, last: bool) -> float:
    return CostCurve(member.curve).at(1) * (len(stage.layers) + head_cost_in_layers(member) * last)


def _hops(ring: Sequence[Registration]) -> float:
    """From each to the next, and from the last one back: nothing within a host, else at most half the way of
    both to the master and back.
    """
    following = [*ring[1:], *ring[:1]]
    far = [(one, other) for one, other in zip(ring, following) if not one.host or one.host != other.host]
    return sum(((one.rtt or 0.0) + (other.rtt or 0.0)) / 2 for one, other in far if one is not other)


# Times slower that a worker may be measured and still count as equally fast; not measured.
SPEED_NOISE_FACTOR = 1.25
MAX_STAGE_TIME_RATIO = 0.9  # a further stage must cut the slowest one's time to this share; not measured

NO_WEIGHTS = WeightBytes(0, 0, 0)


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """A worker as somewhere to put layers.

    layer: what one costs in a lap. tail: how many of them the model's end costs. room: bytes for weights.
    """

    worker: Registration
    layer: float
    tail: float
    room: float

    def cost(self, layers: int, last: bool) -> float:
        return self.layer * (layers + self.tail * last)

    def most(self, first: bool = False, last: bool = False) -> float:
        """Layers that fit, beside the embedding before the first and the head behind the last one."""
        weights = self.worker.weights or NO_WEIGHTS
        room = self.room - weights.first * first - weights.last * last
        return math.floor(room / weights.layer) if weights.layer and room < math.inf else room


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Sites in ring order, and how many layers each has. slowest, whole: costs of one stage, and of a lap."""

    sites: tuple[WorkerCost, ...]
    counts: tuple[int, ...]
    slowest: float
    whole: float

    @property
    def stages(self) -> tuple[Stage, ...]:
        edges = pairwise(accumulate(self.counts, initial=0))
        return tuple(
            Stage(site.worker.name, site.worker.address, Range(*edge))
            for site, edge in zip(self.sites, edges)
        )


def choose_stages(
    workers: Sequence[Registration], config: RingConfig, least: int, most: int | None = None
) -> tuple[Stage, ...]:
    """Stages of `least` of these workers: the quickest, and of equals those who joined first. Of more where
    fewer have no room; and, up to `most`, as long as each further one makes the slowest stage clearly faster.

    In the order of the numbers in their names, then as they joined. Raises Refused, in words.
    """
    sites = worker_costs(workers, config)
    able = [number for number, worker in enumerate(workers) if worker_costs([worker], config)[0].most() >= 1]
    ranked = sorted(able, key=lambda number: sites[number].layer)
    best: LayerSplit | None = None
    for count in range(least, min(len(ranked), config.model_layers) + 1):
        if best is not None and count > (most or least):
            break
        chosen = sorted((workers[number] for number in sorted(ranked[:count])), key=_number_in)
        found = split_layers(worker_costs(chosen, config), config.model_layers)
        if found and (best is None or found.slowest <= best.slowest * MAX_STAGE_TIME_RATIO):
            best = found
    if best is None:
        raise Refused(_lacking(sites, config))
    return best.stages


def fits(worker: Registration, layers: Range, beside: Sequence[Registration], config: RingConfig) -> bool:
    """Whether this worker has room for that range while those beside it have theirs."""
    site = worker_costs([worker, *beside], config)[0]
    return len(layers) <= site.most(layers.first == 0, layers.last == config.model_layers)


def worker_costs(workers: Sequence[Registration], config: RingConfig) -> list[WorkerCost]:
    """What each of them costs and holds while all of them are at work.

    Workers of one host compete when they measure: the quickest is right for all of them, and memory that
    they share was emptiest when it looked largest. Those who are about equally fast count as equal, so that
    the same ring is cut the same way every time. The model's end counts wherever all have measured.
    """
    rows = config.shape.nodes if config.drafts else 1
    measured = [_measured(worker, workers, rows) for worker in workers]
    quickest = min(filter(None, measured), default=1.0)
    if config.placement == "even" or not all(measured):
        costs = [(quickest, 0.0)] * len(workers)
    else:
        alike = max(measured) <= quickest * SPEED_NOISE_FACTOR
        layers = [quickest if alike else layer for layer in measured]
        costs = [(layer, head_cost_in_layers(worker)) for worker, layer in zip(workers, layers)]
    return [WorkerCost(worker, *cost, _room(worker, workers)) for worker, cost in zip(workers, costs)]


def split_layers(sites: Sequence[WorkerCost], layers: int) -> LayerSplit | None:
    """All layers over all of these; None where they have no room."""
    cuts = [found for order in _orders(sites) if (found := _share(order, layers))]
    return min(cuts, key=lambda one: (one.slowest, one.whole), default=None)


def _orders(sites: Sequence[WorkerCost]) -> Iterator[tuple[WorkerCost, ...]]:
    """Neighbours of one host beside each other, in the order they joined; then with every other beginning
    and end, which need the most room. In between the order changes nothing.
    """
    hosts = [site.worker.host or site.worker.name for site in sites]
    near = sorted(range(len(sites)), key=lambda number: hosts.index(hosts[number]))
    yield tuple(sites[number] for number in near)
    for first, last in permutations(near, 2):
        between = (number for number in near if number not in (first, last))
        yield tuple(sites[number] for number in (first, *between, last))


def _share(sites: tuple[WorkerCost, ...], layers: int) -> LayerSplit | None:
    """One layer after the other to where it costs least. As a stage's cost only grows with its layers, no
    other way makes the slowest stage faster; of equals the earlier one gets more, for the last has the head.
    """
    end = len(sites) - 1
    most = [site.most(number == 0, number == end) for number, site in enumerate(sites)]
    if min(most) < 1:
        return None
    counts = [1] * len(sites)
    queue = [(site.cost(2, number == end), number) for number, site in enumerate(sites)]
    heapify(queue)
    for _ in range(layers - len(sites)):
        while queue and counts[queue[0][1]] >= most[queue[0][1]]:
            heappop(queue)
        if not queue:
            return None
        number = heappop(queue)[1]
        counts[number] += 1
        heappush(queue, (sites[number].cost(counts[number] + 1, number == end), number))
    costs = [site.cost(count, number == end) for number, (site, count) in enumerate(zip(sites, counts))]
    return LayerSplit(sites, tuple(counts), max(costs), sum(costs))


def _measured(worker: Registration, workers: Sequence[Registration], rows: int) -> float:
    """Seconds of one layer; 0 where nobody measured."""
    peers = [one for one in workers if _host(one) == _host(worker) and bool(one.gpus) == bool(worker.gpus)]
    return min(CostCurve(one.curve).at(rows) for one in peers)


def _room(worker: Registration, workers: Sequence[Registration]) -> float:
    """Bytes for weights, beside the KV pages it has promised."""
    sharing = [one for one in workers if _memory(one) == _memory(worker)]
    offered = [one.memory for one in sharing if one.memory is not None]
    return max(offered) / len(sharing) - worker.kv_bytes if offered else math.inf


def _host(worker: Registration) -> str:
    return worker.host or worker.name


def _memory(worker: Registration) -> str:
    """Whose it is: the GPU's, or the machine's."""
    return worker.gpus[0] if worker.gpus else _host(worker)


def _lacking(sites: Sequence[WorkerCost], config: RingConfig) -> str:
    if len(sites) > config.model_layers:
        return f"{len(sites)} workers cannot share {config.model_layers} layers"
    weights = max((site.worker.weights or NO_WEIGHTS for site in sites), key=lambda one: one.layer)
    need = weights.layer * config.model_layers + weights.first + weights.last
    rooms = [max(site.room, 0.0) for site in sites]
    gap = need - sum(rooms)
    offers = " + ".join("an unknown amount" if room == math.inf else memory_in_words(room) for room in rooms)
    words = f"{memory_in_words(gap)} are missing" if gap > 0 else "no cut between two layers fits"
    words += ", for KV pages take all: --kv-memory sets less" if 0.0 in rooms else ""
    return (
        f"layers 0:{config.model_layers} need {memory_in_words(need)}, "
        f"workers offer {offers} beside their KV pages; {words}"
    )


Stages = tuple[Stage, ...]


def next_stages(
    members: Sequence[Registration],
    config: RingConfig,
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
        return _with_brought_ranges(workers, config, before)
    if not before:
        lacking = config.workers - len(workers)
        if lacking > 0:
            return f"{lacking} of {config.workers} workers"
        return choose_stages(workers, config, config.workers)
    for passed_over in (failed, ()):
        heirs = _inherit([one for one in workers if one.name not in passed_over], before, config)
        if None not in heirs:
            return _stages(zip((stage.layers for stage in before), heirs))
    lost = f"{heirs.count(None)} of {len(before)} workers"
    if patient or not workers:
        return lost
    try:
        return choose_stages(workers, config, min(len(workers), len(before)))
    except Refused as error:
        return f"{lost}; without: {error}"


def could_form(
    members: Sequence[Registration], config: RingConfig, before: Stages, failed: Collection[str]
) -> bool:
    """Whether these make a ring as large as it was, or is to be."""
    try:
        return not isinstance(next_stages(members, config, before, failed=failed), str)
    except Refused:
        return False


def better_stages(
    members: Sequence[Registration], config: RingConfig, present: Stages, busy: Collection[str]
) -> Stages | None:
    """Stages of a better ring than the present one of the busy: with as many workers as were wished for,
    where it had to be formed of fewer, or with a drafter that came late.
    """
    spare = {member.kind for member in members if member.name not in busy}
    if len(present) < config.workers and "worker" in spare:
        with suppress(Refused):  # who came late has no room for anything
            more = next_stages(members, config)
            if not isinstance(more, str):
                return more
    return present if config.drafts and "drafter" in spare else None


def rebalanced_stages(members: Sequence[Registration], config: RingConfig) -> Stages:
    """Stages of as many workers as help. Raises Refused where they have no room, Unavailable for a hole."""
    workers = [member for member in members if member.kind == "worker"]
    if any(worker.layers for worker in workers):
        drawn = _with_brought_ranges(workers, config, ())
        if isinstance(drawn, str):
            raise Unavailable(f"the ring lacks {drawn}")
        return drawn
    least = min(config.workers, len(workers))
    return choose_stages(workers, config, least, config.max_stages or config.model_layers)


# Times as many tokens a second as before: less, and no request is interrupted for it; not measured.
MIN_GAIN = 1.1


def faster_stages(
    members: Sequence[Registration], config: RingConfig, present: Stages, busy: Collection[str], requests: int
) -> Stages | None:
    """Stages with workers that are not busy yet, if this many requests are then written clearly faster."""
    workers = [member for member in members if member.kind == "worker"]
    if all(one.name in busy for one in workers) or not all(one.curve for one in workers):
        return None
    most = max(config.workers, config.max_stages or 0)
    try:
        wanted = rebalanced_stages(members, replace(config, max_stages=most))
    except (Refused, Unavailable):
        return None
    if len(wanted) > max(most, len(present)):  # fewer have no room
        return None
    sites = {site.worker.name: site for site in worker_costs(workers, config)}
    before, after = (tokens_per_second(stages, sites, requests) for stages in (present, wanted))
    return wanted if after >= before * MIN_GAIN else None


def tokens_per_second(stages: Stages, sites: Mapping[str, WorkerCost], requests: int) -> float:
    """Of so many requests, a token a lap each. Each waits for its lap, and all for the slowest stage."""
    costs = [sites[stage.name].cost(len(stage.layers), stage is stages[-1]) for stage in stages]
    lap = sum(costs) + _hops([sites[stage.name].worker for stage in stages])
    return min(max(requests, 1) / lap, 1 / max(costs))


def to_load(wanted: Stages, present: Stages, loaded: Mapping[str, Range]) -> dict[str, Range]:
    """By name, ranges of which some layer is neither run by its worker now, nor loaded ahead."""
    running = {stage.name: stage.layers for stage in present}

    def here(stage: Stage, layers: Range | None) -> bool:
        return layers is not None and layers.first <= stage.layers.first <= stage.layers.last <= layers.last

    return {
        stage.name: stage.layers
        for stage in wanted
        if not here(stage, running.get(stage.name)) and not here(stage, loaded.get(stage.name))
    }


def _with_brought_ranges(workers: Sequence[Registration], config: RingConfig, before: Stages) -> Stages | str:
    """Brought ranges, and heirs for the rest."""
    fixed = [(worker.layers, worker) for worker in workers if worker.layers]
    holes = _holes([layers for layers, _ in fixed], config.model_layers)
    spare = [worker for worker in workers if worker.layers is None]
    heirs = _fill(holes, spare, [worker for _, worker in fixed], before, config)
    lacking = [str(hole) for hole, heir in zip(holes, heirs) if heir is None]
    if lacking:
        return "a worker for layers " + ", ".join(lacking)
    return _stages([*fixed, *zip(holes, heirs)])


def _inherit(
    workers: Sequence[Registration], before: Stages, config: RingConfig
) -> list[Registration | None]:
    """A worker for each stage of the ring before; None where there is none."""
    here = {worker.name: worker for worker in workers}
    kept = [here[stage.name] for stage in before if stage.name in here]
    spare = [worker for worker in workers if worker not in kept]
    holes = [stage.layers for stage in before if stage.name not in here]
    heirs = iter(_fill(holes, spare, kept, before, config))
    return [here[stage.name] if stage.name in here else next(heirs) for stage in before]


def _fill(
    holes: Sequence[Range],
    spare: Sequence[Registration],
    beside: Sequence[Registration],
    before: Stages,
    config: RingConfig,
) -> list[Registration | None]:
    """For each hole whoever ran it, else who joined first of those with room for it; or None."""
    had = {stage.name: stage.layers for stage in before}
    left = list(spare)
    placed = list(beside)
    heirs: list[Registration | None] = []
    for hole in holes:
        able = (worker for worker in left if fits(worker, hole, placed, config))
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
