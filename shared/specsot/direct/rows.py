"""Rows that are still on their way: what a stage asks of a tensor, answered before there is one.

Refuses to know how they come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class PendingRows(ABC):
    """shape: as it will be."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What is launched on `device` from now on finds them there."""

    @abstractmethod
    def check(self) -> None:
        """Asked once they should be there. Raises Unavailable: they are not, or not these."""
