"""Slices of a head's fc on the wire: cut into parts of at most 1 MiB, put together again in order.

Refuses to know streams; whoever reads one keeps one `TapReader` for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from specsot.members import Tap
from specsot.v1 import ring_pb2
from specsot.wire.checks import require
from specsot.wire.pieces import PIECE_BYTES
from specsot.wire.tensors import checked_size, decode_tensor, write_tensor

MAX_TAP_BYTES = 1 << 30


def cut_tap(tap: Tap) -> Iterator[ring_pb2.Tap]:
    """Parts of whole rows, in row order."""
    weight = cast(torch.Tensor, tap.weight)
    rows = weight.shape[0]
    step = max(1, PIECE_BYTES // max(1, weight.shape[1] * weight.element_size()))
    for first in range(0, max(rows, 1), step):
        message = ring_pb2.Tap(epoch=tap.epoch, layer=tap.layer, rows=rows, first_row=first)
        write_tensor(weight[first : first + step], message.part)
        yield message


class TapReader:
    """Collects the parts of one tap at a time; memory grows only with what really came."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._of: tuple[int, int, int] | None = None
        self._rows = 0

    def read(self, message: ring_pb2.Tap) -> Tap | None:
        """The whole tap with its last part, else None. Raises WireError for parts that do not fit."""
        part = decode_tensor(message.part)
        self._check(message, part)
        self._parts.append(part)
        self._rows += part.shape[0]
        if self._rows < message.rows:
            return None
        weight = torch.cat(self._parts)
        self._parts, self._of, self._rows = [], None, 0
        return Tap(message.epoch, message.layer, weight)

    def _check(self, message: ring_pb2.Tap, part: torch.Tensor) -> None:
        key = (message.epoch, message.layer, message.rows)
        require(part.dim() == 2, f"a tap's part must be [rows, H], got {list(part.shape)}")
        checked_size((message.rows, part.shape[1]), part.dtype, MAX_TAP_BYTES)
        follows = self._of in (None, key) and message.first_row == self._rows
        require(follows, f"tap of layer {message.layer}: row {message.first_row} came, not row {self._rows}")
        fits = self._rows + part.shape[0] <= message.rows and (part.shape[0] > 0 or message.rows == 0)
        require(fits, f"tap of layer {message.layer}: a part of {part.shape[0]} rows does not fit")
        alike = all(part.shape[1] == p.shape[1] and part.dtype == p.dtype for p in self._parts[:1])
        require(alike, f"tap of layer {message.layer}: parts differ in width or type")
        self._of = key
