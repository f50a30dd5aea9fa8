"""The two-step top-k is torch's."""

from __future__ import annotations

import pytest
import torch

from specsot_drafter.growth import TOPK_BLOCK, TWO_STEP_VALUES, topk


@pytest.mark.parametrize(
    "shape",
    [
        (1, 100),
        (3, 64),
        (2, 3, 8192),
        (1, 1, TWO_STEP_VALUES),
        (9, 4096),
        (40, 1000),
        (600, TOPK_BLOCK),
        (200, 4 * TOPK_BLOCK),
    ],
)
@pytest.mark.parametrize("k", [1, 4, 10])
def test_the_same_values_and_columns(shape: tuple[int, ...], k: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    best, where = topk(values, k)
    assert torch.equal(best, values.topk(k).values)
    assert torch.equal(values.gather(-1, where), best)


def test_where_little_is_left_nothing_is_lost() -> None:
    """A grammar leaves few candidates, the rest are at minus infinity."""
    values = torch.full((16, 4096), -torch.inf)
    values[:, 77], values[:, 78], values[:, 4000] = -1.0, -2.0, -3.0
    best, where = topk(values, 4)
    assert best[5].tolist() == [-1.0, -2.0, -3.0, -torch.inf]
    assert where[5, :3].tolist() == [77, 78, 4000]
    assert int(where.max()) < 4096
