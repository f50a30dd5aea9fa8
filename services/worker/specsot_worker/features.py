"""The fused feature of every committed token, in pages like KV: a drafter may come late, or have rested.

Refuses to know what the tokens are, and what a drafter was told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specsot.core.frames import Opening
from specsot.core.kv_plan import open_one, window_of
from specsot.core.pages import PageTable
from specsot.model.kv import indices, untouched_zeros
from specsot.params import Window


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Positions start .. stop - 1 of one sequence."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _PageSpan:
    """Where a sequence goes on: its rows first .. last - 1 lie so many slots `behind` their own numbers."""

    first: int
    last: int
    offset: int


class FeatureStore:
    """As many pages as KV has; with committed rows alone they never run out before those do."""

    def __init__(
        self, pages: int, page_rows: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._table = PageTable(pages, page_rows)
        self._features = untouched_zeros((pages * page_rows, width), dtype, device)
        self._newest: tuple[list[int], Tensor] = [], self._features[:0]
        self._pages: dict[int, _PageSpan] = {}  # the table need not be asked for every row of a page

    @property
    def free_pages(self) -> int:
        return self._table.free

    def open(self, opening: Opening) -> None:
        """Raises NotFound for a fork of what is not here, Overloaded."""
        copy = open_one(self._table, replace(opening, window=window_of(opening), pruning=None))
        if copy is not None:
            size = self._table.page_rows
            source, target = copy.source * size, copy.target * size
            self._features[target : target + copy.rows] = self._features[source : source + copy.rows]

    def close(self, sequence: int) -> None:
        """Unknown sequences have nothing."""
        self._pages.pop(sequence, None)
        self._table.close(sequence)

    def available_from(self, sequence: int) -> int:
        """From this position on everything is here: a window leaves behind what is in front of it."""
        policy, dropped = self._table.policy(sequence), -self._table.column(sequence, 0)
        if not isinstance(policy, Window) or not dropped:
            return 0
        return self._table.pages_for(policy.sinks) * self._table.page_rows + dropped

    def reserve(self, rows: FeatureRows) -> None:
        """Room for what comes next of a sequence. Raises NotFound, Overloaded."""
        sequence, table = rows.sequence, self._table
        page = self._pages.get(sequence)
        if page and rows.stop <= page.last:
            return
        table.trim(sequence, rows.start)
        table.reserve(sequence, rows.stop)
        last = table.pages_for(rows.stop) * table.page_rows
        behind = table.slots(sequence, last - 1, last)[0] - last + 1
        self._pages[sequence] = _PageSpan(last - table.page_rows, last, behind)

    def store(self, parts: Sequence[FeatureRows], features: Tensor, rows: list[int] | None = None) -> None:
        """Rows of all parts, for which there is room: these of `features` [n, width], or all of them."""
        slots = self._slots(parts)
        numbers = slots if rows is None else [slots, rows]
        index = indices(numbers, self._features.device)  # one copy to the device
        stored = features if rows is None else features[index[1]]
        self._features[index if rows is None else index[0]] = stored
        self._newest = slots, stored

    def load(self, parts: Sequence[FeatureRows]) -> Tensor:
        """[rows of all parts, width]."""
        slots, newest = self._slots(parts), self._newest
        self._newest = [], self._features[:0]  # whose they were may write over them soon
        return newest[1] if slots == newest[0] else self._features[indices(slots, self._features.device)]

    def _slots(self, parts: Sequence[FeatureRows]) -> list[int]:
        slots: list[int] = []
        for one in parts:
            page = self._pages.get(one.sequence)
            if page and page.first <= one.start:
                slots += range(one.start + page.offset, one.stop + page.offset)
            else:
                slots += self._table.slots(one.sequence, one.start, one.stop)
        return slots
