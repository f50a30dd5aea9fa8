"""Which kernels a captured graph spends its time in.

Refuses to know what the graph computes: kernels go by the names they have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

TIMES = 3  # that a graph is replayed
MOST = 10  # kernels that are told by name
LETTERS = 48  # of a name: what templates add is left out


def kernels_of(replay: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel in one replay, the longest first.

    Kernels may overlap, and a profile slows them down: shares mean more than sums.
    """
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(TIMES):
            replay()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        spent[event.key] += event.self_device_time_total / TIMES
    return longest(spent)


def longest(spent: Mapping[str, float]) -> dict[str, float]:
    """The MOST that take longest, by short names, and all others together."""
    named: dict[str, float] = defaultdict(float)
    for name, taken in spent.items():
        named[_short(name)] += taken
    order = sorted(named, key=lambda name: -named[name])
    told = {name: round(named[name], 1) for name in order[:MOST]}
    rest = sum(named[name] for name in order[MOST:])
    return told | ({"others": round(rest, 1)} if rest else {})


def _short(name: str) -> str:
    """Without its template's arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:LETTERS]
