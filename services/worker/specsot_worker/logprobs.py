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
    """Return the outcomes in the same order, with a log-probability for each token of the sequences that ask
    for it. The outcomes of other sequences, and those without tokens, are returned unchanged.

    outcomes: Outcomes of one frame, one for each query.
    queries: The queries from which the outcomes came, with the sequence's options and the numbers of its
        logits.
    logits: Logits of all nodes, [num_nodes, vocab].

    If no sequence asks for them, all outcomes are returned unchanged. Each token gets as many of the
    likeliest tokens as its sequence asks for.
    """
    num_tops = [query.state.opening.logprobs for query in queries]
    if num_tops.count(None) == len(num_tops):
        return list(outcomes)
    rows = list[int]()
    tokens = list[int]()
    max_top = 0
    for outcome, query, top in zip(outcomes, queries, num_tops):
        if top is not None:
            nodes = outcome.accepted or (0,)
            rows += [query.row + node for node in nodes[: len(outcome.tokens)]]
            tokens = tokens + list(outcome.tokens)
            max_top = max(max_top, top)
    if not rows:
        return list(outcomes)
    entries = iter(token_logprobs(logits[rows], tokens, max_top))
    return [
        outcome if top is None else _with_logprobs(outcome, entries, top)
        for outcome, top in zip(outcomes, num_tops)
    ]


# Natural logarithm. Stands for the log-probability of a token that cannot be chosen, because JSON has no
# infinity. Precedent: vLLM, -9999.
MIN_LOGPROB: Final = -9999.0


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Return for each row of logits the log-probability of one token and of the likeliest tokens. Values
    below MIN_LOGPROB are raised to it for the token itself.

    logits: [n, vocab].
    tokens: The n token ids, one for each row.
    num_top: How many of the likeliest tokens are listed; at most the size of the vocabulary. 0: none.

    The values of the likeliest tokens are not raised.
    """
    logprobs = logits.float().log_softmax(-1)
    token_values = logprobs.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]).flatten()
    token_values = token_values.clamp(min=MIN_LOGPROB)
    best = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return [
        Logprob(logprob, tuple(zip(likeliest, top_values)))
        for logprob, likeliest, top_values in zip(
            token_values.tolist(), best.indices.tolist(), best.values.tolist()
        )
    ]


def _with_logprobs(outcome: Outcome, entries: Iterator[Logprob], num_top: int) -> Outcome:
    """Return the outcome with one log-probability entry for each of its tokens.

    outcome: Outcome of one sequence.
    entries: Entries of all sequences. Those of the outcome's tokens are taken from its front.
    num_top: How many of the likeliest tokens the request asks for; longer lists are cut.
    """
    own_entries = (Logprob(one.logprob, one.top[:num_top]) for one in islice(entries, len(outcome.tokens)))
    return replace(outcome, chances=tuple(own_entries))
