"""What a frame's header means for a page table: copies, moves, and a place for every row.

Refuses to know tensors and layers. Every stage, and the sequencer's mirror, runs this same rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot.errors import WireError
from specsot.frames import Chunk, Frame, Growth, Opening, Segment, rows_of
from specsot.pages import PageCopy, PageTable
from specsot.tree import ancestry, depths


@dataclass(frozen=True, slots=True)
class Place:
    """One segment's rows: KV rows 0..base-1 are visible to all of them, the rest by `visible`.

    pages:   cover rows 0 .. base + rows - 1.
    visible: bits over the segment's own rows, per row; None for a prompt chunk (causal).
    """

    base: int
    rows: int
    pages: tuple[int, ...]
    visible: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A frame applied. Copies and moves come before any row is written.

    slots, positions: of every row of the frame, in row order.
    moves: (source slot, target slot) pairs of accepted tree rows; gather all, then scatter.
    freed: pages that nobody owns any more; wiped, so that one sequence's rows that are not numbers
           never reach another.
    """

    copies: tuple[PageCopy, ...]
    moves: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    places: tuple[Place, ...]
    freed: tuple[int, ...]


def arrange(table: PageTable, frame: Frame) -> Arrangement:
    """Apply a header in its order: openings, keeps and new rows, closings."""
    copies = tuple(filter(None, (open_one(table, opening) for opening in frame.openings)))
    moves: list[tuple[int, int]] = []
    slots: list[int] = []
    positions: list[int] = []
    places: list[Place] = []
    for segment in frame.segments:
        base = base_of(segment)
        moves += kept_rows(table, segment)
        table.reserve(segment.sequence, base + rows_of(segment))
        slots += table.slots(segment.sequence, base, base + rows_of(segment))
        positions += positions_of(segment)
        places.append(_place(table, segment, base))
    freed = tuple(page for sequence in frame.closings for page in table.close(sequence))
    return Arrangement(copies, tuple(moves), tuple(slots), tuple(positions), tuple(places), freed)


def open_one(table: PageTable, opening: Opening) -> PageCopy | None:
    """Open one sequence, as a fork where it says so. Ids are never reused: a second one is an error."""
    if opening.sequence in table:
        raise WireError(f"sequence {opening.sequence} is already open")
    if opening.fork is None:
        table.open(opening.sequence)
        return None
    return table.fork(opening.sequence, opening.fork.sequence, opening.fork.length)


def base_of(segment: Segment) -> int:
    """Committed rows in front of a segment."""
    return segment.start if isinstance(segment, Chunk) else segment.committed


def kept_rows(table: PageTable, segment: Segment) -> list[tuple[int, int]]:
    """Moves that bring the accepted rows of the tree before down to end at `committed`."""
    if isinstance(segment, Chunk) or not segment.keep:
        return []
    start = segment.committed - len(segment.keep)
    sources = table.slots(segment.sequence, start, start + segment.keep[-1] + 1)
    pairs = ((sources[node], sources[i]) for i, node in enumerate(segment.keep))
    return [(source, target) for source, target in pairs if source != target]


def positions_of(segment: Segment) -> list[int]:
    """True token position of each row."""
    if isinstance(segment, Chunk):
        return list(range(segment.start, segment.start + len(segment.tokens)))
    return [segment.committed + depth for depth in depths(segment.tree.parents)]


def _place(table: PageTable, segment: Segment, base: int) -> Place:
    rows = rows_of(segment)
    pages = table.pages(segment.sequence)[: table.pages_for(base + rows)]
    visible = ancestry(segment.tree.parents) if isinstance(segment, Growth) else None
    return Place(base, rows, pages, visible)
