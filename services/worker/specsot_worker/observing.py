"""Who follows a worker's laps, as its process was asked.

Refuses to know what they make of it.
"""

from __future__ import annotations

from specsot.process.observing import Observation
from specsot_worker.spans import LapSpans
from specsot_worker.watching import Watch, Watches


def watch_of(observation: Observation, every: int) -> Watch:
    """every: of laps that carry a traced request one is traced."""
    watches: list[Watch] = []
    if observation.registry is not None:
        from specsot_worker.figures import Figures

        watches.append(Figures(observation.registry))
    if observation.tracer.on:
        watches.append(LapSpans(observation.tracer, every))
    return Watches(watches) if watches else Watch()
