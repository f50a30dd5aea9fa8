"""The observer of a worker's laps, as its process was asked for one."""

from __future__ import annotations

from specsot.service.telemetry import Observation
from specsot_worker.telemetry import LapSpans, WorkerObserver


def worker_observer(observation: Observation, every: int) -> WorkerObserver:
    """every: of laps that carry a traced request one is traced."""
    observer = WorkerObserver()
    if observation.registry is not None:
        from specsot_worker.metrics import WorkerMetrics

        observer = WorkerMetrics(observation.registry)
    return LapSpans(observation.tracer, every, observer) if observation.tracer.on else observer
