"""Which GPU a thread computes on, and the stream by which things leave it meanwhile.

Refuses to know what is computed. A thread serves members of one GPU alone: its events, streams and captures
are there.
"""

from __future__ import annotations

from functools import cache

import torch


def use_device(device: str) -> None:
    """From now on this thread's. Without a number, and on a CPU, nothing changes."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """For copies that wait for less than what was launched last."""
    return torch.cuda.Stream(device)
