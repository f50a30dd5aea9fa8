"""Log-probabilities of generated tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

import torch

from specsot.core.frames import Logprob, Outcome
from specsot_worker.sampling import TargetQuery


def add_logprobs(
    outcomes: Sequence[Outcome], queries: Sequence[TargetQuery], logits: torch.Tensor
) -> list[Outcome]:
    """Return the outcomes, with a log-probability for each token of the sequences that ask for it. logits:
    [num_rows, vocab].
    """
    asked = [question.state.opening.logprobs for question in queries]
    rows = list[int]()
    tokens = list[int]()
    most = 0
    for outcome, question, top in zip(outcomes, queries, asked):
        if top is not None:
            nodes = outcome.accepted or (0,)
            rows += [question.row + node for node in nodes[: len(outcome.tokens)]]
            tokens = tokens + list(outcome.tokens)
            most = max(most, top)
    if not rows:
        return list(outcomes)
    chances = iter(token_logprobs(logits[rows], tokens, most))
    return [
        outcome if top is None else _with_logprobs(outcome, chances, top)
        for outcome, top in zip(outcomes, asked)
    ]


# Natural logarithm. Stands for the log-probability of a token that cannot be chosen, because JSON has no
# infinity. Precedent: vLLM, -9999.
LEAST_LOGPROB: Final = -9999.0


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return for each row of logits [num_rows, vocab] the log-probability of its token and of the `top`
    likeliest tokens.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]).flatten()
    own = own.clamp(min=LEAST_LOGPROB)
    best = logprobs.topk(min(top, logprobs.shape[-1]))
    return [
        Logprob(mine, tuple(zip(likeliest, theirs)))
        for mine, likeliest, theirs in zip(own.tolist(), best.indices.tolist(), best.values.tolist())
    ]


def _with_logprobs(outcome: Outcome, chances: Iterator[Logprob], top: int) -> Outcome:
    """Return the outcome with the next of `chances`, each cut to the `top` that was asked for."""
    own = (Logprob(one.logprob, one.top[:top]) for one in islice(chances, len(outcome.tokens)))
    return replace(outcome, chances=tuple(own))
