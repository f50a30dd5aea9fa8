"""Placement of layers on workers: which workers become stages, and with how many layers each.

Placement follows the workers' measured speed and free memory. After a loss it also decides which workers take
over the lost layers.
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

# KV slots per page if a GPU computes. Untuned.
GPU_PAGE_ROWS = 64
# KV slots per page if only CPUs compute. Untuned.
CPU_PAGE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Throughput:
    """The expected speed of a ring for one sequence without drafts, which advances one token per step.

    names: a name and layer range for each stage, for display.
    stages: seconds of compute of each stage per step; 0.0 for a worker that has measured nothing.
    hops: seconds of all hops between stages per step together, see `hop_seconds`.
    """

    names: tuple[str, ...]
    stages: tuple[float, ...]
    hops: float

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of one sequence, or None if no stage was measured."""
        step = sum(self.stages) + self.hops
        return 1 / step if sum(self.stages) else None

    def __str__(self) -> str:
        """Describe the ring in one line; only the names of its stages if no stage was measured.

        Hops that take no time are left out. For example:
        "a 0:16 12.1 ms, b 16:32 13.0 ms, hops 0.4 ms: 39.2 tokens/s without drafts"
        """
        if self.tokens_per_second is None:
            return ", ".join(self.names)
        parts = [f"{name} {in_ms(seconds)}" for name, seconds in zip(self.names, self.stages)]
        hops = [f"hops {in_ms(self.hops)}"] if self.hops else []
        return f"{', '.join([*parts, *hops])}: {self.tokens_per_second:.1f} tokens/s without drafts"


def expected_throughput(stages: Sequence[Stage], members: Mapping[str, Registration]) -> Throughput:
    """Return the expected speed of a ring with these stages.

    stages: the layer ranges, with the worker of each, in ring order.
    members: registrations by name; every stage's worker must be among them.
    """
    return Throughput(
        tuple(f"{stage.name} {stage.layers}" for stage in stages),
        tuple(_seconds(stage, members[stage.name], stage is stages[-1]) for stage in stages),
        hop_seconds([members[stage.name] for stage in stages]),
    )


def head_cost_in_layers(worker: Registration) -> float:
    """Return the cost of the lm_head, in layers; 0.0 if the worker has not reported the sizes of its weights.
    The cost is the ratio of the lm_head's bytes to those of a layer, because a step with one token reads
    every weight once.

    worker: the worker's registration.
    """
    weights = worker.weights
    return weights.last / weights.layer if weights and weights.layer else 0.0


def _number_in(worker: Registration) -> float:
    """Return the number at the end of a worker's name, so that "worker-0" is the first stage; infinity if
    there is none, so that such workers come after all numbered ones.

    worker: the worker's registration.
    """
    found = re.search(r"-(\d+)$", worker.name)
    return int(found[1]) if found else math.inf


def read_bytes(worker: Registration, layers: Range | None) -> int:
    """Return the bytes of the worker's weights that every step reads: its layers, and the lm_head on the last
    stage. The embedding does not count, as a step reads only a few rows of it. Return 0 if the sizes of the
    weights are unknown. The last stage is the one whose layers end with the model's last.

    worker: the worker's registration.
    layers: the layers that it runs, or None if it runs none.
    """
    if worker.weights is None or layers is None:
        return 0
    last = worker.weights.last if layers.last == worker.model_layers else 0
    return worker.weights.layer * len(layers) + last


def in_ms(seconds: float) -> str:
    """Return a time in words, such as "12.1 ms".

    seconds: the time in seconds.
    """
    return f"{seconds * 1e3:.1f} ms"


def _seconds(stage: Stage, member: Registration, is_last: bool) -> float:
    """Return the seconds of compute of one stage for a step with one token; 0.0 if its worker has measured
    nothing.

    stage: the layer range.
    member: the registration of the stage's worker.
    is_last: True for the last stage, which has the lm_head.
    """
    return CostCurve(member.curve).at(1) * (len(stage.layers) + head_cost_in_layers(member) * is_last)


# Seconds. What a step takes from one stage to the next, or from the last back to the first, if both compute
# on GPUs of one host: hidden states are copied to the host, and the next step is launched only once its frame
# has come. Chosen by measurement: two stages of Qwen2.5-Coder-1.5B on one H200 decode 275 tokens/s, and their
# layers alone would give 510.
GPU_HOP_SECONDS = 0.0008


def hop_seconds(workers: Sequence[Registration]) -> float:
    """Return the seconds of all hops of one step: from each stage to the next, and from the last back to the
    first; 0 for a single stage. A member whose round trip was not measured counts as 0 s. A member without a
    known host counts as on a host of its own.

    A hop within a host takes GPU_HOP_SECONDS between GPUs, and no time otherwise. Between hosts it takes at
    most the mean of both members' round trips to the master, as the path between them could lead over the
    master.

    workers: the registrations of the stages, in ring order.
    """
    following = [*workers[1:], *workers[:1]]
    hops = [(one, other) for one, other in zip(workers, following) if one is not other]
    return sum(_hop_seconds(one, other) for one, other in hops)


def _hop_seconds(one: Registration, other: Registration) -> float:
    """Return the seconds of the hop from one stage to another, see `hop_seconds`.

    one: the registration of the stage that sends.
    other: the registration of the stage that receives.
    """
    if one.host and one.host == other.host:
        return GPU_HOP_SECONDS if one.gpus and other.gpus else 0.0
    return ((one.rtt or 0.0) + (other.rtt or 0.0)) / 2


# Ratio. If the slowest worker's layer time is within this factor of the quickest one's, all count as equally
# fast. Untuned.
SPEED_NOISE_FACTOR = 1.25
# Fraction. A further stage must reduce the slowest stage's time to this share of what it was. Untuned.
MAX_STAGE_TIME_RATIO = 0.9

# Stands for the sizes of weights that a worker has not reported.
NO_WEIGHTS = WeightBytes(0, 0, 0)


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """One worker as a place for layers: what a stage on it costs, and how many layers it has room for.

    worker: the worker's registration.
    layer_cost: the cost of one layer per step, in seconds, or the same unit for all workers if they were not
        measured.
    head_layers: the cost of the lm_head, in layers; 0.0 if it is unknown or does not count.
    free_bytes: bytes for weights, in addition to the KV pages; infinite if the worker's memory is unknown.
    """

    worker: Registration
    layer_cost: float
    head_layers: float
    free_bytes: float

    def cost(self, num_layers: int, is_last: bool) -> float:
        """Return the cost of a stage on this worker, in the unit of `layer_cost`.

        num_layers: how many layers the stage has.
        is_last: True for the last stage, which has the lm_head.
        """
        return self.layer_cost * (num_layers + self.head_layers * is_last)

    def max_layers(self, is_first: bool = False, is_last: bool = False) -> float:
        """Return how many layers fit into the worker's room; 0 or a negative number if not even the embedding
        or the lm_head fits; infinity if the room is unknown. It is the free room itself, in bytes, if the
        size of a layer is unknown.

        is_first: True for the first stage, which has the embedding.
        is_last: True for the last stage, which has the lm_head.
        """
        weights = self.worker.weights or NO_WEIGHTS
        room = self.free_bytes - weights.first * is_first - weights.last * is_last
        return math.floor(room / weights.layer) if weights.layer and room < math.inf else room


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A division of all layers of the model between workers, with its cost.

    workers: the workers in ring order.
    counts: the number of layers of each worker, in the same order.
    slowest_stage_cost: the cost of the slowest stage, in the unit of `WorkerCost.layer_cost`.
    step_cost: the cost of a step, which is the sum over all stages, in the same unit.
    """

    workers: tuple[WorkerCost, ...]
    counts: tuple[int, ...]
    slowest_stage_cost: float
    step_cost: float

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages with their ranges, in ring order. Counts (3, 5) give the ranges 0:3 and 3:8."""
        edges = pairwise(accumulate(self.counts, initial=0))
        return tuple(
            Stage(site.worker.name, site.worker.address, Range(*edge))
            for site, edge in zip(self.workers, edges)
        )


def choose_stages(
    workers: Sequence[Registration], config: RingConfig, min_workers: int, max_workers: int | None = None
) -> tuple[Stage, ...]:
    """Return stages on the quickest of these workers; among equals, on those that joined first. Workers that
    have no room for any layer are not used. No more workers are used than the model has layers.

    At least `min_workers` workers are used, and more of them if fewer have no room for the model. Up to
    `max_workers`, a further one is added as long as it reduces the slowest stage's time to
    MAX_STAGE_TIME_RATIO. The stages are ordered by the numbers in the workers' names, then as they joined,
    unless another order has more room or is faster.

    workers: the registrations of the workers, in the order in which they joined.
    config: the options of the ring, with the model's number of layers.
    min_workers: the minimum number of workers to use.
    max_workers: the maximum number of workers to use for the sake of speed; None for `min_workers`.

    Raises Refused, which says what is missing, if the workers have no room for the model.
    """
    sites = worker_costs(workers, config)
    able = [
        number for number, worker in enumerate(workers) if worker_costs([worker], config)[0].max_layers() >= 1
    ]
    ranked = sorted(able, key=lambda number: sites[number].layer_cost)
    best: LayerSplit | None = None
    for count in range(min_workers, min(len(ranked), config.model_layers) + 1):
        if best is not None and count > (max_workers or min_workers):
            break
        chosen = sorted((workers[number] for number in sorted(ranked[:count])), key=_number_in)
        found = split_layers(worker_costs(chosen, config), config.model_layers, config.tail_layers)
        if found and (
            best is None or found.slowest_stage_cost <= best.slowest_stage_cost * MAX_STAGE_TIME_RATIO
        ):
            best = found
    if best is None:
        raise Refused(_lacking(sites, config))
    return best.stages


def fits(
    worker: Registration, layers: Range, other_workers: Sequence[Registration], config: RingConfig
) -> bool:
    """Return True if a worker has room for a range of layers. A worker whose memory is unknown always has
    room.

    worker: the worker's registration.
    layers: the range of layers.
    other_workers: registrations of workers that run at the same time, with which it may share its memory.
    config: the options of the ring.
    """
    site = worker_costs([worker, *other_workers], config)[0]
    return len(layers) <= site.max_layers(layers.first == 0, layers.last == config.model_layers)


def worker_costs(workers: Sequence[Registration], config: RingConfig) -> list[WorkerCost]:
    """Return the cost and the room of each worker while all of them run, in the same order; empty without
    workers. With the placement "even", or if a worker has not measured, each layer costs the same everywhere.
    Costs are those of a step with as many tokens as a draft tree has nodes, or with one token if the ring
    does not draft.

    Workers of one host compete for its cores while they measure, so the quickest measurement is used for all
    of them. Memory that they share is taken from the report with the most free memory, and divided. If all
    workers are about equally fast they count as equal, so that the same ring is divided in the same way every
    time. The lm_head counts only if all workers have measured. If every stage has the embedding, it counts as
    taken from each worker's room.

    workers: the registrations of the workers.
    config: the options of the ring; with the placement "even", all workers cost the same.
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
    sites = [WorkerCost(worker, *cost, _room(worker, workers)) for worker, cost in zip(workers, costs)]
    return [_with_embedding(site) for site in sites] if config.embeds_everywhere else sites


def _with_embedding(site: WorkerCost) -> WorkerCost:
    """Return the cost with the embedding's bytes taken from `free_bytes` and set to 0 in the weights, so that
    the first stage needs no room for it in addition; unchanged without weights.

    site: the cost and the room of the worker.
    """
    weights = site.worker.weights or NO_WEIGHTS
    worker = replace(site.worker, weights=replace(weights, first=0)) if site.worker.weights else site.worker
    return replace(site, worker=worker, free_bytes=site.free_bytes - weights.first)


def split_layers(sites: Sequence[WorkerCost], num_layers: int, tail: int = 1) -> LayerSplit | None:
    """Return the division of all layers between all of these workers with the fastest slowest stage, or None
    if they have no room. Return None also if there are fewer layers than workers - 1 + `tail`. Among
    divisions with equal slowest stages the one with the smallest sum over all stages is chosen, and among
    those the first order tried.

    sites: the cost and the room of each worker, in the order in which they joined; at least one.
    num_layers: the number of the model's layers.
    tail: how many of the last layers one stage must hold.
    """
    cuts = [found for order in _orders(sites) if (found := _share(order, num_layers, tail))]
    return min(cuts, key=lambda one: (one.slowest_stage_cost, one.step_cost), default=None)


def _orders(sites: Sequence[WorkerCost]) -> Iterator[tuple[WorkerCost, ...]]:
    """Yield orders of the workers in the ring, at least one. A single worker gives one order.

    Workers of one host are neighbours, and hosts come in the order in which they joined. Further orders have
    every other pair of first and last stage, which need the most room because of the embedding and the
    lm_head. The order in between does not matter.

    sites: the cost and the room of each worker, in the order in which they joined.
    """
    hosts = [site.worker.host or site.worker.name for site in sites]
    near = sorted(range(len(sites)), key=lambda number: hosts.index(hosts[number]))
    yield tuple(sites[number] for number in near)
    for first, last in permutations(near, 2):
        between = (number for number in near if number not in (first, last))
        yield tuple(sites[number] for number in (first, *between, last))


def _share(sites: tuple[WorkerCost, ...], num_layers: int, tail: int = 1) -> LayerSplit | None:
    """Return the division of the layers between workers in this order, or None if they have no room. Return
    None also if a worker has no room for one layer, or the last one for the tail, and if there are fewer
    layers than workers - 1 + `tail`.

    Each worker gets one layer, and the last one the tail. Each further layer goes to the worker whose stage
    would cost least with it. This greedy division makes the slowest stage as fast as possible, as the cost of
    a stage only grows with its layers. Among equals the earlier stage gets the layer.

        2 equal workers, the lm_head costs 2 layers, 8 layers -> counts [5, 3], both stages cost 5 layers

    sites: the cost and the room of each worker, in ring order.
    num_layers: the number of the model's layers.
    tail: how many of the last layers one stage must hold.
    """
    end = len(sites) - 1
    max_counts = [site.max_layers(number == 0, number == end) for number, site in enumerate(sites)]
    counts = [1] * end + [tail]
    if sum(counts) > num_layers or any(count > most for count, most in zip(counts, max_counts)):
        return None
    queue = [(site.cost(counts[number] + 1, number == end), number) for number, site in enumerate(sites)]
    heapify(queue)
    for _ in range(num_layers - sum(counts)):
        while queue and counts[queue[0][1]] >= max_counts[queue[0][1]]:
            heappop(queue)
        if not queue:
            return None
        number = heappop(queue)[1]
        counts[number] += 1
        heappush(queue, (sites[number].cost(counts[number] + 1, number == end), number))
    costs = [site.cost(count, number == end) for number, (site, count) in enumerate(zip(sites, counts))]
    return LayerSplit(sites, tuple(counts), max(costs), sum(costs))


def _measured(worker: Registration, workers: Sequence[Registration], num_tokens: int) -> float:
    """Return a worker's seconds for one layer in a step, the quickest measurement of its host; 0 if a worker
    there has not measured. A worker's curve at this number of tokens is used. Of the workers on the host,
    only those count that have a GPU if this one has, or none if it has none.

    worker: the worker's registration.
    workers: the registrations of all workers, this one included.
    num_tokens: number of tokens in the batch of the step.
    """
    peers = [one for one in workers if _host(one) == _host(worker) and bool(one.gpus) == bool(worker.gpus)]
    return min(CostCurve(one.curve).at(num_tokens) for one in peers)


def _room(worker: Registration, workers: Sequence[Registration]) -> float:
    """Return a worker's bytes for weights, in addition to its KV pages: an equal share of the memory that it
    shares with others, or infinity if the amount is unknown. The memory is the largest amount that one of
    them reports. The KV pages are subtracted, so that the result may be negative.

    worker: the worker's registration.
    workers: the registrations of all workers that run, this one included.
    """
    sharing = [one for one in workers if _memory(one) == _memory(worker)]
    offered = [one.memory for one in sharing if one.memory is not None]
    return max(offered) / len(sharing) - worker.kv_bytes if offered else math.inf


def _host(worker: Registration) -> str:
    """Return the worker's host; its own name if the host is unknown, so that it shares a host with no other
    worker.

    worker: the worker's registration.
    """
    return worker.host or worker.name


def _memory(worker: Registration) -> str:
    """Return what identifies the memory of a worker: its first GPU, or its host. Workers with the same value
    share their memory.

    worker: the worker's registration.
    """
    return worker.gpus[0] if worker.gpus else _host(worker)


def _lacking(sites: Sequence[WorkerCost], config: RingConfig) -> str:
    """Return why the workers cannot hold the model, in words. The text says how much memory is missing, or,
    if there is enough in total, that no cut between layers fits; or that there are more workers than layers;
    or that they are too many because the last layers share keys and values and cannot be apart. The text
    names --kv-memory if a worker's KV pages leave no room.

    sites: the cost and the room of each worker; may be empty.
    config: the options of the ring, with the model's number of layers.
    """
    if len(sites) > config.model_layers:
        return f"{len(sites)} workers cannot share {config.model_layers} layers"
    if len(sites) > config.model_layers - config.tail_layers + 1:
        return (
            f"{len(sites)} workers cannot share {config.model_layers} layers, of which the last "
            f"{config.tail_layers} share keys and values and cannot be apart"
        )
    weights = max((site.worker.weights or NO_WEIGHTS for site in sites), key=lambda one: one.layer)
    need = weights.layer * config.model_layers + weights.first + weights.last
    rooms = [max(site.free_bytes, 0.0) for site in sites]
    gap = need - sum(rooms)
    offers = " + ".join("an unknown amount" if room == math.inf else memory_in_words(room) for room in rooms)
    words = f"{memory_in_words(gap)} are missing" if gap > 0 else "no cut between two layers fits"
    words += ", for KV pages take all: --kv-memory sets less" if 0.0 in rooms else ""
    return (
        f"layers 0:{config.model_layers} need {memory_in_words(need)}, "
        f"workers offer {offers} in addition to their KV pages; {words}"
    )


# The layer ranges of an epoch in ring order, with the worker of each; empty for no epoch.
Stages = tuple[Stage, ...]


def next_stages(
    members: Sequence[Registration],
    config: RingConfig,
    previous: Stages = (),
    wait_for_lost: bool = True,
    failed_names: Collection[str] = (),
) -> Stages | str:
    """Return the stages of the next ring, or what is missing for it, in words. Without a previous ring, as
    many workers as were configured are needed, and they are chosen by speed and room. If lost workers are not
    waited for and the layers do not fit the present workers, the words say so.

    A worker that was started with a layer range gets that range; each gap goes to one of the other workers.
    Without such ranges, each worker left of the previous ring keeps the range that it has loaded, and other
    workers inherit the ranges of those that were lost.

    members: the registrations of all members; drafters are ignored.
    config: the options of the ring.
    previous: the stages of the ring that was formed last; empty if none was.
    wait_for_lost: True to wait for the lost workers if no present one can inherit a lost range; False to
        divide all layers between the workers that are present.
    failed_names: names of workers that could not take part in the last attempt. They are used only if the
        ring cannot be formed without them.

    Raises Refused if the workers of a first ring have no room for the model.
    """
    workers = [member for member in members if member.kind == "worker"]
    if any(worker.layers for worker in workers):
        return _with_brought_ranges(workers, config, previous)
    if not previous:
        lacking = config.workers - len(workers)
        if lacking > 0:
            return f"{lacking} of {config.workers} workers"
        return choose_stages(workers, config, config.workers)
    for passed_over in (failed_names, ()):
        heirs = _inherit([one for one in workers if one.name not in passed_over], previous, config)
        if None not in heirs:
            return _stages(zip((stage.layers for stage in previous), heirs))
    lost = f"{heirs.count(None)} of {len(previous)} workers"
    if wait_for_lost or not workers:
        return lost
    try:
        return choose_stages(workers, config, min(len(workers), len(previous)))
    except Refused as error:
        return f"{lost}; without: {error}"


def could_form(
    members: Sequence[Registration], config: RingConfig, previous: Stages, failed_names: Collection[str]
) -> bool:
    """Return True if these members can form a ring as large as the previous one, or as large as was
    configured. Return False also if their memory is too small. Lost workers count as missing here, unless
    others can inherit their ranges.

    members: the registrations of all members.
    config: the options of the ring.
    previous: the stages of the ring that was formed last; empty if none was.
    failed_names: names of workers that could not take part in the last attempt.
    """
    try:
        return not isinstance(next_stages(members, config, previous, failed_names=failed_names), str)
    except Refused:
        return False


def better_stages(
    members: Sequence[Registration], config: RingConfig, present: Stages, busy_names: Collection[str]
) -> Stages | None:
    """Return the stages of a ring that is better than the present one, or None if no better one is possible.
    A spare worker matters only while fewer stages than configured run; a spare drafter only if the ring uses
    drafters.

    A ring is better if it has more workers, where fewer than configured had to be used, or if it gains a
    drafter that joined late; then the stages may be the present ones.

    members: the registrations of all members.
    config: the options of the ring.
    present: the stages of the running ring.
    busy_names: names of the members of the running ring.
    """
    spare = {member.kind for member in members if member.name not in busy_names}
    if len(present) < config.workers and "worker" in spare:
        # Refused here means that the worker that joined late has no room for any layer.
        with suppress(Refused):
            more = next_stages(members, config)
            if not isinstance(more, str):
                return more
    return present if config.drafts and "drafter" in spare else None


def rebalanced_stages(members: Sequence[Registration], config: RingConfig) -> Stages:
    """Return stages on as many workers as make the ring faster. At least as many workers are used as were
    configured, or all if there are fewer; at most `max_stages`, or as many as the model has layers. If a
    worker was started with a layer range, the stages follow the ranges instead.

    members: the registrations of all members; drafters are ignored.
    config: the options of the ring, which bound the number of stages.

    Raises Refused if the workers have no room for the model, and Unavailable if workers with given layer
    ranges leave a gap.
    """
    workers = [member for member in members if member.kind == "worker"]
    if any(worker.layers for worker in workers):
        drawn = _with_brought_ranges(workers, config, ())
        if isinstance(drawn, str):
            raise Unavailable(f"the ring lacks {drawn}")
        return drawn
    min_workers = min(config.workers, len(workers))
    return choose_stages(workers, config, min_workers, config.max_stages or config.model_layers)


# Ratio. A faster ring must write so many times as many tokens per second, or requests are not interrupted for
# it. Untuned.
MIN_GAIN = 1.1


def faster_stages(
    members: Sequence[Registration],
    config: RingConfig,
    present: Stages,
    busy_names: Collection[str],
    num_requests: int,
) -> Stages | None:
    """Return stages that include workers which are not in the ring yet, if running requests would then be
    clearly faster (MIN_GAIN); else None. Return None also if all workers are in the ring already, if a worker
    has measured nothing, if the stages cannot be formed, or if they would be more than both the permitted
    number and the present number.

    members: the registrations of all members; drafters are ignored.
    config: the options of the ring.
    present: the stages of the running ring.
    busy_names: names of the members of the running ring.
    num_requests: how many requests run at the same time.
    """
    workers = [member for member in members if member.kind == "worker"]
    if all(one.name in busy_names for one in workers) or not all(one.curve for one in workers):
        return None
    stage_limit = max(config.workers, config.max_stages or 0)
    try:
        new_stages = rebalanced_stages(members, replace(config, max_stages=stage_limit))
    except (Refused, Unavailable):
        return None
    # More stages than allowed are returned only if fewer have no room for the model.
    if len(new_stages) > max(stage_limit, len(present)):
        return None
    sites = {site.worker.name: site for site in worker_costs(workers, config)}
    before, after = (tokens_per_second(stages, sites, num_requests) for stages in (present, new_stages))
    return new_stages if after >= before * MIN_GAIN else None


def tokens_per_second(stages: Stages, sites: Mapping[str, WorkerCost], num_requests: int) -> float:
    """Return the tokens per second of all requests together, at one token per step and request. The time of
    the slowest stage includes the lm_head for the last stage.

    Each request waits for its own step to pass all stages and hops, and all requests together are bounded by
    the slowest stage.

        stages of 10 ms and 20 ms, no hops: 1 request -> 1 / 0.03 = 33; 4 requests -> min(133, 1 / 0.02) = 50

    stages: the layer ranges, with the worker of each, in ring order.
    sites: the measured cost of each worker, by name.
    num_requests: how many requests run at the same time; 0 counts as 1.

    Raises KeyError if a stage's worker is not in `sites`.
    """
    costs = [sites[stage.name].cost(len(stage.layers), stage is stages[-1]) for stage in stages]
    step = sum(costs) + hop_seconds([sites[stage.name].worker for stage in stages])
    return min(max(num_requests, 1) / step, 1 / max(costs))


def to_load(
    next_stages: Stages, running_stages: Stages, loaded_ranges: Mapping[str, Range]
) -> dict[str, Range]:
    """Return, by worker name, the ranges that workers must load before the next stages can run: the worker
    does not run all of the range's layers now, and has not loaded them ahead. Empty if nothing must be
    loaded. A range counts as available if the worker runs it, or has loaded it, as a whole.

    next_stages: the stages that shall run.
    running_stages: the stages that run now.
    loaded_ranges: by worker name, the range that the worker has loaded in addition to the one that it runs.
    """
    running = {stage.name: stage.layers for stage in running_stages}

    def here(stage: Stage, available: Range | None) -> bool:
        """Return True if the stage's layers lie within a range that its worker has; False for None.

        stage: a stage of the next ring.
        available: the range that the worker runs, or has loaded; None if it has none.
        """
        return (
            available is not None
            and available.first <= stage.layers.first <= stage.layers.last <= available.last
        )

    return {
        stage.name: stage.layers
        for stage in next_stages
        if not here(stage, running.get(stage.name)) and not here(stage, loaded_ranges.get(stage.name))
    }


def _with_brought_ranges(
    workers: Sequence[Registration], config: RingConfig, previous: Stages
) -> Stages | str:
    """Return stages with the ranges that workers were started with, and other workers in the gaps; or what is
    missing, in words. Words are returned if a gap has no worker with room for it: "a worker for layers 4:8,
    12:16".

    workers: the registrations of all workers, at least one of which was started with a range.
    config: the options of the ring, with the model's number of layers.
    previous: the stages of the ring that was formed last; empty if none was.
    """
    fixed = [(worker.layers, worker) for worker in workers if worker.layers]
    holes = _holes([layers for layers, _ in fixed], config.model_layers)
    spare = [worker for worker in workers if worker.layers is None]
    heirs = _fill(holes, spare, [worker for _, worker in fixed], previous, config)
    lacking = [str(hole) for hole, heir in zip(holes, heirs) if heir is None]
    if lacking:
        return "a worker for layers " + ", ".join(lacking)
    return _stages([*fixed, *zip(holes, heirs)])


def _inherit(
    workers: Sequence[Registration], previous: Stages, config: RingConfig
) -> list[Registration | None]:
    """Return a worker for each stage of the previous ring, in the same order, or None for a stage that no
    worker can take. A worker that is present keeps its stage. The stages of missing workers go to workers
    that had no stage.

    workers: the registrations of the workers that may be used.
    previous: the stages of the ring that was formed last.
    config: the options of the ring.
    """
    present = {worker.name: worker for worker in workers}
    remaining = [present[stage.name] for stage in previous if stage.name in present]
    spare = [worker for worker in workers if worker not in remaining]
    holes = [stage.layers for stage in previous if stage.name not in present]
    heirs = iter(_fill(holes, spare, remaining, previous, config))
    return [present[stage.name] if stage.name in present else next(heirs) for stage in previous]


def _fill(
    holes: Sequence[Range],
    spare_workers: Sequence[Registration],
    other_workers: Sequence[Registration],
    previous: Stages,
    config: RingConfig,
) -> list[Registration | None]:
    """Return a worker for each hole (a range without a worker), in the same order, or None for a hole that no
    worker can take. Each worker is placed at most once.

    The worker that ran the hole's range before is preferred, then workers that ran none of the holes, then
    the order of joining. A worker must have room for the range, while `other_workers` and those placed
    already also run.

    holes: the ranges of layers that have no worker.
    spare_workers: registrations of the workers without a range.
    other_workers: registrations of the workers that have a range.
    previous: the stages of the ring that was formed last.
    config: the options of the ring.
    """
    had = {stage.name: stage.layers for stage in previous}
    left = list(spare_workers)
    placed = list(other_workers)
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


def _stages(assignments: Iterable[tuple[Range, Registration | None]]) -> Stages:
    """Return the stages for these assignments, in the order of the layers.

    assignments: pairs of a layer range and the worker that runs it; a pair without a worker is left out.
    """
    made = [Stage(worker.name, worker.address, layers) for layers, worker in assignments if worker]
    return tuple(sorted(made, key=lambda stage: stage.layers.first))


def _holes(covered: Sequence[Range], num_layers: int) -> list[Range]:
    """Return the ranges of 0 .. num_layers - 1 that no given range covers, in ascending order; empty if all
    layers are covered. Ranges that overlap are allowed.

        covered 0:4 and 8:12 of 16 layers -> 4:8 and 12:16

    covered: layer ranges, in any order.
    num_layers: the number of the model's layers.
    """
    holes: list[Range] = []
    reached = 0
    for taken in sorted(covered, key=lambda one: one.first):
        if taken.first > reached:
            holes.append(Range(reached, taken.first))
        reached = max(reached, taken.last)
    return holes + ([Range(reached, num_layers)] if reached < num_layers else [])
