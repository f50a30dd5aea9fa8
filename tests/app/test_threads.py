"""All tensor work of an embedded fleet runs on one thread, and so on one OpenMP team."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

COUNT = """
import asyncio, os
from specsot_app.fleets import Wanted, open_fleet
from specsot_app.asking import ask_of

async def main():
    fleet = await open_fleet(Wanted(drafter="{drafter}", stages=2))
    async for _ in fleet.generate(ask_of("Explain Photosynthesis.", mode="{mode}", max_new_tokens=12)):
        pass
    print(len(os.listdir("/proc/self/task")))
    await fleet.close()

asyncio.run(main())
"""


def threads_with(drafter: str, mode: str) -> int:
    program = COUNT.format(drafter=drafter, mode=mode)
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_drafter_brings_no_second_openmp_team():
    """With more threads than cores OpenMP's waiting changes, and every lap takes half as long again."""
    assert threads_with("eagle", "sot") == threads_with("none", "direct")
