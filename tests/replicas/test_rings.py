"""Two rings without weights behind one master, in virtual time: whatever breaks, every answer is the same."""

import random

import pytest

from tests.conftest import some
from tests.faults.campaign import ASKS, Campaign, Fault, answers, play
from tests.faults.checker import check
from tests.faults.clients import Habit
from tests.faults.history import Lapped, Worked
from tests.faults.world import Shape

pytestmark = pytest.mark.torch

TWO = Shape(stages=2, drafter=False, replicas=2)


def many(*asks):
    return tuple((0.01 * n, ask, Habit()) for n, ask in enumerate(asks))


def busy(history):
    """Frames that each worker computed."""
    seen = [entry.member.partition("#")[0] for _, entry in history if isinstance(entry, Worked)]
    return {name: seen.count(name) for name in sorted(set(seen))}


def epochs(history):
    return {entry.epoch for _, entry in history if isinstance(entry, Lapped)}


def test_requests_are_spread_over_both_rings():
    history = play(Campaign(TWO, many(*ASKS[:4]), ()), 1)
    assert check(history, answers()) == []
    assert len(busy(history)) == 4
    assert len(epochs(history)) == 2


def test_a_ring_that_dies_leaves_the_other_alone_and_its_requests_go_on_there():
    history = play(Campaign(TWO, many(*ASKS[:4]), (Fault("kill", "worker-1", 1.0),)), 1)
    assert check(history, answers()) == []
    assert len(epochs(history)) == 2, "one epoch of each ring: nothing was formed anew for it"


@pytest.mark.parametrize("seed", some(range(2), 1))
def test_whatever_happens_the_rules_hold(seed):
    rng = random.Random(seed)
    whom = [f"worker-{n}" for n in range(4)]
    faults = tuple(
        Fault(rng.choice(("kill", "leave", "freeze")), name, rng.uniform(0, 8), 20.0)
        for name in rng.sample(whom, 3)
    )
    habits = (Habit(), Habit(pause=0.3), Habit(leave=9, back=4.0), Habit(timeout=30.0))
    clients = tuple((rng.uniform(0, 6), rng.choice(ASKS), rng.choice(habits)) for _ in range(6))
    shape = Shape(stages=2, drafter=True, replicas=2, journal=bool(seed % 2))
    assert check(play(Campaign(shape, clients, faults), seed), answers()) == []
