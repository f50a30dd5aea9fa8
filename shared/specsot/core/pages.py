"""Allocates KV pages: the same operations in the same order give the same table on every stage.

A sequence's KV rows are numbered like its positions. Three numbers locate a row:

* its *row* number in the sequence, 0, 1, ...;
* its *column*: the row's place among the rows that the sequence still holds, which differs from the row
  number once pages were returned (see `PageTable.trim`) or rows were skipped (see `PageTable.skip`);
* its *slot*: page * page_rows + offset, the row's place in the KV tensor of every layer.

Only sequences with a KV policy (a window or pruning) return pages or prune rows. For all others, columns
equal row numbers, and `trim`, `prune` and `HeadShares` play no part.

Worked example with 4 rows per page. A sequence that holds pages [5, 2, 7] has row 9 in column 9. The column
lies in pages[9 // 4] = 7 at offset 9 % 4 = 1, so the slot is 7 * 4 + 1 = 29.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specsot.errors import NotFound, Overloaded
from specsot.params import HeadCounts, HeadPruning, HeadWindows, Pruning, Window

Policy = Window | Pruning | HeadWindows


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The copy that a fork needs: the first `rows` rows of page `source` go to page `target`, in every layer.

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
    """The KV pages that one open sequence holds in a `PageTable`.

    policy: what the sequence attends to, which bounds what it holds. None: all rows.
    pages: page numbers in row order, without the pages that were returned.
    absent: how many rows have no column any more, because their pages were returned or because they were
        skipped. They lay after the sequence's first rows.
    kept: how many of the first `pruned` rows pruning has left. They are in the first columns.
    pruned: the row before which pruning has been applied.
    rows_kept_by_head: by layer and KV head, how many of the first `kept` columns are the head's own rows.
        None unless heads keep different numbers of rows.
    listed: the first pages as a tuple, as they were asked for last. Whoever removes pages empties it.
    """

    policy: Policy | None
    pages: list[int]
    absent: int = 0
    kept: int = 0
    pruned: int = 0
    rows_kept_by_head: HeadCounts | None = None
    listed: tuple[int, ...] = ()

    def first_pages(self, count: int) -> tuple[int, ...]:
        """Return the first pages as a tuple. The same tuple is returned until other pages are asked for,
        because every step asks for the pages of every sequence.

        count: number of pages, at most as many as the sequence holds.
        """
        if len(self.listed) != count:
            self.listed = tuple(self.pages[:count])
        return self.listed


class _HeldBySequence(dict[int, _Held]):
    """What each open sequence holds, by its id. `PageTable` looks this up several times per sequence and
    step, so a missing key raises NotFound without a method around each look-up.
    """

    def __missing__(self, sequence: int) -> _Held:
        """Raise NotFound, because the sequence is not open.

        sequence: id of the sequence.
        """
        raise NotFound(f"sequence {sequence} is not open")


def max_held_pages(policy: Policy | None, rows: int, page_rows: int) -> int | None:
    """Return the largest number of pages that a sequence with this policy can hold, or None if the number
    grows with the sequence.

    policy: what the sequence attends to. With None, it attends to all rows and there is no bound; there is
        none with `HeadWindows`, nor with a pruning that skips layers or keeps all rows.
    rows: the largest number of rows that are fed at a time.
    page_rows: number of rows of a page.

    >>> max_held_pages(Window(sinks=4, recent=508), rows=24, page_rows=256)  # 1 + 3 + 1
    5

    For a window, the bound follows from its sinks and recent rows; for a pruning, from the rows that it keeps
    at most and `prune_every`.
    """
    if policy is None or isinstance(policy, HeadWindows):
        return None
    windowed = isinstance(policy, Window)
    first, last = (policy.sinks, policy.recent) if windowed else (policy.max_kept_rows, policy.prune_every)
    return None if first is None else -(-first // page_rows) + -(-(last + rows) // page_rows) + 1


class PageTable:
    """A table of which sequence owns which KV pages. It allocates reference-counted pages of `page_rows`
    rows, lowest free page number first.

    If a sequence has a window, `trim` returns the pages between its sinks and its recent rows. A column
    counts the rows that the sequence still holds, without the returned pages. `prune` moves the rows that
    pruning keeps to the first columns; if no layer needs the pages between these and the rows that were never
    pruned, `trim` returns those pages too.

    Deterministic: two tables that see the same calls hold the same pages. A call that raises changes nothing.

    count: number of KV pages in all.
    page_rows: number of rows of a page.

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
        """Create a table in which all pages are free and no sequence is open.

        count: number of KV pages in all, the same on every stage and on the drafter.
        page_rows: number of rows (positions) of a page.
        """
        self.count = count
        self.page_rows = page_rows
        self._free = list(range(count))
        self._owners = [0] * count
        self._held = _HeldBySequence()
        # Ids of the open sequences that have a policy.
        self._with_policy = set[int]()

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def has_policies(self) -> bool:
        """True if some open sequence has a KV policy. Without any, `trim` and `prune` do nothing."""
        return bool(self._with_policy)

    @property
    def sequences(self) -> frozenset[int]:
        """Ids of the open sequences."""
        return frozenset(self._held)

    def __contains__(self, sequence: int) -> bool:
        """Return whether a sequence is open.

        sequence: id of the sequence.
        """
        return sequence in self._held

    def open(self, sequence: int, policy: Policy | None = None) -> None:
        """Open a sequence that has no rows and no pages yet.

        sequence: id of the sequence, which must not be open.
        policy: which rows the sequence attends to, and so which pages `trim` and `prune` may return. With
            None, it attends to all preceding rows.
        """
        self._hold(sequence, _Held(policy, []))

    def _hold(self, sequence: int, held: _Held) -> None:
        """Record what a new sequence holds.

        sequence: id of the sequence, which is not open.
        held: its policy and its first pages.
        """
        self._held[sequence] = held
        if held.policy:
            self._with_policy.add(sequence)

    def fork(self, sequence: int, source: int, length: int) -> PageCopy | None:
        """Open `sequence` with the first `length` rows and the policy of `source`, and return the copy that
        the caller must make, or None.

        Full pages are shared. If `length` ends within a page, that page's rows go to a page of the fork's
        own: the copy that the caller must make is returned. None is returned if nothing has to be copied.

        sequence: id of the new sequence.
        source: id of the open sequence whose rows are shared.
        length: number of rows to share, from row 0 on.

        Raises NotFound if the source is not open, if its heads keep different rows (pruning or head windows),
        or if it no longer holds a row that the fork would attend to. Raises Overloaded if no page is free.

        Raises NotFound also if the source has fewer than `length` rows' pages. After an error, the new
        sequence is not open.
        """
        origin = self._held[source]
        if isinstance(origin.policy, Pruning | HeadWindows):
            raise NotFound(f"sequence {source} cannot be forked: its heads keep different rows")
        num_shared, rows_of_last_page = divmod(length - origin.absent, self.page_rows)
        if len(origin.pages) < num_shared + bool(rows_of_last_page) or not self._holds_attended_rows(
            origin, length
        ):
            raise NotFound(f"sequence {source} has no {length} rows to fork")
        own_pages = [self._allocate_page()] if rows_of_last_page else []
        for page in origin.pages[:num_shared]:
            self._owners[page] += 1
        self._hold(sequence, _Held(origin.policy, origin.pages[:num_shared] + own_pages, origin.absent))
        return (
            PageCopy(origin.pages[num_shared], own_pages[0], rows_of_last_page) if rows_of_last_page else None
        )

    def reserve(self, sequence: int, rows: int) -> None:
        """Allocate pages so that the rows 0 .. rows - 1 of a sequence have pages.

        Does nothing if they have pages already. Raises NotFound if the sequence is not open, and Overloaded
        if too few pages are free; then no page is allocated.

        sequence: id of the sequence.
        rows: number of rows that need pages, returned ones included.

        Pages that were returned count as present, so that they are not allocated again.
        """
        held = self._held[sequence]
        num_missing = -(-(rows - held.absent) // self.page_rows) - len(held.pages)
        if num_missing <= 0:
            return
        if num_missing > self.free:
            raise Overloaded(f"{num_missing} more KV pages are needed, {self.free} are free")
        held.pages += [self._allocate_page() for _ in range(num_missing)]

    def place(self, sequence: int, start: int, stop: int) -> PlacedRows:
        """Reserve pages for the rows up to stop - 1, and return the location of the rows start .. stop - 1.

        The result is the column of row `start`, the sequence's pages up to the page of row stop - 1, and the
        slots of the rows. Worked example with 4 rows per page: a sequence that holds pages [0, 2] places the
        rows 5 .. 9 while page 3 is the lowest free one; the result is (5, (0, 2, 3), [9, 10, 11, 12, 13]).

        sequence: id of the sequence.
        start: the first row, which lies after the returned pages.
        stop: the row after the last one.

        Raises NotFound if the sequence is not open, and Overloaded if too few pages are free.

        The slots are a range if all rows lie on one page, otherwise a list. After Overloaded, no page is
        allocated.
        """
        held = self._held[sequence]
        size = self.page_rows
        column = start - held.absent
        end = stop - held.absent
        pages = held.listed
        # `cover` would return `held.listed` as well if the number of pages is the same. This is checked here
        # to save the call, because a step places rows of every sequence, mostly on the pages of the step
        # before.
        if len(pages) != -(-end // size):
            column, pages = self.cover(sequence, start, stop)
        # Most trees lie on a single page, and a range costs less than a list.
        last = len(pages) - 1
        if last >= 0 and column // size == last:
            shift = (pages[last] - last) * size
            return column, pages, range(shift + column, shift + end)
        return column, pages, self._slots_of_columns(pages, column, end)

    def cover(self, sequence: int, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """Reserve pages for the rows up to stop - 1, and return the column of row `start` and the sequence's
        pages up to the page of row stop - 1.

        The pages that the sequence holds beyond that row are not part of the result, nor are returned pages.

        sequence: id of the sequence.
        start: a row after the returned pages.
        stop: the row after the last one that needs a page.

        Raises NotFound if the sequence is not open, and Overloaded if too few pages are free. After
        Overloaded, no page is allocated.
        """
        held = self._held[sequence]
        count = -(-(stop - held.absent) // self.page_rows)
        if len(held.listed) == count:
            return start - held.absent, held.listed
        if count > len(held.pages):
            self.reserve(sequence, stop)
        return start - held.absent, held.first_pages(count)

    def covered(
        self, sequences: Sequence[int], starts: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Return the column of one row of each of several sequences, and the pages that `cover`, `place` or
        `pages` returned last for each sequence. Nothing is reserved: the row may lie after these pages, and
        the caller has to compare.

        sequences: ids of the sequences. Raises NotFound if one is not open.
        starts: a row of each sequence, after the returned pages.

        For a sequence whose pages were never returned, or that has released pages since, the pages are ().
        """
        held = [self._held[sequence] for sequence in sequences]
        columns = [start - one.absent for start, one in zip(starts, held)]
        return columns, [one.listed for one in held]

    def unreserve(self, sequence: int, pages: int) -> tuple[int, ...]:
        """Release the pages that a sequence reserved last, and return those that no sequence owns now.

        sequence: id of the sequence. Raises NotFound if it is not open.
        pages: number of pages to release, at most as many as the sequence holds. With 0, nothing is released
            and the result is empty.

        A page that is shared stays allocated for its other owners.
        """
        held = self._held[sequence]
        num_kept = len(held.pages) - pages
        released = held.pages[num_kept:]
        del held.pages[num_kept:]
        held.listed = ()
        return self._release_pages(released)

    def trim(self, sequence: int, row: int) -> tuple[int, ...]:
        """Release the pages that no row from `row` on attends to, according to the sequence's policy, and
        return those that became free.

        Returns the released pages that no sequence owns any more; the others are still shared. Returns an
        empty tuple if the sequence has no policy or no page can be released.

        sequence: id of the sequence. Raises NotFound if it is not open.
        row: the next row to be fed.

        A page that is still shared is released by this sequence all the same. Pages of sinks, of rows that
        pruning left, and of recent rows are kept, and so is the page of `row`.
        """
        held = self._held[sequence]
        if held.policy is None:
            return ()
        unneeded = self._unneeded_pages(held, row)
        released = held.pages[unneeded]
        del held.pages[unneeded]
        held.listed = ()
        held.absent += len(released) * self.page_rows
        return self._release_pages(released)

    def skip(self, sequence: int, rows: int) -> None:
        """Leave out the next `rows` rows of a sequence, which will never be stored. The row after them has
        the column after that of the last stored row.

        Worked example: a sequence has stored the rows 0 .. 9 and skips 1,000 rows. Row 1,010 then has column
        10. The rows 0 .. 9 stay in their columns, but can no longer be addressed by their numbers, and the
        sequence can be forked from row 1,010 on only.

        sequence: id of the sequence. Raises NotFound if it is not open.
        rows: number of rows to leave out.
        """
        self._held[sequence].absent += rows

    def prune(self, sequence: int, row: int) -> RowPruning | None:
        """Prune the committed rows before `row` if a pruning is due, or return None.

        A pruning is due if `row` has reached a multiple of the policy's `prune_every` that was not pruned at.
        Heads then choose among the rows that the previous pruning left and all rows since. The caller must
        move the rows as the returned value says.

        Worked example: half of the rows are kept, and a pruning is due every 16 rows. At row 16 the sources
        are columns 0..15 and the targets are columns 0..7. At row 32 the sources are columns 0..7 and the 16
        columns of the rows since, and the targets are columns 0..11.

        sequence: id of the sequence. Raises NotFound if it is not open.
        row: number of committed rows, which is the next row to be fed.

        Returns None also for a sequence without a policy or with a window. The table then counts the kept
        rows as its first columns and all rows before `row` as pruned, before the caller has moved anything;
        pages are returned only by `trim`. If heads keep different numbers of rows, `heads` of the result says
        how many.
        """
        held = self._held[sequence]
        policy = held.policy
        if not isinstance(policy, Pruning) or policy.due(row) <= held.pruned:
            return None
        fresh = range(self.column(sequence, held.pruned), self.column(sequence, row))
        sources = self._slots_at(held, (*range(held.kept), *fresh))
        shares = None
        if isinstance(policy, HeadPruning):
            after = policy.rows_kept_by_head(held.rows_kept_by_head, len(fresh))
            shares = HeadShares(held.kept, held.rows_kept_by_head or policy.no_rows_kept, after)
            held.rows_kept_by_head = after
            held.kept = max(map(max, after))
        else:
            held.kept = policy.num_kept_rows(len(sources))
        held.pruned = row
        targets = self._slots_at(held, range(held.kept))
        return RowPruning(tuple(sources), tuple(targets), policy.skip_layers, shares)

    def pruned_columns(self, sequence: int) -> tuple[int, int]:
        """Return how many rows pruning left, and the first column whose row was never pruned.

        A result of (8, 16) means that columns 0..7 hold kept rows, columns 8..15 nothing that may be read,
        and columns from 16 on the rows since the last pruning. Before the first pruning, the result is (0,
        0).

        sequence: id of the sequence. Raises NotFound if it is not open.
        """
        held = self._held[sequence]
        return held.kept, self.column(sequence, held.pruned)

    def rows_kept_by_head(self, sequence: int) -> HeadCounts | None:
        """Return, by layer and KV head, how many of the first columns are rows that pruning left to the head.

        None is returned if all heads have as many as `pruned_columns` returns.

        sequence: id of the sequence. Raises NotFound if it is not open.
        """
        return self._held[sequence].rows_kept_by_head

    def reservable_rows(self, sequence: int, row: int) -> int:
        """Return how many rows from `row` on could have pages if the sequence were trimmed at `row` first.

        The pages that the sequence holds already, the free pages, and the pages that trimming would free all
        count; pages that other sequences share would not become free. The result may be negative if the
        sequence's own pages end before `row`.

        sequence: id of the sequence. Raises NotFound if it is not open.
        row: the next row to be fed.

        Nothing is trimmed or allocated.
        """
        held = self._held[sequence]
        unneeded = held.pages[self._unneeded_pages(held, row)] if held.policy else ()
        num_unshared = sum(self._owners[page] == 1 for page in unneeded)
        return (len(held.pages) + self.free + num_unshared) * self.page_rows + held.absent - row

    def close(self, sequence: int) -> tuple[int, ...]:
        """Release all pages of a sequence; return those that no sequence owns now.

        Closing an unknown sequence does nothing and returns an empty tuple.

        sequence: id of the sequence.
        """
        held = self._held.pop(sequence, None)
        self._with_policy.discard(sequence)
        return self._release_pages(held.pages) if held else ()

    def policy(self, sequence: int) -> Policy | None:
        """Return the policy with which the sequence, or the source of its fork, was opened. None means all
        rows.

        sequence: id of the sequence. Raises NotFound if it is not open.
        """
        return self._held[sequence].policy

    def pages(self, sequence: int) -> tuple[int, ...]:
        """Return the page numbers of a sequence in row order: column c lies in pages[c // page_rows].

        The result is empty if nothing was reserved. Raises NotFound if the sequence is not open.

        sequence: id of the sequence.
        """
        held = self._held[sequence]
        return held.first_pages(len(held.pages))

    def column(self, sequence: int, row: int) -> int:
        """Return the column of a row: its number without the rows of returned pages and the skipped rows.

        sequence: id of the sequence. Raises NotFound if it is not open.
        row: number of a row that lies after the returned pages and the skipped rows.
        """
        return row - self._held[sequence].absent

    def slots(self, sequence: int, start: int, stop: int) -> Sequence[int]:
        """Return the slots (page * page_rows + offset) of the rows start .. stop - 1, in row order.

        The result is a range if all rows lie on one page, and empty if `start` equals `stop`.

        sequence: id of the sequence. Raises NotFound if it is not open.
        start: the first row. It lies after the returned pages.
        stop: the row after the last one. All rows must have reserved pages.
        """
        held = self._held[sequence]
        return self._slots_of_columns(held.pages, start - held.absent, stop - held.absent)

    def _slots_of_columns(self, pages: Sequence[int], first: int, end: int) -> Sequence[int]:
        """Return the slots of the columns first .. end - 1, in order; a range if all lie on one page.

        With 4 rows per page and pages [5, 2, 7], the columns 2..4 have slots [22, 23, 8].

        pages: the pages of the sequence.
        first: the first column.
        end: the column after the last one.

        An empty list is returned if `end` is not greater than `first`. Raises IndexError for columns without
        pages.
        """
        size = self.page_rows
        place = first // size
        if first < end <= (page_end := (place + 1) * size):
            shift = (pages[place] - place) * size
            return range(first + shift, end + shift)
        found: list[int] = []
        while first < end:
            shift = (pages[place] - place) * size
            found += range(first + shift, (page_end if page_end < end else end) + shift)
            first = page_end
            place = place + 1
            page_end = page_end + size
        return found

    def is_shared(self, page: int) -> bool:
        """Return whether several sequences own a page. False for a free page.

        page: number of the page, 0 .. count - 1.
        """
        return self._owners[page] > 1

    def pages_for(self, rows: int) -> int:
        """Return how many pages a number of rows takes, rounded up. 0 rows take no page.

        rows: number of rows.
        """
        return -(-rows // self.page_rows)

    def missing_pages(self, rows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the sequences for which `reserve` would allocate pages, each with the number of these pages.

        rows: pairs of a sequence's id and the number of its rows that need pages, those on returned pages
            included.

        Sequences that have enough pages are left out. Raises NotFound if a sequence is not open.

            # pages of 8 rows, sequences 1 and 2 hold two each: rows (1, 16), (2, 17) -> [(2, 1)]
        """
        size = self.page_rows
        held_of = self._held
        return [
            (sequence, missing)
            for sequence, num_rows in rows
            if (missing := -(-(num_rows - (held := held_of[sequence]).absent) // size) - len(held.pages)) > 0
        ]

    def _slots_at(self, held: _Held, columns: Sequence[int]) -> list[int]:
        """Return the slot of each column, in the order of `columns`.

        held: the pages of the sequence.
        columns: column numbers in any order. With 4 rows per page and pages [5, 2], the columns (6, 1) have
            the slots [10, 21].
        """
        pages = held.pages
        size = self.page_rows
        return [pages[column // size] * size + column % size for column in columns]

    def _unneeded_pages(self, held: _Held, row: int) -> slice:
        """Return which of the sequence's pages no row from `row` on needs, as a slice of `held.pages`.

        These pages lie after the pages of the first rows (sinks, or rows that pruning left) and before the
        page of the first recent row. The slice is empty if the policy needs all rows, or if the sequence is
        still too short.

        held: the pages of the sequence.
        row: the next row to be fed.

        The slice is empty also with head windows and with a pruning that skips layers.
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
        return slice(first, max((since - held.absent) // self.page_rows, first))

    def _holds_attended_rows(self, held: _Held, row: int) -> bool:
        """Return whether the sequence still holds all rows that rows from `row` on attend to.

        held: the pages of the sequence.
        row: the next row to be fed.

        True for every policy but a window, and for a window of which no page was returned. Otherwise True if
        the first recent row that such rows attend to lies after the returned pages.
        """
        if not isinstance(held.policy, Window) or not held.absent:
            return True
        first = self.pages_for(held.policy.sinks) * self.page_rows + held.absent
        return first <= row - held.policy.recent

    def _release_pages(self, pages: list[int]) -> tuple[int, ...]:
        """Drop one reference to each page; return the pages that are free now, in the order of `pages`.

        pages: page numbers, each owned by at least one sequence.

        Pages that another sequence still owns are not part of the result.
        """
        freed: list[int] = []
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                heapq.heappush(self._free, page)
                freed.append(page)
        return tuple(freed)

    def _allocate_page(self) -> int:
        """Allocate the free page with the lowest number, and return the number. Raises Overloaded if there is
        none.
        """
        if not self._free:
            raise Overloaded("no KV page free")
        page = heapq.heappop(self._free)
        self._owners[page] = 1
        return page
