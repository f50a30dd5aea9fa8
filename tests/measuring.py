"""Members measure how fast they are in little time: hundreds of rings start, and nearly none is placed by it.

Without it, a member's start took longer than all that most tests ask of it; and while one process of tests
measured, the others waited.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext


def measure_little(put: Callable[[object, str, object], None] = setattr) -> None:
    """Change the constants that say how much members measure, in this process.

    put: sets an attribute of a module; another function than `setattr` may raise an error for a new name.
    """
    from specsot_drafter import loader as drafting
    from specsot_model import cuda_graphs, device_speed
    from specsot_worker import loader as working

    for module, name in (
        (cuda_graphs, "MIN_TURNS"),
        (cuda_graphs, "MAX_TURNS_CPU"),
        (drafting, "MIN_TURNS"),
    ):
        put(module, name, 1)
    put(cuda_graphs, "PATIENCE_SECONDS", 0.0)
    put(cuda_graphs, "SIZES", (1, 8, 128))
    put(drafting, "MEASURED_ROWS", (1, 16))
    put(device_speed, "COPIED", 1 << 20)
    put(device_speed, "PIECES", ())
    put(working, "alone_on", lambda device: nullcontext())
