"""How likely the model found the tokens of prompts, where requests ask for it (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specsot.core.frames import Frame, Logprob, Opening, PromptChunk, rows_of
from specsot_worker.logprobs import token_logprobs

# Rows whose logits are made at a time: a prompt's, at a vocabulary of 128k, are 512 KiB each.
ROWS_AT_A_TIME = 64


@dataclass(slots=True)
class _Score:
    """One prompt as far as it was read. last: the hidden row [1, H] of its newest token."""

    top: int
    chances: list[Logprob] = field(default_factory=list[Logprob])
    last: torch.Tensor | None = None


class PromptScores:
    """Every row of a prompt says how likely the next token was; chunks of a prompt come in order."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits = logits
        self._scores: dict[int, _Score] = {}

    def open(self, opening: Opening) -> None:
        if opening.prompt_logprobs is not None:
            self._scores[opening.sequence] = _Score(opening.prompt_logprobs)

    def read(self, frame: Frame) -> None:
        """The frame's prompt chunks; its rows have passed every layer."""
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
        """Of all tokens of its prompt but the first, once."""
        score = self._scores.pop(sequence, None)
        return tuple(score.chances) if score else ()

    def forget(self, sequence: int) -> None:
        self._scores.pop(sequence, None)

    def _extend(self, score: _Score, tokens: tuple[int, ...], hidden: torch.Tensor) -> None:
        """tokens [n], hidden [n, H]: a row belongs to the token behind its own."""
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
