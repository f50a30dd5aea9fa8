"""All tensor work of embedded fleets runs on one thread, and so on one OpenMP team."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.forked import ran

pytestmark = pytest.mark.torch


async def count_threads() -> list[int]:
    """With a fleet without, and one with a drafter."""
    from specsot_app.fleet.options import FleetOptions
    from specsot_bench.core.methods import HEAD, PLAINLY
    from specsot_bench.rounds import models_of
    from specsot_bench.runners import Runners

    counts: list[int] = []
    async with Runners(models_of(FleetOptions(dtype="fp32"), None)) as runners:
        for method in (PLAINLY, HEAD[0]):
            await runners.write(method, "Explain Photosynthesis.", 4)
            counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_drafter_brings_no_second_openmp_team():
    """With more threads than cores OpenMP's waiting changes, and every step takes half as long again."""
    status, told = ran("tests.app.test_threads")
    assert status == 0, "\n".join(told)
    plainly, with_a_head = map(int, told[-1].split())
    assert with_a_head == plainly > 2


if __name__ == "__main__":
    import torch

    from specsot.grammar import state

    # The rests between explored places are timers, which are threads, too.
    state.run_later = lambda seconds, call: call()
    torch.set_num_threads(3)
    print(*asyncio.run(count_threads()))
