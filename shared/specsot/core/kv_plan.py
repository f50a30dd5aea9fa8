"""Plans what a frame does to the KV cache: page copies, row moves, and which columns every row sees.

Every stage, and the sequencer's mirror, runs this same rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import or_

from specsot.core.frames import Frame, Opening, PromptChunk, Segment, TreeSegment, rows_of
from specsot.core.pages import PageCopy, PageTable, Policy, RowPruning
from specsot.core.tree import ancestry, depths
from specsot.errors import WireError
from specsot.params import LEAST_RECENT, HeadWindows, Pruning, Window


@dataclass(frozen=True, slots=True)
class VisibleColumns:
    """What a policy leaves of the columns in front of a segment and of the first ones.

    sinks: by row how many of the first columns it sees as sinks, or as what pruning left.
    since: by row the first of the other columns in front of the segment that it sees.
    turns: by row how many positions nearer it is to the sinks than its own position says, or 0.
    """

    sinks: tuple[int, ...]
    since: tuple[int, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """What one layer's heads see where each has a window of its own, and columns are positions.

    windows: (sinks, recent) of every KV head.
    positions: of the rows.
    """

    windows: tuple[tuple[int, int], ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One segment's rows: columns 0..base-1 are visible to all of them, the rest by `visible`.

    A sequence without a window has a column for every KV row; else see `PageTable`.

    pages:   cover columns 0 .. base + rows - 1.
    visible: bits over the segment's own rows, per row; None for a prompt chunk (causal).
    sight:   of a policy, in layers from `skip` on; None where there is none.
    heads:   windows of every layer's heads, for rows at `positions`; then there is no sight.
    """

    base: int
    rows: int
    pages: tuple[int, ...]
    visible: tuple[int, ...] | None
    sight: VisibleColumns | None = None
    skip: int = 0
    heads: HeadWindows | None = None
    positions: tuple[int, ...] = ()

    def sight_at(self, layer: int) -> VisibleColumns | HeadColumns | None:
        """What a policy leaves in this layer of the model."""
        if self.heads:
            return HeadColumns(self.heads.layers[layer], self.positions)
        return None if layer < self.skip else self.sight


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A frame applied. Trimmed pages are wiped first; copies, moves and prunings come before any row is
    written, in this order.

    slots, positions: of every row of the frame, in row order.
    moves: (source slot, target slot) pairs of accepted tree rows; gather all, then scatter.
    trimmed: pages that a policy does not need, which may be somebody else's already.
    freed: pages that nobody owns any more. Both are wiped, so that one sequence's rows that are not
           numbers never reach another.
    """

    trimmed: tuple[int, ...]
    copies: tuple[PageCopy, ...]
    moves: tuple[tuple[int, int], ...]
    prunings: tuple[RowPruning, ...]
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    places: tuple[SegmentPlan, ...]
    freed: tuple[int, ...]


def plan_frame(table: PageTable, frame: Frame) -> KvPlan:
    """Apply a header in its order: openings, keeps and new rows, closings.

    What policies leave, of sequences that were open before, comes first: whoever counts pages opening by
    opening and segment by segment then never finds more of them free than there are.
    """
    there = [segment for segment in frame.segments if segment.sequence in table]
    trimmed = [page for segment in there for page in table.trim(segment.sequence, base_of(segment))]
    copies = tuple(filter(None, (open_one(table, opening) for opening in frame.openings)))
    moves: list[tuple[int, int]] = []
    prunings: list[RowPruning | None] = []
    slots: list[int] = []
    positions: list[int] = []
    places: list[SegmentPlan] = []
    for segment in frame.segments:
        base = base_of(segment)
        moves += kept_rows(table, segment)
        prunings.append(table.prune(segment.sequence, base))
        table.reserve(segment.sequence, base + rows_of(segment))
        slots += table.slots(segment.sequence, base, base + rows_of(segment))
        positions += positions_of(segment)
        places.append(_plan_segment(table, segment, base))
    freed = tuple(page for sequence in frame.closings for page in table.close(sequence))
    return KvPlan(
        tuple(trimmed),
        copies,
        tuple(moves),
        tuple(filter(None, prunings)),
        tuple(slots),
        tuple(positions),
        tuple(places),
        freed,
    )


def open_one(table: PageTable, opening: Opening) -> PageCopy | None:
    """Open one sequence, as a fork where it says so. Ids are never reused: a second one is an error."""
    if opening.sequence in table:
        raise WireError(f"sequence {opening.sequence} is already open")
    if opening.fork is None:
        table.open(opening.sequence, policy_of(opening))
        return None
    return table.fork(opening.sequence, opening.fork.sequence, opening.fork.length)


def policy_of(opening: Opening) -> Policy | None:
    """What a sequence keeps; sinks are tokens of what was asked, never of what it writes."""
    window = opening.window
    if window is None:
        return opening.pruning or opening.heads
    return replace(window, sinks=min(window.sinks, opening.prompt - opening.generated))


def window_of(opening: Opening) -> Window | None:
    """The same for those who keep rows by their positions alone: in place of what pruning leaves in every
    layer, as many recent ones."""
    match policy := policy_of(opening):
        case Window():
            return policy
        case Pruning(most=int(most)):
            return Window(0, max(most, LEAST_RECENT))
        case _:
            return None


def tree_depth_limit(opening: Opening, position: int) -> int | None:
    """How many positions a tree whose root sits there may span; None: any number."""
    match policy_of(opening):
        case Window(recent=recent):
            return recent
        case Pruning(prune_every=every):
            return every - position % every
        case _:
            return None


def base_of(segment: Segment) -> int:
    """Committed rows in front of a segment."""
    return segment.start if isinstance(segment, PromptChunk) else segment.committed


def kept_rows(table: PageTable, segment: Segment) -> list[tuple[int, int]]:
    """Moves that bring the accepted rows of the tree before down to end at `committed`."""
    if isinstance(segment, PromptChunk) or segment.keep in ((), (0,)):
        return []
    start = segment.committed - len(segment.keep)
    sources = table.slots(segment.sequence, start, start + segment.keep[-1] + 1)
    pairs = ((sources[node], sources[i]) for i, node in enumerate(segment.keep))
    return [(source, target) for source, target in pairs if source != target]


def positions_of(segment: Segment) -> list[int]:
    """True token position of each row."""
    if isinstance(segment, PromptChunk):
        return list(range(segment.start, segment.start + len(segment.tokens)))
    return [segment.committed + depth for depth in depths(segment.tree.parents)]


def _plan_segment(table: PageTable, segment: Segment, base: int) -> SegmentPlan:
    rows, column = rows_of(segment), table.column(segment.sequence, base)
    pages = table.pages(segment.sequence)[: table.pages_for(column + rows)]
    visible = ancestry(segment.tree.parents) if isinstance(segment, TreeSegment) else None
    place = SegmentPlan(column, rows, pages, visible)
    match policy := table.policy(segment.sequence):
        case None:
            return place
        case Window():
            return hide_outside_window(policy, place, base, positions_of(segment))
        case Pruning():
            return hide_pruned(table.pruned(segment.sequence), place, policy.skip_layers)
        case HeadWindows():
            visible, positions = visible or _causal(rows), tuple(positions_of(segment))
            return replace(place, visible=visible, heads=policy, positions=positions)


def hide_pruned(pruned: tuple[int, int], place: SegmentPlan, skip: int) -> SegmentPlan:
    """A place's rows, where pruning left so many first columns of those before another one."""
    kept, since = pruned
    if kept == since:
        return place
    rows, visible = place.rows, place.visible or _causal(place.rows)
    return replace(
        place, visible=visible, sight=VisibleColumns((kept,) * rows, (since,) * rows, (0,) * rows), skip=skip
    )


def hide_outside_window(
    window: Window, place: SegmentPlan, base: int, positions: Sequence[int]
) -> SegmentPlan:
    """The place of rows at `positions` as a window leaves it; `base`: position of its base column."""
    if max(positions) - window.recent <= window.sinks:
        return place  # nothing is hidden yet: frames run as they do without a window
    visible = place.visible or _causal(place.rows)
    firsts = [position - window.recent for position in positions]
    sight = VisibleColumns(
        tuple(min(window.sinks, position + 1) for position in positions),
        tuple(min(max(first - base + place.base, window.sinks), place.base) for first in firsts),
        tuple(max(first - window.sinks, 0) for first in firsts),
    )
    before = _before([max(first, window.sinks) for first in firsts], positions)
    bits = tuple(seen & ~far for seen, far in zip(visible, before))
    return replace(place, visible=bits, sight=sight)


def _causal(rows: int) -> tuple[int, ...]:
    return tuple((2 << row) - 1 for row in range(rows))


def _before(firsts: Sequence[int], positions: Sequence[int]) -> list[int]:
    """For each of `firsts` the rows at positions in front of it, as bits."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ranked = [positions[row] for row in order]
    masks = list(accumulate((1 << row for row in order), or_, initial=0))
    return [masks[bisect_left(ranked, first)] for first in firsts]
