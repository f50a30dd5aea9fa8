"""How long the threads of this process have waited for GPUs.

A step takes longer with more work of the GPU only if the host waits for it. So the draft policy must know how
much of a step the host waited.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_waits = threading.local()


def wait_for(event: torch.cuda.Event) -> None:
    """Wait until the GPU has reached an event, and count the seconds of the wait for this thread.

    event: An event that was recorded on a stream.
    """
    began = time.perf_counter()
    event.synchronize()
    _waits.seconds = waited_seconds() + time.perf_counter() - began


def waited_seconds() -> float:
    """Return the seconds that this thread has spent in `wait_for` so far."""
    return getattr(_waits, "seconds", 0.0)
