"""Features of committed tokens in pages, like KV: for the drafter, and the last stage of the next epoch."""

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
from specsot_model.core.kv_plan import open_one, window_of
from specsot_model.kv import indices, untouched_zeros


class FeatureRows(NamedTuple):
    """Positions start .. stop - 1 of one sequence."""

    sequence: int
    start: int
    stop: int


MAX_UNWRITTEN = (
    16  # laps: to write each one's features takes a host 0.2 ms, and a small model's lap 1.6 (H200)
)


class FeatureStore:
    """As many pages as KV has; with committed rows alone they never run out before those do.

    unwritten: on a GPU, features of so many laps at most are written together.
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
        on_gpu = torch.device(device).type == "cuda"
        self._most = (MAX_UNWRITTEN if on_gpu else 1) if unwritten is None else unwritten
        self._unwritten: list[tuple[list[int], Tensor]] = []  # slots, and what belongs there
        self._table = PageTable(pages, page_rows)
        self._features = untouched_zeros((pages * page_rows, width), dtype, device)
        self._newest: tuple[Sequence[FeatureRows], Tensor] = (), self._features[:0]

    @property
    def free_pages(self) -> int:
        return self._table.free

    def open(self, opening: Opening) -> None:
        """Raises NotFound for a fork of what is not here, Overloaded."""
        copy = open_one(
            self._table, replace(opening, window=window_of(opening), pruning=None, importance=None)
        )
        if copy is not None:
            self._write()
            size = self._table.page_rows
            source, target = copy.source * size, copy.target * size
            self._features[target : target + copy.rows] = self._features[source : source + copy.rows]

    def close(self, sequence: int) -> None:
        """Unknown sequences have nothing."""
        self._table.close(sequence)

    def available_from(self, sequence: int) -> int:
        """From this position on everything is here: a window leaves behind what is in front of it."""
        policy = self._table.policy(sequence)
        if not isinstance(policy, Window) or not (dropped := -self._table.column(sequence, 0)):
            return 0
        return self._table.pages_for(policy.sinks) * self._table.page_rows + dropped

    def place(self, rows: FeatureRows) -> Sequence[int]:
        """Slots for what comes next of a sequence. Raises NotFound, Overloaded."""
        if self._table.wanted(rows.sequence, rows.stop):
            self._write()  # before a page is another's
            self._table.trim(rows.sequence, rows.start)
            self._table.reserve(rows.sequence, rows.stop)
        return self._table.slots(*rows)

    def store(
        self, parts: Sequence[FeatureRows], slots: list[int], features: Tensor, rows: list[int] | None = None
    ) -> None:
        """All parts, at the slots they were given: these rows of `features` [n, width], or all of them."""
        stored = features if rows is None else features[indices(rows, self._features.device)]
        self._unwritten.append((slots, stored))
        self._newest = parts, stored
        if len(self._unwritten) >= self._most:
            self._write()

    def _write(self) -> None:
        """What is put off: in one copy of slots to the device."""
        unwritten = self._unwritten
        self._unwritten = []
        if unwritten:
            slots, features = zip(*unwritten)
            index = indices(list(chain.from_iterable(slots)), self._features.device)
            self._features[index] = features[0] if len(features) == 1 else torch.cat(features)

    def fill(self, rows: FeatureRows, features: Tensor) -> None:
        """Rows of a stage of another epoch. Raises NotFound, Overloaded, WireError."""
        own = self._features
        if (features.dtype, features.shape[1]) != (own.dtype, own.shape[1]):
            shape = f"{features.shape[1]} numbers in {features.dtype}"
            raise WireError(f"features of {shape} came, {own.shape[1]} in {own.dtype} are kept here")
        self.store([rows], list(self.place(rows)), features.to(own.device))

    def load(self, parts: Sequence[FeatureRows]) -> Tensor:
        """[rows of all parts, width]."""
        # whose it was may write over it soon
        newest = self._newest
        self._newest = ((), self._features[:0])
        if parts == newest[0]:
            return newest[1]
        self._write()
        slots = list(chain.from_iterable(starmap(self._table.slots, parts)))
        return self._features[indices(slots, self._features.device)]
