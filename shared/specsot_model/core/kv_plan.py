"""Plans what a frame does to the KV cache: page copies, slot moves, and which columns every token sees.

Every stage, and the sequencer's own copy of the page table, apply this rule to the same frames in the same
order. Their page tables therefore stay equal, and no message about KV pages is ever sent.

Words of this file:

* A *row* of a frame is one token of its batch. A segment is the run of rows that one sequence contributes.
* A *position* is the index of a token within its sequence. It decides the rotary embedding.
* A *column* is the index of a KV entry among those that a sequence still holds. Columns equal positions
  until a policy gives pages back: with 8-row pages and 2 pages trimmed, position 40 is column 24.
* A *slot* is the place of a KV entry in the cache: page * page_rows + offset. Column c of a sequence lies in
  the slot pages[c // page_rows] * page_rows + c % page_rows.
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
from specsot.params import MAX_TOKENS, MIN_RECENT, HeadCounts, HeadPruning, HeadWindows, Pruning, Window
from specsot.values import value
from specsot_kernels.segments import HeadColumns, RowSpan, VisibleColumns


@value
class PolicySpan(RowSpan):
    """The rows of one segment when the layers of the model do not all see the same columns.

    The inherited `sight` applies to layers from `skip` on only.

    skip: Number of first layers that see every column, because the policy does not apply to them.
    heads: The window of every KV head of every layer; None unless the policy is `HeadWindows`.
    positions: One number per row. With `heads` it is the row's true position; with `rows_kept_by_head` it is
    the
        row's column.
    rows_kept_by_head: By layer and KV head, how many of the first columns hold keys that pruning left to this
        head. It applies to layers from `skip` on, and is set only if heads keep different numbers.
    since: With `rows_kept_by_head`, the first column that was not pruned yet: every head sees the columns
    from
        here on.
    """

    skip: int = 0
    heads: HeadWindows | None = None
    positions: tuple[int, ...] = ()
    rows_kept_by_head: HeadCounts | None = None
    since: int = 0

    def at(self, layer: int) -> RowSpan:
        """Return the span as `layer` (index in the whole model) reads it."""
        if self.heads:
            return replace(self, sight=HeadColumns(self.heads.layers[layer], self.positions))
        if layer < self.skip:
            return replace(self, sight=None)
        if self.rows_kept_by_head:
            windows = tuple((kept, MAX_TOKENS) for kept in self.rows_kept_by_head[layer])
            return replace(self, sight=HeadColumns(windows, self.positions, self.since))
        return self


@value
class KvPlan:
    """What one frame does to the KV cache of every layer.

    A stage zeroes the trimmed pages first, then copies pages, then moves slots, then prunes, and only then
    writes the KV of the frame's rows. The freed pages are zeroed as well. Zeroing matters because a masked
    column is still multiplied by a zero weight: a NaN that one sequence left in a page would reach the next
    owner of that page.

    trimmed: Pages that a policy gave back. One of them may belong to another sequence of this frame already.
    copies: Partly filled pages that a fork copies.
    moves: Pairs (source slot, target slot) of accepted tree nodes. Gather all sources, then scatter.
    prunings: Prunings that are due before this frame's rows.
    slots: The slot of every row of the frame, in row order.
    positions: The position of every row of the frame, in row order.
    spans: One span per segment: what the rows of the segment may attend to.
    freed: Pages that no sequence owns after the frame's closings.
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
    """Apply a frame header to `table` and return what the frame does to the KV cache.

    The order is fixed: trims, openings, per segment the moves, the pruning and the new slots, closings.
    Sequences that were open before the frame are trimmed first. A scheduler that counts free pages opening
    by opening and segment by segment therefore never counts a page that is not free yet.

    Raises WireError if an opening repeats an id, NotFound if a segment or a fork names a sequence that is
    not open, and Overloaded if the pages do not suffice.

    Example, pages of 8 rows, sequence 1 holds page 0, six of its tokens are committed after this frame's
    keep. The previous tree had its root at position 4, and its nodes 0 and 2 were accepted:

        # previous tree, positions 4..6:  nodes [0 1 2] in slots [4 5 6]
        # TreeSegment(committed=6, keep=(0, 2), tree=one node)
        # moves [(6, 5)]: node 2 follows node 0; slot 6 is free for the new root
        # slots (6,), positions (6,)
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
        # Positions, not columns. Rows of a prompt chunk follow each other; nodes of a tree sit at the depth
        # of the node, so siblings share a position but not a slot.
        at: Sequence[int] = range(base, base + rows_of(segment))
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
    """Open one sequence in `table`, as a fork if the opening names one.

    Return the page copy that the fork needs, or None if the fork point lies on a page boundary or there is
    no fork. Raises WireError if the id is open already: sequence ids are never reused.
    """
    if opening.sequence in table:
        raise WireError(f"sequence {opening.sequence} is already open")
    if opening.fork is None:
        table.open(opening.sequence, policy_of(opening))
        return None
    return table.fork(opening.sequence, opening.fork.sequence, opening.fork.length)


def policy_of(opening: Opening) -> Policy | None:
    """Return the KV policy of a sequence, or None if every token attends to all tokens before it.

    The sinks of a window are limited to prompt tokens that the sequence did not write itself (before a
    repair): generated tokens never become sinks, so a repaired sequence keeps the same sinks.
    """
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
    """Return the window for a cache that can only drop tokens by position: a drafter's KV, stored features.

    Pruning by key norm has no meaning there. If pruning bounds the rows of every layer, the result is a
    window without sinks that keeps as many recent positions. None: the cache keeps every position.
    """
    match policy := policy_of(opening):
        case Window():
            return policy
        case Pruning(max_kept_rows=int(most)):
            return Window(0, max(most, MIN_RECENT))
        case _:
            return None


def tree_depth_limit(policy: Policy | None, position: int) -> int | None:
    """Return how many positions a tree may span whose root sits at `position`, or None if there is no limit.

    A window limits a tree to its recent positions. Under pruning, a tree ends before the next multiple of
    `prune_every`: with prune_every 50, a root at position 48 leaves 2 positions, 48 and 49.
    """
    match policy:
        case Window(recent=recent):
            return recent
        case Pruning(prune_every=every):
            return every - position % every
        case _:
            return None


def base_of(segment: Segment) -> int:
    """Return the number of committed tokens before a segment: the position of its first row."""
    return segment.start if isinstance(segment, PromptChunk) else segment.committed


def kept_rows(table: PageTable, segment: TreeSegment) -> Sequence[tuple[int, int]]:
    """Return the (source slot, target slot) moves that make the accepted nodes of the previous tree adjacent.

    The previous tree was written in node order from its root's position on. After the moves its accepted
    nodes occupy the positions that end right before `committed`.

        # nodes of the previous tree [0 1 2 3] in slots [10 11 12 13], keep (0, 2, 3)
        # -> moves [(12, 11), (13, 12)]; the caller gathers all sources before it scatters
    """
    # If the accepted nodes are 0, 1, ..., k, they are adjacent already.
    if not segment.keep or segment.keep[-1] + 1 == len(segment.keep):
        return ()
    start = segment.committed - len(segment.keep)
    sources = table.slots(segment.sequence, start, start + segment.keep[-1] + 1)
    pairs = ((sources[node], sources[i]) for i, node in enumerate(segment.keep))
    return [(source, target) for source, target in pairs if source != target]


def _hide(
    table: PageTable, sequence: int, policy: Policy, span: RowSpan, positions: Sequence[int]
) -> RowSpan:
    """Return `span` without the columns that the policy of its sequence hides from its rows."""
    match policy:
        case Window():
            return hide_outside_window(policy, span, positions)
        case HeadPruning():
            kept = table.rows_kept_by_head(sequence)
            since = table.pruned_columns(sequence)[1]
            return hide_pruned_by_head(kept, since, span, positions, policy.skip_layers)
        case Pruning():
            return hide_pruned(table.pruned_columns(sequence), span, policy.skip_layers)
        case HeadWindows():
            told = span.rows, span.base, span.tail, span.pages, span.seen
            return PolicySpan(*told, None, 0, policy, tuple(positions))


def hide_pruned(pruned: tuple[int, int], span: RowSpan, skip: int) -> RowSpan:
    """Hide the columns that pruning emptied, in layers from `skip` on.

    pruned: (kept, since). Of the columns before `since`, pruning left keys in the first `kept`.

        # columns [0 1 2 3 | 4 .. 9 | 10 11 12], pruned (4, 10) -> rows see 0..3 and 10 onwards, not 4..9
    """
    kept, since = pruned
    if kept == since:
        return span
    rows = span.rows
    sight = VisibleColumns((kept,) * rows, (since,) * rows, (0,) * rows)
    return PolicySpan(rows, span.base, span.tail, span.pages, span.seen, sight, skip)


def hide_pruned_by_head(
    kept: HeadCounts | None, since: int, span: RowSpan, positions: Sequence[int], skip: int
) -> RowSpan:
    """Hide the columns that pruning emptied, if each KV head keeps its own number, in layers from `skip` on.

    kept: By layer and KV head, how many of the first columns hold keys; None before the first pruning.
    since: First column that was not pruned yet.
    positions: Positions of the rows. The first row of a segment sits at the segment's base, so a row's
        column is base + its position - the first position.
    """
    if kept is None or all(rows == since for heads in kept for rows in heads):
        return span
    columns = tuple(span.base + position - positions[0] for position in positions)
    told = span.rows, span.base, span.tail, span.pages, span.seen
    return PolicySpan(*told, None, skip, None, columns, kept, since)


def hide_outside_window(window: Window, span: RowSpan, positions: Sequence[int]) -> RowSpan:
    """Hide the columns that lie outside a window of sinks and recent positions.

    positions: Positions of the rows; the first row sits at the segment's base.

    The row at position p sees the first `sinks` positions and the positions from p - recent to p. Its query
    is turned for the sinks as if it sat at sinks + recent (`VisibleColumns.turns`).

        # Window(sinks=2, recent=16), rows at positions 30 and 31
        # -> sinks (2, 2), since (14, 15), turns (12, 13)
    """
    # As long as the window hides nothing, the frame runs the same kernels as without a window.
    if max(positions) - window.recent <= window.sinks:
        return span
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
    """Return for each position in `firsts` the set of rows at smaller positions, as a bit mask over rows.

    # firsts [3, 5], rows at positions [3 4 4 5] -> [0b0000, 0b0111]
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ranked = [positions[row] for row in order]
    masks = list(accumulate((1 << row for row in order), or_, initial=0))
    return [masks[bisect_left(ranked, first)] for first in firsts]
