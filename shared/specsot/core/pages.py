"""Allocates KV pages: the same operations in the same order give the same table on every stage."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from specsot.errors import NotFound, Overloaded
from specsot.params import HeadCounts, HeadPruning, HeadWindows, Pruning, Window

Policy = Window | Pruning | HeadWindows


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `rows` rows of page `source` to page `target`, in every layer."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class HeadShares:
    """The rows of one pruning that each KV head has, and those that it keeps.

    before: by layer and head, how many of the first `shared` sources are rows that the head kept; the other
        shared sources are rows of heads that kept more. Every source after those is a row of every head.
    after: by layer and head, how many rows it keeps, in the first targets.

    Worked example: two heads kept 2 and 3 rows, and 2 rows followed, so the sources are columns
    [c0 c1 c2 | c3 c4] and shared is 3. The first head chooses among c0 c1 c3 c4, the second among all.
    """

    shared: int
    before: HeadCounts
    after: HeadCounts


@dataclass(frozen=True, slots=True)
class RowPruning:
    """Of the rows at slots `sources` every KV head keeps as many as there are `targets`, and there; the first
    `skip` layers keep all.

    heads: set if heads keep different numbers of rows; there are then targets for the one that keeps most.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    skip: int
    heads: HeadShares | None = None


# Rows of a sequence, one behind the other: the first one's column, pages up to the last one's, slots of all.
PlacedRows = tuple[int, tuple[int, ...], Sequence[int]]


@dataclass(slots=True)
class _Held:
    """A sequence's pages in row order; behind those of its first rows, `gone` more were given back.

    kept, pruned: of its first `pruned` rows so many are left, in its first columns.
    kept_by_head: by layer and KV head, how many of the first `kept` columns are the head's own rows. None
        unless heads keep different numbers of rows.
    """

    policy: Policy | None
    pages: list[int]
    gone: int = 0
    kept: int = 0
    pruned: int = 0
    kept_by_head: HeadCounts | None = None


def most_held(policy: Policy | None, rows: int, page_rows: int) -> int | None:
    """Pages that a sequence holds at most while rows are fed to it, so many at a time; None: no bound."""
    if policy is None or isinstance(policy, HeadWindows):
        return None
    windowed = isinstance(policy, Window)
    first, last = (policy.sinks, policy.recent) if windowed else (policy.most, policy.prune_every)
    return None if first is None else -(-first // page_rows) + -(-(last + rows) // page_rows) + 1


class PageTable:
    """Pages of `page_rows` rows, reference counted; the lowest free number goes out first.

    Where a sequence has a window, pages between its sinks and what is recent are given back (`trim`); its
    columns are the rows that it still holds, counted without those. Pruned rows move to the first columns
    (`prune`), and where no layer needs the pages behind them, those go back in the same way.

    Deterministic: two tables that see the same calls hold the same pages. A call that raises
    changes nothing.
    """

    def __init__(self, count: int, page_rows: int) -> None:
        self.count = count
        self.page_rows = page_rows
        self._free = list(range(count))
        self._owners = [0] * count
        self._held: dict[int, _Held] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> frozenset[int]:
        return frozenset(self._held)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._held

    def open(self, sequence: int, policy: Policy | None = None) -> None:
        self._held[sequence] = _Held(policy, [])

    def fork(self, sequence: int, source: int, length: int) -> PageCopy | None:
        """Open `sequence` as the first `length` rows of `source`, with its window: full pages shared, a part
        copied.

        Raises NotFound (no such source, one whose heads keep different rows, or rows that the fork would see
        are gone), Overloaded (no page for the part).
        """
        origin = self._of(source)
        if isinstance(origin.policy, Pruning | HeadWindows):
            raise NotFound(f"sequence {source} cannot be forked: its heads keep different rows")
        full, part = divmod(length, self.page_rows)
        shared = full - origin.gone
        if len(origin.pages) < shared + bool(part) or not self._sees(origin, length):
            raise NotFound(f"sequence {source} has no {length} rows to fork")
        own = [self._take()] if part else []
        for page in origin.pages[:shared]:
            self._owners[page] += 1
        self._held[sequence] = _Held(origin.policy, origin.pages[:shared] + own, origin.gone)
        return PageCopy(origin.pages[shared], own[0], part) if part else None

    def reserve(self, sequence: int, rows: int) -> None:
        """Make sure rows up to rows - 1 have pages. Raises Overloaded when there are too few."""
        missing = self.wanted(sequence, rows)
        pages = self._of(sequence).pages
        if missing > self.free:
            raise Overloaded(f"{missing} KV pages wanted, {self.free} free")
        pages += [self._take() for _ in range(missing)]

    def place(self, sequence: int, start: int, stop: int) -> PlacedRows:
        """Reserve pages up to row stop - 1, and tell where rows from `start` on lie. Raises Overloaded."""
        pages = self.cover(sequence, stop)
        held = self._held[sequence]
        column = start - held.gone * self.page_rows
        return column, pages, self._run(held, column, column + stop - start)

    def cover(self, sequence: int, stop: int) -> tuple[int, ...]:
        """Reserve pages up to row stop - 1, and tell which those are. Raises Overloaded."""
        held = self._of(sequence)
        size = self.page_rows
        count = -(-stop // size) - held.gone
        if count > len(held.pages):
            self.reserve(sequence, stop)
        return tuple(held.pages[:count])

    def unreserve(self, sequence: int, pages: int) -> tuple[int, ...]:
        """Give back so many pages that were reserved last; returns those that nobody owns now."""
        held = self._of(sequence).pages
        given, held[len(held) - pages :] = held[len(held) - pages :], []
        return self._give(given)

    def trim(self, sequence: int, row: int) -> tuple[int, ...]:
        """Give back the pages that no row from `row` on attends to; returns those that nobody owns now."""
        held = self._of(sequence)
        if held.policy is None:
            return ()
        behind = self._behind(held, row)
        given, held.pages[behind] = held.pages[behind], []
        held.gone += len(given)
        return self._give(given)

    def prune(self, sequence: int, row: int) -> RowPruning | None:
        """Prune the rows in front of `row`, all committed, if that is due."""
        held = self._of(sequence)
        policy = held.policy
        if not isinstance(policy, Pruning) or policy.due(row) <= held.pruned:
            return None
        fresh = range(self.column(sequence, held.pruned), self.column(sequence, row))
        sources = self._slots(held, (*range(held.kept), *fresh))
        shares = None
        if isinstance(policy, HeadPruning):
            after = policy.kept_by_head(held.kept_by_head, len(fresh))
            shares = HeadShares(held.kept, held.kept_by_head or policy.none_kept, after)
            held.kept_by_head = after
            held.kept = max(map(max, after))
        else:
            held.kept = policy.kept(len(sources))
        held.pruned = row
        targets = self._slots(held, range(held.kept))
        return RowPruning(tuple(sources), tuple(targets), policy.skip_layers, shares)

    def pruned(self, sequence: int) -> tuple[int, int]:
        """How many rows pruning left in the first columns, and from which column on nothing was pruned."""
        held = self._of(sequence)
        return held.kept, self.column(sequence, held.pruned)

    def kept_by_head(self, sequence: int) -> HeadCounts | None:
        """By layer and KV head, how many of the first columns are rows that pruning left it. None if every
        head has as many as `pruned` says.
        """
        return self._of(sequence).kept_by_head

    def room(self, sequence: int, row: int) -> int:
        """How many rows from `row` on could be reserved, once that is trimmed."""
        held = self._of(sequence)
        behind = held.pages[self._behind(held, row)] if held.policy else ()
        mine = sum(self._owners[page] == 1 for page in behind)
        return (len(held.pages) + held.gone + self.free + mine) * self.page_rows - row

    def close(self, sequence: int) -> tuple[int, ...]:
        """Give a sequence's pages back; returns those nobody owns now. Unknown sequences have none."""
        held = self._held.pop(sequence, None)
        return self._give(held.pages) if held else ()

    def policy(self, sequence: int) -> Policy | None:
        """What it was opened with, or its source."""
        return self._of(sequence).policy

    def pages(self, sequence: int) -> tuple[int, ...]:
        """Page numbers of a sequence in row order: column c lies in the (c // page_rows)-th."""
        return tuple(self._of(sequence).pages)

    def column(self, sequence: int, row: int) -> int:
        """Where a row behind what is gone lies among all that are held."""
        return row - self._of(sequence).gone * self.page_rows

    def slots(self, sequence: int, start: int, stop: int) -> Sequence[int]:
        """Flat slot (page * page_rows + offset) of rows start .. stop - 1, behind what is gone."""
        first = self.column(sequence, start)
        return self._run(self._of(sequence), first, first + stop - start)

    def _run(self, held: _Held, first: int, end: int) -> Sequence[int]:
        """Slots of columns first .. end - 1."""
        size = self.page_rows
        pages = held.pages
        place = first // size
        if first < end <= (most := (place + 1) * size):  # as of most trees: all on one page
            shift = (pages[place] - place) * size
            return range(first + shift, end + shift)
        found: list[int] = []
        while first < end:
            shift = (pages[place] - place) * size
            found += range(first + shift, (most if most < end else end) + shift)
            first = most
            place = place + 1
            most = most + size
        return found

    def shared(self, page: int) -> bool:
        """Whether several sequences hold it."""
        return self._owners[page] > 1

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.page_rows)

    def wanted(self, sequence: int, rows: int) -> int:
        """How many more pages `reserve(sequence, rows)` would take."""
        held = self._of(sequence)
        missing = -(-rows // self.page_rows) - held.gone - len(held.pages)
        return missing if missing > 0 else 0

    def _of(self, sequence: int) -> _Held:
        try:
            return self._held[sequence]
        except KeyError:
            raise NotFound(f"sequence {sequence} is not open") from None

    def _slots(self, held: _Held, columns: Sequence[int]) -> list[int]:
        pages = held.pages
        size = self.page_rows
        return [pages[column // size] * size + column % size for column in columns]

    def _behind(self, held: _Held, row: int) -> slice:
        """Which of its pages hold neither its first rows nor any that is recent to rows from `row` on."""
        match held.policy:
            case None:
                return slice(0, 0)
            case Window(sinks, recent):
                rows = sinks
                since = row - recent
            case Pruning(skip_layers=0):
                rows = held.kept
                since = held.pruned
            case _:
                return slice(0, 0)
        first = self.pages_for(rows)
        gone = since // self.page_rows - first
        return slice(first, first + max(gone - held.gone, 0))

    def _sees(self, held: _Held, row: int) -> bool:
        """Whether all that rows from `row` on attend to is held."""
        if not isinstance(held.policy, Window) or not held.gone:
            return True
        first = (self.pages_for(held.policy.sinks) + held.gone) * self.page_rows
        return first <= row - held.policy.recent

    def _give(self, pages: list[int]) -> tuple[int, ...]:
        freed: list[int] = []
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                heapq.heappush(self._free, page)
                freed.append(page)
        return tuple(freed)

    def _take(self) -> int:
        if not self._free:
            raise Overloaded("no KV page free")
        page = heapq.heappop(self._free)
        self._owners[page] = 1
        return page
