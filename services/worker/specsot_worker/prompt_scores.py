"""Log-probabilities of prompt tokens, for requests that ask for them (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specsot.core.frames import Frame, Logprob, Opening, PromptChunk, rows_of
from specsot_worker.logprobs import token_logprobs

# Positions. Logits of this many prompt tokens are made at a time; with a vocabulary of 128k, each takes 512
# KiB in float32. Untuned.
ROWS_AT_A_TIME = 64


@dataclass(slots=True)
class _Score:
    """The log-probabilities of one prompt, as far as it has been fed.

    top: How many likeliest tokens are asked for at each position.
    chances: One entry for each scored token.
    last: Hidden state [1, hidden_size] of the newest token, which scores the next chunk's first token.
    """

    top: int
    chances: list[Logprob] = field(default_factory=list[Logprob])
    last: torch.Tensor | None = None


class PromptScores:
    """Scores the tokens of prompts: every hidden state of a prompt tells how likely the next token was.
    Chunks of a prompt arrive in order.
    """

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits = logits
        self._scores: dict[int, _Score] = {}

    def open(self, opening: Opening) -> None:
        """Start scoring a sequence's prompt, if it asks for that."""
        if opening.prompt_logprobs is not None:
            self._scores[opening.sequence] = _Score(opening.prompt_logprobs)

    def read(self, frame: Frame) -> None:
        """Score the prompt chunks of a frame that has passed every layer."""
        if not self._scores:
            return
        first = 0
        for segment in frame.segments:
            score = self._scores.get(segment.sequence)
            rows = rows_of(segment)
            if score and isinstance(segment, PromptChunk):
                assert frame.hidden is not None
                self._extend(score, segment.tokens, frame.hidden[first : first + rows])
            first += rows

    def take(self, sequence: int) -> tuple[Logprob, ...]:
        """Return the log-probabilities of all prompt tokens but the first, and forget them. Empty if none
        were asked for.
        """
        score = self._scores.pop(sequence, None)
        return tuple(score.chances) if score else ()

    def forget(self, sequence: int) -> None:
        """Drop a sequence that has closed."""
        self._scores.pop(sequence, None)

    def _extend(self, score: _Score, tokens: tuple[int, ...], hidden: torch.Tensor) -> None:
        """Score the tokens of one chunk.

        tokens: Of length n.
        hidden: [n, hidden_size]. A hidden state scores the token after its own.

            # chunks [a b c] and [d e]: hidden a, b score b, c; then hidden c, d score d, e
        """
        before = score.last
        score.last = hidden[-1:].clone()
        rows = hidden[:-1]
        targets = tokens[1:]
        if before is not None:
            rows = torch.cat((before, rows))
            targets = tokens
        for start in range(0, len(targets), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            score.chances += token_logprobs(self._logits(rows[part]), targets[part], score.top)
