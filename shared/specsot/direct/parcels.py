"""A frame's rows as one piece of memory, with a stamp in front.

Refuses to know how it travels. On a GPU nobody sees whether bytes came: who lost a peer goes on computing
with whatever lies in memory. So the first stage stamps each frame with its number, the others pass on the
stamp that came, and the last one believes nothing that has another.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from specsot.direct.channel import Channel
from specsot.direct.rows import PendingRows
from specsot.direct.standing import copy_stream
from specsot.errors import Unavailable
from specsot.wire.tensors import Beside

STAMP = 16  # bytes, so that the rows behind it lie as kernels like them


def stamp_of(number: int, device: torch.device) -> Tensor:
    """Never that of memory that is all zeros."""
    return torch.full((STAMP // 8,), number + 1, dtype=torch.int64, device=device).view(torch.uint8)


@torch.inference_mode()
def pack(stamp: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([stamp, *(rows.contiguous().view(-1).view(torch.uint8) for rows in tensors)])


class Parcel:
    """The rows of one frame, announced by their types and shapes."""

    def __init__(self, channel: Channel, number: int, announced: Sequence[Beside]) -> None:
        self._channel, self._number, self._announced = channel, number, announced
        self._data: Tensor | None = None
        self._came: Any = None  # a GPU's event

    def open(self, device: torch.device) -> list[Tensor]:
        """Takes what comes next by the channel, once. Raises Unavailable."""
        sizes = [prod(each.shape) * each.dtype.itemsize for each in self._announced]
        if self._data is None:
            self._data = torch.zeros(STAMP + sum(sizes), dtype=torch.uint8, device=device)
            self._channel.receive(self._data)
            self._came = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        parts = self._data[STAMP:].split(sizes)
        return [part.view(each.dtype).view(each.shape) for part, each in zip(parts, self._announced)]

    @property
    def stamp(self) -> Tensor | None:
        """As it will have come; None before anybody opened it."""
        return None if self._data is None else self._data[:STAMP]

    def check(self) -> None:
        """Waits for the rows, by a stream of its own: not for what is made of them. Raises Unavailable."""
        wanted = stamp_of(self._number, torch.device("cpu"))
        if self._channel.lost or self.stamp is None or not torch.equal(self._read(self.stamp), wanted):
            raise Unavailable(f"the rows of frame {self._number} never came")

    def _read(self, stamp: Tensor) -> Tensor:
        if self._came is None:
            return stamp
        way = copy_stream(stamp.device)
        with torch.cuda.stream(way):
            way.wait_event(self._came)
            return stamp.cpu()


class Coming(PendingRows):
    """One tensor of a parcel."""

    def __init__(self, parcel: Parcel, place: int, announced: Beside) -> None:
        super().__init__(torch.Size(announced.shape))
        self._parcel, self._place = parcel, place

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self._parcel.open(device)[self._place].to(dtype)

    def check(self) -> None:
        self._parcel.check()
