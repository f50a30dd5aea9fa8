"""Who shares the layers, how many each, in which order; and what that promises."""

import itertools
import random
import re
from dataclasses import replace

import pytest

from specsot.errors import Refused
from specsot.members import Range, Stage, WeightBytes
from specsot_master.core.ring.epoch import member_infos
from specsot_master.core.ring.placement import (
    choose_stages,
    expected_throughput,
    faster_stages,
    fits,
    split_layers,
    to_load,
    worker_costs,
)
from tests.fleet.test_formation import WISHES, worker

GIB = 1 << 30
PLAIN = replace(WISHES, drafter="none", model_layers=32)
WEIGHTS = WeightBytes(GIB // 2, GIB, GIB)


def site(name, ms=1.0, gib=None, **more):
    """A worker on a machine of its own: milliseconds a layer, and memory beside its KV pages."""
    memory = None if gib is None else int(gib * GIB) + (1 << 20)
    told = dict(host=name, curve=((1, ms / 1e3),), memory=memory, weights=WEIGHTS)
    return worker(name, model_layers=32, **(told | more))


def placed(*workers, least=None, most=None, wishes=PLAIN):
    stages = choose_stages(workers, wishes, least or len(workers), most)
    return " ".join(f"{stage.name}={stage.layers}" for stage in stages)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([site("a")], "a=0:32"),
        ([site("a"), site("b"), site("c")], "a=0:12 b=12:23 c=23:32"),
        ([site("a"), site("b", 1.2)], "a=0:17 b=17:32"),  # equal within noise
        ([site("w-10"), site("w-1"), site("x"), site("w-0")], "w-0=0:9 w-1=9:18 w-10=18:26 x=26:32"),
        ([site("a", 0.0), site("b", 9.0)], "a=0:16 b=16:32"),  # nothing is known of one of them
        ([site("a", 3), site("b", 1, weights=None)], "a=0:8 b=8:32"),
        ([site("a", gib=5), site("b", gib=17)], "b=0:24 a=24:32"),  # embedding and head take room, too
        ([site("a", gib=1.2), site("b", gib=17), site("c", gib=17)], "b=0:16 a=16:18 c=18:32"),
        ([site("a"), site("b"), site("c", host="a")], "a=0:12 c=12:23 b=23:32"),  # neighbours
        ([site("a", 5, host="x"), site("b", host="x")], "a=0:17 b=17:32"),  # they disturbed each other
        (
            [site("a", 5, host="x"), site("c", host="x"), site("b")],
            "a=0:12 c=12:23 b=23:32",
        ),  # the same, beside b
        ([site("a", 3, host="x"), site("b", host="x", gpus=("G",), weights=None)], "a=0:8 b=8:32"),  # a GPU
    ],
)
def test_the_slowest_stage_is_as_fast_as_can_be(workers, expected):
    assert placed(*workers) == expected


def test_a_step_takes_at_least_as_long_as_its_weights_are_read():
    one, other = site("a", copy_speed=10 * GIB), site("b")
    first, last = member_infos([one, other], {"a": Range(0, 8), "b": Range(8, 32)}, ())
    assert (first.weights, first.min_seconds) == (4 * GIB, 0.4), (
        "the embedding is not read, but for a few rows"
    )
    assert (last.weights, last.min_seconds) == (13 * GIB, 0.0), "nobody measured"
    disturbed = site("b", host="a", copy_speed=GIB)
    shared = member_infos([one, disturbed], {"b": Range(8, 32)}, ())
    assert shared[1].min_seconds == 1.3, "as fast as the same memory was elsewhere"


def test_the_head_of_the_model_counts_as_layers_where_all_have_measured():
    assert placed(site("a", 1), site("b", 3)) == "a=0:26 b=26:32"
    assert placed(site("a", 1), site("b", 3), wishes=replace(PLAIN, placement="even")) == "a=0:16 b=16:32"
    heavy = replace(WEIGHTS, last=10 * WEIGHTS.layer)  # a small model of many words
    assert placed(site("a", weights=heavy), site("b", weights=heavy)) == "a=0:21 b=21:32"


def test_no_other_cut_of_the_same_order_is_better():
    rng = random.Random(7)
    for _ in range(30):
        workers = [site(name, rng.uniform(1, 9), rng.uniform(2, 9), weights=None) for name in "abc"]
        workers = [replace(one, weights=WeightBytes(GIB, 0, 0), model_layers=9) for one in workers]
        sites = worker_costs(workers, PLAIN)
        found = split_layers(sites, 9)
        costs = [
            max(one.cost(count, number == 2) for number, (one, count) in enumerate(zip(order, counts)))
            for order in itertools.permutations(sites)
            for counts in itertools.product(range(1, 8), repeat=3)
            if sum(counts) == 9 and all(count <= one.max_layers() for one, count in zip(order, counts))
        ]
        assert (found.slowest_stage_cost if found else None) == (min(costs) if costs else None)


def test_more_workers_than_needed_are_used_where_fewer_have_no_room_or_when_asked_for_all_that_help():
    few = [site("a", gib=10), site("b", gib=4), site("c", gib=9)]
    assert placed(*few, least=2) == "a=0:13 b=13:21 c=21:32"
    alike = [site(name) for name in "abcde"]
    assert placed(*alike, least=2) == "a=0:17 b=17:32"
    assert placed(*alike, least=2, most=3) == "a=0:12 b=12:23 c=23:32"
    assert placed(*alike, least=2, most=32).count("=") == 5
    assert placed(*alike, site("slow", 40), least=2, most=32).count("=") == 5
    assert placed(site("slow", 40), *alike, least=2) == "a=0:17 b=17:32"
    assert placed(site("tiny", gib=0.1), *alike, least=2) == "a=0:17 b=17:32"


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (
            [site("a", gib=8), site("b", gib=4)],
            "layers 0:32 need 18.0 GiB, workers offer 8.0 GiB + 4.0 GiB in addition to their KV pages; "
            "6.0 GiB are missing",
        ),
        (
            [site("a", gib=-4)],
            "workers offer 0 B in addition to their KV pages; 18.0 GiB are missing, "
            "for KV pages take all: --kv-memory sets less",
        ),
        ([site("a", gib=9.3), site("b", gib=8.8)], "no cut between two layers fits"),
        ([site("a", gib=16, host="x"), site("b", gib=9, host="x")], "offer 8.0 GiB + 8.0 GiB"),
    ],
)
def test_a_refusal_says_what_is_needed_offered_and_missing(workers, words):
    with pytest.raises(Refused, match=re.escape(words)):
        placed(*workers)


def test_room_for_a_range_counts_other_members_of_the_same_host():
    a, b = site("a", gib=10, host="x"), site("b", gib=10, host="x")
    assert fits(a, Range(4, 20), (), PLAIN)
    assert not fits(a, Range(4, 20), (b,), PLAIN)
    assert not fits(a, Range(0, 19), (), PLAIN)
    assert fits(worker("nobody knows"), Range(0, 32), (b,), PLAIN)


def test_the_pace_counts_layers_the_models_end_and_hops_between_machines():
    a, b, c = site("a", 1, rtt=0.004), site("b", 2, rtt=0.002), site("c", 1, host="b", rtt=0.002)
    members = {one.name: one for one in (a, b, c)}
    stages = tuple(Stage(name, name, Range(n * 4, n * 4 + 4)) for n, name in enumerate("abc"))
    pace = expected_throughput(stages, members)
    assert pace.stages == pytest.approx((0.004, 0.008, 0.006))
    assert pace.hops == pytest.approx(0.006)
    assert str(pace) == "a 0:4 4.0 ms, b 4:8 8.0 ms, c 8:12 6.0 ms, hops 6.0 ms: 41.7 tokens/s without drafts"
    unmeasured = {name: replace(one, curve=()) for name, one in members.items()}
    assert str(expected_throughput(stages, unmeasured)) == "a 0:4, b 4:8, c 8:12"


def test_stages_on_gpus_of_one_host_take_time_between_them():
    """Qwen2.5-Coder-1.5B in two stages on one H200: its layers take 1.96 ms, and 275 tokens/s came."""
    a, b = site("a", host="x", gpus=("G",)), site("b", host="x", gpus=("G",))
    stages = Stage("a", "a", Range(0, 1)), Stage("b", "b", Range(1, 2))
    members = {one.name: replace(one, weights=None, curve=((1, 0.00098),)) for one in (a, b)}
    pace = expected_throughput(stages, members)
    assert pace.hops > 0
    assert pace.tokens_per_second == pytest.approx(275, rel=0.15)
    on_cpus = {name: replace(one, gpus=()) for name, one in members.items()}
    assert expected_throughput(stages, on_cpus).hops == 0
    alone = expected_throughput(stages[:1], members)
    assert alone.hops == 0, "a single stage passes nothing on"


ONE, TWO = replace(PLAIN, workers=1), replace(PLAIN, workers=1, max_stages=2)
FAR = dict(rtt=0.02)


@pytest.mark.parametrize(
    ("workers", "requests", "wishes", "expected"),
    [
        ([site("a", 2), site("b")], 1, ONE, "b=0:32"),  # twice as fast
        ([site("a"), site("b", 2)], 1, ONE, None),
        ([site("a"), site("b", 0.95)], 1, ONE, None),  # equal within noise
        ([site("a"), site("b")], 1, TWO, None),  # one text waits for both stages in turn
        ([site("a"), site("b")], 2, TWO, "a=0:17 b=17:32"),  # two texts use both at once
        ([site("a"), site("b")], 2, ONE, None),  # more stages than wished for
        ([site("a", **FAR), site("b", **FAR)], 2, TWO, None),  # the hops cost what it brings
        ([site("a", **FAR), site("b", **FAR)], 4, TWO, "a=0:17 b=17:32"),
        ([site("a", **FAR), site("b", 0.7, **FAR)], 1, TWO, None),
        ([site("a"), site("b", curve=())], 2, TWO, None),  # nothing is known of it
        ([site("a", gib=20), site("b", 0.1, gib=2)], 1, ONE, None),  # no room for all layers
        ([site("a")], 5, TWO, None),
    ],
)
def test_a_worker_is_taken_in_amid_requests_where_that_pays(workers, requests, wishes, expected):
    present = (Stage("a", "a:1", Range(0, 32)),)
    found = faster_stages(workers, wishes, present, {"a"}, requests)
    assert (found and " ".join(f"{stage.name}={stage.layers}" for stage in found)) == expected


def test_what_a_stage_runs_or_has_loaded_needs_no_loading():
    def ring(*edges):
        return tuple(
            Stage(name, name, Range(*edge)) for name, edge in zip("abc", itertools.pairwise((0, *edges)))
        )

    wanted = ring(10, 20, 32)
    assert to_load(wanted, ring(16, 32), {}) == {"b": Range(10, 20), "c": Range(20, 32)}
    assert to_load(wanted, ring(16, 32), {"c": Range(20, 32)}) == {"b": Range(10, 20)}
    assert to_load(wanted, ring(16, 32), {"b": Range(8, 20), "c": Range(21, 32)}) == {"c": Range(20, 32)}
    assert to_load(ring(8, 12), ring(16, 20), {}) == {"b": Range(8, 12)}


SHARED = replace(PLAIN, tail_layers=22)


def test_layers_that_share_keys_stay_together_on_the_last_stage():
    """Also where another cut would be faster; among those that are allowed, the fastest is chosen."""
    assert placed(site("a"), site("b"), wishes=SHARED) == "a=0:10 b=10:32"
    assert placed(site("a"), site("b"), wishes=replace(PLAIN, tail_layers=4)) == "a=0:17 b=17:32"
    assert placed(site("a"), site("b"), site("c"), wishes=SHARED) == "a=0:5 b=5:10 c=10:32"
    assert placed(site("a", 0.1), site("b"), wishes=SHARED) == "b=0:3 a=3:32", "the quick one has the tail"
    assert placed(site("a", gib=20), site("b", gib=9), wishes=SHARED) == "b=0:10 a=10:32", "as it has room"
    with pytest.raises(Refused, match="12 workers cannot share 32 layers, of which the last 22 share"):
        placed(*(site(f"w-{number}") for number in range(12)), wishes=SHARED)


def test_an_embedding_on_every_stage_takes_room_on_every_stage():
    """Layers of half a GiB, and one GiB of embedding and of lm_head each."""
    everywhere = replace(PLAIN, embeds_everywhere=True)
    for wishes, middle in ((PLAIN, 8), (everywhere, 6)):
        found = worker_costs([site("a", gib=4)], wishes)[0]
        assert (found.max_layers(), found.max_layers(is_last=True)) == (middle, middle - 2)
        assert found.max_layers(is_first=True) == 6, "the first stage has it once"
        assert fits(site("a", gib=4), Range(2, 10), (), wishes) == (wishes is PLAIN)
