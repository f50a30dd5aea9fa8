"""All tensor work of embedded fleets runs on one thread, and so on one OpenMP team."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

COUNT = """
import asyncio, os
from specsot_app.fleet.options import FleetOptions
from specsot_app.fleet.opening import open_fleet
from specsot_app.core.ask import ask_of

ASK = ask_of("Explain Photosynthesis.", mode="{mode}", max_new_tokens=64, max_branch_tokens=8)

async def main():
    fleet = await open_fleet(FleetOptions(drafter="{drafter}", stages=2))
    async for _ in fleet.generate(ASK):
        pass
    print(len(os.listdir("/proc/self/task")))
    await fleet.close()

asyncio.run(main())
"""

TABLES = """
import asyncio, os
from specsot_app.bench.core.methods import HEAD, PLAINLY
from specsot_app.bench.runners import Runners
from specsot_app.bench.rounds import models_of
from specsot_app.fleet.options import FleetOptions

async def main():
    async with Runners(models_of(FleetOptions(dtype="fp32"), None)) as stands:
        for method in (PLAINLY, HEAD[0]):
            await stands.write(method, "Explain Photosynthesis.", 4)
            counts.append(len(os.listdir("/proc/self/task")))
    print(*counts)

counts = []
asyncio.run(main())
"""


def counts_of(program: str) -> list[int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}  # counted, not timed
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return [int(count) for count in done.stdout.splitlines()[-1].split()]


def threads_with(drafter: str, mode: str) -> int:
    return counts_of(COUNT.format(drafter=drafter, mode=mode))[-1]


@pytest.mark.full  # the fleets of the tables are one without and one with a drafter, too
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_drafter_brings_no_second_openmp_team():
    """With more threads than cores OpenMP's waiting changes, and every lap takes half as long again."""
    assert threads_with("eagle", "sot") == threads_with("none", "direct")


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_fleets_of_the_tables_share_one_openmp_team():
    plainly, with_a_head = counts_of(TABLES)
    assert with_a_head == plainly
