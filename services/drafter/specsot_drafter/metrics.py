"""A drafter's Prometheus metrics: trees, what they cost, rests, pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from specsot.core.frames import Drafts
from specsot.members import Configuration
from specsot.service.telemetry import LAP_BUCKETS, PolledCollector
from specsot_drafter.telemetry import DrafterObserver


class DrafterMetrics(DrafterObserver):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._trees = Counter("specsot:drafter_trees", "Trees sent, lone roots left out", registry=registry)
        self._nodes = Counter("specsot:drafter_nodes", "Their nodes beyond the roots", registry=registry)
        self._rests = Counter("specsot:drafter_rests", "Times when drafting did not pay", registry=registry)
        told = "Learning what came and drafting once"
        self._seconds = Histogram(
            "specsot:drafter_draft_seconds", told, buckets=LAP_BUCKETS, registry=registry
        )
        self._epoch: tuple[Configuration, Callable[[], int]] | None = None
        registry.register(PolledCollector(self._collect))

    def formed(self, configuration: Configuration, free: Callable[[], int]) -> None:
        self._epoch = configuration, free

    def drafted(self, drafts: Drafts, seconds: float) -> None:
        grown = [len(draft.tree) - 1 for draft in drafts.drafts if len(draft.tree) > 1]
        self._trees.inc(len(grown))
        self._nodes.inc(sum(grown))
        self._rests.inc(drafts.rest > 0)
        self._seconds.observe(seconds)

    def disbanded(self) -> None:
        self._epoch = None

    def _collect(self) -> Iterator[Metric]:
        if self._epoch is None:
            return
        configuration, free = self._epoch
        for name, about, value in (
            ("drafter_epoch", "The epoch it takes part in", configuration.epoch),
            ("drafter_kv_pages", "KV pages it has", configuration.pages),
            ("drafter_kv_pages_free", "KV pages that no sequence has here", free()),
        ):
            yield GaugeMetricFamily(f"specsot:{name}", about, value)
