"""Tensors on the wire: element type, shape and raw little-endian rows, checked before memory is taken.

Refuses to know what the numbers mean. Nothing here can run code: no pickle, no torch.load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specsot.errors import WireError
from specsot.v1 import values_pb2
from specsot.wire.checks import known, require

MAX_DIMENSIONS = 4
MAX_BYTES = 256 << 20

_NUMBERS = {
    torch.float32: values_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: values_pb2.DATA_TYPE_BFLOAT16,
    torch.float16: values_pb2.DATA_TYPE_FLOAT16,
}
_TYPES = {int(number): dtype for dtype, number in _NUMBERS.items()}


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
    if dtype not in _NUMBERS:
        raise WireError(f"tensors of {dtype} do not travel")
    message.dtype = _NUMBERS[dtype]
    message.shape.extend(shape)


def decode_beside(message: values_pb2.Tensor) -> Beside:
    """Raises WireError past the limits, and for bytes that should not be here."""
    announced_size(message)
    require(not message.data, f"a tensor beside its message brought {len(message.data)} bytes")
    return Beside(tuple(message.shape), _TYPES[message.dtype])


def decode_tensor(message: values_pb2.Tensor, pieces: Sequence[bytes] = ()) -> torch.Tensor:
    """A CPU tensor that owns its memory. pieces: what came behind the message's own data.

    Raises WireError unless all bytes together are exactly the shape's.
    """
    size, shape = announced_size(message), tuple(message.shape)
    came = len(message.data) + sum(map(len, pieces))
    require(came == size, f"tensor {list(shape)} needs {size} bytes, got {came}")
    dtype = _TYPES[message.dtype]
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray().join((message.data, *pieces)), dtype=dtype).view(shape)


def announced_size(message: values_pb2.Tensor) -> int:
    """Bytes of the whole tensor by its type and shape. Raises WireError past the limits."""
    return checked_size(tuple(message.shape), known(_TYPES, message.dtype, "tensor type"))


def checked_size(shape: Sequence[int], dtype: torch.dtype, limit: int = MAX_BYTES) -> int:
    """Bytes a tensor takes. Raises WireError past the limits on dimensions and bytes.

    An empty tensor may not be endless in its other dimensions: torch could not count its strides.
    """
    require(len(shape) <= MAX_DIMENSIONS, f"tensor has {len(shape)} dimensions, {MAX_DIMENSIONS} are allowed")
    spread = math.prod(max(side, 1) for side in shape) * dtype.itemsize
    require(spread <= limit, f"tensor {list(shape)} takes {spread} bytes, {limit} are allowed")
    return math.prod(shape) * dtype.itemsize
