"""Proposers behind one base: an EAGLE head, a small language model, n-grams of the sequence itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from specsot.core.frames import Features
from specsot.core.verdict import UnreadTrees, UnreadVerdict
from specsot.params import MAX_TOKENS
from specsot_drafter.core.selection import Candidates, Flags, Floats, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence

Offer = Callable[[], Candidates | None]


class ChosenTrees(UnreadTrees, Protocol):
    """Trees of a proposer's own candidates. sequences: whose they are."""

    @property
    def sequences(self) -> tuple[int, ...]: ...

    def take(self) -> Flags | None:
        """[trees, n] which candidates were chosen; None: nobody asked for that. Waits for the device."""
        ...


class Proposer(ABC):
    """One way to draft, within one epoch. It follows the texts it was given, each until it is closed.

    widths: nodes per tree that are fed at most to grow level 2, 3, ...; one less than its deepest tree.
    positions: how many it knows.
    at_once: it grows all levels without asking between them.
    took_early: `begin` has gone on with what `begin_early` began, and nothing else is offered.
    """

    widths: tuple[int, ...]
    positions: int = MAX_TOKENS
    at_once = False
    took_early = False

    @property
    @abstractmethod
    def free_pages(self) -> int:
        """KV pages nobody owns; all of them once every text is closed."""

    @abstractmethod
    def open(self, sequence: DraftSequence) -> None:
        """Follow a text from here; a fork shares what it can with its source."""

    @abstractmethod
    def follows(self, sequence: int) -> bool:
        """Whether this text is followed still."""

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Give everything back. Texts that are not followed are ignored."""

    @abstractmethod
    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Candidates for trees of `levels` levels; fewer where `keep_growing` says so, more where a graph has
        more.

        None where there is no room for any. A text without room gets no candidate.
        """

    def begin(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Offer:
        """The same in two parts: a device may be at it until what is returned is called; nothing else may be
        asked before that.
        """
        return partial(self.propose, sequences, levels, keep_growing)

    def begin_early(self, verdict: UnreadVerdict, ids: int, levels: int) -> bool:
        """Begin what `begin` will be asked for behind these trees; whether that could be done. `begin` then
        goes on with that, however many levels it is asked for, or says by `took_early` that it could not.

        ids: tokens that may be fed.
        """
        return False

    def choose_early(self, texts: Sequence[int], nodes: int, room: int, trust: Floats) -> ChosenTrees | None:
        """Have a device choose what it grows behind a verdict that is known by now, for these texts; see
        `EarlyGrowth.choose`. None where it cannot.
        """
        return None

    def observe(self, batch: Features) -> None:  # noqa: B027 (most need not)
        """Lessons came; their tokens are in the texts already."""

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """Rows that must be computed before any of these can grow."""
        return 0

    def catch_up(self) -> None:  # noqa: B027 (nothing is ever due)
        """Compute what is due, while nobody waits."""

    def max_levels(self, sequence: DraftSequence) -> int:
        """How deep a tree it could draft for this text now; 0 where it cannot. The last node of use is the
        one before the text's last token.
        """
        levels = self.levels_at(sequence)
        left = sequence.remaining - 1
        return levels if levels <= left else max(left, 0)

    def levels_at(self, sequence: DraftSequence, further: int = 0) -> int:
        """The same so many tokens further on, wherever it ends: but for the last position."""
        room = sequence.max_tokens(self.positions) - sequence.committed - 1 - further
        levels = len(self.widths) + 1 if self.follows(sequence.id) else 0
        return levels if levels <= room else max(room, 0)
