"""The target token of a row: a function of its logits, seed, ordinal and position, nothing else.

Refuses to know trees, penalties and acceptance. argmax at temperature 0; otherwise temperature, top-k,
top-p, min-p (the order of Hugging Face generate; EAGLE's own code cuts by top-p before top-k), then the
inverse CDF in vocabulary order at the counter-based uniform. Ties at an edge of a cut all stay in, so
that no sorting algorithm has a say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specsot.core.sampling import uniform
from specsot.params import Sampling

NUCLEUS_CANDIDATES = 512  # a nucleus is looked for among so many tokens, then among eight times more
MIN_TEMPERATURE, MAX_TEMPERATURE = (
    1e-30,
    1e30,
)  # temperatures beyond behave like these, and float32 can divide by them
MIN_WEIGHT = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """How one row's token is drawn; `position` is where the drawn token will stand."""

    sampling: Sampling
    seed: int
    ordinal: int
    position: int


def choose_tokens(logits: torch.Tensor, requests: Sequence[DrawRequest]) -> list[int | None]:
    """Target token of each row of `logits` [rows, V]; None where a row's logits are not numbers."""
    chosen = argmax_tokens(logits)
    by_sampling: dict[Sampling, list[int]] = {}
    for row, wish in enumerate(requests):
        if wish.sampling.temperature > 0 and chosen[row] is not None:
            by_sampling.setdefault(wish.sampling, []).append(row)
    for sampling, rows in by_sampling.items():
        points = [uniform(requests[row].seed, requests[row].ordinal, requests[row].position) for row in rows]
        picked = logits if len(rows) == len(requests) else logits[rows]
        for row, token in zip(rows, draw_tokens(picked, sampling, points)):
            chosen[row] = token
    return chosen


def argmax_tokens(logits: torch.Tensor) -> list[int | None]:
    """The argmax of each row [rows, V]; None where a row holds NaN, infinity, or nothing but -infinity."""
    best, tokens = logits.max(dim=-1)
    both = torch.stack((best.double(), tokens.double())).tolist()  # read once: each read awaits the device
    return [int(token) if top == top and abs(top) != float("inf") else None for top, token in zip(*both)]


def draw_tokens(logits: torch.Tensor, sampling: Sampling, points: Sequence[float]) -> list[int]:
    """One token for each row [rows, V], where the row's CDF passes its point in [0, 1).

    Sums are float64. Masked tokens carry -inf. The temperature must be > 0.
    """
    tokens, weights = sampling_weights(logits, sampling)
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[:, -1:]
    wanted = whole * torch.tensor(points, dtype=torch.float64, device=logits.device)[:, None]
    below = torch.nextafter(whole, torch.zeros_like(whole))  # rounding might reach the very end
    place = torch.searchsorted(sums, wanted.minimum(below), right=True)
    return (place if tokens is None else tokens.gather(-1, place)).flatten().tolist()


def sampling_weights(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Tokens that may be drawn, ascending, and their weights, both [rows, n]; the weights are what is
    left of a softmax, so they need not sum to 1. Tokens None: the whole vocabulary.
    """
    temperature = min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
    shifted = logits.float() - logits.amax(-1, keepdim=True)
    weights = shifted.div_(temperature).softmax(-1)
    if not sampling.top_k and sampling.top_p == 1:
        floors = sampling.min_p * weights.amax(-1, keepdim=True)
        return None, weights.masked_fill_(weights < floors, 0) if sampling.min_p else weights
    return _truncated_weights(weights, sampling)


def _truncated_weights(weights: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Look only at the likeliest, and at more of them while tokens that stay may lie beyond."""
    size, candidates = weights.shape[-1], 2 * sampling.top_k or NUCLEUS_CANDIDATES
    while True:
        candidates = min(candidates, size)
        values, tokens = weights.topk(candidates)
        floors = _weight_floors(values, sampling)
        if candidates == size or bool((values[:, -1:] < floors).all()):
            break
        candidates *= 8
    tokens, order = tokens.sort(-1)
    values = values.gather(-1, order)
    return tokens, values.masked_fill_(values < floors, 0)


def _weight_floors(values: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The least weight [rows, 1] that stays, as far as these weights [rows, n], descending, can tell."""
    floors = torch.full_like(values[:, :1], MIN_WEIGHT)
    if 0 < sampling.top_k < values.shape[-1]:
        floors = floors.maximum(values[:, sampling.top_k - 1 : sampling.top_k])
    if sampling.top_p < 1:
        sums = values.masked_fill(values < floors, 0).cumsum(-1, dtype=torch.float64)
        whole = sums[:, -1:] if sampling.top_k else 1.0
        before = sums[:, :-1] < sampling.top_p * whole  # what more is wanted behind each
        floors = floors.maximum(values.gather(-1, before.sum(-1, keepdim=True)))
    return floors.maximum(sampling.min_p * values[:, :1])
