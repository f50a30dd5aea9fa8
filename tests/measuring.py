"""Members measure how fast they are by few rows and short copies: tests start hundreds of rings.

As users have it, a process copies 64 MiB fourteen times, which takes 0.3 s of a core, a P-EAGLE head is
measured for 0.5 s, and processes of one machine wait until others have measured.
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
    put(cuda_graphs, "SIZES", (1, 16))
    put(drafting, "MEASURED_ROWS", (1, 16))
    put(device_speed, "COPIED", 1 << 20)
    put(device_speed, "PIECES", ())
    put(working, "alone_on", lambda device: nullcontext())
