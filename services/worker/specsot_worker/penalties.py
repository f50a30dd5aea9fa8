"""Changes logits before a token is chosen: excluded tokens, biases, and penalties on tokens that occurred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from specsot.params import Sampling
from specsot_model.inference import inference_mode
from specsot_model.kv import indices


def without_tokens(
    logits: Callable[[torch.Tensor], torch.Tensor], tokens: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the same logits function, but with the logits of some tokens set to -inf, in place: no argmax,
    draw or bias chooses these tokens, and no log-probability counts them.

    logits: Function from hidden states [num_tokens, hidden_size] to logits [num_tokens, vocab]. It must
        return a new tensor for each call.
    tokens: Ids of the excluded tokens, below the size of the vocabulary. Empty: `logits` itself is returned.

    Tensors of the returned function are those of `logits` changed in place.
    """
    barred: torch.Tensor | None = None

    @inference_mode
    def masked(hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_tokens, vocab], in which the excluded tokens have -inf.

        hidden: Hidden states after the last layer, [num_tokens, hidden_size].
        """
        nonlocal barred
        token_logits = logits(hidden)
        # The ids are copied to the device once.
        if barred is None:
            barred = torch.tensor(tokens, device=token_logits.device)
        return token_logits.index_fill_(-1, barred, float("-inf"))

    return masked if tokens else logits


def apply_penalties(logits: torch.Tensor, sampling: Sampling, counts: Mapping[int, int]) -> None:
    """Apply the request's biases, then its penalties, to the logits of one node, in place. Nothing changes if
    the request asks for neither.

    logits: [vocab].
    sampling: Sampling parameters of the sequence, with `logit_bias` and the penalties.
    counts: How often the sequence has generated each token, by token id. Tokens of the prompt are present
        with a count of 0. Empty: no penalty applies.

    A bias is applied to its token even if the sequence has not generated it.
    """
    if sampling.logit_bias:
        _bias(logits, sampling.logit_bias)
    if sampling.penalises and counts:
        _penalise(logits, sampling, counts)


class RowBiases:
    """The biases of several sequences, which are added to the logits of all of them at once."""

    def __init__(self, samplings: Sequence[Sampling]) -> None:
        """Remember the biases. Nothing is copied to a device yet.

        samplings: Sampling parameters of the sequences, in the order of the rows of logits.
        """
        biases = [(row, *bias) for row, one in enumerate(samplings) for bias in one.logit_bias]
        self._places = [row for row, _, _ in biases], [token for _, token, _ in biases]
        self._additions = [addition for _, _, addition in biases]
        # Rows and token ids, int64 [2, num_biases], and the additions, on the device; None before.
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    def add_to(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits with the biases, in float32, to which `apply_penalties` adds those of one row,
        too. Without biases, the logits themselves are returned. The host does not wait for the device.

        logits: [num_sequences, vocab]. They are changed in place if they are float32.
        """
        if not self._additions:
            return logits
        logits = logits.float()
        if self._on_device is None:
            additions = torch.tensor(self._additions)
            additions = additions.pin_memory() if logits.is_cuda else additions
            self._on_device = (
                indices(self._places, logits.device),
                additions.to(logits.device, non_blocking=True),
            )
        (rows, tokens), additions = self._on_device
        # A token has one bias per sequence, so that no place is written twice.
        logits[rows, tokens] += additions
        return logits


def _bias(logits: torch.Tensor, bias: tuple[tuple[int, float], ...]) -> None:
    """Add biases to the logits of single tokens, in place.

    logits: [vocab].
    bias: Pairs of a token id and the number that is added to its logit. At least one.
    """
    tokens, additions = zip(*bias)
    index = torch.tensor(tokens, device=logits.device)
    logits[index] += torch.tensor(additions, dtype=logits.dtype, device=logits.device)


def _penalise(logits: torch.Tensor, sampling: Sampling, counts: Mapping[int, int]) -> None:
    """Apply the penalties to the logits of the tokens that have occurred, in place.

    logits: [vocab].
    sampling: Sampling parameters with the three penalties.
    counts: By token id, how often the sequence has generated the token; 0 for tokens of the prompt only. Not
        empty.

    The repetition penalty is that of CTRL (Keskar et al. 2019): a positive logit is divided by it, another is
    multiplied. Frequency and presence penalties are OpenAI's and concern tokens that the sequence generated
    itself.

    A repetition penalty of 1, and frequency and presence penalties of 0, change nothing. Tokens of the
    prompt that were not generated get the repetition penalty only.
    """
    index = torch.tensor(list(counts), device=logits.device)
    num_generated = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
    old_logits = logits[index]
    penalty = sampling.repetition_penalty
    repeated = torch.where(old_logits > 0, old_logits / penalty, old_logits * penalty)
    costs = num_generated * sampling.frequency_penalty + (num_generated > 0) * sampling.presence_penalty
    logits[index] = repeated - costs
