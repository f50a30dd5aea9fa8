"""Sends hidden states between stages in 8 bits (`--hop-dtype int8`), and converts them on arrival.

Every BLOCK numbers of a hidden state share a scale, so the rounding of a hidden state does not depend on the
other tokens of the frame. But rounding changes the hidden states, so a ring with other layer ranges may
generate other tokens. Hidden states are converted only when a stage reads them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specsot.core.frames import Frame, Payload
from specsot.transport.links import RingLink
from specsot.transport.pending_rows import PendingRows
from specsot_model.kv import round_to_int8

# Numbers. How many numbers share a scale. Chosen by the perplexity of SmolLM2 over four stages: 17.98 with
# 64, 18.21 with one scale per hidden state, whose largest number is 40 times the median, and 18.03 without
# rounding.
BLOCK = 64
# Bytes. Size of a scale.
SCALE = torch.half.itemsize


def round_off(rows: Tensor) -> Tensor:
    """Round hidden states to 8 bits: int8 [num_tokens, num_blocks, block + SCALE]. The last SCALE bytes of
    each block are its scale. If the hidden size is no multiple of BLOCK, the whole hidden state is one block.

    rows: [num_tokens, hidden_size].

    For example:

        # hidden_size 576 -> 9 blocks of 64 numbers and 2 bytes: [num_tokens, 9, 66]
    """
    width = rows.shape[-1]
    return round_to_int8(rows.unflatten(-1, (-1, width if width % BLOCK else BLOCK)))


class RoundedRows(PendingRows):
    """Hidden states or features that arrived in 8 bits. They are converted when a stage asks for them."""

    def __init__(self, rows: Payload) -> None:
        """Wrap hidden states without converting them.

        rows: Rounded hidden states as `round_off` returns them, which may still be on their way.
        """
        count, blocks, block = rows.shape
        super().__init__(torch.Size((count, max(blocks * (block - SCALE), 0))))
        self._rows = rows

    def to(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the hidden states as numbers, [num_tokens, hidden_size].

        device: Where they are to be.
        dtype: Type of the numbers.
        """
        here: Tensor = self._rows.to(device, torch.int8)
        scales = here[..., -SCALE:].clone(memory_format=torch.contiguous_format).view(torch.half)
        return here[..., :-SCALE].to(dtype).mul_(scales).flatten(1)

    def check(self) -> None:
        """Raise the error of the transfer, if it has failed. Otherwise do nothing."""
        if isinstance(self._rows, PendingRows):
            self._rows.check()


def with_numbers(frame: Frame) -> Frame:
    """Return the frame with hidden states that a stage can read as numbers, whichever form they arrived in. A
    frame without hidden states, or with numbers already, is returned unchanged.

    frame: The frame as it arrived.
    """
    if frame.hidden is None or len(frame.hidden.shape) == 2:
        return frame
    return replace(frame, hidden=_numbers(frame.hidden), fused=_numbers(frame.fused))


def _numbers(rows: Payload | None) -> Payload | None:
    """Wrap a tensor that arrived in 8 bits, which has three dimensions. None and a tensor of two dimensions
    are returned unchanged.

    rows: Hidden states or features, or None.
    """
    return rows if rows is None or len(rows.shape) == 2 else RoundedRows(rows)


class RoundedRowsLink(RingLink):
    """A link to the next stage that rounds the hidden states of frames to 8 bits."""

    def __init__(self, link: RingLink) -> None:
        """Wrap a link.

        link: The link to the next stage, by which rounded frames are sent.
        """
        self._link = link

    def post(self, message: Any) -> None:
        """Send a message from the compute thread. Hidden states of a frame are rounded first.

        message: Any message of the ring.
        """
        self._link.post(_rounded(message))

    async def send(self, message: Any) -> None:
        """Send a message from the event loop. Hidden states of a frame are rounded first.

        message: Any message of the ring.
        """
        await self._link.send(_rounded(message))

    async def close(self) -> bool | None:
        """Close the wrapped link after all sent messages have arrived. Return True if they have arrived, as
        far as this end knows, False if they have not or if that is unknown, and None from a link within a
        process, where no message can be lost.
        """
        return await self._link.close()


def _rounded(message: Any) -> Any:
    """Return a frame with rounded hidden states and fused features. Return any other message, and a frame
    without hidden states, unchanged.

    message: Any message of the ring.

    Frames are not changed; a new one is returned.
    """
    if not isinstance(message, Frame) or message.hidden is None:
        return message
    fused = None if message.fused is None else round_off(message.fused)
    return replace(message, hidden=round_off(message.hidden), fused=fused)
