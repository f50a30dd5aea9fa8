"""Which workers share the layers, in which order and how many each: the slowest stage as fast as can be.

Pure. Refuses to know epochs, who was where before, and how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise, permutations

from specsot.amounts import in_words
from specsot.errors import Refused
from specsot.members import Range, Registration, Stage, WeightBytes
from specsot_master.fleet.pace import head_cost_in_layers, seconds_at
from specsot_master.fleet.wishes import RingConfig

SPEED_NOISE_FACTOR = 1.25  # how many times slower a worker may seem and still count as equally fast
MAX_STAGE_TIME_RATIO = 0.9  # to this part of its time a further stage must bring the slowest one

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
    workers: Sequence[Registration], wishes: RingConfig, least: int, most: int | None = None
) -> tuple[Stage, ...]:
    """Stages of `least` of these workers: the quickest, and of equals those who joined first. Of more where
    fewer have no room; and, up to `most`, as long as each further one makes the slowest stage clearly faster.

    Raises Refused, in words.
    """
    sites = worker_costs(workers, wishes)
    able = [number for number, worker in enumerate(workers) if worker_costs([worker], wishes)[0].most() >= 1]
    ranked = sorted(able, key=lambda number: sites[number].layer)
    best: LayerSplit | None = None
    for count in range(least, min(len(ranked), wishes.model_layers) + 1):
        if best is not None and count > (most or least):
            break
        chosen = [workers[number] for number in sorted(ranked[:count])]
        found = split_layers(worker_costs(chosen, wishes), wishes.model_layers)
        if found and (best is None or found.slowest <= best.slowest * MAX_STAGE_TIME_RATIO):
            best = found
    if best is None:
        raise Refused(_lacking(sites, wishes))
    return best.stages


def fits(worker: Registration, layers: Range, beside: Sequence[Registration], wishes: RingConfig) -> bool:
    """Whether this worker has room for that range while those beside it have theirs."""
    site = worker_costs([worker, *beside], wishes)[0]
    return len(layers) <= site.most(layers.first == 0, layers.last == wishes.model_layers)


def worker_costs(workers: Sequence[Registration], wishes: RingConfig) -> list[WorkerCost]:
    """What each of them costs and holds while all of them are at work.

    Workers of one host compete when they measure: the quickest is right for all of them, and memory that
    they share was emptiest when it looked largest. Those who are about equally fast count as equal, so that
    the same ring is cut the same way every time.
    """
    rows = wishes.shape.nodes if wishes.drafter else 1
    measured = [_measured(worker, workers, rows) for worker in workers]
    unlike = min(measured) > 0 and max(measured) > min(measured) * SPEED_NOISE_FACTOR
    if wishes.placement == "measured" and unlike:
        costs = [(layer, head_cost_in_layers(worker)) for worker, layer in zip(workers, measured)]
    else:
        costs = [(min(filter(None, measured), default=1.0), 0.0)] * len(workers)
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
    return min(seconds_at(one.curve, rows) for one in peers)


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


def _lacking(sites: Sequence[WorkerCost], wishes: RingConfig) -> str:
    if len(sites) > wishes.model_layers:
        return f"{len(sites)} workers cannot share {wishes.model_layers} layers"
    weights = max((site.worker.weights or NO_WEIGHTS for site in sites), key=lambda one: one.layer)
    need = weights.layer * wishes.model_layers + weights.first + weights.last
    rooms = [max(site.room, 0.0) for site in sites]
    gap = need - sum(rooms)
    offers = " + ".join("an unknown amount" if room == math.inf else in_words(room) for room in rooms)
    words = f"{in_words(gap)} are missing" if gap > 0 else "no cut between two layers fits"
    return (
        f"layers 0:{wishes.model_layers} need {in_words(need)}, "
        f"workers offer {offers} beside their KV pages; {words}"
    )
