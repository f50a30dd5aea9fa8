"""Changes logits before a token is chosen: excluded tokens, biases, and penalties on tokens that occurred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from specsot.params import Sampling


def without_tokens(
    logits: Callable[[torch.Tensor], torch.Tensor], tokens: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the same logits function with the logits of `tokens` set to -inf, in place: no argmax, draw or
    bias chooses these tokens, and no log-probability counts them.

    logits: Maps [num_rows, hidden_size] to [num_rows, vocab]. It must return a new tensor for each call.
    tokens: Token ids below the size of the vocabulary.
    """
    barred: torch.Tensor | None = None

    @torch.inference_mode()
    def masked(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal barred
        found = logits(hidden)
        # The ids are copied to the device once.
        if barred is None:
            barred = torch.tensor(tokens, device=found.device)
        return found.index_fill_(-1, barred, float("-inf"))

    return masked if tokens else logits


def apply_penalties(logits: torch.Tensor, sampling: Sampling, counts: Mapping[int, int]) -> None:
    """Apply biases and penalties to the logits [vocab] of one node, in place.

    counts: How often each token was generated. Tokens of the prompt are present with a count of 0.
    """
    if sampling.logit_bias:
        _bias(logits, sampling.logit_bias)
    if sampling.penalises and counts:
        _penalise(logits, sampling, counts)


def _bias(logits: torch.Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    """Add the biases of `(token, bias)` pairs."""
    tokens, gains = zip(*bias)
    at = torch.tensor(tokens, device=logits.device)
    logits[at] += torch.tensor(gains, dtype=logits.dtype, device=logits.device)


def _penalise(logits: torch.Tensor, sampling: Sampling, counts: Mapping[int, int]) -> None:
    """Apply the penalties to the tokens that have occurred.

    The repetition penalty is that of CTRL (Keskar et al. 2019): a positive logit is divided by it, another is
    multiplied. Frequency and presence penalties are OpenAI's and concern tokens that the sequence generated
    itself.
    """
    at = torch.tensor(list(counts), device=logits.device)
    written = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
    before = logits[at]
    rate = sampling.repetition_penalty
    repeated = torch.where(before > 0, before / rate, before * rate)
    costs = written * sampling.frequency_penalty + (written > 0) * sampling.presence_penalty
    logits[at] = repeated - costs
