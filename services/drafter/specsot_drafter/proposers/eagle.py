"""Proposes with an EAGLE head: one transformer layer or a few, over hidden states of the base model.

Rows that are *due* are rows of committed tokens whose draft KV could be computed and is not computed yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from specsot.core.frames import FeatureBatch, Features, Opening, TreeSegment
from specsot.errors import NotFound, Overloaded
from specsot.members import TreeShape
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DraftPages, DueRows, FollowedSequence, compute_rows, read_features
from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.fused import graph_head
from specsot_drafter.overlap.graph_growth import LEVEL_ROWS, TreeGraphs
from specsot_drafter.proposers.trees import TreeProposer
from specsot_model.core.kv_plan import window_of
from specsot_model.cuda_graphs import PROMPT_ROWS, Capture, GraphCapture, run_once
from specsot_model.inference import inference_mode

# Rows. The lengths of the made-up prompts of the warm-up, from a full frame to one row.
WARMUP_ROWS = (PROMPT_ROWS, 512, 128, 32, 8, 1)


class EagleProposer(TreeProposer):
    """Proposer that grows trees with an EAGLE head, in captured CUDA graphs where the head and the machine
    allow it.

    Rows without features are skipped, see `eagle_kv`. Once no KV page is free for the features of a sequence,
    the sequence is not followed any more.
    """

    first_due = 0
    _followed: dict[int, FollowedSequence]

    def __init__(
        self,
        head: DraftHead,
        shape: TreeShape,
        pages: int,
        page_rows: int,
        capture: Capture | None = None,
    ) -> None:
        """Allocate the KV pages; on a GPU also capture the graphs and warm up, which takes seconds.

        head: The EAGLE head.
        shape: Gives the depth, the children per node (top_k) and the nodes of a tree.
        pages: Number of KV pages.
        page_rows: Number of KV slots of a page.
        capture: Captures functions as graphs. None: as CUDA graphs.
        """
        pages_of_head = DraftPages(head, pages, page_rows)
        widths = (shape.top_k,) * shape.depth
        super().__init__(head, pages_of_head, shape.top_k, widths, -math.inf, shape.nodes - 1)
        # Followed sequences whose newest known token is no root yet, because their prompts are being
        # processed. `_prefilling` removes those without due rows until their next batch. Prefixes, of which
        # there may be many more than sequences that decode, never have a root.
        self._without_root: dict[int, FollowedSequence] = {}
        if graphs := _graphs(head, self._pages, shape, capture):
            self._warm_up()
            self._graphs = graphs
            self.at_once = True
            self._warm_up()

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """Return the number of due rows of some sequences, and of all sequences whose prompts are being
        processed.

        sequences: The sequences whose trees are to grow. Due rows of other sequences are computed when trees
            are requested for those sequences.

        Sequences that are not followed count 0. A sequence whose prompt is being processed counts twice if
        it is named, too.
        """
        followed = [self._followed.get(sequence.id) for sequence in sequences]
        num_due = sum([one.due for one in followed if one])
        return num_due + sum([one.due for one in self._prefilling()]) if self._without_root else num_due

    def open(self, sequence: DraftSequence) -> None:
        """Follow a sequence from its start or from its fork.

        sequence: What the drafter knows of the sequence. If no KV page is free, the sequence is not followed.

        If the source of a fork is not followed, or not up to the fork, the sequence shares no rows: the rows
        of its committed tokens are skipped.
        """
        try:
            self._followed[sequence.id] = self._fork(sequence)
        except NotFound:
            self._followed[sequence.id] = self._start(sequence)
        except Overloaded:
            self._pages.close(sequence.id)

    def observe(self, batch: Features) -> None:
        """Store the features of all batches of a message.

        batch: The message. Its `rows` are the fused features of the batches' tokens, [num_tokens,
            head.width].

        A sequence is dropped if no KV page is free for its features. If the message has no features, the rows
        of its tokens are skipped. Raises WireError if the features do not have one row per token and the
        head's width.

        Batches of sequences that are not followed store nothing. Features that asynchronous growth has
        stored on the device already are not stored again.
        """
        self._record_roots(batch)
        followed = self._followed
        if batch.rows is None:
            for feature_batch in batch.feature_batches:
                if known := followed.get(feature_batch.sequence):
                    self._skip(known, feature_batch.start)
            return
        rows = list[int]()
        slots = list[int]()
        first = 0
        growth = self._async_growth
        for feature_batch in batch.feature_batches:
            stop = first + len(feature_batch.tokens)
            on_device = growth and feature_batch.sequence in followed and growth.covers(feature_batch)
            if not on_device and (new_slots := self._feature_slots(feature_batch)):
                rows += range(first, stop)
                slots += new_slots
            first = stop
        if rows:
            self._pages.store_features(slots, read_features(self._head, batch.rows, first, rows))

    def _record_roots(self, batch: Features) -> None:
        """Update `_without_root` with a message: a followed sequence without a bonus token has no root yet.

        batch: The message.
        """
        without_root = self._without_root
        for feature_batch in batch.feature_batches:
            sequence = feature_batch.sequence
            if feature_batch.bonus is None:
                if sequence in self._followed:
                    without_root[sequence] = self._followed[sequence]
            elif without_root:
                without_root.pop(sequence, None)

    def close(self, sequence: int) -> None:
        """Free the pages of a sequence, and follow it no more. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        self._without_root.pop(sequence, None)
        self._followed.pop(sequence, None)
        self._pages.close(sequence)

    def catch_up(self) -> None:
        """Compute the due rows of all sequences, at a time when no sequence waits for a tree. Nothing happens
        if no rows are due.
        """
        self._compute_due(self._followed.values())

    def _compute_before(self, followed: FollowedSequence, row: int) -> None:
        """Compute the due rows of a sequence that lie before a row.

        followed: The sequence.
        row: The first row that is not computed.

        Nothing happens if the rows before it are computed already. The rows count as computed afterwards.
        """
        due = row - followed.extended
        if due > 0:
            compute_rows(self._head, self._pages, [followed.take(asked=False, rows=due)])

    def _skip(self, followed: FollowedSequence, start: int) -> None:
        """Skip the rows of a sequence up to its newest committed token.

        followed: The sequence. Its due rows before `start` are computed first.
        start: The first row that is skipped.

        Due rows before `start` are computed even if there are no rows to skip.
        """
        self._compute_before(followed, start)
        followed.extended = followed.skipped = followed.length
        self._pages.table.skip(followed.id, followed.length - start)

    def _compute_due(self, sequences: Iterable[FollowedSequence]) -> None:
        """Compute the due rows of some sequences, and count them as computed. Nothing happens for sequences
        without due rows. Growing a tree computes the last row once more, because it needs the row's output.

        sequences: Followed sequences.
        """
        if due := [one.take(asked=False) for one in sequences if one.due]:
            compute_rows(self._head, self._pages, due)

    def _prefilling(self) -> list[FollowedSequence]:
        """Remove sequences without due rows from `_without_root`, and return the remaining ones: sequences
        whose prompts are being processed, and prefixes. [] if there are none.

        A removed sequence gets due rows only by a further batch, which adds it again.
        """
        without_root = self._without_root
        for sequence in [sequence for sequence, one in without_root.items() if not one.due]:
            del without_root[sequence]
        return list(without_root.values())

    def _take_due(self, followed: Sequence[FollowedSequence]) -> list[DueRows]:
        """Return the due rows of some sequences, then those of all sequences whose prompts are being
        processed, and count them as computed.

        followed: Sequences whose trees grow. Only these get an output, which is that of their last row.
        """
        own = [one.take(asked=True) for one in followed]
        return own + [one.take(asked=False) for one in self._prefilling()]

    def _compute_too_long(self, followed: Sequence[FollowedSequence]) -> None:
        """Compute the due rows of these sequences, and of all sequences whose prompts are being processed,
        because a graph has room only for rows of sequences whose trees grow.

        followed: Sequences whose trees grow, and which have more due rows than a graph has room for. May be
            empty.
        """
        self._compute_due((*followed, *self._prefilling()))

    @inference_mode
    def _warm_up(self) -> None:
        """Draft for made-up sequences, so that the kernels for such sizes are compiled and loaded.

        Otherwise the first requests would wait for compilation, and the policy would take the time of the
        compilation for the cost of drafting.

        The sequence is closed afterwards, so that no page stays in use.
        """
        for rows in WARMUP_ROWS:
            sequence = DraftSequence(Opening(0, prompt=rows, limit=rows))
            self.open(sequence)
            for num_tokens in (rows, 1):
                feature_batch = FeatureBatch(0, sequence.committed, (0,) * num_tokens, 0, 1)
                sequence.observe(feature_batch)
                payload = torch.zeros(num_tokens, self._head.width, dtype=self._head.dtype)
                self.observe(Features(0, 0, feature_batches=(feature_batch,), rows=payload))
                self.propose([sequence], min(2, len(self.widths) + 1))
            self.close(sequence.id)

    def _catch_up_to(self, trees: Sequence[TreeSegment]) -> bool:
        """Return whether the draft rows and features of all sequences are complete up to the roots of their
        trees; see `TreeProposer`.

        trees: The trees that are being verified.

        If they are not complete, all due rows of these sequences are computed first. Due rows of other
        sequences whose prompts are being processed are computed in any case. The result is False if a
        sequence is not followed, or if its features up to the root have not arrived.
        """
        followed = [self._followed.get(tree.sequence) for tree in trees]
        known = self._are_known(followed, trees)
        # In most steps, all rows are complete and no prompt is being processed.
        if known and not self._without_root:
            return True
        # Sequences whose rows are complete have no due rows, so they are not looked at.
        incomplete = () if known else filter(None, followed)
        self._compute_due((*incomplete, *self._prefilling()))
        return known or self._are_known(followed, trees)

    def _are_known(self, followed: Sequence[FollowedSequence | None], trees: Sequence[TreeSegment]) -> bool:
        """Return whether the draft rows and features of all sequences are complete up to the roots of their
        trees.

        followed: The followed sequence of each tree. None: the tree's sequence is not followed, and the
            result is False.
        trees: The trees that are being verified, in the same order.
        """
        return not [
            tree
            for one, tree in zip(followed, trees)
            if one is None or not one.extended == one.sequence.committed == tree.committed
        ]

    def _reserve(self, sequence: DraftSequence) -> TreeRoom | None:
        """Reserve the rows of a tree after a sequence's own rows, and return where they are. Return None if
        the sequence is not followed, if no page is free, or if the newest row of the sequence was skipped.

        sequence: The sequence that a tree is to grow for.
        """
        followed = self._followed.get(sequence.id)
        # A tree grows from a feature of the base model, which a skipped row does not have.
        if followed is None or followed.length <= followed.skipped:
            return None
        self._pages.trim(followed.id, followed.extended)
        return self._pages.reserve_tree(followed.id, followed.length, self._grown)

    def _start(self, sequence: DraftSequence) -> FollowedSequence:
        """Open the pages of a sequence that shares no rows, and return what is followed of it. The rows of
        tokens that are committed already are skipped.

        sequence: What the drafter knows of the sequence.
        """
        self._pages.table.open(sequence.id, window_of(sequence.opening))
        self._pages.table.skip(sequence.id, sequence.committed)
        return FollowedSequence(sequence, sequence.committed, sequence.committed)

    def _fork(self, sequence: DraftSequence) -> FollowedSequence:
        """Share rows with the source of a fork, after computing those of them that are due. Return what is
        followed of the fork.

        sequence: The sequence that forks.

        A fork at n shares n - 1 draft rows: row n - 1 pairs feature n - 1 with token n, which differs. Raises
        NotFound if the source is not followed up to the fork or has skipped the last row before it, and
        Overloaded if no page is free.

        The fork's first n - 1 rows count as computed, and it counts as having skipped what the source has
        skipped.
        """
        fork = sequence.opening.fork
        source = self._followed.get(fork.sequence) if fork else None
        if fork is None or source is None or not source.skipped < fork.length <= source.length:
            raise NotFound(f"sequence {sequence.id} forks what is not followed so far")
        self._compute_before(source, fork.length - 1)
        self._pages.fork(sequence.id, fork.sequence, fork.length)
        return FollowedSequence(sequence, fork.length - 1, source.skipped)

    def _feature_slots(self, feature_batch: FeatureBatch) -> Sequence[int] | None:
        """Return the slots for the features of a batch, one per token. Return None if the sequence is not
        followed. If no KV page is free, the sequence is dropped, and the result is None, too.

        feature_batch: Committed tokens of one sequence.

        The slots are those of the batch's positions, in order; pages for them are reserved.
        """
        if not self.follows(feature_batch.sequence):
            return None
        stop = feature_batch.start + len(feature_batch.tokens)
        try:
            return self._pages.table.place(feature_batch.sequence, feature_batch.start, stop)[2]
        except Overloaded:
            self.close(feature_batch.sequence)
            return None


def compile_eagle(head: DraftHead, shape: TreeShape) -> None:
    """Make a proposer for trees of a shape, which launches all of its kernels once, without capturing them.
    Within `compile_ahead`, this compiles the kernels.

    head: The EAGLE head.
    shape: The largest tree.
    """
    # One page that holds the longest prompt of the warm-up and a tree.
    EagleProposer(head, shape, 1, 2 * PROMPT_ROWS, run_once)


def _graphs(
    head: DraftHead, memory: DraftPages, shape: TreeShape, capture: Capture | None
) -> TreeGraphs | None:
    """Return the captured graphs of a head. Return None if the head or the machine has no kernels for that.

    head: The EAGLE head.
    memory: Its KV pages and features.
    shape: The largest tree.
    capture: Captures functions as graphs. None: as CUDA graphs.

    Capturing takes seconds. If the tree shape is not fixed, a level has at most LEVEL_ROWS rows over all
    trees.
    """
    fused = graph_head(head)
    if fused is None:
        return None
    from specsot_kernels.gpu.growing import grow

    rows = None if shape.fixed else LEVEL_ROWS
    levels = shape.depth + 1
    capture = capture or GraphCapture()
    return TreeGraphs(fused, memory, shape.top_k, levels, capture, grow, level_rows=rows)
