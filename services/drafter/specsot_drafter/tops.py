"""The k largest of many columns, in two steps where one is slow.

Refuses to know what the values mean.

torch's CPU topk walks every column; a block's maximum is a fast pass, the k largest values lie in the k
blocks with the largest maxima, and those are few columns (5 times faster at 32000 columns).
"""

from __future__ import annotations

from torch import Tensor

BLOCK = 64
MANY = 1 << 15  # values from which two steps are worth it


def tops(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`values.topk(k, dim=-1)` of [..., n]: values and columns, [..., k], falling."""
    columns = values.shape[-1]
    if values.is_cuda or values.numel() < MANY or columns % BLOCK or columns < k * BLOCK:
        best, where = values.topk(k, dim=-1)
        return best, where
    blocks = values.unflatten(-1, (-1, BLOCK))
    near = blocks.amax(-1).topk(k, dim=-1).indices
    index = near.unsqueeze(-1).expand(*near.shape, BLOCK)
    best, where = blocks.gather(-2, index).flatten(-2).topk(k, dim=-1)
    return best, near.gather(-1, where // BLOCK) * BLOCK + where % BLOCK
