"""Six flaws that a review found by reading, and that the harness finds: each planted once more, and caught.

A plant puts the flaw back into the code as it is now. Where the flaw has not been mended yet (`MENDED`) there is
nothing to plant, and nothing that would be clean without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.faults.campaign import ASKS, LONG, Campaign, Fault, judge
from tests.faults.clients import Habit
from tests.faults.parts import AT_GRAMMAR, AT_LAP, AT_PROMPT
from tests.faults.world import Shape

pytestmark = pytest.mark.slow

DIRECT, PLANNED = ASKS[0], ASKS[2]
MENDED: frozenset[str] = frozenset()  # names of findings whose flaw is planted, because it is gone

Plant = Callable[[pytest.MonkeyPatch], None]


def everybody(*asks: object) -> tuple[tuple[float, object, Habit], ...]:
    return tuple((0.1 * n, ask, Habit()) for n, ask in enumerate(asks))


def poisoned(seed: int) -> Campaign:
    """Two who are half written, and a third one of which a worker dies."""
    ask = replace(PLANNED if seed == AT_GRAMMAR else DIRECT, seed=seed)
    return Campaign(Shape(2, True), (*everybody(DIRECT, PLANNED), (1.0, ask, Habit(once=True))), ())
