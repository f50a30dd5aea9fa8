"""A worker's Prometheus metrics: frames, pages, and at stage 0 whole laps and their hops."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from specsot.core.frames import Frame, Result, rows_of
from specsot.core.pages import PageTable
from specsot.members import Configuration
from specsot.service.telemetry import LAP_BUCKETS, PolledCollector
from specsot_worker.telemetry import WorkerObserver


class WorkerMetrics(WorkerObserver):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._frames = Counter("specsot:worker_frames", "Frames computed here", registry=registry)
        self._rows = Counter("specsot:worker_rows", "Rows computed here", registry=registry)
        self._compute = _histogram("worker_compute_seconds", "Compute of one frame here", registry)
        self._queue = _histogram(
            "worker_queue_seconds", "How long a frame lay here before its turn", registry
        )
        self._lap = _histogram("worker_lap_seconds", "One lap, from stage 0 and back to it", registry)
        self._hop = _histogram(
            "worker_hop_seconds", "Mean of a lap's hops: links, and waiting there", registry
        )
        self._in_flight: dict[int, float] = {}
        self._configuration: Configuration | None = None
        self._table: PageTable | None = None
        registry.register(PolledCollector(self._collect))

    def formed(self, configuration: Configuration, table: PageTable) -> None:
        self._configuration, self._table = configuration, table

    def launched(self, frame: Frame, now: float) -> Frame:
        self._in_flight[frame.number] = now
        return frame

    def dequeued(self, frame: Frame, seconds: float) -> None:
        self._queue.observe(seconds)

    def computed(self, frame: Frame, seconds: float) -> None:
        self._frames.inc()
        self._rows.inc(sum(map(rows_of, frame.segments)))
        self._compute.observe(seconds)

    def returned(self, result: Result, now: float) -> None:
        began = self._in_flight.pop(result.number, None)
        if began is None:
            return
        self._lap.observe(now - began)
        if len(result.seconds) > 1:  # the last hop is the way back
            self._hop.observe(max(now - began - sum(result.seconds), 0.0) / len(result.seconds))

    def disbanded(self) -> None:
        self._in_flight.clear()
        self._configuration = self._table = None

    def _collect(self) -> Iterator[Metric]:
        configuration, table = self._configuration, self._table
        if configuration is None or table is None:
            return
        for name, about, value in (
            ("worker_epoch", "The epoch it takes part in", configuration.epoch),
            ("worker_kv_pages", "KV pages it has", configuration.pages),
            ("worker_kv_pages_free", "KV pages that no sequence has here", table.free),
        ):
            yield GaugeMetricFamily(f"specsot:{name}", about, value)
        yield _layers_gauge(configuration)


def _layers_gauge(configuration: Configuration) -> Metric:
    mine = next(stage for stage in configuration.stages if stage.name == configuration.you)
    labels = {"worker": mine.name, "layers": str(mine.layers), "stage": str(configuration.stages.index(mine))}
    gauge = GaugeMetricFamily("specsot:worker_layers", "How many layers it runs", labels=tuple(labels))
    gauge.add_metric(tuple(labels.values()), len(mine.layers))
    return gauge


def _histogram(name: str, about: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"specsot:{name}", about, buckets=LAP_BUCKETS, registry=registry)
