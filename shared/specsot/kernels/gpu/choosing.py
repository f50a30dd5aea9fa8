"""The best candidates of every request: one program each feels for the least score that is still chosen.

Refuses to know trees. Scores become whole numbers of the same order; their threshold is found bit by bit,
highest first, and of those that lie on it the lower numbers are taken, as a stable sort would.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from specsot.kernels.contract import DraftResults
from specsot.kernels.gpu.launching import kernel, on_device_of, power_of_two


def organize_draft_results(
    score_list: Sequence[Tensor], token_list: Sequence[Tensor], parents_list: Sequence[Tensor], nodes: int
) -> DraftResults:
    """See `reference`."""
    batch = len(score_list[0])
    scores = torch.cat([each.flatten(1) for each in score_list], dim=1)
    tokens = torch.cat(tuple(token_list), dim=1)
    known = torch.cat(tuple(parents_list[:-1]), dim=1) if len(parents_list) > 1 else parents_list[0][:, :1]
    selected, chosen = tokens.new_empty((2, batch, nodes - 1), dtype=torch.long).unbind()
    if nodes > 1:
        size, wide = scores.shape[1], scores.dtype == torch.float64
        with on_device_of(scores):
            _choose[(batch,)](scores, tokens, selected, chosen, size, nodes - 1, wide, power_of_two(size))
    return DraftResults(known.long(), selected, chosen)


@kernel
def _choose(
    scores, tokens, selected, chosen, size, wanted, wide: tl.constexpr, room: tl.constexpr
):  # fmt: skip
    b, number = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    there = number < size
    score = tl.load(scores + b * size + number, mask=there, other=0.0)
    score = score.to(tl.float64) if wide else score.to(tl.float32)
    score = tl.where(score == score, score, float("-inf")) + 0.0  # no NaN, no negative zero
    if wide:
        order = score.to(tl.int64, bitcast=True)
        order = order ^ ((order >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        short = score.to(tl.int32, bitcast=True)
        order = (short ^ ((short >> 31) & 0x7FFFFFFF)).to(tl.int64)
    positive = tl.sum((there & (order >= 0)).to(tl.int32), 0) >= wanted
    least = tl.where(positive, 0, -9223372036854775808 if wide else -2147483648).to(tl.int64)
    for bit in range(62 if wide else 30, -1, -1):
        higher = least + (tl.full((), 1, tl.int64) << bit)
        enough = tl.sum((there & (order >= higher)).to(tl.int32), 0) >= wanted
        least = tl.where(enough, higher, least)
    above, level = there & (order > least), there & (order == least)
    room_left = wanted - tl.sum(above.to(tl.int32), 0)
    taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room_left))
    place = b * wanted + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(selected + place, number, mask=taken)
    tl.store(chosen + place, tl.load(tokens + b * size + number, mask=taken, other=0), mask=taken)
