"""What a target token must be, by Transformers' own processors and plain sums in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specsot.params import Sampling
from specsot_worker.core.accept import draw_key, uniform


def times_of(prompt: Sequence[int], written: Sequence[int]) -> dict[int, int]:
    """How often each token that stands there was written."""
    return {token: list(written).count(token) for token in (*prompt, *written)}


def shape(logits: torch.Tensor, sampling: Sampling, times: Mapping[int, int]) -> torch.Tensor:
    """Scores [V], float64, behind bias and penalties (frequency and presence by their formula)."""
    scores, seen = logits.double()[None], torch.tensor([list(times)])
    if sampling.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[t], gain] for t, gain in sampling.logit_bias])(seen, scores)
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, scores)
    for token, count in times.items():
        if count:
            scores[0, token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores[0]


def distribute(logits: torch.Tensor, sampling: Sampling, times: Mapping[int, int]) -> torch.Tensor:
    """Probabilities [V], float64; the temperature must be > 0."""
    scores, seen = shape(logits, sampling, times)[None], torch.tensor([list(times)])
    scores = TemperatureLogitsWarper(float(sampling.temperature))(seen, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(seen, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(seen, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(seen, scores)
    return scores[0].softmax(-1)


def pick(
    logits: torch.Tensor, sampling: Sampling, times: Mapping[int, int], seed: int, ordinal: int, position: int
) -> int:
    """The target token behind one row [V]."""
    if not sampling.temperature:
        return int(shape(logits, sampling, times).argmax())
    chances, key = distribute(logits, sampling, times), draw_key(seed, ordinal, position)
    tokens = range(1 << (len(chances) - 1).bit_length())
    while len(tokens) > 1:
        low, high = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
        left, right = (float(chances[half.start : half.stop].sum()) for half in (low, high))
        number = uniform(key, len(low))
        tokens = high if number * (left + right) >= left and right else low
    return tokens[0]
