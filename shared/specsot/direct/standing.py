"""Which GPU a thread computes on.

Refuses to know what is computed. A thread serves members of one GPU alone: its events, streams and captures
are there.
"""

from __future__ import annotations

import torch


def stand_on(device: str) -> None:
    """From now on this thread's. Without a number, and on a CPU, nothing changes."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
