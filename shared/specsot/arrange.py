"""What a frame's header means for a page table: copies, moves, and a place for every row.

Refuses to know tensors and layers. Every stage, and the sequencer's mirror, runs this same rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import or_

from specsot.errors import WireError
from specsot.frames import Chunk, Frame, Growth, Opening, Segment, rows_of
from specsot.pages import PageCopy, PageTable
from specsot.params import Window
from specsot.tree import ancestry, depths


@dataclass(frozen=True, slots=True)
class Sight:
    """What a window leaves of the columns in front of a segment and of those of its sinks.

    sinks: by row how many of the first columns it sees as sinks; they count as nothing else.
    since: by row the first of the other columns in front of the segment that it sees.
    turns: by row how many positions nearer it is to the sinks than its own position says, or 0.
    """

    sinks: tuple[int, ...]
    since: tuple[int, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """One segment's rows: columns 0..base-1 are visible to all of them, the rest by `visible`.

    A sequence without a window has a column for every KV row; else see `PageTable`.

    pages:   cover columns 0 .. base + rows - 1.
    visible: bits over the segment's own rows, per row; None for a prompt chunk (causal).
    sight:   of a window; None where there is none.
    """

    base: int
    rows: int
    pages: tuple[int, ...]
    visible: tuple[int, ...] | None
    sight: Sight | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A frame applied. Trimmed pages are wiped first; copies and moves come before any row is written.

    slots, positions: of every row of the frame, in row order.
    moves: (source slot, target slot) pairs of accepted tree rows; gather all, then scatter.
    trimmed: pages behind windows, which may be somebody else's already.
    freed: pages that nobody owns any more. Both are wiped, so that one sequence's rows that are not
           numbers never reach another.
    """

    trimmed: tuple[int, ...]
    copies: tuple[PageCopy, ...]
    moves: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    places: tuple[Place, ...]
    freed: tuple[int, ...]


def arrange(table: PageTable, frame: Frame) -> Arrangement:
    """Apply a header in its order: openings, keeps and new rows, closings.

    What windows leave, of sequences that were open before, comes first: whoever counts pages opening by
    opening and segment by segment then never finds more of them free than there are.
    """
    there = [segment for segment in frame.segments if segment.sequence in table]
    trimmed = [page for segment in there for page in table.trim(segment.sequence, base_of(segment))]
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
    return Arrangement(
        tuple(trimmed), copies, tuple(moves), tuple(slots), tuple(positions), tuple(places), freed
    )


def open_one(table: PageTable, opening: Opening) -> PageCopy | None:
    """Open one sequence, as a fork where it says so. Ids are never reused: a second one is an error."""
    if opening.sequence in table:
        raise WireError(f"sequence {opening.sequence} is already open")
    if opening.fork is None:
        table.open(opening.sequence, window_of(opening))
        return None
    return table.fork(opening.sequence, opening.fork.sequence, opening.fork.length)


def window_of(opening: Opening) -> Window | None:
    """A sequence's window; sinks are tokens of what was asked, never of what it writes."""
    window = opening.window
    return window and replace(window, sinks=min(window.sinks, opening.prompt - opening.generated))


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
    rows, column = rows_of(segment), table.column(segment.sequence, base)
    pages = table.pages(segment.sequence)[: table.pages_for(column + rows)]
    visible = ancestry(segment.tree.parents) if isinstance(segment, Growth) else None
    place = Place(column, rows, pages, visible)
    window = table.window(segment.sequence)
    return look_through(window, place, base, positions_of(segment)) if window else place


def look_through(window: Window, place: Place, base: int, positions: Sequence[int]) -> Place:
    """The place of rows at `positions` as a window leaves it; `base`: position of its base column."""
    visible = place.visible or [(2 << row) - 1 for row in range(place.rows)]
    firsts = [position - window.recent for position in positions]
    sight = Sight(
        tuple(min(window.sinks, position + 1) for position in positions),
        tuple(min(max(first - base + place.base, window.sinks), place.base) for first in firsts),
        tuple(max(first - window.sinks, 0) for first in firsts),
    )
    before = _before([max(first, window.sinks) for first in firsts], positions)
    bits = tuple(seen & ~far for seen, far in zip(visible, before))
    return replace(place, visible=bits, sight=sight)


def _before(firsts: Sequence[int], positions: Sequence[int]) -> list[int]:
    """For each of `firsts` the rows at positions in front of it, as bits."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ranked = [positions[row] for row in order]
    masks = list(accumulate((1 << row for row in order), or_, initial=0))
    return [masks[bisect_left(ranked, first)] for first in firsts]
