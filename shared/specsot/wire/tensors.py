"""Tensors on the wire: element type, shape and raw little-endian rows, checked before memory is taken.

Refuses to know what the numbers mean. Nothing here can run code: no pickle, no torch.load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def encode_tensor(tensor: torch.Tensor) -> values_pb2.Tensor:
    """Any float32, bfloat16 or float16 tensor, from any device. Raises WireError for other types."""
    if tensor.dtype not in _NUMBERS:
        raise WireError(f"tensors of {tensor.dtype} do not travel")
    rows = tensor.detach().cpu().contiguous().reshape(-1)
    data = rows.view(torch.uint8).numpy().tobytes()
    return values_pb2.Tensor(dtype=_NUMBERS[tensor.dtype], shape=tensor.shape, data=data)


def decode_tensor(message: values_pb2.Tensor) -> torch.Tensor:
    """A CPU tensor that owns its memory. Raises WireError unless the bytes are exactly the shape's."""
    dtype = known(_TYPES, message.dtype, "tensor type")
    size = checked_size(message.shape, dtype)
    data = message.data
    require(len(data) == size, f"tensor {list(message.shape)} needs {size} bytes, got {len(data)}")
    tensor = torch.empty(tuple(message.shape), dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(memoryview(data), np.uint8)
    return tensor


def checked_size(shape: Sequence[int], dtype: torch.dtype, limit: int = MAX_BYTES) -> int:
    """Bytes a tensor takes. Raises WireError past the limits on dimensions and bytes."""
    require(len(shape) <= MAX_DIMENSIONS, f"tensor has {len(shape)} dimensions, {MAX_DIMENSIONS} are allowed")
    size = math.prod(shape) * dtype.itemsize
    require(size <= limit, f"tensor {list(shape)} takes {size} bytes, {limit} are allowed")
    return size
