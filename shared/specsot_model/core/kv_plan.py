"""Plans what a frame does to the KV cache: page copies, slot moves, and which columns every token sees.

Every stage, and the sequencer's own copy of the page table, apply this rule to the same frames in the same
order. Their page tables therefore stay equal, and no message about KV pages is ever sent.

Words of this file:

* A *row* of a frame is one token of its batch (a batch row; in `specsot.core.pages` a row is a KV entry of a
  sequence). A segment is the run of batch rows that one sequence contributes.
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
from itertools import accumulate, zip_longest
from operator import or_

from specsot.core.frames import Frame, Opening, PromptChunk, Segment, TreeSegment
from specsot.core.pages import PageCopy, PageTable, Policy, RowPruning
from specsot.core.tree import Shape, Tree, shape_of
from specsot.core.tree_frames import check_supported
from specsot.errors import WireError
from specsot.params import MAX_TOKENS, MIN_RECENT, HeadCounts, HeadPruning, HeadWindows, Pruning, Window
from specsot.values import value
from specsot_kernels.segments import HeadColumns, RowSpan, VisibleColumns


@value
class PolicySpan(RowSpan):
    """The rows of one segment when the layers of the model do not all see the same columns.

    The inherited `sight` applies to layers from `skip_layers` on only.

    skip_layers: number of first layers that see every column, because the policy does not apply to them.
    heads: the window of every KV head of every layer; None unless the policy is `HeadWindows`.
    positions: one number per row. With `heads` it is the row's true position; with `rows_kept_by_head` it is
        the row's column. Empty if neither is set.
    rows_kept_by_head: by layer and KV head, how many of the first columns hold keys that pruning left to this
        head. It applies to layers from `skip_layers` on, and is None unless heads keep different numbers.
    since: with `rows_kept_by_head`, the first column that was not pruned yet: every head sees the columns
        from this column on. Otherwise 0.
    """

    skip_layers: int = 0
    heads: HeadWindows | None = None
    positions: tuple[int, ...] = ()
    rows_kept_by_head: HeadCounts | None = None
    since: int = 0

    def at(self, layer: int) -> RowSpan:
        """Return the span as one layer reads it: with that layer's sight.

        The order of precedence is: windows by head, then layers before `skip_layers`, which see every column,
        then what pruning left to each head; without any of these the span itself is returned.

        layer: index of the layer in the whole model, not in a stage's range.
        """
        if self.heads:
            return replace(self, sight=HeadColumns(self.heads.layers[layer], self.positions))
        if layer < self.skip_layers:
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

    trimmed: numbers of the pages that a policy gave back. One of them may belong to another sequence of this
        frame already.
    copies: the partly filled pages that a fork copies.
    moves: pairs (source slot, target slot) of accepted tree nodes. Gather all sources, then scatter.
    prunings: the prunings that are due before this frame's rows are written.
    slots: the slot of every row of the frame, in row order.
    positions: the position of every row of the frame, in row order.
    spans: one span per segment, in row order: what the rows of the segment may attend to.
    freed: numbers of the pages that no sequence owns after the frame's closings.
    """

    trimmed: tuple[int, ...]
    copies: tuple[PageCopy, ...]
    moves: tuple[tuple[int, int], ...]
    prunings: tuple[RowPruning, ...]
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    spans: tuple[RowSpan, ...]
    freed: tuple[int, ...]


def plan_frame(table: PageTable, frame: Frame, trees: Sequence[Tree] = ()) -> KvPlan:
    """Apply a frame header to `table` and return what the frame does to the KV cache.

    The order is fixed: trims, openings, per segment the moves, the pruning and the new slots, closings.
    Sequences that were open before the frame are trimmed first. A scheduler that counts free pages opening by
    opening and segment by segment therefore never counts a page that is not free yet. Sequences without a
    policy are never trimmed or pruned.

    table: the page table of this stage. It is changed: after the call it holds the pages as they are after
        the frame.
    frame: the frame, of which only the header is read (openings, segments, closings). A frame without any of
        the three changes nothing and yields a plan of empty tuples.
    trees: for each segment, the tree that is planned instead of the segment's own tree; all segments must
        then be tree segments. Empty: the segments' own trees are planned.

    Raises WireError if an opening repeats an id, if a tree frame is not supported (`check_supported`), or if
    a part of a tree has no nodes or belongs to a sequence with a policy; NotFound if a segment or a fork
    names a sequence that is not open; and Overloaded if the pages do not suffice.

    Example, pages of 8 rows, sequence 1 holds page 0, six of its tokens are committed after this frame's
    keep. The previous tree had its root at position 4, and its nodes 0 and 2 were accepted:

        # previous tree, positions 4..6:  nodes [0 1 2] in slots [4 5 6]
        # TreeSegment(committed=6, keep=(0, 2), tree=one node)
        # moves [(6, 5)]: node 2 follows node 0; slot 6 is free for the new root
        # slots (6,), positions (6,)

    A part of a tree (`specsot.core.tree_parts`) has rows of its own nodes only. They see the nodes of earlier
    parts as earlier rows of the same tree, and the accepted nodes were moved with the first part:

        # TreeSegment(committed=6, keep=(0, 2), tree=[a b c], earlier=2), b below a, c below b
        # moves [], slots (8,), positions (8,); the span has 1 row, tail 3, and visible (0b111,)
    """
    trimmed: list[int] = []
    for segment in frame.segments if table.has_policies else ():
        if segment.sequence in table and table.policy(segment.sequence):
            trimmed += table.trim(segment.sequence, base_of(segment))
    # Most frames neither open nor close a sequence, so no generator is made for those: even an empty one
    # takes the host a microsecond.
    opened = [open_sequence(table, opening) for opening in frame.openings] if frame.openings else ()
    moves: list[tuple[int, int]] = []
    prunings: list[RowPruning | None] = []
    slots: list[int] = []
    positions: list[int] = []
    spans: list[RowSpan] = []
    has_policies = table.has_policies
    # Parents and shape of the last tree. The trees of many sequences often share one tuple of parents, whose
    # shape is then computed once.
    shape_parents: tuple[int, ...] = ()
    shape = Shape((), ())
    # Without `trees`, `tree` is None for every segment.
    for segment, tree in zip_longest(frame.segments, trees):
        visible = None
        earlier = 0
        # Positions, not columns. Rows of a prompt chunk follow each other; nodes of a tree sit at the depth
        # of the node, so siblings share a position but not a slot.
        row_positions: Sequence[int]
        if isinstance(segment, TreeSegment):
            if segment.parent or segment.scratch or segment.freed:
                check_supported(segment)
            base = segment.committed
            parents = (segment.tree if tree is None else tree).parents
            if parents is not shape_parents:
                shape_parents = parents
                shape = shape_of(parents)
            depths, visible = shape
            earlier = segment.earlier
            if earlier or segment.later:
                _check_part(table, segment)
                stop = segment.nodes.stop
                depths, visible = depths[earlier:stop], visible[earlier:stop]
            # If the accepted nodes are 0, 1, ..., k, they are adjacent already.
            keep = segment.keep
            if keep and keep[-1] + 1 != len(keep) and not earlier:
                moves += accepted_moves(table, segment)
            # A tree of n nodes is a chain if its last node has depth n - 1. The positions of a chain are
            # consecutive, and a range costs less than a list.
            row_positions = (
                range(base + earlier, base + earlier + len(depths))
                if shape.depths[-1] + 1 == len(parents)
                else [base + depth for depth in depths]
            )
        else:
            base = segment.start
            row_positions = range(base, base + len(segment.tokens))
        sequence = segment.sequence
        policy = table.policy(sequence) if has_policies else None
        if policy:
            prunings.append(table.prune(sequence, base))
        num_rows = len(row_positions)
        tail = earlier + num_rows
        column, pages, new_slots = table.place(sequence, base, base + tail)
        slots += new_slots[earlier:] if earlier else new_slots
        positions += row_positions
        span = RowSpan(num_rows, column, tail, pages, visible)
        spans.append(_hide_by_policy(table, sequence, policy, span, row_positions) if policy else span)
    freed = [page for sequence in frame.closings for page in table.close(sequence)] if frame.closings else ()
    return KvPlan(
        trimmed=tuple(trimmed),
        copies=tuple(filter(None, opened)) if opened else (),
        moves=tuple(moves),
        prunings=tuple(filter(None, prunings)) if prunings else (),
        slots=tuple(slots),
        positions=tuple(positions),
        spans=tuple(spans),
        freed=tuple(freed),
    )


def _check_part(table: PageTable, segment: TreeSegment) -> None:
    """Raise WireError if a part of a tree has no nodes, or if its sequence has a KV policy: trees under a
    policy travel whole.

    table: the page table of this stage, which is only read.
    segment: a tree segment of which other parts feed some nodes.
    """
    refused = f"draft round {segment.draft_round} of sequence {segment.sequence} cannot travel in parts"
    if table.policy(segment.sequence):
        raise WireError(f"{refused}, because its KV policy hides tokens")
    if not segment.nodes:
        raise WireError(f"{refused}: this part has no nodes")


def open_sequence(table: PageTable, opening: Opening) -> PageCopy | None:
    """Open one sequence in `table`, as a fork if the opening names one, and return the page copy that the
    fork needs.

    Return None if there is no fork, or if the fork point lies on a page boundary, so that all pages can be
    shared.

    table: the page table of this stage, which is changed.
    opening: the opening of the sequence, from the frame header: its id, its fork, and its KV policy.

    Raises WireError if the id is open already (sequence ids are never reused), NotFound if the source of the
    fork is not open, and Overloaded if no page is free for the copy.
    """
    if opening.sequence in table:
        raise WireError(f"sequence {opening.sequence} is already open")
    if opening.fork is None:
        table.open(opening.sequence, policy_of(opening))
        return None
    return table.fork(opening.sequence, opening.fork.sequence, opening.fork.length)


def policy_of(opening: Opening) -> Policy | None:
    """Return the KV policy of a sequence, or None if every token attends to all tokens before it.

    The result is a `Window`, a `HeadPruning` for a pruning with importances, a `Pruning` without, or
    `HeadWindows`.

    opening: the opening of the sequence. It carries at most one of a window, a pruning (with or without an
        importance of each KV head), and windows by head.

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
    """Return the window for a cache that can only drop tokens by position: a drafter's KV, or stored
    features.

    Pruning by key norm has no meaning for such a cache. If pruning bounds the rows of every layer, the result
    is a window without sinks that keeps as many recent positions. Return None if the cache must keep every
    position. None is also returned for windows by head, and for a pruning that does not bound the rows.

    opening: the opening of the sequence, which holds its window or pruning.
    """
    match policy := policy_of(opening):
        case Window():
            return policy
        case Pruning(max_kept_rows=int(max_kept_rows)):
            return Window(0, max(max_kept_rows, MIN_RECENT))
        case _:
            return None


def tree_depth_limit(policy: Policy | None, position: int) -> int | None:
    """Return how many positions a tree may span whose root sits at `position`, or None if there is no limit.

    A window limits a tree to its recent positions. Under pruning, a tree ends before the next multiple of
    `prune_every`: with prune_every 50, a root at position 48 leaves 2 positions, 48 and 49. There is no limit
    without a policy and for windows by head.

    policy: the KV policy of the sequence; None if it has no policy.
    position: index in the sequence of the tree's root, that is, the number of committed tokens.
    """
    match policy:
        case Window(recent=recent):
            return recent
        case Pruning(prune_every=every):
            return every - position % every
        case _:
            return None


def base_of(segment: Segment) -> int:
    """Return the number of committed tokens before a segment, which is the position of the segment's first
    row.

    segment: a prompt chunk or a tree of a frame header.
    """
    return segment.start if isinstance(segment, PromptChunk) else segment.committed


def accepted_moves(table: PageTable, segment: TreeSegment) -> Sequence[tuple[int, int]]:
    """Return the (source slot, target slot) moves that make the accepted nodes of the previous tree adjacent.

    The previous tree was written in node order from its root's position on. After the moves its accepted
    nodes occupy the positions that end right before `committed`. Return an empty sequence if no node was
    accepted, or if the accepted nodes are adjacent already.

    table: the page table of this stage, which is only read.
    segment: the sequence's next tree. Its `keep` holds the accepted node numbers of the previous tree.

    Raises NotFound if the sequence is not open.

        # nodes of the previous tree [0 1 2 3] in slots [10 11 12 13], keep (0, 2, 3)
        # -> moves [(12, 11), (13, 12)]; the caller gathers all sources before it scatters
    """
    # If the accepted nodes are 0, 1, ..., k, they are adjacent already.
    keep = segment.keep
    if not keep or keep[-1] + 1 == len(keep):
        return ()
    start = segment.committed - len(keep)
    slots = table.slots(segment.sequence, start, start + keep[-1] + 1)
    return [(slots[node], slots[place]) for place, node in enumerate(keep) if node != place]


def _hide_by_policy(
    table: PageTable, sequence: int, policy: Policy, span: RowSpan, positions: Sequence[int]
) -> RowSpan:
    """Return `span` without the columns that the policy of its sequence hides from its rows.

    A window hides columns in every layer, a pruning in layers from its `skip_layers` on. The span itself is
    returned as long as the policy hides nothing, except for windows by head.

    table: the page table, which knows what pruning left of the sequence. It is only read.
    sequence: id of the segment's sequence.
    policy: the KV policy of that sequence.
    span: the rows of one segment, which see all earlier columns so far.
    positions: position in the sequence of each row of the span.
    """
    match policy:
        case Window():
            return hide_outside_window(policy, span, positions)
        case HeadPruning():
            rows_kept = table.rows_kept_by_head(sequence)
            since = table.pruned_columns(sequence)[1]
            return hide_pruned_by_head(rows_kept, since, span, positions, policy.skip_layers)
        case Pruning():
            return hide_pruned(table.pruned_columns(sequence), span, policy.skip_layers)
        case HeadWindows():
            columns = span.rows, span.base, span.tail, span.pages, span.seen
            return PolicySpan(*columns, sight=None, heads=policy, positions=tuple(positions))


def hide_pruned(pruned: tuple[int, int], span: RowSpan, skip_layers: int) -> RowSpan:
    """Return `span` without the columns that pruning emptied, in layers from `skip_layers` on.

    Return `span` itself if pruning emptied no column. Otherwise the result is a `PolicySpan`.

    pruned: (num_kept, since), in columns. Of the columns before `since`, pruning left keys in the first
        `num_kept`.
    span: the rows of one segment; the result sees a part of its columns.
    skip_layers: number of first layers of the model that are not pruned and see every column.

        # columns [0 1 2 3 | 4 .. 9 | 10 11 12], pruned (4, 10) -> rows see 0..3 and 10 onwards, not 4..9
    """
    num_kept, since = pruned
    if num_kept == since:
        return span
    rows = span.rows
    sight = VisibleColumns((num_kept,) * rows, (since,) * rows, (0,) * rows)
    return PolicySpan(rows, span.base, span.tail, span.pages, span.seen, sight, skip_layers)


def hide_pruned_by_head(
    rows_kept: HeadCounts | None, since: int, span: RowSpan, positions: Sequence[int], skip_layers: int
) -> RowSpan:
    """Return `span` without the columns that pruning emptied, if each KV head keeps its own number of
    columns.

    Return `span` itself before the first pruning, and if pruning emptied no column of any head. Otherwise the
    result is a `PolicySpan`.

    rows_kept: by layer and KV head, how many of the first columns hold keys; None before the first pruning.
    since: first column that was not pruned yet.
    span: the rows of one segment; the result sees a part of its columns.
    positions: position of each row. The first row of a segment sits at the segment's base, so a row's column
        is base + its position - the first position.
    skip_layers: number of first layers of the model that are not pruned and see every column.
    """
    if rows_kept is None or all(rows == since for heads in rows_kept for rows in heads):
        return span
    columns = tuple(span.base + position - positions[0] for position in positions)
    return PolicySpan(
        rows=span.rows,
        base=span.base,
        tail=span.tail,
        pages=span.pages,
        visible=span.seen,
        skip_layers=skip_layers,
        positions=columns,
        rows_kept_by_head=rows_kept,
        since=since,
    )


def hide_outside_window(window: Window, span: RowSpan, positions: Sequence[int]) -> RowSpan:
    """Return `span` without the columns that lie outside a window of sinks and recent positions.

    Return `span` itself as long as the window hides nothing from any row.

    window: how many first positions (`sinks`) and how many positions before its own (`recent`) a row sees.
    span: the rows of one segment; the result sees a part of its columns.
    positions: position of each row; the first row sits at the segment's base.

    The row at position p sees the first `sinks` positions and the positions from p - recent to p. Its query
    is turned for the sinks as if it sat at sinks + recent (`VisibleColumns.turns`).

        # Window(sinks=2, recent=16), rows at positions 30 and 31
        # -> sinks (2, 2), since (14, 15), turns (12, 13)
    """
    # As long as the window hides nothing, the frame runs the same kernels as without a window.
    if max(positions) - window.recent <= window.sinks:
        return span
    first_recent = [position - window.recent for position in positions]
    sight = VisibleColumns(
        tuple(min(window.sinks, position + 1) for position in positions),
        tuple(min(max(first - positions[0] + span.base, window.sinks), span.base) for first in first_recent),
        tuple(max(first - window.sinks, 0) for first in first_recent),
    )
    too_far = _rows_before([max(first, window.sinks) for first in first_recent], positions)
    visible_bits = tuple(seen & ~far_rows for seen, far_rows in zip(span.seen, too_far))
    return replace(span, visible=visible_bits, sight=sight)


def _rows_before(limits: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return for each limit the set of rows at smaller positions, as a bit mask over rows (bit i is row i).

    limits: one position per row; any order.
    positions: position of each row of the segment; siblings of a tree share a position.

        # limits [3, 5], rows at positions [3 4 4 5] -> [0b0000, 0b0111]
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ranked = [positions[row] for row in order]
    masks = list(accumulate((1 << row for row in order), or_, initial=0))
    return [masks[bisect_left(ranked, first)] for first in limits]
