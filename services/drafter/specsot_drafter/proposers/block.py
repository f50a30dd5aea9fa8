"""Proposes with a DFlash or DSpark head: one pass drafts a block; its likeliest paths are the tree.

A *place* is a position of the block, for which the head gives a distribution over tokens: a DFlash head the
same after every path, a DSpark head another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specsot.core.frames import Features
from specsot.errors import NotFound, Overloaded
from specsot.members import TreeShape
from specsot_drafter.block_graphs import (
    Best,
    BlockGraphs,
    BlockReader,
    CandidateReader,
    PlaceReader,
    best_of,
    span_of,
)
from specsot_drafter.core.selection import Candidates, KeepGrowing, align_levels, likeliest_paths, pad_rows
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DraftPages, read_features
from specsot_drafter.grammar import filter_candidates, make_guide
from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.dflash import BlockHead
from specsot_drafter.heads.dspark import DSparkHead
from specsot_drafter.markov_growth import MarkovGrowth
from specsot_drafter.proposers import Proposer
from specsot_model.core.kv_plan import window_of
from specsot_model.cuda_graphs import Capture
from specsot_model.kv import indices


class BlockProposer(Proposer):
    """Proposer that drafts whole blocks with a DFlash head in one forward pass.

    Rows without features are skipped, as `specsot_drafter.eagle_kv` describes. Once no KV page is free for
    the features of a sequence, the sequence is not followed any more.
    """

    def __init__(
        self, head: BlockHead, shape: TreeShape, pages: int, page_rows: int, capture: Capture | None = None
    ) -> None:
        """Allocate the KV pages, and capture the graphs.

        head: The DFlash head.
        shape: The largest tree; `top_k` is the number of tokens of every place that a tree may contain. All
            levels come from one pass, so deeper levels feed no rows (`widths` are 0).
        pages: Number of KV pages.
        page_rows: Number of KV slots of a page.
        capture: Captures graphs, for a head that `captured_blocks` returns. None: no graphs.
        """
        self.widths = (0,) * (min(head.block.drafts, shape.depth + 1) - 1)
        self.positions = head.positions
        self._head = head
        self._breadth = shape.top_k
        self._nodes = shape.nodes - 1
        self._pages = DraftPages(head, pages, page_rows, features=False)
        self._table = self._pages.table
        # By followed sequence, the row before which the last skipped row lies; 0 if no row was skipped.
        self._followed: dict[int, int] = {}
        self._graphs = BlockGraphs(head, self._pages.kv, self._make_reader(), capture) if capture else None
        self.at_once = self._graphs is not None

    @property
    def free_pages(self) -> int:
        """The number of KV pages that no sequence owns."""
        return self._table.free

    def open(self, sequence: DraftSequence) -> None:
        """Follow a sequence from its start or from its fork.

        sequence: What the drafter knows of the sequence. If the rows that its fork shares are absent, they
            are skipped. If no KV page is free, the sequence is not followed.

        A fork whose source is not followed, or has skipped rows beyond the fork, starts without shared rows.
        It is closed if the source does not have the rows.
        """
        fork = sequence.opening.fork
        skipped = self._followed.get(fork.sequence) if fork else None
        if fork is None or skipped is None or skipped > sequence.committed:
            skipped = sequence.committed
            self._table.open(sequence.id, window_of(sequence.opening))
            self._table.skip(sequence.id, skipped)
        else:
            try:
                self._pages.share(sequence.id, fork.sequence, fork.length)
            except (NotFound, Overloaded):
                self.close(sequence.id)
                return
        self._followed[sequence.id] = skipped

    def close(self, sequence: int) -> None:
        """Free the pages of a sequence, and follow it no more. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        self._followed.pop(sequence, None)
        self._pages.close(sequence)

    def observe(self, batch: Features) -> None:
        """Store keys and values of committed tokens, skip tokens without features, and drop sequences without
        free pages.

        batch: The message. Its `rows` are the fused features of the batches' tokens, [num_tokens,
            head.width].

        Raises WireError if the features do not have one row per token and the head's width.

        Batches of sequences that are not followed store nothing.
        """
        rows = list[int]()
        slots = list[int]()
        positions = list[int]()
        first = 0
        for feature_batch in batch.feature_batches:
            stop = first + len(feature_batch.tokens)
            end = feature_batch.start + len(feature_batch.tokens)
            followed = feature_batch.sequence in self._followed
            if followed and batch.rows is None:
                self._followed[feature_batch.sequence] = end
                self._table.skip(feature_batch.sequence, len(feature_batch.tokens))
            elif followed:
                try:
                    slots += self._table.place(feature_batch.sequence, feature_batch.start, end)[2]
                except Overloaded:
                    self.close(feature_batch.sequence)
                else:
                    rows += range(first, stop)
                    positions += range(feature_batch.start, end)
            first = stop
        if rows:
            features = read_features(self._head, batch.rows, first, rows)
            place, slot = indices((positions, slots), self._head.device)
            self._head.remember(features, place, slot, self._pages.kv)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Return candidates for one tree per sequence. Return None if no sequence is followed or has free
        pages.

        sequences: The sequences to draft for, in the order of the result.
        levels: Maximum number of levels.
        keep_growing: Not called, since one pass drafts all levels. It may be None.

        Sequences that are not followed or have no free pages get barred candidates, and so do candidates
        that a grammar forbids.
        """
        rooms = [self._reserve(sequence) for sequence in sequences]
        found = [(sequence, room) for sequence, room in zip(sequences, rooms) if room]
        if not found:
            return None
        own = [sequence for sequence, _ in found]
        roots = [sequence.tokens[-1] for sequence in own]
        reserved = [room for _, room in found]
        if self._graphs and (results := self._graphs.run(roots, reserved)):
            candidates = self._offer_results(results, levels, own)
        else:
            candidates = self._offer_outputs(self._draft(roots, reserved), roots, levels, own)
        return pad_rows(candidates, [room is not None for room in rooms])

    def _make_reader(self) -> BlockReader:
        """Return what reads the outputs of blocks in captured graphs."""
        return PlaceReader(self._head, self._breadth)

    def _offer_results(
        self, results: tuple[Tensor, ...], levels: int, sequences: Sequence[DraftSequence]
    ) -> Candidates:
        """Return the candidates that a captured graph has drafted. Those that a grammar forbids are barred.

        results: Results of the reader, on the host.
        levels: Number of levels of the trees; there may be more.
        sequences: The sequence of each tree.
        """
        scores, tokens = results
        return offer_paths((scores, tokens), levels, self._nodes, sequences)

    def _offer_outputs(
        self, outputs: Tensor, roots: Sequence[int], levels: int, sequences: Sequence[DraftSequence]
    ) -> Candidates:
        """Return candidates for the outputs of blocks. Those that a grammar forbids are barred.

        outputs: The head's outputs at all rows of the blocks, [blocks, rows, hidden].
        roots: Token id of each block's first row.
        levels: Number of levels of the trees.
        sequences: The sequence of each tree.
        """
        first = self._head.block.first
        best = best_of(self._head, outputs[:, first : first + levels], self._breadth)
        return offer_paths(best, levels, self._nodes, sequences)

    def _draft(self, roots: Sequence[int], rooms: Sequence[TreeRoom]) -> Tensor:
        """Draft one block per root, without a graph. Return the head's outputs, [roots, rows, hidden].

        roots: Token id of each sequence's newest token.
        rooms: The reserved rows of each block.

        A block of 4 rows with the root r: tokens [r m m m] (m is the mask), positions [p p+1 p+2 p+3].
        """
        head = self._head
        block = self._head.block
        device = self._head.device
        tokens = torch.full((len(roots), block.rows), block.mask, device=device)
        tokens[:, 0] = torch.tensor(roots, device=device)
        starts = torch.tensor([room.position for room in rooms], device=device)
        positions = (starts[:, None] + torch.arange(block.rows, device=device)).flatten()
        slots = torch.tensor([slot for room in rooms for slot in room.slots], device=device)
        plan = head.plan([span_of(block, room) for room in rooms], self._table.page_rows)
        outputs = head.forward(tokens.flatten(), tokens, HeadRows(positions, slots, plan, self._pages.kv))
        return outputs.view(len(roots), block.rows, -1)

    def _reserve(self, sequence: DraftSequence) -> TreeRoom | None:
        """Reserve a block's rows after a sequence's own rows, and return where they are. Return None if the
        sequence is not followed, or if no page is free.

        sequence: The sequence that a block is to be drafted for.

        Pages that a window hides are freed first.
        """
        if sequence.id not in self._followed:
            return None
        self._pages.trim(sequence.id, sequence.committed)
        return self._pages.reserve_tree(sequence.id, sequence.committed, self._head.block.rows)


class MarkovProposer(BlockProposer):
    """Proposer that drafts blocks with a DSpark head. The Markov head then grows the trees level by level."""

    def __init__(
        self, head: DSparkHead, shape: TreeShape, pages: int, page_rows: int, capture: Capture | None = None
    ) -> None:
        """Allocate the KV pages, and capture the graphs.

        head: The DSpark head.
        shape: The largest tree; `top_k` is the number of children of each node. Reading a level costs far
            less than the pass of the body, so deeper levels count as rows that are not fed (`widths` are 0).
        pages: Number of KV pages.
        page_rows: Number of KV slots of a page.
        capture: Captures graphs, for a head that `captured_blocks` returns. None: no graphs.
        """
        self._markov_head = head
        self._top_k = min(shape.top_k, head.draft_vocab)
        self._reader = CandidateReader(head, self._top_k, shape.nodes - 1)
        super().__init__(head, shape, pages, page_rows, capture)

    def _make_reader(self) -> BlockReader:
        """Return what reads the outputs of blocks in captured graphs."""
        return self._reader

    def _offer_results(
        self, results: tuple[Tensor, ...], levels: int, sequences: Sequence[DraftSequence]
    ) -> Candidates:
        """Return the candidates that a captured graph has grown. Those that a grammar forbids are barred.

        results: Scores, tokens and parents of the candidates at all levels of a block, on the host.
        levels: Number of levels of the trees. Deeper candidates are left out.
        sequences: The sequence of each tree.
        """
        sizes = self._reader.sizes[:levels]
        depths = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        scores, tokens, parents = (part[:, : len(depths)].numpy() for part in results)
        candidates = Candidates(tokens.astype(np.int64), scores, parents.astype(np.int64), depths)
        return filter_candidates(candidates, sequences, self._nodes)

    def _offer_outputs(
        self, outputs: Tensor, roots: Sequence[int], levels: int, sequences: Sequence[DraftSequence]
    ) -> Candidates:
        """Return the candidates that grow from the outputs of blocks, without those that a grammar forbids.

        outputs: The head's outputs at all rows of the blocks, [blocks, rows, hidden].
        roots: Token id of each block's first row.
        levels: Number of levels of the trees.
        sequences: The sequence of each tree.
        """
        head = self._markov_head
        guide = make_guide(head, sequences)
        tokens = torch.tensor(roots, device=head.device)
        growth = MarkovGrowth(head, outputs, tokens, levels, self._top_k, self._nodes, guide)
        return growth.run(growth.last, levels)


def offer_paths(best: Best, levels: int, nodes: int, sequences: Sequence[DraftSequence]) -> Candidates:
    """Return trees of the likeliest paths through the tokens of a block. Candidates that a sequence's grammar
    forbids are barred.

    best: Log-probabilities and ids of the likeliest tokens of every place, [sequences, places, breadth] each.
    levels: Number of places that are used, from the first.
    nodes: Maximum number of nodes of a tree, without its root.
    sequences: The sequence of each tree.
    """
    scores, tokens = (each[:, :levels].tolist() for each in best)
    trees = [likeliest_paths(*each, nodes) for each in zip(scores, tokens)]
    return filter_candidates(align_levels(trees), sequences, nodes)
