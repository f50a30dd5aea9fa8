"""Proposers behind one interface: an EAGLE head, a small language model, n-grams of the sequence itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specsot.core.frames import Features
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence


class Proposer(Protocol):
    """One way to draft, within one epoch. It follows the texts it was given, each until it is closed.

    widths: nodes per tree that are fed at most to grow level 2, 3, ...; one less than its deepest tree.
    """

    widths: tuple[int, ...]

    @property
    def free_pages(self) -> int:
        """KV pages nobody owns; all of them once every text is closed."""
        ...

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """Rows that must be computed before any of these can grow."""
        ...

    def open(self, sequence: DraftSequence) -> None:
        """Follow a text from here; a fork shares what it can with its source."""
        ...

    def observe(self, batch: Features) -> None:
        """Lessons came; their tokens are in the texts already."""
        ...

    def close(self, sequence: int) -> None:
        """Give everything back. Texts that are not followed are ignored."""
        ...

    def max_levels(self, sequence: DraftSequence) -> int:
        """How deep a tree it could draft for this text now; 0 where it cannot."""
        ...

    def catch_up(self) -> None:
        """Compute what is due, while nobody waits."""
        ...

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Candidates for trees of at most `levels` levels; fewer where `keep_growing` says so.

        None where there is no room for any. A text without room gets no candidate.
        """
        ...
