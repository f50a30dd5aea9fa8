"""A KV row in 8 bits: its numbers as int8, and behind them, in two more bytes, their scale in fp16.

Refuses to know pages and layers. With its scale in it, a row is moved, copied and wiped like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specsot.members import KvDtype

SCALE_BYTES = 2  # bytes
MIN_SCALE = 2.0**-24  # of a scale: a row of zeros stays one


def round_rows(rows: Tensor) -> Tensor:
    """[..., head_dim] to int8 [..., head_dim + 2]. What is not finite does not come back finite."""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(MIN_SCALE).half()
    whole = (wide / scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((whole, scale.view(torch.int8)), -1)


def as_numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as they are kept, whichever way that is, as numbers [..., head_dim]."""
    if rows.dtype != torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].view(torch.float16)
    return rows[..., :-SCALE_BYTES].to(dtype).mul_(scale)


def row_bytes(head_dim: int, itemsize: int, kept: KvDtype) -> int:
    """Of one key or value of one head."""
    return head_dim + SCALE_BYTES if kept == "int8" else head_dim * itemsize
