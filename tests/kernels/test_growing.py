"""A level of growth by the kernels of a GPU, against the rule in plain torch."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from specsot.kernels import growing as rule
from specsot.kernels.growing import CandidatePool, LevelFrontier

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot.kernels.gpu import growing as kernels

pytestmark = pytest.mark.torch
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def empty_pool(trees: int, size: int) -> CandidatePool:
    whole = torch.zeros((2, trees, size), dtype=torch.long, device=DEVICE)
    return CandidatePool(whole[0], torch.zeros((trees, size), device=DEVICE), whole[1])


def grown(
    way: object, levels: list[Tensor], trees: int, k: int, offsets: Tensor | None
) -> tuple[CandidatePool, list[LevelFrontier]]:
    pool, frontiers = empty_pool(trees, k + (len(levels) - 1) * k * k), list[LevelFrontier]()
    for level, logits in enumerate(levels):
        before = frontiers[-1] if frontiers else None
        frontiers.append(way.grow(logits, k, level, 3, pool, before, offsets))  # type: ignore[attr-defined]
    return pool, frontiers


@pytest.mark.parametrize(
    ("trees", "k", "columns", "coarse", "moved"),
    [(1, 3, 8500, False, True), (2, 3, 600, True, False), (2, 1, 37, False, False)],
)
def test_levels_are_the_rules(trees: int, k: int, columns: int, coarse: bool, moved: bool) -> None:
    """coarse: many ties, which go to the lower number. 8,500 columns are three parts, the last one short."""
    torch.manual_seed(trees)
    levels = [torch.randn(trees * (k if level else 1), columns, device=DEVICE) for level in range(3)]
    if coarse:
        levels = [each.round() for each in levels]
    offsets = torch.arange(columns, device=DEVICE) * 2 if moved else None
    (pool, found), (own, wanted) = (grown(way, levels, trees, k, offsets) for way in (kernels, rule))
    assert pool.tokens.tolist() == own.tokens.tolist()
    assert pool.parents.tolist() == own.parents.tolist()
    torch.testing.assert_close(pool.scores, own.scores)
    for one, other in zip(found, wanted):
        for name in ("tokens", "numbers", "origins", "bits"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def test_rows_of_no_numbers_stay_within_the_vocabulary() -> None:
    logits = torch.full((2, 50), float("nan"), device=DEVICE)
    pool = empty_pool(2, 4)
    after = kernels.grow(logits, 4, 0, 1, pool, None, None)
    assert bool(((after.tokens >= 0) & (after.tokens < 50)).all())
    assert bool(((after.numbers >= 0) & (after.numbers < 4)).all())
