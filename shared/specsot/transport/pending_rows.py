"""Rows being copied between GPUs of one process, and the stream that copies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specsot.core.frames import Frame


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


def use_device(device: str) -> None:
    """From now on this thread's. Without a number, and on a CPU, nothing changes."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """For copies that wait for less than what was launched last."""
    return torch.cuda.Stream(device)


class Crossing(PendingRows):
    """Rows on a GPU, computed or not yet. Made before anything else is launched behind what computes them."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows.shape)
        self._rows = rows
        self._computed = torch.cuda.current_stream(rows.device).record_event()

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """torch copies on the source's current stream, where the next frame is computed already: behind that
        one the copy would come a whole stage too late. So it gets a stream of its own.
        """
        way = copy_stream(self._rows.device)
        with torch.cuda.stream(way):
            way.wait_event(self._computed)
            here = self._rows.to(device, dtype, non_blocking=True)
        self._rows.record_stream(way)
        torch.cuda.current_stream(device).wait_stream(way)
        return here

    def check(self) -> None:
        """Within a process nothing is lost on the way."""


def let_rows_cross(message: Any) -> Any:
    """A message to another member of this process, with a frame's rows on their way to the other GPU.

    Features stay as they are: who drafts on another GPU copies them, and no lap waits for that.
    """
    if not isinstance(message, Frame):
        return message
    return replace(message, hidden=_on_its_way(message.hidden), fused=_on_its_way(message.fused))


def _on_its_way(rows: Tensor | None) -> Tensor | Crossing | None:
    return Crossing(rows) if rows is not None and rows.is_cuda else rows
