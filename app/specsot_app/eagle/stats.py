"""What a generation tells beside its tokens: pieces as they are written, and figures at the end.

Refuses to know models, tensors and clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot.frames import End
from specsot.kernels import TreeStatistics


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one sequence of the batch has just written; `end` comes with its last ones."""

    sequence: int
    tokens: tuple[int, ...]
    end: End | None = None


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """One sequence of the batch.

    tokens: what it wrote, the end-of-sequence token included.
    end:    STOP, LENGTH, or FAILED when the target's logits were no numbers; None while it writes.
    accept_lengths: accepted drafts of each of its trees, as far as they were written.
    """

    tokens: tuple[int, ...]
    end: End | None
    accept_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EagleStats:
    """A whole generation.

    seed:    that all draws came from: with it the same tokens come again.
    laps:    forwards of the target, the prompts' included.
    seconds: spent in target and drafter.
    trees:   what all trees came to.
    """

    sequences: tuple[SequenceStats, ...]
    seed: int
    laps: int
    seconds: float
    trees: TreeStatistics

    @property
    def new_tokens(self) -> int:
        """Of all sequences."""
        return sum(len(one.tokens) for one in self.sequences)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those proposed."""
        return self.trees.acceptance_rate

    @property
    def mean_accept_length(self) -> float:
        """Accepted drafts of a tree; one more token comes with each."""
        return self.trees.mean_accept_length
