"""Greedy walks down trees: one program a request, which steps from child to child as `reference` does.

Refuses to know chances. A walk looks at most at as many children as there are nodes, so that broken links
cannot hold the device, and reads nothing outside of its arrays whatever they say.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specsot.kernels.contract import Verified
from specsot.kernels.gpu.launching import kernel, on_device_of


def blank(candidates: Tensor, steps: int, more: int = 0) -> tuple[Verified, Tensor]:
    """The results before any walk, -1 everywhere, and `more` numbers beside them; one allocation."""
    batch, nodes = candidates.shape
    sizes = (batch * nodes, batch * (steps + 1), batch, more)
    whole = candidates.new_full((sum(sizes),), -1, dtype=torch.int32)
    predicts, accepted, counts, beside = whole.split(sizes)
    return Verified(predicts, accepted.view(batch, steps + 1), counts), beside


def verify_tree_greedy(
    candidates: Tensor,
    target_predict: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    steps: int,
) -> Verified:
    """See `reference`."""
    arrays = (candidates, target_predict, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    batch, nodes = candidates.shape
    found, _ = blank(candidates, steps)
    with on_device_of(candidates):
        _verify[(batch,)](*(each.contiguous() for each in arrays), *found, nodes, steps, num_warps=1)
    return found


@kernel
def _verify(candidates, targets, slots, first, following, predicts, accepted, counts, nodes, steps):
    b = tl.program_id(0).to(tl.int64)
    rows, row = tl.num_programs(0) * nodes, b * nodes
    taken, looked = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    slot = number_at(slots + row, taken, nodes)
    wanted = number_at(targets, slot, rows)
    tl.store(accepted + b * (steps + 1), slot)
    child = number_at(first + row, taken, nodes)
    while (child >= 0) & (child < nodes) & (taken < steps) & (looked < nodes):
        looked += 1
        if number_at(candidates + row, child, nodes) == wanted:
            put_at(predicts, slot, rows, wanted)
            slot = number_at(slots + row, child, nodes)
            wanted = number_at(targets, slot, rows)
            taken += 1
            tl.store(accepted + b * (steps + 1) + taken, slot)
            child = number_at(first + row, child, nodes)
        else:
            child = number_at(following + row, child, nodes)
    put_at(predicts, slot, rows, wanted)
    tl.store(counts + b, taken)


@kernel
def number_at(array, place, size):
    """array[place] as int64; -1 where there is no such place."""
    return tl.load(array + place, mask=(place >= 0) & (place < size), other=-1).to(tl.int64)


@kernel
def put_at(array, place, size, value):
    """array[place] = value, where there is such a place."""
    tl.store(array + place, value, mask=(place >= 0) & (place < size))
