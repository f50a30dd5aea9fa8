"""A level of growth by the kernels of a GPU, against the rule in plain torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from specsot_kernels.growing import WORD, CandidatePool, LevelFrontier, LevelPlace

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu import growing as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plainly_grown(
    logits: Tensor,
    k: int,
    place: LevelPlace,
    words: int,
    pool: CandidatePool,
    before: LevelFrontier | None,
    offsets: Tensor | None,
) -> LevelFrontier:
    """In plain torch."""
    trees = pool.tokens.shape[0]
    chances = torch.log_softmax(logits.float(), -1).view(trees, -1, logits.shape[-1])
    more, ids = _tops(chances, k)
    tokens = ids if offsets is None else ids + offsets[ids]
    nodes = more.shape[1]
    scores = more if before is None else more + before.scores.unsqueeze(2)
    parents = (
        torch.zeros_like(tokens) if before is None else (before.numbers + 1).unsqueeze(2).expand_as(tokens)
    )
    own = slice(place.first, place.first + nodes * k)
    pool.tokens[:, own], pool.parents[:, own] = tokens.flatten(1), parents.flatten(1)
    pool.scores[:, own] = scores.flatten(1)
    best, chosen = _tops(scores.flatten(1), place.width)
    above = chosen // k
    origins = above + nodes * torch.arange(trees, device=above.device).unsqueeze(1)
    bits = _own_bits(place.fed, place.width, words, above.device).repeat(trees, 1)
    if before is not None:
        bits |= before.bits[origins.flatten()]
    return LevelFrontier(best, tokens.flatten(1).gather(1, chosen), chosen + place.first, origins, bits)


def _tops(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, order = values.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], order[..., :k]


def _own_bits(first: int, width: int, words: int, device: torch.device) -> Tensor:
    """[width, words]: row first + i sees bit first + i."""
    number = torch.arange(first, first + width, device=device).unsqueeze(1)
    word = torch.arange(words, device=device).unsqueeze(0)
    bit = torch.ones_like(number) << (number % WORD)
    bit = torch.where(bit >= 1 << (WORD - 1), bit - (1 << WORD), bit)  # as a signed word has it
    return torch.where(number // WORD == word, bit, 0).to(torch.int32)


def empty_pool(trees: int, size: int) -> CandidatePool:
    whole = torch.zeros((2, trees, size), dtype=torch.long, device=DEVICE)
    return CandidatePool(whole[0], torch.zeros((trees, size), device=DEVICE), whole[1])


def grown(
    grow: Any, levels: list[Tensor], widths: tuple[int, ...], k: int, offsets: Tensor | None
) -> tuple[CandidatePool, list[LevelFrontier]]:
    trees, first, fed = len(levels[0]), 0, 0
    pool, frontiers = empty_pool(trees, k * (1 + sum(widths[:-1]))), list[LevelFrontier]()
    for logits, width in zip(levels, widths):
        before, place = frontiers[-1] if frontiers else None, LevelPlace(first, fed, width)
        first, fed = first + len(logits) // trees * k, fed + width
        frontiers.append(grow(logits, k, place, 3, pool, before, offsets))
    return pool, frontiers


@pytest.mark.parametrize(
    ("widths", "k", "columns", "coarse", "moved"),
    [
        ((3, 3, 3), 3, 8500, False, True),
        ((3, 3, 3), 3, 600, True, False),
        ((2, 4, 1), 2, 37, True, False),
        ((1, 1, 1), 1, 37, False, False),
    ],
)
def test_levels_are_the_rules(
    widths: tuple[int, ...], k: int, columns: int, coarse: bool, moved: bool
) -> None:
    """coarse: many ties, which go to the lower number. 8,500 columns are three parts, the last one short."""
    trees = 1 if moved else 2
    torch.manual_seed(trees)
    levels = [torch.randn(trees * nodes, columns, device=DEVICE) for nodes in (1, *widths[:-1])]
    if coarse:
        levels = [each.round() for each in levels]
    offsets = torch.arange(columns, device=DEVICE) * 2 if moved else None
    (pool, found), (own, wanted) = (
        grown(way, levels, widths, k, offsets) for way in (kernels.grow, plainly_grown)
    )
    assert pool.tokens.tolist() == own.tokens.tolist()
    assert pool.parents.tolist() == own.parents.tolist()
    torch.testing.assert_close(pool.scores, own.scores)
    for one, other in zip(found, wanted):
        for name in ("tokens", "numbers", "origins", "bits"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def test_rows_of_no_numbers_stay_within_the_vocabulary() -> None:
    logits = torch.full((2, 50), float("nan"), device=DEVICE)
    pool = empty_pool(2, 4)
    after = kernels.grow(logits, 4, LevelPlace(0, 0, 4), 1, pool, None, None)
    assert bool(((after.tokens >= 0) & (after.tokens < 50)).all())
    assert bool(((after.numbers >= 0) & (after.numbers < 4)).all())
