"""The k largest of many columns, in two steps where one is slow.

Refuses to know what the values mean.

torch's CPU topk walks every column; a block's maximum is a fast pass, the k largest values lie in the k
blocks with the largest maxima, and those are few columns (5 times faster at 32000 columns).
"""

from __future__ import annotations

from torch import Tensor

TOPK_BLOCK = 64
TWO_STEP_VALUES = 1 << 15  # values from which two steps are worth it


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`values.topk(k, dim=-1)` of [..., n]: values and columns, [..., k], falling."""
    columns = values.shape[-1]
    if values.is_cuda or values.numel() < TWO_STEP_VALUES or columns % TOPK_BLOCK or columns < k * TOPK_BLOCK:
        best, where = values.topk(k, dim=-1)
        return best, where
    blocks = values.unflatten(-1, (-1, TOPK_BLOCK))
    near = blocks.amax(-1).topk(k, dim=-1).indices
    index = near.unsqueeze(-1).expand(*near.shape, TOPK_BLOCK)
    best, where = blocks.gather(-2, index).flatten(-2).topk(k, dim=-1)
    return best, near.gather(-1, where // TOPK_BLOCK) * TOPK_BLOCK + where % TOPK_BLOCK
