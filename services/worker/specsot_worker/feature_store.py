"""Keeps features of committed tokens in pages, for the drafter and for the last stage of the next epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from specsot.core.frames import Opening
from specsot.core.pages import PageTable
from specsot.errors import WireError
from specsot.params import Window
from specsot_model.core.kv_plan import open_sequence, window_of
from specsot_model.kv import indices, untouched_zeros


class FeatureRows(NamedTuple):
    """Range of positions of one sequence, whose features are meant.

    sequence: Id of the sequence.
    start: First position of the range.
    stop: Position after the last one of the range. Equal to `start` if the range is empty.
    """

    sequence: int
    start: int
    stop: int


# Steps. On a GPU, the features of at most this many steps are written together: writing those of one step
# takes the host 0.2 ms, and a step of a small model takes 1.6 ms (H200).
MAX_UNWRITTEN = 16


class FeatureStore:
    """Store of features, in as many pages as the KV cache has. Only committed tokens are stored, so these
    pages never run out before the KV pages do.
    """

    def __init__(
        self,
        pages: int,
        page_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
        unwritten: int | None = None,
    ) -> None:
        """Allocate the pages.

        pages: Number of pages.
        page_rows: Number of features of a page.
        width: Number of elements of one feature.
        dtype: Type of the elements.
        device: Where the features are kept.
        unwritten: Number of steps whose features are written together. None: MAX_UNWRITTEN on a GPU, else 1.
        """
        on_gpu = torch.device(device).type == "cuda"
        self._max_unwritten = (MAX_UNWRITTEN if on_gpu else 1) if unwritten is None else unwritten
        # Slots and the features that belong there, not written yet.
        self._unwritten: list[tuple[list[int], Tensor]] = []
        self._table = PageTable(pages, page_rows)
        self._features = untouched_zeros((pages * page_rows, width), dtype, device)
        # What was stored last. It is what a drafter is sent next, unless it lacks more.
        self._newest: tuple[Sequence[FeatureRows], Tensor] = (), self._features[:0]

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence owns."""
        return self._table.free

    def open(self, opening: Opening) -> None:
        """Open a sequence. A fork shares its source's pages; a page that the fork shares in part is copied.

        opening: What every stage knows about the sequence.

        Raises NotFound if the source of the fork is unknown, Overloaded if there are too few pages.
        """
        copy = open_sequence(
            self._table, replace(opening, window=window_of(opening), pruning=None, importance=None)
        )
        if copy is not None:
            self._write()
            size = self._table.page_rows
            source, target = copy.source * size, copy.target * size
            self._features[target : target + copy.rows] = self._features[source : source + copy.rows]

    def close(self, sequence: int) -> None:
        """Free a sequence's pages. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        self._table.close(sequence)

    def available_from(self, sequence: int) -> int:
        """Return the position from which on every feature of a sequence is stored. 0 if none was dropped.
        With a window, features between the sinks and the window are dropped.

        sequence: Id of the sequence.
        """
        policy = self._table.policy(sequence)
        if not isinstance(policy, Window) or not (dropped := -self._table.column(sequence, 0)):
            return 0
        return self._table.pages_for(policy.sinks) * self._table.page_rows + dropped

    def place(self, rows: FeatureRows) -> Sequence[int]:
        """Return the slots in which the next features of a sequence are to be stored, one per position.

        rows: The sequence and its next positions.

        Raises NotFound if the sequence is unknown, Overloaded if there are too few pages.
        """
        if self._table.missing_pages(rows.sequence, rows.stop):
            # Features must reach their slots before a page belongs to another sequence.
            self._write()
            self._table.trim(rows.sequence, rows.start)
            self._table.reserve(rows.sequence, rows.stop)
        return self._table.slots(*rows)

    def store(
        self, parts: Sequence[FeatureRows], slots: list[int], features: Tensor, rows: list[int] | None = None
    ) -> None:
        """Store features at the slots that `place` has returned.

        parts: The sequences and positions that are stored, in the order of the slots.
        slots: One slot for each stored position.
        features: [n, width].
        rows: Which rows of `features` are stored, one for each slot. None: all.
        """
        stored = features if rows is None else features[indices(rows, self._features.device)]
        self._unwritten.append((slots, stored))
        self._newest = parts, stored
        if len(self._unwritten) >= self._max_unwritten:
            self._write()

    def _write(self) -> None:
        """Write the features that were put off, with one copy of slots to the device. Nothing happens if
        there are none.
        """
        unwritten = self._unwritten
        self._unwritten = []
        if unwritten:
            slots, features = zip(*unwritten)
            index = indices(list(chain.from_iterable(slots)), self._features.device)
            self._features[index] = features[0] if len(features) == 1 else torch.cat(features)

    def fill(self, rows: FeatureRows, features: Tensor) -> None:
        """Store features that were migrated from another epoch.

        rows: The sequence and its next positions.
        features: [num_positions, width].

        Raises WireError for another dtype or width, NotFound if the sequence is unknown, and Overloaded if
        there are too few pages.
        """
        stored = self._features
        if (features.dtype, features.shape[1]) != (stored.dtype, stored.shape[1]):
            shape = f"{features.shape[1]} numbers in {features.dtype}"
            raise WireError(
                f"received features of {shape}, but this stage stores {stored.shape[1]} in {stored.dtype}"
            )
        self.store([rows], list(self.place(rows)), features.to(stored.device))

    def load(self, parts: Sequence[FeatureRows]) -> Tensor:
        """Return the features of all parts, one after the other: [num_features, width]. Raises NotFound if a
        sequence is unknown.

        parts: Sequences and ranges of their positions, which must be stored.
        """
        # The tensor is the newest step's output, which its owner may overwrite soon, so it is returned once
        # only.
        newest = self._newest
        self._newest = ((), self._features[:0])
        if parts == newest[0]:
            return newest[1]
        self._write()
        slots = list(chain.from_iterable(starmap(self._table.slots, parts)))
        return self._features[indices(slots, self._features.device)]
