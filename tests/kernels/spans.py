"""Rows of random trees, branches and prompts on random pages: what kernels of attention are asked for."""

from __future__ import annotations

import random

from specsot_kernels.attention_tables import (
    AttentionTables,
    Numbers,
    PieceTables,
    RowSights,
    TableRoom,
)
from specsot_kernels.segments import RowSpan

PAGE = 16
PAGES = 40


def a_tree(rng: random.Random, rows: int, before: int) -> tuple[int, ...]:
    """Each row sees the tail's committed part, itself, and a random earlier row's line."""
    seen: list[int] = []
    for row in range(rows):
        above = seen[rng.randrange(row)] if row else (1 << before) - 1
        seen.append(above | 1 << (before + row))
    return tuple(seen)


def branches(rng: random.Random, count: int, shared: int, rows: int) -> list[RowSpan]:
    """Trees of sequences with the same first pages, and causal rows of one that shares fewer."""
    fresh = iter(rng.sample(range(20, PAGES), PAGES - 20))
    common = tuple(range(3, 3 + shared))
    spans: list[RowSpan] = []
    for number in range(count):
        base, before = shared * PAGE + rng.randrange(PAGE), number % 3
        pages = common + tuple(next(fresh) for _ in range(-(-(base + before + rows) // PAGE) - shared))
        spans.append(RowSpan(rows, base, before + rows, pages, a_tree(rng, rows, before)))
    own = max(shared - 1, 0)
    return [*spans, RowSpan(5, own * PAGE, 5, (*common[:own], next(fresh)))]


def filled(room: TableRoom, tables: AttentionTables) -> list[Numbers] | None:
    """The tables padded with zeros to the shapes of the room; None if they do not fit."""
    padded = room.fill_pieces(PieceTables(tables.pieces, tables.starts, tables.slots, tables.pages))
    if padded is None or any(one > other for one, other in zip(tables.bits.shape, room.shapes[3])):
        return None
    return [padded[0], *room.fill_sights(RowSights(*tables[2:5])), *padded[1:]]
