"""Numbers on their way to a device in one copy, from memory that a copy engine may read.

Refuses to know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int32]
Shapes = Sequence[tuple[int, ...]]


class Staging:
    """Host memory that a copy engine reads: not to be written again before it did."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=on_gpu)
        self._numbers: Numbers = self._host.numpy()
        self._sent = torch.cuda.Event() if on_gpu else None

    def send(self, parts: Sequence[Numbers], target: Tensor) -> None:
        """One copy of all parts, one behind the other; what is behind them in `target` stays."""
        if self._sent:
            self._sent.synchronize()
        ends = np.cumsum([0, *(part.size for part in parts)])
        for part, (start, end) in zip(parts, pairwise(ends.tolist())):
            self._numbers[start:end] = part.reshape(-1)
        target[: ends[-1]].copy_(self._host[: ends[-1]], non_blocking=True)
        if self._sent:
            self._sent.record()


def indices(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Whole numbers on a device. From pinned memory: else the host waits for all that runs there."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def size_of(shapes: Shapes) -> int:
    """How many numbers tensors of these shapes hold together."""
    return sum(map(prod, shapes))


def views(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    """Tensors of these shapes, one behind the other in `flat`."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]
