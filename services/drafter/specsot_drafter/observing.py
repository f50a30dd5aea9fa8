"""Who follows a drafter's work, as its process was asked."""

from __future__ import annotations

from specsot.service.telemetry import Observation
from specsot_drafter.telemetry import DrafterObserver, DrafterObservers, DraftSpans


def drafter_observer(observation: Observation) -> DrafterObserver:
    watches: list[DrafterObserver] = []
    if observation.registry is not None:
        from specsot_drafter.metrics import DrafterMetrics

        watches.append(DrafterMetrics(observation.registry))
    if observation.tracer.on:
        watches.append(DraftSpans(observation.tracer))
    return DrafterObservers(watches) if watches else DrafterObserver()
