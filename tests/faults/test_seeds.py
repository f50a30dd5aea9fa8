"""Random faults by the first seeds: whatever happens, every rule holds. `make faults SEED=n` tells one."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from tests.conftest import some
from tests.faults.campaign import answers, draw, fingerprint, play
from tests.faults.checker import HARMLESS, check
from tests.faults.history import History

pytestmark = pytest.mark.slow

SEEDS = range(20)


@cache
def played(seed: int) -> History:
    return play(draw(seed), seed)


@pytest.mark.parametrize("seed", some(SEEDS, 7, 12, 19))
def test_every_rule_holds(seed: int) -> None:
    assert check(played(seed), answers()) == []


def test_short_stalls_of_one_loop_never_add_up_to_a_long_one() -> None:
    for seed in range(2000):
        free = dict[str, float]()
        for fault in draw(seed).faults:
            if fault.kind == "stall" and fault.lasts <= HARMLESS:
                assert fault.at > free.get(fault.whom, 0.0)
                free[fault.whom] = fault.at + fault.lasts


def test_a_seed_does_the_same_again() -> None:
    """However long anything really takes."""
    assert fingerprint(play(draw(19), 19)) == fingerprint(played(19))


@pytest.mark.full
@pytest.mark.parametrize("seed", [19])
def test_a_seed_does_the_same_in_another_process(seed: int) -> None:
    """Whatever its strings hash to."""
    told = fingerprint(played(seed))
    code = f"from tests.faults.campaign import *; print(fingerprint(play(draw({seed}), {seed})))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split()[-1] == told
