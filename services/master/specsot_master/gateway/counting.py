"""Lets a master's figures be counted: of its requests at the desk, of its laps.

Refuses to know which figures there are and who reads them.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from specsot_master.assembly import Master
from specsot_master.desk import Desk
from specsot_master.gateway.metrics import Metrics
from specsot_master.gateway.watching import RequestWatch


def count(master: Master, desk: Desk, registry: CollectorRegistry | None = None) -> Metrics:
    """From now on. registry: where the process tells its own figures already."""
    metrics = Metrics(master.info, lambda: master.conductor.owed, registry=registry)
    desk.watch(lambda _: RequestWatch(metrics, time.monotonic))
    master.laps.follow(metrics.heard)
    return metrics
