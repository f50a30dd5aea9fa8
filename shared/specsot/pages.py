"""Who owns which KV page: one allocator, the same operations in the same order on every stage.

Refuses to know tensors, layers and tokens: it hands out page numbers and says what to copy.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from specsot.errors import NotFound, Overloaded


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `rows` rows of page `source` to page `target`, in every layer."""

    source: int
    target: int
    rows: int


class PageTable:
    """Pages of `page_rows` rows, reference counted; the lowest free number goes out first.

    Deterministic: two tables that see the same calls hold the same pages. A call that raises
    changes nothing.
    """

    def __init__(self, count: int, page_rows: int) -> None:
        self.count, self.page_rows = count, page_rows
        self._free = list(range(count))
        self._owners = [0] * count
        self._pages: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def sequences(self) -> frozenset[int]:
        return frozenset(self._pages)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._pages

    def open(self, sequence: int) -> None:
        """A sequence without pages."""
        self._pages[sequence] = []

    def fork(self, sequence: int, source: int, length: int) -> PageCopy | None:
        """Open `sequence` as the first `length` rows of `source`: full pages shared, a part copied.

        Raises NotFound (no such source), Overloaded (no page for the part).
        """
        shared, part = divmod(length, self.page_rows)
        origin = self._of(source)
        if len(origin) < shared + bool(part):
            raise NotFound(f"sequence {source} has no {length} rows to fork")
        own = [self._take()] if part else []
        for page in origin[:shared]:
            self._owners[page] += 1
        self._pages[sequence] = origin[:shared] + own
        return PageCopy(origin[shared], own[0], part) if part else None

    def reserve(self, sequence: int, rows: int) -> None:
        """Make sure rows 0 .. rows - 1 have pages. Raises Overloaded when there are too few."""
        pages = self._of(sequence)
        missing = self.pages_for(rows) - len(pages)
        if missing > self.free:
            raise Overloaded(f"{missing} KV pages wanted, {self.free} free")
        pages.extend(self._take() for _ in range(missing))

    def close(self, sequence: int) -> tuple[int, ...]:
        """Give a sequence's pages back; returns those nobody owns now. Unknown sequences have none."""
        freed: list[int] = []
        for page in self._pages.pop(sequence, ()):
            self._owners[page] -= 1
            if not self._owners[page]:
                heapq.heappush(self._free, page)
                freed.append(page)
        return tuple(freed)

    def pages(self, sequence: int) -> tuple[int, ...]:
        """Page numbers of a sequence in row order."""
        return tuple(self._of(sequence))

    def slots(self, sequence: int, start: int, stop: int) -> list[int]:
        """Flat slot (page * page_rows + offset) of rows start .. stop - 1."""
        pages, size = self._of(sequence), self.page_rows
        return [pages[row // size] * size + row % size for row in range(start, stop)]

    def pages_for(self, rows: int) -> int:
        """How many pages hold `rows` rows."""
        return -(-rows // self.page_rows)

    def wanted(self, sequence: int, rows: int) -> int:
        """How many more pages `reserve(sequence, rows)` would take."""
        return max(0, self.pages_for(rows) - len(self._of(sequence)))

    def _of(self, sequence: int) -> list[int]:
        if sequence not in self._pages:
            raise NotFound(f"sequence {sequence} is not open")
        return self._pages[sequence]

    def _take(self) -> int:
        if not self._free:
            raise Overloaded("no KV page free")
        page = heapq.heappop(self._free)
        self._owners[page] = 1
        return page
