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

SAME_LAP_SECONDS = 0.001  # seconds: events closer together came with one lap


class RequestMetrics:
    """find: the figures of the ring that has a request, by its id. `clock`: seconds that only go forward."""

    def __init__(self, find: Callable[[str], Metrics], clock: Callable[[], float]) -> None:
        self._find, self._metrics, self._clock = find, find(""), clock
        self._began = clock()
        self._last: float | None = None
        self._waited = 0.0
        self._branches: dict[int, float] = {}

    def told(self, event: Event) -> None:
        match event:
            case Started(request):
                self._metrics = self._find(request)
                self._waited = self._clock() - self._began
                self._metrics.observe("request_queue_time_seconds", self._waited)
            case Planned(points) if points:
                self._metrics.observe("sot_points_per_request", len(points))
            case BranchStarted(branch):
                self._branches[branch] = self._clock()
                self._metrics.branches += 1
            case BranchFinished(branch) if branch in self._branches:
                self._metrics.observe("sot_branch_seconds", self._clock() - self._branches.pop(branch))
                self._metrics.branches -= 1
            case SkeletonText() | BranchText() | MergedText():
                self._hear()
            case Finished():
                self._metrics.finished(event.statistics, self._waited)
            case _:
                pass

    def ended(self) -> None:
        self._metrics.branches -= len(self._branches)
        self._branches.clear()

    def _hear(self) -> None:
        now = self._clock()
        if self._last is not None and now - self._last > SAME_LAP_SECONDS:
            self._metrics.observe("inter_token_latency_seconds", now - self._last)
        self._last = now
