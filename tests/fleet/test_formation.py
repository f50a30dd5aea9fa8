"""Who may join, and what every member of a ring is told."""

from dataclasses import replace

import pytest

from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.errors import Occupied, Refused
from specsot.members import Head, Range, Registration, TreeShape
from specsot_master.core.ring.epoch import (
    check_joining,
    configurations_of,
    count_pages,
    step_curve,
    with_one_gpu,
)
from specsot_master.core.ring.placement import next_stages
from specsot_master.core.ring.ring_state import RingConfig

WISHES = RingConfig(fingerprint="abc", model_layers=8, workers=2)


def worker(name, layers=None, **more):
    fields = dict(
        kind="worker",
        name=name,
        address=f"{name}:1",
        fingerprint="abc",
        model_layers=8,
        max_positions=2048,
        kv_bytes=1 << 20,
        row_bytes=64,
        layers=layers,
        curve=((1, 0.001), (8, 0.002)),
    )
    return Registration(**(fields | more))


def drafter(name="d", **more):
    return worker(name, **({"kind": "drafter", "head": Head((2, 4, 5), 16)} | more))


@pytest.mark.parametrize(
    ("joining", "members", "words"),
    [
        (worker("w", fingerprint="xyz"), [], "fingerprint xyz, here abc"),
        (worker("w", protocol=9), [], "protocol 9, this master 1"),
        (worker("w"), [worker("w", address="v:1")], "named w has joined already"),
        (
            drafter("d2", address="drafter:50052", host="two"),
            [drafter("d1", address="drafter:50052", host="one")],
            r"drafter d1 of host one has joined already at drafter:50052: give every process .*--advertise",
        ),
        (drafter("d2", head=Head((1,), 16)), [drafter("d1")], "d2 has head Head.*d1 Head.*: all must agree"),
        (worker("master"), [], "a worker cannot be named master"),
        (worker("w", Range(0, 9)), [], "0:9 do not lie within 0:8"),
        (worker("w", Range(4, 4)), [], "4:4 do not lie within"),
        (worker("w", Range(3, 8)), [worker("v", Range(0, 4))], "3:8 overlap 0:4 of v"),
        (worker("w"), [drafter(), worker("v", quantization="int8")], "w has quantization none, v int8"),
    ],
)
def test_who_does_not_belong_is_refused_with_both_values(joining, members, words):
    with pytest.raises(Refused, match=words):
        check_joining(joining, members, WISHES)


@pytest.mark.parametrize(
    "layers", [Range(0, 6), Range(4, 8), Range(4, 5), Range(0, 3), Range(1, 8), Range(0, 8)]
)
def test_a_range_that_parts_layers_which_share_keys_is_refused_with_the_allowed_cuts(layers):
    wishes = replace(WISHES, tail_layers=5)
    if layers in (Range(0, 3), Range(1, 8), Range(0, 8)):
        check_joining(worker("w", layers), [], wishes)
        return
    words = f"layers {layers} part the layers 3:8, which share keys and values; .* cut before layers 1 to 3"
    with pytest.raises(Refused, match=words):
        check_joining(worker("w", layers), [], wishes)


@pytest.mark.parametrize(
    ("joining", "member", "kind"),
    [
        (worker("w"), worker("w"), Occupied),
        (drafter("d2", head=None), drafter("d1"), Occupied),
        (worker("w", Range(3, 8)), worker("v", Range(0, 4)), Occupied),
        (worker("w", fingerprint="xyz"), worker("w"), Refused),
        (worker("w"), worker("v", quantization="int8"), Refused),
    ],
)
def test_a_worker_that_one_member_keeps_out_is_refused_with_that_reason(joining, member, kind):
    with pytest.raises(Refused) as refused:
        check_joining(joining, [member], WISHES)
    assert refused.type is kind


def test_a_ring_without_drafter_refuses_one():
    with pytest.raises(Refused, match="--drafter none"):
        check_joining(drafter(), [], RingConfig(fingerprint="abc", model_layers=8, drafter="none"))


def test_a_worker_more_than_needed_is_welcome():
    check_joining(worker("w"), [worker("u"), worker("v")], WISHES)
    check_joining(worker("w"), [worker("u", Range(0, 4)), worker("v", Range(4, 8))], WISHES)


def test_workers_of_one_machine_get_different_gpus_and_one_that_brings_its_own_keeps_it():
    here, given = [worker("pinned", gpus=("B",))], []
    for name in "uvwx":
        here.append(with_one_gpu(worker(name, gpus=("A", "B", "C")), here))
        given += here[-1].gpus
    assert given == ["A", "C", "A", "B"]
    assert with_one_gpu(here[0], here) == here[0]
    assert with_one_gpu(worker("cpu"), here).gpus == ()
    stages = next_stages(here[:2], WISHES)
    assert {name: told.gpu for name, told in configurations_of(1, here[:2], stages, WISHES).items()} == {
        "pinned": "B",
        "u": "A",
    }


def test_pages_are_what_the_tightest_member_holds():
    members = [worker("a"), worker("b", kv_bytes=256 * 64 * 4 * 3), drafter(kv_bytes=256 * 64 * 9)]
    stages = next_stages(members, WISHES)
    assert count_pages(members, stages, members[2:], WISHES) == 3
    with pytest.raises(Refused, match="more KV memory: 0 pages"):
        count_pages([worker("a", kv_bytes=1), worker("b")], stages, [], WISHES)


def test_every_member_receives_the_same_ring_under_its_own_name():
    members = [worker("a"), worker("b"), drafter()]
    plans = configurations_of(3, members, next_stages(members, WISHES), WISHES)
    assert set(plans) == {"a", "b", "d"}
    assert {plan.you for plan in plans.values()} == {"a", "b", "d"}
    assert {plan.drafter for plan in plans.values()} == {"d:1"}
    assert step_curve(members, plans["a"].stages) == ((1, 0.008), (8, 0.016))


@pytest.mark.parametrize(("stages", "most", "flight"), [(1, None, 1), (2, None, 3), (2, 1, 1), (3, 2, 2)])
def test_as_many_frames_fly_as_keep_all_stages_busy_unless_fewer_shall(stages, most, flight):
    wished = replace(WISHES, workers=stages, max_in_flight=most)
    members = [worker(name) for name in "abc"[:stages]]
    plans = configurations_of(1, members, next_stages(members, wished), wished)
    assert {plan.flight for plan in plans.values()} == {flight}


def test_trees_are_as_large_as_the_drafter_can_make_them():
    """And whole where either of the two says so; a drafter without pages of its own limits nobody."""
    chain, members = TreeShape(4, 1, 6), [worker("a"), worker("b")]
    for own, wished, shape in (
        (None, TreeShape(), TreeShape()),
        (chain, TreeShape(), chain),
        (chain, TreeShape(fixed=True), replace(chain, fixed=True)),
        (replace(chain, fixed=True), TreeShape(), replace(chain, fixed=True)),
    ):
        joined = [*members, drafter(shape=own, row_bytes=0, drafters=("ngram",))]
        plan = configurations_of(1, joined, next_stages(joined, WISHES), replace(WISHES, shape=wished))["a"]
        assert (plan.shape, plan.slots) == (shape, shape.slots)
        assert plan.pages > 1


def test_the_last_stage_keeps_features_in_the_same_memory():
    """A row of KV takes 4 layers x 64 bytes; the ring of features has rows of 16 numbers of 4 bytes."""
    members = [worker("a"), worker("b", number_bytes=4), drafter()]
    stages = next_stages(members, WISHES)
    assert not isinstance(stages, str)
    assert count_pages(members, stages, [], WISHES) == (1 << 20) // (4 * 64 * 256)
    left = (1 << 20) - FEATURE_RING_ROWS * 16 * 4
    assert count_pages(members, stages, members[2:], WISHES) == left // (4 * 64 * 256)
    poor = [members[0], replace(members[1], kv_bytes=9), members[2]]
    with pytest.raises(Refused, match="0 pages of 256 rows fit"):
        count_pages(poor, stages, poor[2:], WISHES)


def test_pages_are_small_where_a_gpu_computes_and_hold_as_many_rows_as_anywhere():
    """Unless somebody chose; more memory than there may be pages for is left alone."""
    for gpus, rows in (((), 256), (("A",), 64)):
        members = [worker(name, gpus=gpus, kv_bytes=1 << 40) for name in "uv"]
        ring = configurations_of(1, members, next_stages(members, WISHES), WISHES)["u"]
        assert (ring.page_rows, ring.pages * ring.page_rows) == (rows, 4096 * 256)
        chosen = replace(WISHES, page_rows=32)
        ring = configurations_of(1, members, next_stages(members, chosen), chosen)["u"]
        assert (ring.page_rows, ring.pages) == (32, 4096)
