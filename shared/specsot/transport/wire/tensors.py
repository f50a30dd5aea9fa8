"""Tensors on the wire: dtype, shape and raw rows, checked before memory is taken; large ones in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from specsot.errors import WireError
from specsot.members import Tap
from specsot.transport.wire.schema import Enumeration, require
from specsot.v1 import ring_pb2, values_pb2

MAX_DIMENSIONS = 4  # of a tensor; none that travels has more
MAX_BYTES = 256 << 20  # bytes of a tensor, as grpc_channel.RING_BYTES

TYPES = Enumeration(values_pb2.DataType.DESCRIPTOR, lambda name: getattr(torch, name), "tensor type")


@dataclass(frozen=True, slots=True)
class Beside:
    """A tensor whose rows do not travel in the message: this is what the message says of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Beside:
        return cls(tuple(tensor.shape), tensor.dtype)

    def describe(self, message: values_pb2.Tensor) -> None:
        """Fill in all there is. Raises WireError for types that do not travel."""
        _describe(self.dtype, self.shape, message)
        message.beside = True


def write_tensor(tensor: torch.Tensor, message: values_pb2.Tensor) -> None:
    """Fill in any float32, bfloat16 or float16 tensor, from any device. Raises WireError for other types.

    In place, because protobuf copies a whole message when it is put into another one.
    """
    message.data = bytes(describe_tensor(tensor, message))


def describe_tensor(tensor: torch.Tensor, message: values_pb2.Tensor) -> memoryview:
    """Fill in all but the data, which is returned: little-endian rows, not copied where they lie that way."""
    _describe(tensor.dtype, tensor.shape, message)
    # numpy knows no bfloat16; its bits travel as those of an integer.
    rows = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return np.ascontiguousarray(rows.numpy(force=True)).reshape(-1).view(np.uint8).data


def _describe(dtype: torch.dtype, shape: Sequence[int], message: values_pb2.Tensor) -> None:
    if dtype not in TYPES.numbers:
        raise WireError(f"tensors of {dtype} do not travel")
    message.dtype = TYPES.encode(dtype)
    message.shape.extend(shape)


def decode_beside(message: values_pb2.Tensor) -> Beside:
    """Raises WireError past the limits, and for bytes that should not be here."""
    announced_size(message)
    require(not message.data, f"a tensor beside its message brought {len(message.data)} bytes")
    return Beside(tuple(message.shape), TYPES.decode(message.dtype))


def decode_tensor(message: values_pb2.Tensor, pieces: Sequence[bytes] = ()) -> torch.Tensor:
    """A CPU tensor that owns its memory. pieces: what came behind the message's own data.

    Raises WireError unless all bytes together are exactly the shape's.
    """
    shape = tuple(message.shape)
    dtype = TYPES.decode(message.dtype)
    size = checked_size(shape, dtype)
    came = len(message.data) + sum(map(len, pieces))
    if came != size:
        raise WireError(f"tensor {list(shape)} needs {size} bytes, got {came}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray().join((message.data, *pieces)), dtype=dtype).view(shape)


def announced_size(message: values_pb2.Tensor) -> int:
    """Bytes of the whole tensor by its type and shape. Raises WireError past the limits."""
    return checked_size(tuple(message.shape), TYPES.decode(message.dtype))


def checked_size(shape: Sequence[int], dtype: torch.dtype, limit: int = MAX_BYTES) -> int:
    """Bytes a tensor takes. Raises WireError past the limits on dimensions and bytes.

    An empty tensor may not be endless in its other dimensions: torch could not count its strides.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise WireError(f"tensor has {len(shape)} dimensions, {MAX_DIMENSIONS} are allowed")
    size = math.prod(shape) * dtype.itemsize
    spread = size or math.prod(max(side, 1) for side in shape) * dtype.itemsize
    if spread > limit:
        raise WireError(f"tensor {list(shape)} takes {spread} bytes, {limit} are allowed")
    return size


PIECE_BYTES = 1 << 20  # bytes of a tensor in one message, so that heartbeats come between; not measured

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
        return sum(self._lacking.values()) if self._full else 0

    def take(self, data: bytes) -> None:
        """A piece of the first tensor that is not whole."""
        name = next(name for name, lacking in self._lacking.items() if lacking)
        fits = 0 < len(data) <= min(PIECE_BYTES, self._lacking[name])
        require(fits, f"a piece of {len(data)} bytes came where {self._lacking[name]} are lacking")
        self.pieces[name].append(data)
        self._lacking[name] -= len(data)


MAX_TAP_BYTES = 1 << 30  # bytes of one tap's rows; bounds memory, not tuned


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
        self._parts = []
        self._of = None
        self._rows = 0
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
