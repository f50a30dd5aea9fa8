"""What launching kernels takes: the compiler with a type, sizes of tiles, the device of the tensors.

Refuses to know kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

kernel: Callable[[Callable[..., Any]], Any] = triton.jit
HERE: AbstractContextManager[None] = nullcontext()


def power_of_two(size: int) -> int:
    """The least that is not below `size`: tiles come in these."""
    return 1 << (size - 1).bit_length()


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Nothing to enter on one device, or in Triton's interpreter; a switch costs microseconds."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(tensor.device)
