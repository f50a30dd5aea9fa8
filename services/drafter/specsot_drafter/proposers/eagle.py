"""Proposes with an EAGLE head: one transformer layer or a few, over hidden states of the base model.

Rows that are *due* are rows of committed tokens whose draft KV could be computed and is not computed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specsot.core.device_verification import DeviceVerification
from specsot.core.frames import FeatureBatch, Features, Opening, TreeSegment
from specsot.errors import NotFound, Overloaded, WireError
from specsot.members import TreeShape
from specsot_drafter.async_growth import AsyncGrowth, VerifiedTree
from specsot_drafter.core.selection import Candidates, Floats, KeepGrowing, pad_rows
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DraftPages, DueRows, FollowedSequence, compute_rows
from specsot_drafter.grammar import filter_candidates, make_guide
from specsot_drafter.graph_growth import LEVEL_ROWS, GraphInput, TreeGraphs
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.fused import fuse_head
from specsot_drafter.proposers import ChosenTrees, Offer, Proposer
from specsot_model.core.kv_plan import window_of
from specsot_model.cuda_graphs import PROMPT_ROWS, GraphCapture
from specsot_model.kv import indices

# Rows. The lengths of the made-up prompts of the warm-up, from a full frame to one row.
WARMUP_ROWS = (PROMPT_ROWS, 512, 128, 32, 8, 1)


class EagleProposer(Proposer):
    """Grows trees with an EAGLE head, in captured CUDA graphs where the head and the machine allow it.

    Once features of a sequence are missing, or no KV page is free for them, the sequence is not followed any
    more, because every later draft row would attend to the gap.
    """

    def __init__(self, head: DraftHead, shape: TreeShape, pages: int, page_rows: int) -> None:
        """Allocate the KV pages; on a GPU also capture the graphs and warm up, which takes seconds.

        shape: gives the depth, the children per node (top_k) and the nodes of a tree.
        pages, page_rows: number of KV pages, and rows of each.
        """
        self.widths = (shape.top_k,) * shape.depth
        self.positions = head.positions
        # Rows that growing the largest tree takes.
        self._grown = sum(self.widths)
        self._head = head
        self._top_k = shape.top_k
        self._max_nodes = shape.nodes - 1
        self._pages = DraftPages(head, pages, page_rows)
        self._followed: dict[int, FollowedSequence] = {}
        self._graphs: TreeGraphs | None = None
        # The growth that was launched before the host has read the verification result it follows.
        self._early: AsyncGrowth | None = None
        if graphs := _graphs(head, self._pages, shape):
            self._warm_up()
            self._graphs = graphs
            self.at_once = True
            self._warm_up()

    @property
    def free_pages(self) -> int:
        return self._pages.table.free

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """Return the due rows of these sequences, and of all sequences whose prompts are being processed.

        Due rows of other sequences are computed when trees are requested for those sequences.
        """
        own = [self._followed[sequence.id].due for sequence in sequences if sequence.id in self._followed]
        return sum(own) + sum(one.due for one in self._reading())

    def open(self, sequence: DraftSequence) -> None:
        """Follow a sequence from its start or from its fork.

        If the source of the fork is not followed that far, or if no KV page is free, the sequence is not
        followed.
        """
        try:
            begin = self._fork if sequence.committed else self._start
            self._followed[sequence.id] = begin(sequence)
        except (NotFound, Overloaded):
            self._pages.close(sequence.id)

    def follows(self, sequence: int) -> bool:
        return sequence in self._followed

    def observe(self, batch: Features) -> None:
        """Store the features of all batches of a message.

        Drop a sequence if no KV page is free for its features. Drop all sequences of the message if it has
        no features at all, since each of them has a gap then.
        Raises WireError if the features do not have one row per token and the head's width.
        """
        if batch.rows is None:
            for feature_batch in batch.feature_batches:
                self.close(feature_batch.sequence)
            return
        rows = list[int]()
        slots = list[int]()
        first = 0
        for feature_batch in batch.feature_batches:
            stop = first + len(feature_batch.tokens)
            follows = feature_batch.sequence in self._followed
            there = follows and self._early and self._early.covers(feature_batch)
            if not there and (own := self._room_for(feature_batch)):
                rows += range(first, stop)
                slots += own
            first = stop
        if rows:
            self._store(batch.rows, first, rows, slots)

    def close(self, sequence: int) -> None:
        self._followed.pop(sequence, None)
        self._pages.close(sequence)

    def catch_up(self) -> None:
        self._compute_due(self._followed.values())

    def _compute_due(self, sequences: Iterable[FollowedSequence]) -> None:
        """Compute the due rows of these sequences. Growing a tree computes the last row once more."""
        if due := [one.take(asked=False) for one in sequences if one.due]:
            compute_rows(self._head, self._pages, due)

    def _reading(self) -> list[FollowedSequence]:
        """Return the sequences with due rows whose prompts are not complete yet."""
        return [one for one in self._followed.values() if one.sequence.root is None and one.due]

    def _take(self, asked: Sequence[FollowedSequence]) -> list[DueRows]:
        """Take the due rows of the given sequences, then of all whose prompts are being processed.

        Only the given sequences get an output, which is that of their last row.
        """
        own = [one.take(asked=True) for one in asked]
        return own + [one.take(asked=False) for one in self._reading()]

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        return self.begin(sequences, levels, keep_growing)()

    def begin(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Offer:
        """See `Proposer.begin`.

        In this order of preference: continue asynchronous growth, launch a graph, or grow level by level when
        the offer is called. Sequences without free KV pages get barred candidates.
        """
        early = self._early
        self._early = None
        if early and (offer := self._go_on(early, sequences, levels)):
            return offer
        rooms = [self._reserve(sequence) for sequence in sequences]
        growing = [(sequence, room) for sequence, room in zip(sequences, rooms) if room]
        if not growing:
            return lambda: None
        grow = self._begin_graph(growing, levels) or partial(self._grow, growing, levels, keep_growing)
        present = [room is not None for room in rooms]
        self.used_async &= all(present)
        return grow if all(present) else lambda: pad_rows(grow(), present)

    def _grow(
        self, growing: Sequence[tuple[DraftSequence, TreeRoom]], levels: int, keep: KeepGrowing | None
    ) -> Candidates:
        """Compute the due rows, then grow the trees level by level, without a graph."""
        own, rooms = zip(*growing)
        due = self._take([self._followed[sequence.id] for sequence in own])
        last = compute_rows(self._head, self._pages, due)
        guide = make_guide(self._head, own)
        return TreeGrowth(self._head, self._pages.kv, rooms, self._top_k, guide).run(last, levels, keep)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Draft for made-up sequences, so that the kernels for such sizes are compiled and loaded.

        Otherwise the first requests would wait for compilation, and the policy would take the time of the
        compilation for the cost of drafting.
        """
        for rows in WARMUP_ROWS:
            sequence = DraftSequence(Opening(0, prompt=rows, limit=rows))
            self.open(sequence)
            for told in (rows, 1):
                feature_batch = FeatureBatch(0, sequence.committed, (0,) * told, 0, 1)
                sequence.observe(feature_batch)
                payload = torch.zeros(told, self._head.width, dtype=self._head.dtype)
                self.observe(Features(0, 0, feature_batches=(feature_batch,), rows=payload))
                self.propose([sequence], min(2, len(self.widths) + 1))
            self.close(sequence.id)

    def _begin_graph(
        self, growing: Sequence[tuple[DraftSequence, TreeRoom]], levels: int
    ) -> Callable[[], Candidates] | None:
        """Launch catching up and growing as one graph. Return None if there are no graphs or no room.

        The graph grows all levels without asking the policy or a grammar in between: one more level costs
        less than asking whether the level is profitable, and a draft that a grammar forbids costs less than
        asking the grammar. Forbidden candidates are barred afterwards.
        """
        if (graphs := self._graphs) is None:
            return None
        sequences, rooms = zip(*growing)
        followed = [self._followed[sequence.id] for sequence in sequences]
        behind = (one for one in followed if one.due > graphs.due)
        # A graph has room for `graphs.due` due rows per sequence, and for no other sequences' rows.
        self._compute_due((*behind, *self._reading()))
        due = [one.take(asked=True) for one in followed]
        grown = graphs.begin([GraphInput(*each) for each in zip(due, rooms)], levels)
        if grown is None:
            compute_rows(self._head, self._pages, due)
            return None
        return lambda: filter_candidates(grown(), sequences, self._max_nodes)

    def _go_on(self, early: AsyncGrowth, sequences: Sequence[DraftSequence], levels: int) -> Offer | None:
        """Return the offer of asynchronous growth if all these sequences continue from there, else None.

        If the device's verification result differs from the host's, the returned function grows the trees
        again, and clears `used_async`.
        """
        if not (due := early.take([self._followed.get(sequence.id) for sequence in sequences])):
            return None
        self.used_async = True
        grown = early.of(due)

        def offer() -> Candidates | None:
            if (found := grown() if grown else None) is None and self._graphs:
                self.used_async, rooms = (
                    False,
                    [room for sequence in sequences if (room := self._reserve(sequence))],
                )
                found = self._graphs.run([GraphInput(*each) for each in zip(due, rooms)], levels)
            assert found is not None, "it had room for as many"
            return filter_candidates(found, sequences, self._max_nodes)

        return offer

    @torch.inference_mode()
    def begin_async(self, verdict: DeviceVerification, ids: int, levels: int) -> bool:
        """See `Proposer.begin_async`.

        Growth is launched only with graphs, and only if the rows of every sequence are complete up to its
        tree and its pages can be reserved. Outstanding rows are computed first.
        """
        self._early = None
        graphs = self._graphs
        head = self._head
        followed = [self._followed.get(tree.sequence) for tree in verdict.trees]
        if graphs:
            self._compute_due((*filter(None, followed), *self._reading()))
        if graphs is None or not all(map(self._is_known, followed, verdict.trees)):
            return False
        cover = self._pages.cover_tree
        more = graphs.async_rows
        pages = [cover(tree.sequence, tree.committed, more) for tree in verdict.trees]
        trees = [VerifiedTree(tree, own) for tree, own in zip(verdict.trees, pages) if own]
        if len(trees) == len(pages):
            features = head.features(verdict.features.to(head.device, head.dtype))
            early = graphs.begin_async(trees, verdict.targets.to(head.device), features, ids, levels)
            self._early = early and replace(early, astray=verdict.mispredicted)
        return self._early is not None

    def choose_async(
        self, sequences: Sequence[int], nodes: int, room: int, trust: Floats
    ) -> ChosenTrees | None:
        """See `AsyncGrowth.choose`; `sequences` are sequence ids."""
        return self._early.choose(sequences, nodes, room, trust) if self._early else None

    def _is_known(self, followed: FollowedSequence | None, tree: TreeSegment) -> bool:
        """Return whether the sequence's draft rows and features are complete up to this tree's root.

        Sequences with a KV policy (a window) are excluded, because pages of theirs may have been freed.
        """
        known = followed is not None and followed.extended == followed.length == tree.committed
        return known and self._pages.table.policy(tree.sequence) is None

    def _reserve(self, sequence: DraftSequence) -> TreeRoom | None:
        """Reserve the rows of a tree after the sequence's own rows. Return None if that is impossible."""
        followed = self._followed.get(sequence.id)
        if followed is None:
            return None
        self._pages.trim(followed.id, followed.extended)
        return self._pages.reserve_tree(followed.id, followed.length, self._grown)

    def _start(self, sequence: DraftSequence) -> FollowedSequence:
        self._pages.table.open(sequence.id, window_of(sequence.opening))
        return FollowedSequence(sequence)

    def _fork(self, sequence: DraftSequence) -> FollowedSequence:
        """Share rows with the source of the fork; compute those of them that are due first.

        A fork at n shares n - 1 draft rows: row n - 1 pairs feature n - 1 with token n, which differs.
        Raises NotFound if the source is not followed up to the fork, and Overloaded if no page is free.
        """
        fork = sequence.opening.fork
        source = self._followed.get(fork.sequence) if fork else None
        if fork is None or source is None or source.length < fork.length:
            raise NotFound(f"sequence {sequence.id} forks what is not followed so far")
        due = fork.length - 1 - source.extended
        if due > 0:
            compute_rows(self._head, self._pages, [source.take(asked=False, rows=due)])
        self._pages.fork(sequence.id, fork.sequence, fork.length)
        return FollowedSequence(sequence, extended=fork.length - 1)

    def _room_for(self, feature_batch: FeatureBatch) -> Sequence[int] | None:
        """Return the slots for the features of a batch. Return None if the sequence is not followed.

        If no KV page is free, the sequence is dropped, and the result is None, too.
        """
        if not self.follows(feature_batch.sequence):
            return None
        stop = feature_batch.start + len(feature_batch.tokens)
        try:
            return self._pages.table.place(feature_batch.sequence, feature_batch.start, stop)[2]
        except Overloaded:
            self.close(feature_batch.sequence)
            return None

    def _store(self, payload: Tensor, count: int, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Convert the given rows of the payload to features, and store these in the given slots.

        payload: [count, head.width]. rows, slots: equally many.
        """
        head = self._head
        shape = tuple(payload.shape)
        if shape != (count, head.width):
            raise WireError(f"features are {shape}, their lessons say {(count, head.width)}")
        picked = payload if len(rows) == count else payload[indices(rows, payload.device)]
        self._pages.store_features(slots, head.features(picked.to(device=head.device, dtype=head.dtype)))


def _graphs(head: DraftHead, memory: DraftPages, shape: TreeShape) -> TreeGraphs | None:
    """Capture the graphs of this head. Return None if the head or the machine has no kernels for that."""
    fused = fuse_head(head)
    if fused is None:
        return None
    from specsot_kernels.gpu.growing import grow

    rows = None if shape.fixed else LEVEL_ROWS
    levels = shape.depth + 1
    return TreeGraphs(fused, memory, shape.top_k, levels, GraphCapture(), grow, level_rows=rows)
