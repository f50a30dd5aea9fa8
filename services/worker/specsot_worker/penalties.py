"""What changes logits before a token is chosen: rows without a token, biases, penalties on written tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from specsot.params import Sampling


def without_tokens(
    logits: Callable[[torch.Tensor], torch.Tensor], tokens: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same logits function, but these tokens' logits are -inf, in place: no argmax, draw or bias chooses
    them, and no log-probability counts them.

    logits: [rows, H] -> [rows, V], a tensor of its own for each call. tokens: below V; mostly the last ones.
    """
    barred: torch.Tensor | None = None

    @torch.inference_mode()
    def masked(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal barred
        found = logits(hidden)
        if barred is None:  # copied to the device once
            barred = torch.tensor(tokens, device=found.device)
        return found.index_fill_(-1, barred, float("-inf"))

    return masked if tokens else logits


def apply_penalties(logits: torch.Tensor, sampling: Sampling, counts: Mapping[int, int]) -> None:
    """Change one row [V] in place. times: how often each token before it was written."""
    if sampling.logit_bias:
        _bias(logits, sampling.logit_bias)
    if sampling.penalises and counts:
        _penalise(logits, sampling, counts)


def _bias(logits: torch.Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    tokens, gains = zip(*bias)
    at = torch.tensor(tokens, device=logits.device)
    logits[at] += torch.tensor(gains, dtype=logits.dtype, device=logits.device)


def _penalise(logits: torch.Tensor, sampling: Sampling, counts: Mapping[int, int]) -> None:
    """Repetition: CTRL's (Keskar et al. 2019), away from zero or towards it, by the logit's sign.
    Frequency and presence: OpenAI's, on tokens the sequence wrote itself.
    """
    at = torch.tensor(list(counts), device=logits.device)
    written = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
    before = logits[at]
    rate = sampling.repetition_penalty
    repeated = torch.where(before > 0, before / rate, before * rate)
    costs = written * sampling.frequency_penalty + (written > 0) * sampling.presence_penalty
    logits[at] = repeated - costs
