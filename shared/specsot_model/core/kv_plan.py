"""Plans what a frame does to the KV cache: page copies, row moves, and which columns every row sees.

Every stage, and the sequencer's mirror, runs this same rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import or_

from specsot.core.frames import Frame, Opening, PromptChunk, Segment, TreeSegment, rows_of
from specsot.core.pages import PageCopy, PageTable, Policy, RowPruning
from specsot.core.tree import shape_of
from specsot.errors import WireError
from specsot.params import LEAST_RECENT, MAX_TOKENS, HeadCounts, HeadPruning, HeadWindows, Pruning, Window
from specsot.values import value
from specsot_kernels.segments import HeadColumns, RowSpan, VisibleColumns


@value
class PolicySpan(RowSpan):
    """Rows of a sequence whose layers do not all see the same.

    sight: in layers from `skip` on. heads: windows of every layer's heads, for rows at `positions`.
    kept_by_head: in layers from `skip` on, how many of the first columns are rows that pruning left each KV
        head, where heads keep different numbers; `positions` are then columns, and every head sees those
        from `since` on.
    """

    skip: int = 0
    heads: HeadWindows | None = None
    positions: tuple[int, ...] = ()
    kept_by_head: HeadCounts | None = None
    since: int = 0

    def at(self, layer: int) -> RowSpan:
        if self.heads:
            return replace(self, sight=HeadColumns(self.heads.layers[layer], self.positions))
        if layer < self.skip:
            return replace(self, sight=None)
        if self.kept_by_head:
            windows = tuple((kept, MAX_TOKENS) for kept in self.kept_by_head[layer])
            return replace(self, sight=HeadColumns(windows, self.positions, self.since))
        return self


@value
class KvPlan:
    """A frame applied. Trimmed pages are wiped first; copies, moves and prunings come before any row is
    written, in this order.

    slots, positions: of every row of the frame, in row order.
    spans: of its segments. A sequence without a policy has a column for every KV row; else see `PageTable`.
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
    spans: tuple[RowSpan, ...]
    freed: tuple[int, ...]


def plan_frame(table: PageTable, frame: Frame) -> KvPlan:
    """Apply a header in its order: openings, keeps and new rows, closings.

    What policies leave, of sequences that were open before, comes first: whoever counts pages opening by
    opening and segment by segment then never finds more of them free than there are.
    """
    limited = [one for one in frame.segments if one.sequence in table and table.policy(one.sequence)]
    trimmed = [page for segment in limited for page in table.trim(segment.sequence, base_of(segment))]
    copies = tuple(filter(None, (open_one(table, opening) for opening in frame.openings)))
    moves: list[tuple[int, int]] = []
    prunings: list[RowPruning | None] = []
    slots: list[int] = []
    positions: list[int] = []
    spans: list[RowSpan] = []
    for segment in frame.segments:
        sequence, base = segment.sequence, base_of(segment)
        policy = table.policy(sequence)
        visible = None
        at: Sequence[int] = range(base, base + rows_of(segment))  # true token positions
        if isinstance(segment, TreeSegment):
            moves += kept_rows(table, segment)
            far, visible = shape_of(segment.tree.parents)
            at = [base + depth for depth in far]
        if policy:
            prunings.append(table.prune(sequence, base))
        column, pages, own = table.place(sequence, base, base + len(at))
        slots += own
        positions += at
        span = RowSpan(len(at), column, len(at), pages, visible)
        spans.append(_hide(table, sequence, policy, span, at) if policy else span)
    freed = tuple(page for sequence in frame.closings for page in table.close(sequence))
    told = tuple(moves), tuple(filter(None, prunings)), tuple(slots), tuple(positions), tuple(spans)
    return KvPlan(tuple(trimmed), copies, *told, freed)


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
        pruning = opening.pruning
        importance = opening.importance
        if pruning and importance:
            numbers = pruning.keep_ratio, pruning.prune_every, pruning.skip_layers
            return HeadPruning(*numbers, importance.layers)
        return pruning or opening.heads
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


def tree_depth_limit(policy: Policy | None, position: int) -> int | None:
    """How many positions a tree whose root sits there may span; None: any number."""
    match policy:
        case Window(recent=recent):
            return recent
        case Pruning(prune_every=every):
            return every - position % every
        case _:
            return None


def base_of(segment: Segment) -> int:
    """Committed rows in front of a segment."""
    return segment.start if isinstance(segment, PromptChunk) else segment.committed


def kept_rows(table: PageTable, segment: TreeSegment) -> Sequence[tuple[int, int]]:
    """Moves that bring the accepted rows of the tree before down to end at `committed`."""
    if not segment.keep or segment.keep[-1] + 1 == len(segment.keep):
        return ()  # accepted rows lie one behind the other already
    start = segment.committed - len(segment.keep)
    sources = table.slots(segment.sequence, start, start + segment.keep[-1] + 1)
    pairs = ((sources[node], sources[i]) for i, node in enumerate(segment.keep))
    return [(source, target) for source, target in pairs if source != target]


def _hide(
    table: PageTable, sequence: int, policy: Policy, span: RowSpan, positions: Sequence[int]
) -> RowSpan:
    match policy:
        case Window():
            return hide_outside_window(policy, span, positions)
        case HeadPruning():
            kept = table.kept_by_head(sequence)
            since = table.pruned(sequence)[1]
            return hide_pruned_by_head(kept, since, span, positions, policy.skip_layers)
        case Pruning():
            return hide_pruned(table.pruned(sequence), span, policy.skip_layers)
        case HeadWindows():
            told = span.rows, span.base, span.tail, span.pages, span.seen
            return PolicySpan(*told, None, 0, policy, tuple(positions))


def hide_pruned(pruned: tuple[int, int], span: RowSpan, skip: int) -> RowSpan:
    """Rows where pruning left so many first columns of those before another one."""
    kept, since = pruned
    if kept == since:
        return span
    rows = span.rows
    sight = VisibleColumns((kept,) * rows, (since,) * rows, (0,) * rows)
    return PolicySpan(rows, span.base, span.tail, span.pages, span.seen, sight, skip)


def hide_pruned_by_head(
    kept: HeadCounts | None, since: int, span: RowSpan, positions: Sequence[int], skip: int
) -> RowSpan:
    """Rows at `positions`, the first of which is their base's, where pruning left each head its own number of
    the columns before `since`. kept: None before the first pruning.
    """
    if kept is None or all(rows == since for heads in kept for rows in heads):
        return span
    columns = tuple(span.base + position - positions[0] for position in positions)
    told = span.rows, span.base, span.tail, span.pages, span.seen
    return PolicySpan(*told, None, skip, None, columns, kept, since)


def hide_outside_window(window: Window, span: RowSpan, positions: Sequence[int]) -> RowSpan:
    """Rows at `positions`, the first of which is its base's, as a window leaves them."""
    if max(positions) - window.recent <= window.sinks:
        return span  # nothing is hidden yet: frames run as they do without a window
    firsts = [position - window.recent for position in positions]
    sight = VisibleColumns(
        tuple(min(window.sinks, position + 1) for position in positions),
        tuple(min(max(first - positions[0] + span.base, window.sinks), span.base) for first in firsts),
        tuple(max(first - window.sinks, 0) for first in firsts),
    )
    before = _before([max(first, window.sinks) for first in firsts], positions)
    bits = tuple(seen & ~far for seen, far in zip(span.seen, before))
    return replace(span, visible=bits, sight=sight)


def _before(firsts: Sequence[int], positions: Sequence[int]) -> list[int]:
    """For each of `firsts` the rows at positions in front of it, as bits."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ranked = [positions[row] for row in order]
    masks = list(accumulate((1 << row for row in order), or_, initial=0))
    return [masks[bisect_left(ranked, first)] for first in firsts]
