"""Who follows a worker's laps, as its process was asked."""

from __future__ import annotations

from specsot.service.telemetry import Observation
from specsot_worker.telemetry import LapSpans, WorkerObserver, WorkerObservers


def worker_observer(observation: Observation, every: int) -> WorkerObserver:
    """every: of laps that carry a traced request one is traced."""
    watches: list[WorkerObserver] = []
    if observation.registry is not None:
        from specsot_worker.metrics import WorkerMetrics

        watches.append(WorkerMetrics(observation.registry))
    if observation.tracer.on:
        watches.append(LapSpans(observation.tracer, every))
    return WorkerObservers(watches) if watches else WorkerObserver()
