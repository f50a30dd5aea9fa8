"""An engine around one draft head, for those who have it in memory.

Refuses to know where heads come from.
"""

from __future__ import annotations

import time

from specsot.core.vocabulary import Vocabulary
from specsot.members import Configuration, Curve
from specsot_drafter.drafters.eagle import EagleProposer
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.lanes import Clock
from specsot_drafter.measure import measure_levels
from specsot_drafter.rules import make_budget


def make_engine(
    head: DraftHead,
    configuration: Configuration,
    vocabulary: Vocabulary | None = None,
    curve: Curve | None = None,
    clock: Clock = time.perf_counter,
) -> DraftEngine:
    """curve: seconds per rows of one level of growth; measured here when absent and needed."""
    shape = configuration.shape
    if curve is None:
        curve = () if shape.fixed else measure_levels(head)
    drafter = EagleProposer(head, shape, configuration.pages, configuration.page_rows)
    rule = make_budget("measured", shape, configuration.curve, curve, drafter.widths)
    return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary, clock=clock)
