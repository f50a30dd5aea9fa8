"""Lets a master's figures be counted: of its requests at the desk, of its laps.

Refuses to know which figures there are and who reads them.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from specsot_master.desk import RequestCounter
from specsot_master.gateway.metrics import Metrics
from specsot_master.gateway.watching import RequestMetrics
from specsot_master.master import Master


def observe_master(
    master: Master, desk: RequestCounter, registry: CollectorRegistry | None = None
) -> Metrics:
    """From now on. registry: where the process tells its own figures already."""
    metrics = Metrics(master.info, registry=registry)
    engines = [metrics.of(one.number, lambda one=one: one.conductor.owed) for one in master.replicas]
    for one, engine in zip(master.replicas, engines):
        one.laps.follow(engine.heard)

    def engine_of(request: str) -> Metrics:
        found = (engine for one, engine in zip(master.replicas, engines) if one.conductor.knows(request))
        return next(found, engines[0])

    desk.watch(lambda _: RequestMetrics(engine_of, time.monotonic))
    return metrics
