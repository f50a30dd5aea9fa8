"""The observer of a drafter's work, as its process was asked for one."""

from __future__ import annotations

from specsot.service.telemetry import Observation
from specsot_drafter.telemetry import DrafterObserver, DraftSpans


def drafter_observer(observation: Observation) -> DrafterObserver:
    observer = DrafterObserver()
    if observation.registry is not None:
        from specsot_drafter.metrics import DrafterMetrics

        observer = DrafterMetrics(observation.registry)
    return DraftSpans(observation.tracer, observer) if observation.tracer.on else observer
