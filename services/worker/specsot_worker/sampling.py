"""The target token at every node: a function of logits, seed, ordinal and position, nothing else.

Refuses to know trees and acceptance. argmax at temperature 0; otherwise temperature, top-k, top-p
(the order of Hugging Face generate), then the inverse CDF at the counter-based uniform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specsot.draws import uniform
from specsot.params import Sampling


@dataclass(frozen=True, slots=True)
class Wish:
    """How one row's token is drawn; `position` is where the drawn token will stand."""

    sampling: Sampling
    seed: int
    ordinal: int
    position: int


def choose(logits: torch.Tensor, wishes: Sequence[Wish]) -> list[int | None]:
    """Target token of each row of `logits` [rows, V]; None where a row's logits are not numbers.

    Masked tokens carry -inf. A row of nothing but -inf counts as not numbers.
    """
    best, tokens = logits.max(dim=-1)
    chosen: list[int | None] = [
        token if top == top and abs(top) != float("inf") else None
        for token, top in zip(tokens.tolist(), best.tolist())
    ]
    for row, wish in enumerate(wishes):
        if wish.sampling.temperature > 0 and chosen[row] is not None:
            chosen[row] = draw(logits[row], wish)
    return chosen


def draw(logits: torch.Tensor, wish: Wish) -> int:
    """One token of `logits` [V] by inverse CDF in vocabulary order, in float64."""
    weights = distribution(logits, wish.sampling).cumsum(0)
    point = uniform(wish.seed, wish.ordinal, wish.position) * weights[-1].item()
    index = int(torch.searchsorted(weights, point, right=True))
    return min(index, int((weights < weights[-1]).sum()))


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities [V] (float64) after temperature, top-k and top-p; temperature must be > 0."""
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], float("-inf"))
    probabilities = scaled.softmax(-1)
    return _nucleus(probabilities, sampling.top_p) if sampling.top_p < 1 else probabilities


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p; renormalised."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    spare = ordered.cumsum(0) - ordered >= top_p
    kept = probabilities.index_fill(0, order[spare], 0.0)
    return kept / kept.sum()
