"""One request as the figures see it: when it came, was admitted, told something, ended.

Refuses to know what becomes of the figures.
"""

from __future__ import annotations

from collections.abc import Callable

from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Event,
    Finished,
    MergedText,
    Planned,
    SkeletonText,
    Started,
)
from specsot_master.gateway.metrics import Metrics

MOMENT = 0.001  # seconds: events closer together came with one lap


class RequestWatch:
    """`clock`: seconds that only go forward."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._began = clock()
        self._last: float | None = None
        self._started = self._finished = False
        self._branches = 0
        metrics.waiting += 1

    def told(self, event: Event) -> None:
        match event:
            case Started():
                self._start()
            case Planned(points) if points:
                self._metrics.observe("sot_points_per_request", len(points))
            case BranchStarted():
                self._count_branches(1)
            case BranchFinished():
                self._count_branches(-1 if self._branches else 0)
            case SkeletonText() | BranchText() | MergedText():
                self._hear()
            case Finished():
                self._finished = True
                self._metrics.count(event)
            case _:
                pass

    def ended(self) -> None:
        self._count_branches(-self._branches)
        if not self._finished:
            self._metrics.fail()
        if self._started:
            self._metrics.running -= 1
        else:
            self._metrics.waiting -= 1

    def _start(self) -> None:
        self._started = True
        self._metrics.waiting -= 1
        self._metrics.running += 1
        self._metrics.observe("request_queue_time_seconds", self._clock() - self._began)

    def _count_branches(self, more: int) -> None:
        self._branches += more
        self._metrics.branches += more

    def _hear(self) -> None:
        now = self._clock()
        if self._last is not None and now - self._last > MOMENT:
            self._metrics.observe("inter_token_latency_seconds", now - self._last)
        self._last = now
