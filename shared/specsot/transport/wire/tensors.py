"""Tensors on the wire: type, shape and raw bytes, checked before memory is allocated; large ones in
pieces.
"""

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

# Dimensions. Bounds a tensor's shape; no message has a tensor of more.
MAX_DIMENSIONS = 4
# Bytes. Bounds a tensor, like grpc_channel.RING_BYTES.
MAX_BYTES = 256 << 20

# The torch types of tensors by number.
TYPES = Enumeration(values_pb2.DataType.DESCRIPTOR, lambda name: getattr(torch, name), "tensor type")


@dataclass(frozen=True, slots=True)
class SeparateTensor:
    """The description of a tensor whose data travels by a separate channel and not in the message.

    shape: shape of the tensor.
    dtype: type of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SeparateTensor:
        """Return the description of a tensor.

        tensor: the tensor whose data will travel separately.
        """
        return cls(tuple(tensor.shape), tensor.dtype)

    def describe(self, message: values_pb2.Tensor) -> None:
        """Write the description into a message. Raises WireError for a type that messages do not support.

        message: the message's tensor field.
        """
        _describe(self.dtype, self.shape, message)
        message.separate = True


def write_tensor(tensor: torch.Tensor, message: values_pb2.Tensor) -> None:
    """Write a tensor from any device into a message. Raises WireError for a type that messages do not
    support.

    The message is filled in place, because protobuf copies a message that is assigned to a field of another
    one.

    tensor: the tensor, which is copied.
    message: the message's tensor field.
    """
    message.data = bytes(describe_tensor(tensor, message))


def describe_tensor(tensor: torch.Tensor, message: values_pb2.Tensor) -> memoryview:
    """Write the type and the shape of a tensor into a message, and return its data as little-endian bytes.

    The data of a contiguous CPU tensor is not copied.

    tensor: the tensor, on any device.
    message: the message's tensor field.

    Raises WireError for an unsupported type.
    """
    _describe(tensor.dtype, tensor.shape, message)
    # NumPy has no bfloat16, so the tensor is viewed as integers with the same bits.
    rows = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return np.ascontiguousarray(rows.numpy(force=True)).reshape(-1).view(np.uint8).data


def _describe(dtype: torch.dtype, shape: Sequence[int], message: values_pb2.Tensor) -> None:
    """Write a type and a shape into a message. Raises WireError for an unsupported type.

    dtype: type of the tensor's numbers.
    shape: shape of the tensor.
    message: the message's tensor field.

    The message gets no data. Its shape must be empty before.
    """
    if dtype not in TYPES.numbers:
        raise WireError(f"tensors of {dtype} cannot be sent")
    message.dtype = TYPES.encode(dtype)
    message.shape.extend(shape)


def decode_separate_tensor(message: values_pb2.Tensor) -> SeparateTensor:
    """Return the description of a tensor that travels separately.

    message: the message's tensor field.

    Raises WireError if the tensor exceeds the limits, or if the message contains data.
    """
    announced_size(message)
    require(not message.data, f"a tensor that travels separately came with {len(message.data)} bytes")
    return SeparateTensor(tuple(message.shape), TYPES.decode(message.dtype))


def decode_tensor(message: values_pb2.Tensor, pieces: Sequence[bytes] = ()) -> torch.Tensor:
    """Return a CPU tensor that owns its memory.

    message: type, shape and the beginning of the data.
    pieces: the rest of the data, from later messages.

    Raises WireError if the bytes are not exactly as many as the shape needs.

    Raises WireError also for an unknown type, and for a shape that exceeds MAX_DIMENSIONS or MAX_BYTES.
    """
    shape = tuple(message.shape)
    dtype = TYPES.decode(message.dtype)
    size = checked_size(shape, dtype)
    num_bytes = len(message.data) + sum(map(len, pieces))
    if num_bytes != size:
        raise WireError(f"tensor {list(shape)} needs {size} bytes, got {num_bytes}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray().join((message.data, *pieces)), dtype=dtype).view(shape)


def announced_size(message: values_pb2.Tensor) -> int:
    """Return the bytes of a whole tensor by its type and shape. Raises WireError if it exceeds the limits.

    message: the message's tensor field.
    """
    return checked_size(tuple(message.shape), TYPES.decode(message.dtype))


def checked_size(shape: Sequence[int], dtype: torch.dtype, limit: int = MAX_BYTES) -> int:
    """Return the bytes of a tensor. Raises WireError if it exceeds the limits on dimensions and bytes.

    For an empty tensor, the dimensions other than 0 must be within the limit too, because torch could not
    compute its strides otherwise.

    shape: shape of the tensor.
    dtype: type of its numbers.
    limit: the largest number of bytes.

    The size of an empty tensor is 0, and that of a tensor without dimensions is the size of one number.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise WireError(f"tensor has {len(shape)} dimensions, {MAX_DIMENSIONS} are allowed")
    size = math.prod(shape) * dtype.itemsize
    spread = size or math.prod(max(side, 1) for side in shape) * dtype.itemsize
    if spread > limit:
        raise WireError(f"tensor {list(shape)} takes {spread} bytes, {limit} are allowed")
    return size


# Bytes. Bounds the tensor data in one message, so that heartbeats can be sent between messages. Untuned.
PIECE_BYTES = 1 << 20

# The data of tensors that arrived in later messages, by the tensor's field.
Pieces = Mapping[str, Sequence[bytes]]


class PieceWriter:
    """Writes the tensors of one message, in the order of their fields, and cuts what exceeds PIECE_BYTES.

    Worked example: tensors of 0.75 MiB and 1.5 MiB. The message has all of the first tensor and 0.25 MiB of
    the second; two pieces of 1 MiB and 0.25 MiB follow.
    """

    def __init__(self) -> None:
        """Begin with room for PIECE_BYTES in the message."""
        self._free_bytes = PIECE_BYTES
        self._unsent: list[memoryview] = []

    def write(self, tensor: torch.Tensor, message: values_pb2.Tensor) -> None:
        """Write as much of a tensor into the message as there is room, and keep the rest for `pieces`.

        tensor: the tensor, on any device.
        message: the message's tensor field.

        Raises WireError for an unsupported type.

        Once the room of the message is used up, its data is empty and the whole tensor is kept.
        """
        rows = describe_tensor(tensor, message)
        message.data = bytes(rows[: self._free_bytes])
        self._unsent.append(rows[self._free_bytes :])
        self._free_bytes -= len(message.data)

    def pieces(self) -> Iterator[bytes]:
        """Yield the data that found no room in the message, in pieces of at most PIECE_BYTES. Yields nothing
        if all tensors had room.
        """
        for rows in self._unsent:
            for first in range(0, len(rows), PIECE_BYTES):
                yield bytes(rows[first : first + PIECE_BYTES])


class PieceReader:
    """Collects the pieces of one message's tensors. Raises WireError for a piece that does not fit.

    Pieces may follow only a message that holds PIECE_BYTES of tensor data. If a message with less data has an
    incomplete tensor, the message is invalid and no pieces are expected.

    pieces: the pieces so far, by the tensor's field.
    """

    def __init__(self, tensors: Mapping[str, values_pb2.Tensor]) -> None:
        """Compute how many bytes each tensor of the message lacks.

        tensors: the tensor fields of the message, by name, in the order in which they are written.

        Raises WireError if a tensor exceeds the limits on dimensions and bytes.
        """
        self.pieces: dict[str, list[bytes]] = {name: [] for name in tensors}
        self._missing_bytes = {
            name: max(announced_size(tensor) - len(tensor.data), 0) for name, tensor in tensors.items()
        }
        self._full = sum(len(tensor.data) for tensor in tensors.values()) == PIECE_BYTES

    @property
    def missing_bytes(self) -> int:
        """Number of bytes that are still to come. 0 also if the message is invalid, so that no pieces are
        expected.
        """
        return sum(self._missing_bytes.values()) if self._full else 0

    def add(self, data: bytes) -> None:
        """Add a piece to the first incomplete tensor.

        data: the bytes of the piece. May be called only while bytes are missing.

        Raises WireError if the piece is empty or too long.

        A piece must not exceed PIECE_BYTES, nor the bytes that the first incomplete tensor lacks.
        """
        name = next(name for name, lacking in self._missing_bytes.items() if lacking)
        fits = 0 < len(data) <= min(PIECE_BYTES, self._missing_bytes[name])
        require(fits, f"a piece of {len(data)} bytes came where {self._missing_bytes[name]} are lacking")
        self.pieces[name].append(data)
        self._missing_bytes[name] -= len(data)


# Bytes. Bounds the memory of one tap's weight. Untuned.
MAX_TAP_BYTES = 1 << 30


def cut_tap(tap: Tap) -> Iterator[ring_pb2.Tap]:
    """Yield a tap as messages of whole rows of its weight, in order, of about PIECE_BYTES each.

    A weight of 0 rows yields one message.

    tap: the tap to send.

    A row that is longer than PIECE_BYTES is a message of its own. Each message says how many rows the weight
    has, and which row is its first.
    """
    weight = cast(torch.Tensor, tap.weight)
    rows = weight.shape[0]
    step = max(1, PIECE_BYTES // max(1, weight.shape[1] * weight.element_size()))
    for first in range(0, max(rows, 1), step):
        message = ring_pb2.Tap(epoch=tap.epoch, layer=tap.layer, rows=rows, first_row=first)
        write_tensor(weight[first : first + step], message.part)
        yield message


class TapReader:
    """Collects the parts of a tap, which is a slice of a draft head's weight, one tap at a time. Memory grows
    only with the data that has arrived.
    """

    def __init__(self) -> None:
        """Begin with no part of any tap."""
        self._parts: list[torch.Tensor] = []
        self._key: tuple[int, int, int] | None = None
        self._rows = 0

    def read(self, message: ring_pb2.Tap) -> Tap | None:
        """Add a part. Return the whole tap if this was its last part, otherwise None.

        message: the next part, which begins at the row after the parts so far.

        Raises WireError if the part does not follow the parts so far.

        After the last part, the reader is empty and accepts another tap. Raises WireError also if the part is
        invalid as a tensor.
        """
        part = decode_tensor(message.part)
        self._check(message, part)
        self._parts.append(part)
        self._rows += part.shape[0]
        if self._rows < message.rows:
            return None
        weight = torch.cat(self._parts)
        self._parts = []
        self._key = None
        self._rows = 0
        return Tap(message.epoch, message.layer, weight)

    def _check(self, message: ring_pb2.Tap, part: torch.Tensor) -> None:
        """Raise WireError unless a part follows the parts so far, and remember which tap it belongs to.

        message: the part.
        part: [rows, hidden_size], the decoded tensor of the part.

        A part follows if it has the same epoch, layer and number of rows, begins at the next row, does not
        exceed that number, has at least one row unless the tap has none, and has the same width and type.
        Raises WireError also if the whole tap would exceed MAX_TAP_BYTES, or the part has not two dimensions.
        """
        key = (message.epoch, message.layer, message.rows)
        require(part.dim() == 2, f"a tap's part must be [rows, H], got {list(part.shape)}")
        checked_size((message.rows, part.shape[1]), part.dtype, MAX_TAP_BYTES)
        follows = self._key in (None, key) and message.first_row == self._rows
        require(follows, f"tap of layer {message.layer}: row {message.first_row} came, not row {self._rows}")
        fits = self._rows + part.shape[0] <= message.rows and (part.shape[0] > 0 or message.rows == 0)
        require(fits, f"tap of layer {message.layer}: a part of {part.shape[0]} rows does not fit")
        alike = all(part.shape[1] == p.shape[1] and part.dtype == p.dtype for p in self._parts[:1])
        require(alike, f"tap of layer {message.layer}: parts differ in width or type")
        self._key = key
