"""One text as a draft head follows it: which draft rows are computed, which could be.

Refuses to know tensors and pages: positions and tokens.

Draft row j pairs the feature of position j with the token at j + 1. So with n committed tokens there
are n features, and n rows once the token behind them is known; a fork at n shares n - 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot_drafter.texts import DraftSequence


@dataclass(slots=True)
class FollowedSequence:
    """extended: draft rows computed from true features."""

    sequence: DraftSequence
    extended: int = 0

    @property
    def id(self) -> int:
        return self.sequence.id

    @property
    def length(self) -> int:
        """Features known, of positions 0 .. length - 1."""
        return self.sequence.committed

    @property
    def due(self) -> int:
        """Rows that could be computed and are not yet."""
        return max(min(self.length, len(self.sequence.tokens) - 1) - self.extended, 0)

    def take(self, rows: int | None = None) -> tuple[int, ...]:
        """The tokens of the next rows to compute (all, or the first `rows`), which now count as extended."""
        first = self.extended + 1
        self.extended += self.due if rows is None else rows
        return tuple(self.sequence.tokens[first : self.extended + 1])

    def rewind(self) -> None:
        """Make the last row due again, where nothing else is."""
        if self.sequence.root is not None and not self.due:
            self.extended -= 1
