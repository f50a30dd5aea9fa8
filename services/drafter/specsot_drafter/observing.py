"""Who follows a drafter's work, as its process was asked.

Refuses to know what they make of it.
"""

from __future__ import annotations

from specsot.process.observing import Observation
from specsot_drafter.spans import DraftSpans
from specsot_drafter.watching import Watch, Watches


def watch_of(observation: Observation) -> Watch:
    watches: list[Watch] = []
    if observation.registry is not None:
        from specsot_drafter.figures import Figures

        watches.append(Figures(observation.registry))
    if observation.tracer.on:
        watches.append(DraftSpans(observation.tracer))
    return Watches(watches) if watches else Watch()
