"""Allocates KV pages: the same operations in the same order give the same table on every stage.

A sequence's KV rows are numbered like its positions. Three numbers locate a row:

* its *row* number in the sequence, 0, 1, ...;
* its *column*: the row's place among the rows that the sequence still holds, which differs from the row
  number once pages were returned (see `PageTable.trim`);
* its *slot*: page * page_rows + offset, the row's place in the KV tensor of every layer.

Worked example with 4 rows per page. A sequence that holds pages [5, 2, 7] has row 9 in column 9. The column
lies in pages[9 // 4] = 7 at offset 9 % 4 = 1, so the slot is 7 * 4 + 1 = 29.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from specsot.errors import NotFound, Overloaded
from specsot.params import HeadCounts, HeadPruning, HeadWindows, Pruning, Window

Policy = Window | Pruning | HeadWindows


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `rows` rows of page `source` to page `target`, in every layer.

    source: page number to copy from.
    target: page number to copy to.
    rows: number of rows, fewer than a page has.
    """

    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class HeadShares:
    """How many rows each KV head has before and after one pruning, if heads keep different numbers of rows.

    shared: how many of the first sources hold rows that an earlier pruning left.
    before: by layer and head, how many of the first `shared` sources are rows that the head kept; the other
        shared sources are rows of heads that kept more. Every source after those is a row of every head.
    after: by layer and head, how many rows the head keeps. They move to the first targets.

    Worked example: two heads kept 2 and 3 rows, and 2 rows followed, so the sources are columns
    [c0 c1 c2 | c3 c4] and shared is 3. The first head chooses among c0 c1 c3 c4, the second among all.
    """

    shared: int
    before: HeadCounts
    after: HeadCounts


@dataclass(frozen=True, slots=True)
class RowPruning:
    """One pruning of a sequence: every KV head chooses which rows it keeps and moves them to the first slots.

    sources: slots of all rows among which a head chooses.
    targets: slots of the rows that are kept; a head keeps as many rows as there are targets.
    skip: number of the model's first layers that keep all rows.
    heads: set if heads keep different numbers of rows. There are then as many targets as the head that keeps
        most rows needs.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    skip: int
    heads: HeadShares | None = None


# Consecutive rows of a sequence: the column of the first row, the pages up to the last row's page, and the
# slot of every row.
PlacedRows = tuple[int, tuple[int, ...], Sequence[int]]


@dataclass(slots=True)
class _Held:
    """The pages of one open sequence.

    policy: what the sequence attends to, which bounds what it holds. None: all rows.
    pages: page numbers in row order, without the pages that were returned.
    gone: how many pages were returned. They lay after the pages of the sequence's first rows.
    kept: how many of the first `pruned` rows pruning has left. They are in the first columns.
    pruned: the row before which pruning has been applied.
    rows_kept_by_head: by layer and KV head, how many of the first `kept` columns are the head's own rows.
    None
        unless heads keep different numbers of rows.
    """

    policy: Policy | None
    pages: list[int]
    gone: int = 0
    kept: int = 0
    pruned: int = 0
    rows_kept_by_head: HeadCounts | None = None


def most_held(policy: Policy | None, rows: int, page_rows: int) -> int | None:
    """Return the largest number of pages that a sequence with this policy can hold, or None if unbounded.

    rows: the largest number of rows that are fed at a time.
    page_rows: rows of a page.

    >>> most_held(Window(sinks=4, recent=508), rows=24, page_rows=256)  # 1 + 3 + 1
    5
    """
    if policy is None or isinstance(policy, HeadWindows):
        return None
    windowed = isinstance(policy, Window)
    first, last = (policy.sinks, policy.recent) if windowed else (policy.most, policy.prune_every)
    return None if first is None else -(-first // page_rows) + -(-(last + rows) // page_rows) + 1


class PageTable:
    """Allocates reference-counted pages of `page_rows` rows to sequences, lowest free page number first.

    If a sequence has a window, `trim` returns the pages between its sinks and its recent rows. A column
    counts the rows that the sequence still holds, without the returned pages. `prune` moves the rows that
    pruning keeps to the first columns; if no layer needs the pages between these and the rows that were never
    pruned, `trim` returns those pages too.

    Deterministic: two tables that see the same calls hold the same pages. A call that raises
    changes nothing.

    Worked example of a fork and of a trim:

    >>> table = PageTable(count=8, page_rows=4)
    >>> table.open(1)
    >>> table.reserve(1, rows=10)
    >>> table.fork(2, source=1, length=6)  # page 0 is shared; rows 4 and 5 are copied from page 1 to page 3
    PageCopy(source=1, target=3, rows=2)
    >>> table.pages(1), table.pages(2)
    ((0, 1, 2), (0, 3))
    >>> windowed = PageTable(count=16, page_rows=4)
    >>> windowed.open(1, Window(sinks=4, recent=16))
    >>> windowed.reserve(1, rows=44)
    >>> windowed.trim(1, row=40)  # rows from 40 on see rows 0..3 and 24..: rows 4..23 are returned
    (1, 2, 3, 4, 5)
    >>> windowed.column(1, 40), list(windowed.slots(1, 40, 42))  # 20 earlier rows are still held
    (20, [40, 41])
    """

    def __init__(self, count: int, page_rows: int) -> None:
        self.count = count
        self.page_rows = page_rows
        self._free = list(range(count))
        self._owners = [0] * count
        self._held: dict[int, _Held] = {}

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def sequences(self) -> frozenset[int]:
        """Ids of the open sequences."""
        return frozenset(self._held)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._held

    def open(self, sequence: int, policy: Policy | None = None) -> None:
        """Open a sequence that has no rows yet. policy: what it attends to; None: all preceding rows."""
        self._held[sequence] = _Held(policy, [])

    def fork(self, sequence: int, source: int, length: int) -> PageCopy | None:
        """Open `sequence` with the first `length` rows and the policy of `source`.

        Full pages are shared. If `length` ends within a page, that page's rows go to a page of the fork's
        own: the copy that the caller must make is returned. None is returned if nothing has to be copied.

        Raises NotFound if the source is not open, if its heads keep different rows (pruning or head windows),
        or if it no longer holds a row that the fork would attend to. Raises Overloaded if no page is free.
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
        """Allocate pages so that the rows 0 .. rows - 1 have pages. Raises Overloaded if too few are free."""
        missing = self.wanted(sequence, rows)
        pages = self._of(sequence).pages
        if missing > self.free:
            raise Overloaded(f"{missing} KV pages wanted, {self.free} free")
        pages += [self._take() for _ in range(missing)]

    def place(self, sequence: int, start: int, stop: int) -> PlacedRows:
        """Reserve pages for the rows up to stop - 1, and return the location of the rows start .. stop - 1.

        Raises Overloaded if too few pages are free.
        """
        pages = self.cover(sequence, stop)
        held = self._held[sequence]
        column = start - held.gone * self.page_rows
        return column, pages, self._run(held, column, column + stop - start)

    def cover(self, sequence: int, stop: int) -> tuple[int, ...]:
        """Reserve pages for the rows up to stop - 1, and return the sequence's pages up to that row's page.

        Raises Overloaded if too few pages are free.
        """
        held = self._of(sequence)
        size = self.page_rows
        count = -(-stop // size) - held.gone
        if count > len(held.pages):
            self.reserve(sequence, stop)
        return tuple(held.pages[:count])

    def unreserve(self, sequence: int, pages: int) -> tuple[int, ...]:
        """Release the `pages` pages that the sequence reserved last; return those that no sequence owns
        now.
        """
        held = self._of(sequence).pages
        given, held[len(held) - pages :] = held[len(held) - pages :], []
        return self._give(given)

    def trim(self, sequence: int, row: int) -> tuple[int, ...]:
        """Release the pages that no row from `row` on attends to, according to the sequence's policy.

        Returns the released pages that no sequence owns any more; the others are still shared.
        """
        held = self._of(sequence)
        if held.policy is None:
            return ()
        behind = self._behind(held, row)
        given, held.pages[behind] = held.pages[behind], []
        held.gone += len(given)
        return self._give(given)

    def prune(self, sequence: int, row: int) -> RowPruning | None:
        """Prune the committed rows before `row` if a pruning is due, or return None.

        A pruning is due if `row` has reached a multiple of the policy's `prune_every` that was not pruned at.
        Heads then choose among the rows that the previous pruning left and all rows since. The caller must
        move the rows as the returned value says.

        Worked example: half of the rows are kept, and a pruning is due every 16 rows. At row 16 the sources
        are columns 0..15 and the targets are columns 0..7. At row 32 the sources are columns 0..7 and the 16
        columns of the rows since, and the targets are columns 0..11.
        """
        held = self._of(sequence)
        policy = held.policy
        if not isinstance(policy, Pruning) or policy.due(row) <= held.pruned:
            return None
        fresh = range(self.column(sequence, held.pruned), self.column(sequence, row))
        sources = self._slots(held, (*range(held.kept), *fresh))
        shares = None
        if isinstance(policy, HeadPruning):
            after = policy.rows_kept_by_head(held.rows_kept_by_head, len(fresh))
            shares = HeadShares(held.kept, held.rows_kept_by_head or policy.no_rows_kept, after)
            held.rows_kept_by_head = after
            held.kept = max(map(max, after))
        else:
            held.kept = policy.kept(len(sources))
        held.pruned = row
        targets = self._slots(held, range(held.kept))
        return RowPruning(tuple(sources), tuple(targets), policy.skip_layers, shares)

    def pruned(self, sequence: int) -> tuple[int, int]:
        """Return how many rows pruning left, and the first column whose row was never pruned.

        A result of (8, 16) means that columns 0..7 hold kept rows, columns 8..15 nothing that may be read,
        and columns from 16 on the rows since the last pruning.
        """
        held = self._of(sequence)
        return held.kept, self.column(sequence, held.pruned)

    def rows_kept_by_head(self, sequence: int) -> HeadCounts | None:
        """Return, by layer and KV head, how many of the first columns are rows that pruning left to the head.

        None is returned if all heads have as many as `pruned` returns.
        """
        return self._of(sequence).rows_kept_by_head

    def room(self, sequence: int, row: int) -> int:
        """Return how many rows from `row` on could be reserved if the sequence were trimmed at `row`
        first.
        """
        held = self._of(sequence)
        behind = held.pages[self._behind(held, row)] if held.policy else ()
        mine = sum(self._owners[page] == 1 for page in behind)
        return (len(held.pages) + held.gone + self.free + mine) * self.page_rows - row

    def close(self, sequence: int) -> tuple[int, ...]:
        """Release all pages of a sequence; return those that no sequence owns now.

        Closing an unknown sequence does nothing and returns an empty tuple.
        """
        held = self._held.pop(sequence, None)
        return self._give(held.pages) if held else ()

    def policy(self, sequence: int) -> Policy | None:
        """Return the policy with which the sequence, or the source of its fork, was opened."""
        return self._of(sequence).policy

    def pages(self, sequence: int) -> tuple[int, ...]:
        """Return the page numbers of a sequence in row order: column c lies in pages[c // page_rows]."""
        return tuple(self._of(sequence).pages)

    def column(self, sequence: int, row: int) -> int:
        """Return the column of a row that lies after the returned pages."""
        return row - self._of(sequence).gone * self.page_rows

    def slots(self, sequence: int, start: int, stop: int) -> Sequence[int]:
        """Return the slots (page * page_rows + offset) of the rows start .. stop - 1, which lie after the
        returned pages.
        """
        first = self.column(sequence, start)
        return self._run(self._of(sequence), first, first + stop - start)

    def _run(self, held: _Held, first: int, end: int) -> Sequence[int]:
        """Return the slots of the columns first .. end - 1.

        With 4 rows per page and pages [5, 2, 7], the columns 2..4 have slots [22, 23, 8].
        """
        size = self.page_rows
        pages = held.pages
        place = first // size
        # Most trees lie on a single page, and a range costs less than a list.
        if first < end <= (most := (place + 1) * size):
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
        """Return whether several sequences own the page."""
        return self._owners[page] > 1

    def pages_for(self, rows: int) -> int:
        """Return how many pages `rows` rows take, rounded up."""
        return -(-rows // self.page_rows)

    def wanted(self, sequence: int, rows: int) -> int:
        """Return how many more pages `reserve(sequence, rows)` would allocate."""
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
        """Return which of the sequence's pages no row from `row` on needs: those after the pages of the first
        rows (sinks, or rows that pruning left) and before the page of the first recent row.
        """
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
        """Return whether the sequence still holds all rows that rows from `row` on attend to."""
        if not isinstance(held.policy, Window) or not held.gone:
            return True
        first = (self.pages_for(held.policy.sinks) + held.gone) * self.page_rows
        return first <= row - held.policy.recent

    def _give(self, pages: list[int]) -> tuple[int, ...]:
        """Drop one reference to each page; return the pages that are free now."""
        freed: list[int] = []
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                heapq.heappush(self._free, page)
                freed.append(page)
        return tuple(freed)

    def _take(self) -> int:
        """Allocate the free page with the lowest number. Raises Overloaded if there is none."""
        if not self._free:
            raise Overloaded("no KV page free")
        page = heapq.heappop(self._free)
        self._owners[page] = 1
        return page
