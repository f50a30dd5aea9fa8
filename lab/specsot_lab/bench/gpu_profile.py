"""Which kernels a device spends its time in while something runs.

Kernels go by the names they have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float, str]  # begin and end of a kernel in microseconds, and its name

TIMES = 3  # that it runs
MOST = 10  # kernels that are told by name
LETTERS = 48  # of a name: what templates add is left out


def kernels_of(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel in one run, the longest first. A profile itself slows things down."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(TIMES):
            run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    spans = ((event.time_range.start, event.time_range.end, event.name) for event in events)
    return longest({name: spent / TIMES for name, spent in shares(spans).items()})


def shares(spans: Iterable[Span]) -> dict[str, float]:
    """How long each kernel was the one that all others waited for: one may begin before another ends."""
    spent: dict[str, float] = defaultdict(float)
    until = 0.0
    for begin, end, name in sorted(spans):
        spent[name] += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return spent


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
