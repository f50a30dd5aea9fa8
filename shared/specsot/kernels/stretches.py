"""Which rows of a frame read which columns of the KV, as tables of numbers: what tree attention works off.

Refuses to know heads, tensors, and who owns the sequences. A stretch is a run of pages and the rows that
read it; full pages that neighbouring sequences share, and every row of them sees, are one stretch for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]

LEAST = 128  # columns of a piece: fewer are not worth a program
PIECES = 32  # at least, where there are columns enough; times the KV heads they fill a GPU
WORD = 32


class Span(Protocol):
    """One sequence's rows in a frame: see `specsot.model.segments.Span`."""

    @property
    def rows(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def pages(self) -> tuple[int, ...]: ...
    @property
    def visible(self) -> tuple[int, ...] | None: ...
    @property
    def lead(self) -> int: ...


class Stretch(NamedTuple):
    """Rows first .. first + rows - 1 read columns at .. at + columns - 1, which lie on these pages."""

    first: int
    rows: int
    at: int
    columns: int
    pages: tuple[int, ...]


class Tables(NamedTuple):
    """A frame's work; slots are numbered through, one for each row of each piece.

    pieces: [pieces, 7] first row, rows, where its pages start in `pages`, columns, the first column,
            columns that all of its rows see, first slot.
    pages:  page numbers of all pieces.
    leads:  [rows] columns before this one are seen; bases: [rows] column of bit 0 of the row's bits.
    bits:   [rows, words], bit j of word i: column base + 32 i + j is seen.
    starts: [rows + 1] and slots: row r merges slots[starts[r] : starts[r + 1]].
    """

    pieces: Numbers
    pages: Numbers
    leads: Numbers
    bases: Numbers
    bits: Numbers
    starts: Numbers
    slots: Numbers


def tabulate(spans: Sequence[Span], page_rows: int, tile_rows: int) -> Tables:
    """The work of one frame whose spans come in row order; a piece has at most tile_rows rows."""
    starts = (0, *accumulate(span.rows for span in spans))
    leads, bases, bits = _sights(spans)
    stretches = tuple(_cut(list(zip(starts, spans)), 0, page_rows))
    pieces: list[tuple[int, ...]] = []
    pages: list[int] = []
    slots: list[list[int]] = [[] for _ in range(starts[-1])]
    used = 0
    step = _piece_columns(stretches, page_rows, tile_rows)
    for first, rows, at, columns, run in stretches:
        for left in range(0, columns, step):
            wide, where = min(step, columns - left), len(pages)
            pages += run[left // page_rows : -(-(left + wide) // page_rows)]
            for top in range(first, first + rows, tile_rows):
                high = min(tile_rows, first + rows - top)
                seen = int(leads[top : top + high].min())
                pieces.append((top, high, where, wide, at + left, seen, used))
                for row in range(high):
                    slots[top + row].append(used + row)
                used += high
    ends = np.cumsum([0, *map(len, slots)])
    flat = [slot for each in slots for slot in each]
    return Tables(*map(_numbers, (pieces, pages, leads, bases, bits, ends, flat)))


def _piece_columns(stretches: Sequence[Stretch], page_rows: int, tile_rows: int) -> int:
    """Whole pages, and as many of them as leave pieces enough."""
    work = sum(-(-each.rows // tile_rows) * each.columns for each in stretches)
    return max(-(-max(work // PIECES, LEAST) // page_rows), 1) * page_rows


def _cut(blocks: Sequence[tuple[int, Span]], level: int, page_rows: int) -> Iterator[Stretch]:
    """Stretches of neighbours from the level-th page on; blocks are first rows and spans."""
    for run in _runs(blocks, level, page_rows):
        (first, span), at = run[0], level * page_rows
        end = -(-(span.base + span.tail) // page_rows)
        columns = span.base + span.tail - at
        if len(run) > 1:
            end = level + 1
            while len(_runs(run, end, page_rows)) == 1:
                end += 1
            columns = end * page_rows - at
        if columns > 0:
            rows = sum(each.rows for _, each in run)
            yield Stretch(first, rows, at, columns, span.pages[level:end])
        if len(run) > 1:
            yield from _cut(run, end, page_rows)


def _runs(blocks: Sequence[tuple[int, Span]], level: int, page_rows: int) -> list[list[tuple[int, Span]]]:
    """Neighbours whose level-th page is the same, full, and seen whole."""
    runs: list[list[tuple[int, Span]]] = []
    before: int | None = None
    for block in blocks:
        span = block[1]
        page = span.pages[level] if span.lead >= (level + 1) * page_rows else None
        if runs and page is not None and page == before:
            runs[-1].append(block)
        else:
            runs.append([block])
        before = page
    return runs


def _sights(spans: Sequence[Span]) -> tuple[Numbers, Numbers, Numbers]:
    """Leads, bases and bits of all rows."""
    leads: list[int] = []
    bases: list[int] = []
    rows: list[int] = []
    for span in spans:
        causal = span.visible is None
        leads += [span.base + row + 1 if causal else span.base for row in range(span.rows)]
        bases += [span.base] * span.rows
        rows += span.visible or [0] * span.rows
    words = max((row.bit_length() for row in rows), default=0) // WORD + 1
    packed = b"".join(row.to_bytes(4 * words, "little") for row in rows)
    bits = np.frombuffer(packed, "<i4").reshape(len(rows), words)
    return _numbers(leads), _numbers(bases), bits


def _numbers(values: object) -> Numbers:
    return np.ascontiguousarray(values, np.int32)
