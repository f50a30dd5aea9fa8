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

    num_top: Number of likeliest tokens that are asked for at each position.
    logprobs: The log-probability of each scored token, in the order of the prompt. The first token of the
        prompt has none.
    last: Hidden state [1, hidden_size] of the newest token, which scores the next chunk's first token. None
        before the first chunk.
    """

    num_top: int
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    last: torch.Tensor | None = None


class PromptScores:
    """Scorer of prompt tokens: each hidden state of a prompt gives the probability of the next token. Chunks
    of a prompt arrive in order.
    """

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Start without prompts.

        logits: Function from hidden states [n, hidden_size] to logits [n, vocab].
        """
        self._logits = logits
        self._scores: dict[int, _Score] = {}

    def open(self, opening: Opening) -> None:
        """Start scoring a sequence's prompt, if its request asks for that; otherwise do nothing.

        opening: What every stage knows about the sequence; `prompt_logprobs` is None if nothing is asked for.
        """
        if opening.prompt_logprobs is not None:
            self._scores[opening.sequence] = _Score(opening.prompt_logprobs)

    def read(self, frame: Frame) -> None:
        """Score the prompt chunks of a frame that has passed every layer. Sequences that did not ask for it
        are skipped, and nothing happens if no sequence has asked.

        frame: The frame, with hidden states of the last layer.

        Trees are skipped. Asserts that a frame with a prompt to be scored has hidden states.
        """
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
        """Return the log-probabilities of all prompt tokens but the first, in order, and forget them. Return
        () if none were asked for, for an unknown sequence, and if they were taken already.

        sequence: Id of the sequence whose prompt has been fed completely.
        """
        score = self._scores.pop(sequence, None)
        return tuple(score.logprobs) if score else ()

    def forget(self, sequence: int) -> None:
        """Drop the scores of a sequence that has closed. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        self._scores.pop(sequence, None)

    def _extend(self, score: _Score, tokens: tuple[int, ...], hidden: torch.Tensor) -> None:
        """Score the tokens of one chunk.

        score: What is known of the prompt; the entries of the chunk are appended.
        tokens: Ids of the chunk's n tokens.
        hidden: Hidden states of these tokens after the last layer, [n, hidden_size]. A hidden state scores
            the token after its own.

        For example:

            # chunks [a b c] and [d e]: hidden a, b score b, c; then hidden c, d score d, e

        The chunk's last hidden state is kept for the next chunk. The first token of the prompt gets no
        entry.
        """
        previous = score.last
        score.last = hidden[-1:].clone()
        scoring = hidden[:-1]
        targets = tokens[1:]
        if previous is not None:
            scoring = torch.cat((previous, scoring))
            targets = tokens
        for start in range(0, len(targets), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            score.logprobs += token_logprobs(self._logits(scoring[part]), targets[part], score.num_top)
