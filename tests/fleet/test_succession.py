"""Who runs what next: those who did, their heirs, or everybody anew."""

from dataclasses import replace

import pytest

from specsot.errors import Refused, Unavailable
from specsot.members import Range, Stage, WeightBytes
from specsot_master.core.ring.placement import could_form, next_stages, rebalanced_stages
from tests.fleet.test_formation import WISHES, drafter, worker

MIB = 1 << 20
BEFORE = tuple(Stage(name, f"{name}:1", Range(n * 2, n * 2 + 2)) for n, name in enumerate("abcd"))


def holding(name, layers, **more):
    """A worker with room for so many layers."""
    return worker(name, memory=(layers + 1) * MIB, kv_bytes=MIB, weights=WeightBytes(MIB, 0, 0), **more)


def workers(names):
    return [worker(name) for name in names]


def told(drawn):
    return drawn if isinstance(drawn, str) else " ".join(f"{one.name}={one.layers}" for one in drawn)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], "2 of 2 workers"),
        (workers("u"), "1 of 2 workers"),
        ([worker("u"), drafter()], "1 of 2 workers"),
        (workers("uv"), "u=0:4 v=4:8"),
        (workers("uvw"), "u=0:4 v=4:8"),
        ([worker("u", Range(0, 3))], "a worker for layers 3:8"),
        ([worker("u", Range(0, 3)), worker("v", Range(6, 8))], "a worker for layers 3:6"),
        ([worker("u", Range(0, 3)), worker("v")], "u=0:3 v=3:8"),
        ([worker("v"), worker("w"), worker("u", Range(0, 3))], "u=0:3 v=3:8"),
        ([worker("u", Range(0, 3)), worker("v", Range(3, 8))], "u=0:3 v=3:8"),
        ([holding("v", 4), worker("u", Range(0, 3))], "a worker for layers 3:8"),
        ([holding("v", 4), holding("w", 5), worker("u", Range(0, 3))], "u=0:3 w=3:8"),
    ],
)
def test_the_first_ring(members, expected):
    assert told(next_stages(members, WISHES)) == expected


@pytest.mark.parametrize(
    ("members", "patient", "expected"),
    [
        (workers("dcba"), True, "a=0:2 b=2:4 c=4:6 d=6:8"),
        (workers("acd"), True, "1 of 4 workers"),
        (workers("acd"), False, "a=0:3 c=3:6 d=6:8"),
        (workers("acde"), True, "a=0:2 e=2:4 c=4:6 d=6:8"),
        (workers("efad"), True, "a=0:2 e=2:4 f=4:6 d=6:8"),
        (workers("ead"), True, "1 of 4 workers"),
        (workers("ead"), False, "e=0:3 a=3:6 d=6:8"),
        ([holding("e", 1), holding("f", 2), *workers("acd")], True, "a=0:2 f=2:4 c=4:6 d=6:8"),
        ([holding("e", 1), *workers("acd")], True, "1 of 4 workers"),
        ([holding(name, 3) for name in "acd"], False, "a=0:3 c=3:6 d=6:8"),
        (
            [holding(name, 2) for name in "acd"],
            False,
            "1 of 4 workers; without: layers 0:8 need 8.0 MiB, "
            "workers offer 2.0 MiB + 2.0 MiB + 2.0 MiB in addition to their KV pages; 2.0 MiB are missing",
        ),
        ([], False, "4 of 4 workers"),
        ([worker("a", Range(0, 5)), *workers("xd")], True, "a=0:5 x=5:8"),
        ([worker("a", Range(0, 6)), *workers("xd")], True, "a=0:6 d=6:8"),
    ],
)
def test_the_ring_after_a_loss(members, patient, expected):
    assert told(next_stages(members, WISHES, BEFORE, patient)) == expected


def test_a_failed_member_is_passed_over_only_if_another_can_take_its_place():
    assert (
        told(next_stages(workers("abcde"), WISHES, BEFORE, failed_names={"b"})) == "a=0:2 e=2:4 c=4:6 d=6:8"
    )
    assert told(next_stages(workers("abcd"), WISHES, BEFORE, failed_names={"b"})) == "a=0:2 b=2:4 c=4:6 d=6:8"


def test_a_ring_drawn_anew_takes_all_that_help():
    assert told(rebalanced_stages(workers("abc"), WISHES)) == "a=0:3 b=3:6 c=6:8"
    assert told(rebalanced_stages(workers("abc"), replace(WISHES, max_stages=2))) == "a=0:4 b=4:8"
    assert told(rebalanced_stages(workers("a"), WISHES)) == "a=0:8"
    assert told(rebalanced_stages([*workers("ab"), worker("c", Range(0, 2))], WISHES)) == "c=0:2 a=2:8"
    with pytest.raises(Unavailable, match="the ring lacks a worker for layers 2:8"):
        rebalanced_stages([worker("c", Range(0, 2))], WISHES)
    with pytest.raises(Refused, match=r"7\.0 MiB are missing"):
        rebalanced_stages([holding("a", 1)], WISHES)


def test_a_ring_that_is_refused_could_not_form():
    assert could_form(workers("uv"), WISHES, (), ())
    assert not could_form(workers("u"), WISHES, (), ())
    refused = [holding("a", 1), holding("b", 1)]
    with pytest.raises(Refused):
        next_stages(refused, WISHES, ())
    assert not could_form(refused, WISHES, (), ())
