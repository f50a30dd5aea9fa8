"""Tensors too large for one message: what does not go into its first MiB follows in pieces.

Refuses to know which messages have tensors. Memory is taken for what has come, never for what is announced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from specsot.v1 import values_pb2
from specsot.wire.checks import require
from specsot.wire.tensors import announced_size, describe_tensor

PIECE_BYTES = 1 << 20  # of tensors in one message

Pieces = Mapping[str, Sequence[bytes]]  # what came later, by the tensor's field


class PieceWriter:
    """Fills the tensors of one message, in the order of their fields; `pieces` is what then follows."""

    def __init__(self) -> None:
        self._room = PIECE_BYTES
        self._left: list[memoryview] = []

    def write(self, tensor: torch.Tensor, message: values_pb2.Tensor) -> None:
        """Raises WireError for types that do not travel."""
        rows = describe_tensor(tensor, message)
        message.data = bytes(rows[: self._room])
        self._left.append(rows[self._room :])
        self._room -= len(message.data)

    def pieces(self) -> Iterator[bytes]:
        for rows in self._left:
            for first in range(0, len(rows), PIECE_BYTES):
                yield bytes(rows[first : first + PIECE_BYTES])


class PieceReader:
    """The tensors of one message while their pieces come. Raises WireError for what cannot belong to them.

    A tensor may be short only in a message that is full: anything else is broken, not cut.
    """

    def __init__(self, tensors: Mapping[str, values_pb2.Tensor]) -> None:
        self.pieces: dict[str, list[bytes]] = {name: [] for name in tensors}
        self._lacking = {
            name: max(announced_size(tensor) - len(tensor.data), 0) for name, tensor in tensors.items()
        }
        self._full = sum(len(tensor.data) for tensor in tensors.values()) == PIECE_BYTES

    @property
    def lacks(self) -> int:
        """Bytes still to come."""
        return sum(self._lacking.values()) if self._full else 0

    def take(self, data: bytes) -> None:
        """A piece of the first tensor that is not whole."""
        name = next(name for name, lacking in self._lacking.items() if lacking)
        fits = 0 < len(data) <= min(PIECE_BYTES, self._lacking[name])
        require(fits, f"a piece of {len(data)} bytes came where {self._lacking[name]} are lacking")
        self.pieces[name].append(data)
        self._lacking[name] -= len(data)
