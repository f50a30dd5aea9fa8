"""Measures how well a model predicts a text under a KV policy: teacher-forced, through the stage that also
serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, cast

import torch

from specsot.checkpoint.config import read_config
from specsot.core.frames import Frame, Opening, PromptChunk
from specsot.errors import InvalidRequest
from specsot.params import HeadImportance, HeadPruning, HeadWindows, Pruning, Window
from specsot_bench.core.aggregate import Perplexities, Runs
from specsot_bench.core.aggregate import perplexity as perplexity_of
from specsot_bench.reference_model import load_decoder
from specsot_bench.runners import ModelSet
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage

# Tokens of a KV page.
PAGE_ROWS = 256
# Tokens. Maximum size of a frame. Untuned.
CHUNK = 256

# Which earlier positions are attended to; None: all.
Policy = Window | Pruning | HeadWindows | None


def losses(
    decoder: Decoder, tokens: Sequence[int], policy: Policy = None, first_scored: int = 1
) -> list[float]:
    """Return the negative log-likelihood (nats) of each of `tokens` from position `first_scored` on.

    Each token is predicted from the tokens before it, as far as the policy keeps them.

    The result has len(tokens) - first_scored entries.

    decoder: The whole model.
    tokens: Token ids of the text.
    policy: Policy of the earlier positions that are attended to; None: all are.
    first_scored: Index of the first token that is scored, at least 1; tokens before it, such as a prompt, are
        read but not scored.
    Raises InvalidRequest if no token is left to score, or if the text is longer than the model's context and
    the policy is no window.
    """
    if not 0 < first_scored < len(tokens):
        raise InvalidRequest(
            f"first must be in [1, {len(tokens)}) for so many tokens, got {first_scored}", "first"
        )
    if not isinstance(policy, Window) and len(tokens) > decoder.config.max_positions:
        raise InvalidRequest(
            f"{len(tokens)} tokens, the model has {decoder.config.max_positions} positions", "tokens"
        )
    all_losses: list[float] = []
    for start, logits in _logits(decoder, tokens, policy):
        # After the text's last token there is no token to predict.
        next_tokens = tokens[start + 1 : start + 1 + len(logits)]
        targets = torch.tensor(next_tokens, dtype=torch.long, device=logits.device)
        chunk_losses = torch.nn.functional.cross_entropy(
            logits[: len(targets)].float(), targets, reduction="none"
        )
        all_losses += chunk_losses.tolist()
    return all_losses[first_scored - 1 :]


def _logits(decoder: Decoder, tokens: Sequence[int], policy: Policy) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the start of every chunk of the text, and the logits [chunk_tokens, vocab_size] after each of its
    tokens.

    A chunk has at most CHUNK tokens. A text without tokens yields nothing.

    decoder: The whole model.
    tokens: Token ids of the text.
    policy: Policy of the earlier positions that are attended to; None: all are. A pruning policy also
        shortens chunks, so that each begins where it prunes.
    """
    stage = DecoderStage(decoder, -(-(len(tokens) + CHUNK) // PAGE_ROWS), PAGE_ROWS)
    opening = Opening(1, len(tokens), decodes=False, drafted=False, **_named(policy))
    start = number = 0
    while start < len(tokens):
        stop = min(start + CHUNK, len(tokens))
        if isinstance(policy, Pruning):
            stop = min(stop, policy.due(start) + policy.prune_every)
        chunk = PromptChunk(1, start, tuple(tokens[start:stop]), stop == len(tokens))
        output = stage.run(Frame(1, number, () if start else (opening,), (chunk,)))
        yield start, decoder.logits(cast("torch.Tensor", output.hidden))
        start = stop
        number = number + 1


def _named(policy: Policy) -> dict[str, Any]:
    """Return the fields of an opening that set a policy; without a policy, a window that is None.

    Policies for each head give "heads" (windows), or "pruning" with "importance"; a window gives "window".

    policy: Policy of the earlier positions that are attended to; None: all are.
    """
    match policy:
        case HeadPruning():
            pruning = Pruning(policy.keep_ratio, policy.prune_every, policy.skip_layers)
            return {"pruning": pruning, "importance": HeadImportance(policy.importance)}
        case Pruning():
            return {"pruning": policy}
        case HeadWindows():
            return {"heads": policy}
        case _:
            return {"window": policy}


# Tokens. Maximum length of the reference text that is read. Untuned.
MAX_REFERENCE_TOKENS = 1536


class Scores:
    """Computes perplexities, and keeps each loss that was computed, since lossless methods write the same
    text.
    """

    def __init__(self, models: ModelSet, reference: str | None) -> None:
        """Prepare the reference text.

        At most MAX_REFERENCE_TOKENS tokens of the text are used, or as many as the model has positions. The
        base is not loaded here.

        models: Models of the run, of which the base is used.
        reference: Text for the second perplexity; None: that perplexity is not computed.
        Raises InvalidRequest for a text of fewer than two tokens.
        """
        self._models = models
        # Windows could read farther, but all methods read the same tokens.
        max_tokens = min(MAX_REFERENCE_TOKENS, read_config(models.base).max_positions)
        self._reference = (
            None if reference is None else Text(models.base).encode_prompt(reference)[:max_tokens]
        )
        if self._reference is not None and len(self._reference) < 2:
            raise InvalidRequest("text: it has fewer than two tokens", field="text")
        self._loss = cache(self._losses)

    @cached_property
    def _decoder(self) -> Decoder:
        """Return the base, loaded at its first use."""
        return load_decoder(self._models)

    def quality(self, runs: Runs) -> Perplexities:
        """Return the perplexities of a method. Its own text is read without a window, as far as the base's
        context reaches; the reference text is read with the method's window.

        The second perplexity is None without a reference text, the first one without any written token.
        Texts of Transformers' methods are read without a window. Losses that were computed before are not
        computed again.

        runs: The texts that the method wrote, with their prompts.
        """
        written_texts = [excerpt.token_ids for excerpt in runs.excerpts]
        own_losses = [
            self._loss((*prompt, *text), len(prompt), None)
            for prompt, text in zip(runs.prompts, written_texts)
        ]
        window = None if runs.method.rival else runs.method.window
        reference_perplexity = (
            None if self._reference is None else perplexity_of([self._loss(self._reference, 1, window)])
        )
        return Perplexities(perplexity_of(own_losses), reference_perplexity)

    def _losses(self, tokens: tuple[int, ...], first_scored: int, window: Window | None) -> tuple[float, ...]:
        """Return the losses of a text; without a window, of as much as fits the context.

        Raises InvalidRequest if no token is left to score.

        tokens: Token ids of the text.
        first_scored: Index of the first token that is scored, at least 1.
        window: Window of positions that are attended to; None: all are.
        """
        max_positions = self._decoder.config.max_positions
        scored_tokens = tokens[:max_positions] if window is None else tokens
        return tuple(losses(self._decoder, scored_tokens, window, first_scored))
