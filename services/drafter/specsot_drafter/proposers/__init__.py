"""The interface of proposers: an EAGLE head, a small language model, or n-grams of the sequence itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.frames import Features
from specsot.params import MAX_TOKENS
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.selection import Candidates, ChosenNodes, Floats, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence

# Waits for the growth that `begin` launched, and returns what `propose` returns.
Offer = Callable[[], Candidates | None]


class ChosenTrees(DeviceTrees, Protocol):
    """Trees that a device selects from a proposer's own candidates, before the host has read them.

    sequences: The sequence id of each tree, in the order of the trees.
    """

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequence id of each tree, in the order of the trees."""
        ...

    def take(self) -> ChosenNodes | None:
        """Wait for the device and return the nodes that it has selected, tree by tree in the order of
        `sequences`.

        Return None if the device was never asked to select, that is, if no step used these trees.
        """
        ...


class Proposer(ABC):
    """Proposer of candidates for the sequences of one epoch, each from its opening until it is closed.

    A proposer may stop following a sequence, for example when features are missing or no KV page is free;
    then it offers no candidates for that sequence.

    widths: Maximum number of nodes per tree that are fed to grow level 2, 3, ... The deepest tree has one
        level more than there are entries.
    positions: Number of positions that the draft model supports.
    at_once: True if all levels are launched at once, so that growth cannot stop between levels.
    """

    widths: tuple[int, ...]
    positions: int = MAX_TOKENS
    at_once = False
    # What a subclass knows of each sequence that it follows, by the sequence's id.
    _followed: dict[int, Any]

    @property
    @abstractmethod
    def free_pages(self) -> int:
        """The number of KV pages that no sequence owns."""

    @abstractmethod
    def open(self, sequence: DraftSequence) -> None:
        """Follow a sequence from its opening on. A fork shares KV rows with its source where possible. If
        there is no room for the sequence, it is not followed.

        sequence: What the drafter knows of the sequence.
        """

    def follows(self, sequence: int) -> bool:
        """Return whether the proposer still follows a sequence. Return False for an unknown sequence, and for
        one that was closed or dropped.

        sequence: Id of the sequence.
        """
        return sequence in self._followed

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Free everything that a sequence holds. Nothing happens if the sequence is not followed.

        sequence: Id of the sequence.
        """

    @abstractmethod
    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Return candidates for one tree per sequence. Return None if no sequence has candidates.

        sequences: The sequences to draft for, in the order of the result. Each has a root.
        levels: Number of levels to grow. There are fewer if `keep_growing` stops the growth, and more if a
            captured graph has more.
        keep_growing: Asked before each further level how many nodes of each tree to feed. None: all levels
            grow.

        All candidates of a sequence without free KV pages are barred.
        """

    def begin(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Offer:
        """Launch what `propose` computes, and return a function that waits for it and returns the candidates.

        sequences: The sequences to draft for, in the order of the result.
        levels: Number of levels to grow, as for `propose`.
        keep_growing: Asked before each further level how many nodes of each tree to feed, as for `propose`.
            None: all levels grow.

        Growth that `start_growth` has launched is continued, whatever its levels, and confirmed; or it is
        discarded. The returned function may still discard a confirmed growth. Among the candidates of a
        growth that `start_growth` has launched, those that grammars forbid are not barred; call
        `bar_forbidden` for that.

        The device may be computing until that function is called. Until then, call no other method. The
        arrays of the candidates may be overwritten by the next growth, so copy what must stay longer.
        """
        return partial(self.propose, sequences, levels, keep_growing)

    def start_growth(self, verification: DeviceVerification, ids: int, levels: int) -> AsyncGrowth | None:
        """Launch the growth of the next trees before the host has read the verification result of the current
        ones, and return it. Return None if nothing was launched, as always in the base class. At most one
        growth exists at a time: an earlier one is dropped.

        verification: The trees that are being verified, and their results on the device.
        ids: Number of token ids that may be fed; token 0 is fed instead of a target outside 0 .. ids - 1.
        levels: Levels of the trees that grow.
        """
        return None

    def select(
        self, growth: AsyncGrowth, sequences: Sequence[int], nodes: int, max_levels: int, trust: Floats
    ) -> ChosenTrees | None:
        """Let the device select nodes of the trees that are growing asynchronously, and return the selection.
        Return None if that is impossible, as always in the base class.

        growth: The trees that are growing, from `start_growth`.
        sequences: Ids of the sequences, in the order of the trees in the next frame.
        nodes: Maximum number of nodes per tree, root included.
        max_levels: Maximum number of levels that every one of the sequences can have.
        trust: What is added to a candidate's log-probability at each depth, [levels].
        """
        return None

    def bar_forbidden(self, candidates: Candidates, sequences: Sequence[DraftSequence]) -> Candidates:
        """Return candidates of asynchronous growth with those barred that the grammars of their sequences
        forbid; asynchronous growth itself knows no grammars. The base class, whose trees do not grow
        asynchronously, returns the candidates unchanged.

        candidates: Candidates of the grown trees.
        sequences: The sequence of each tree.
        """
        return candidates

    def observe(self, batch: Features) -> None:  # noqa: B027 (most need not)
        """Learn from a message of feature batches, whose tokens the sequences have already. The base class
        does nothing.

        batch: The message, with the features of the committed tokens if the proposer uses features.
        """

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """Return the number of rows of committed tokens that must be computed before trees can grow. The base
        class returns 0.

        sequences: The sequences whose trees are to grow.
        """
        return 0

    def catch_up(self) -> None:  # noqa: B027 (nothing is ever due)
        """Compute outstanding rows, at a time when no sequence waits for a tree. The base class does
        nothing.
        """

    def max_levels(self, sequence: DraftSequence) -> int:
        """Return the levels of the deepest tree that is useful for a sequence now; 0 if there is none.

        sequence: The sequence.

        A sequence that may write r tokens after its root needs at most r - 1 levels, because the last of
        these tokens comes as the bonus token.
        """
        if not self.follows(sequence.id):
            return 0
        # Every step calls this for every sequence, so `levels_at` and `DraftSequence.max_tokens` are written
        # out here instead of being called.
        end = sequence.end - 1
        positions = MAX_TOKENS if sequence.opening.window else self.positions
        left = (end if end < positions else positions) - sequence.committed - 1
        levels = len(self.widths) + 1
        return levels if levels <= left else max(left, 0)

    def levels_at(self, sequence: DraftSequence, further: int = 0) -> int:
        """Return the levels that fit once more tokens are committed, ignoring the sequence's limit. Return 0
        if the sequence is not followed.

        sequence: The sequence.
        further: Number of tokens that are committed in addition. 0: the present state.

        The bounds are the proposer's deepest tree and the last position that the draft model supports.
        """
        if not self.follows(sequence.id):
            return 0
        room = sequence.max_tokens(self.positions) - sequence.committed - 1 - further
        levels = len(self.widths) + 1
        return levels if levels <= room else max(room, 0)
