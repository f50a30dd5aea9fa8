"""Random faults by the first seeds: whatever happens, every rule holds. `make faults SEED=n` tells one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import some
from tests.faults.campaign import draw, fingerprint, judge
from tests.faults.checker import HARMLESS

pytestmark = pytest.mark.slow

SEEDS = range(20)


@pytest.mark.parametrize("seed", some(SEEDS, 7, 12, 19))
def test_every_rule_holds(seed: int) -> None:
    assert judge(draw(seed), seed) == []


def test_short_stalls_of_one_loop_never_add_up_to_a_long_one() -> None:
    for seed in range(2000):
        free = dict[str, float]()
        for fault in draw(seed).faults:
            if fault.kind == "stall" and fault.lasts <= HARMLESS:
                assert fault.at > free.get(fault.whom, 0.0)
                free[fault.whom] = fault.at + fault.lasts


@pytest.mark.parametrize("seed", [19])
def test_a_seed_does_the_same_again_in_this_process_and_in_another(seed: int) -> None:
    """Whatever its strings hash to, and however long anything really takes."""
    told = fingerprint(seed)
    assert fingerprint(seed) == told
    code = f"from tests.faults.campaign import fingerprint; print(fingerprint({seed}))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split()[-1] == told
