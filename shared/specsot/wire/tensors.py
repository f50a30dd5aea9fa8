"""Tensors on the wire: element type, shape and raw little-endian rows, checked before memory is taken.

Refuses to know what the numbers mean. Nothing here can run code: no pickle, no torch.load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def write_tensor(tensor: torch.Tensor, message: values_pb2.Tensor) -> None:
    """Fill in any float32, bfloat16 or float16 tensor, from any device. Raises WireError for other types.

    In place, because protobuf copies a whole message when it is put into another one.
    """
    if tensor.dtype not in _NUMBERS:
        raise WireError(f"tensors of {tensor.dtype} do not travel")
    # numpy knows no bfloat16; its bits travel as those of an integer.
    rows = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    message.dtype = _NUMBERS[tensor.dtype]
    message.shape.extend(tensor.shape)
    message.data = rows.numpy(force=True).tobytes()


def decode_tensor(message: values_pb2.Tensor) -> torch.Tensor:
    """A CPU tensor that owns its memory. Raises WireError unless the bytes are exactly the shape's."""
    dtype = known(_TYPES, message.dtype, "tensor type")
    shape, data = tuple(message.shape), message.data
    size = checked_size(shape, dtype)
    require(len(data) == size, f"tensor {list(shape)} needs {size} bytes, got {len(data)}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def checked_size(shape: Sequence[int], dtype: torch.dtype, limit: int = MAX_BYTES) -> int:
    """Bytes a tensor takes. Raises WireError past the limits on dimensions and bytes.

    An empty tensor may not be endless in its other dimensions: torch could not count its strides.
    """
    require(len(shape) <= MAX_DIMENSIONS, f"tensor has {len(shape)} dimensions, {MAX_DIMENSIONS} are allowed")
    spread = math.prod(max(side, 1) for side in shape) * dtype.itemsize
    require(spread <= limit, f"tensor {list(shape)} takes {spread} bytes, {limit} are allowed")
    return math.prod(shape) * dtype.itemsize
