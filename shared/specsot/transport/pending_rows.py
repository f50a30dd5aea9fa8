"""Hidden states that are still being computed or copied between GPUs, and the stream that copies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specsot.core.frames import Frame


class PendingRows(ABC):
    """Hidden states that may not have arrived yet.

    shape: shape of the tensor once it has arrived.
    """

    def __init__(self, shape: torch.Size) -> None:
        """shape: shape of the tensor once it has arrived."""
        self.shape = shape

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the tensor on `device`. Work that is launched on that device from now on waits for its data.

        device: where the tensor is needed.
        dtype: the type to which the tensor is converted.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise Unavailable if the data did not arrive, or belongs to another frame.

        Called once the data must have arrived.
        """


def use_device(device: str) -> None:
    """Make a GPU the current device of this thread. Does nothing for a CPU and for "cuda" without a number.

    device: name of the device, such as "cuda:0".
    """
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies that must not wait for the work that was launched last on the device.

    device: the GPU from which the copies read. Every call for the same device returns the same stream.
    """
    return torch.cuda.Stream(device)


class TransferringRows(PendingRows):
    """Hidden states on another GPU of this process, whose computation may still be running.

    Must be created before more work is launched on that GPU, because the copy waits for everything launched
    before.
    """

    def __init__(self, rows: Tensor) -> None:
        """Mark the present end of the work on the other GPU, after which the tensor is complete.

        rows: [num_tokens, width] tensor on the other GPU.
        """
        super().__init__(rows.shape)
        self._rows = rows
        self._computed = torch.cuda.current_stream(rows.device).record_event()

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return a copy on `device`, which work that is launched there later waits for.

        torch copies on the source device's current stream. As the next frame is computed on that stream
        already, the copy would be a whole stage too late, so it gets a stream of its own.

        device: the GPU that needs the tensor.
        dtype: the type to which the tensor is converted.

        Returns before the copy has been made. May be called for several devices.
        """
        stream = copy_stream(self._rows.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._computed)
            copied = self._rows.to(device, dtype, non_blocking=True)
        self._rows.record_stream(stream)
        torch.cuda.current_stream(device).wait_stream(stream)
        return copied

    def check(self) -> None:
        """Do nothing, because no data is lost within a process."""


def let_rows_transfer(message: Any) -> Any:
    """Return a message to another member of this process, with the hidden states of a frame as
    `TransferringRows`.

    Messages other than frames are returned unchanged. Features too: a drafter on another GPU copies them
    itself, and no step waits for that copy.

    message: the message to send.

    A frame without hidden states gets None in their place.
    """
    if not isinstance(message, Frame):
        return message
    return replace(message, hidden=_transferring(message.hidden), fused=_transferring(message.fused))


def _transferring(rows: Tensor | None) -> Tensor | TransferringRows | None:
    """Return a GPU tensor as `TransferringRows`; a CPU tensor and None are returned unchanged.

    rows: [num_tokens, width] tensor, or None.
    """
    return TransferringRows(rows) if rows is not None and rows.is_cuda else rows
