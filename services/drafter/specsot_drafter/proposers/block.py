"""Proposes with a DFlash head: one pass drafts every place of a block; its likeliest paths are the tree.

A *place* is a position of the block, for which the head gives a distribution over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.core.frames import Features
from specsot.core.pages import PageTable
from specsot.errors import NotFound, Overloaded, WireError
from specsot.members import TreeShape
from specsot_drafter.block_graphs import Best, BlockGraphs, best_of, span_of
from specsot_drafter.core.selection import Candidates, KeepGrowing, align_levels, likeliest_paths, pad_rows
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.grammar import filter_candidates
from specsot_drafter.growth import TreeRoom, reserve_room
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.dflash import BlockHead
from specsot_drafter.proposers import Proposer
from specsot_model.core.kv_plan import window_of
from specsot_model.cuda_graphs import Capture


class BlockProposer(Proposer):
    """Drafts whole blocks in one forward pass. See `Proposer`.

    Once features of a sequence are missing, or no KV page is free for them, the sequence is not followed any
    more.
    """

    def __init__(
        self, head: BlockHead, shape: TreeShape, pages: int, page_rows: int, capture: Capture | None = None
    ) -> None:
        """Allocate the KV pages, and capture the graphs.

        shape: top_k is the number of tokens of every place that a tree may contain. All levels come from one
        pass, so deeper levels feed no rows (`widths` are 0).
        capture: captures graphs, for a head that `captured_blocks` returns; None: no graphs.
        """
        self.widths = (0,) * (min(head.block.drafts, shape.depth + 1) - 1)
        self.positions = head.positions
        self._head = head
        self._breadth = shape.top_k
        self._nodes = shape.nodes - 1
        self._table = PageTable(pages, page_rows)
        self._kv = head.make_kv(pages, page_rows)
        self._followed: set[int] = set()
        self._graphs = BlockGraphs(head, self._kv, shape.top_k, capture) if capture else None
        self.at_once = self._graphs is not None

    @property
    def free_pages(self) -> int:
        return self._table.free

    def open(self, sequence: DraftSequence) -> None:
        """Follow a sequence from its start or from its fork.

        A fork is not followed if its source is not followed, or if no KV page is free.
        """
        fork = sequence.opening.fork
        own = sequence.id
        if not sequence.committed or fork is None:
            self._table.open(own, window_of(sequence.opening))
        elif fork.sequence not in self._followed:
            return
        else:
            try:
                copy = self._table.fork(own, fork.sequence, fork.length)
            except (NotFound, Overloaded):
                self.close(own)
                return
            if copy is not None:
                self._kv.copy_page(copy.source, copy.target, copy.rows)
        self._followed.add(own)

    def follows(self, sequence: int) -> bool:
        return sequence in self._followed

    def close(self, sequence: int) -> None:
        self._followed.discard(sequence)
        self._wipe(self._table.close(sequence))

    def observe(self, batch: Features) -> None:
        """Store keys and values of committed tokens; drop sequences without features or without free pages.

        Raises WireError if the features do not have one row per token and the head's width.
        """
        rows = list[int]()
        slots = list[int]()
        positions = list[int]()
        first = 0
        for feature_batch in batch.feature_batches:
            stop = first + len(feature_batch.tokens)
            if batch.rows is None:
                self.close(feature_batch.sequence)
            elif feature_batch.sequence in self._followed:
                end = feature_batch.start + len(feature_batch.tokens)
                try:
                    slots += self._table.place(feature_batch.sequence, feature_batch.start, end)[2]
                except Overloaded:
                    self.close(feature_batch.sequence)
                else:
                    rows += range(first, stop)
                    positions += range(feature_batch.start, end)
            first = stop
        if rows:
            self._remember(batch.rows, first, rows, positions, slots)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """See `Proposer`. `keep_growing` is not called, since one pass drafts all levels."""
        rooms = [self._reserve(sequence) for sequence in sequences]
        found = [(sequence, room) for sequence, room in zip(sequences, rooms) if room]
        if not found:
            return None
        own = [sequence for sequence, _ in found]
        best = self._draft([sequence.tokens[-1] for sequence in own], [room for _, room in found], levels)
        candidates = offer_paths(best, levels, self._nodes, own)
        return pad_rows(candidates, [room is not None for room in rooms])

    def _draft(self, roots: Sequence[int], rooms: Sequence[TreeRoom], levels: int) -> Best:
        """Draft one block per root. Return the likeliest tokens of at least `levels` places.

        A block of 4 rows with the root r: tokens [r m m m] (m is the mask), positions [p p+1 p+2 p+3].
        """
        if self._graphs and (best := self._graphs.run(roots, rooms)):
            return best
        head = self._head
        block = self._head.block
        device = self._head.device
        tokens = torch.full((len(roots), block.rows), block.mask, device=device)
        tokens[:, 0] = torch.tensor(roots, device=device)
        starts = torch.tensor([room.position for room in rooms], device=device)
        positions = (starts[:, None] + torch.arange(block.rows, device=device)).flatten()
        slots = torch.tensor([slot for room in rooms for slot in room.slots], device=device)
        plan = head.plan([span_of(block, room) for room in rooms], self._kv.page_rows)
        outputs = head.forward(tokens.flatten(), tokens, HeadRows(positions, slots, plan, self._kv))
        outputs = outputs.view(len(roots), block.rows, -1)[:, block.first : block.first + levels]
        return best_of(head, outputs, self._breadth)

    def _reserve(self, sequence: DraftSequence) -> TreeRoom | None:
        """Reserve a block's rows after the sequence's own rows. Return None if that is impossible."""
        if sequence.id not in self._followed:
            return None
        self._wipe(self._table.trim(sequence.id, sequence.committed))
        return reserve_room(self._table, sequence.id, sequence.committed, self._head.block.rows)

    def _remember(
        self, payload: Tensor | None, count: int, rows: list[int], positions: list[int], slots: list[int]
    ) -> None:
        """Compute and store the keys and values of the given rows of the payload.

        payload: [count, head.width]. rows, positions, slots: equally many.
        """
        head = self._head
        if payload is None or tuple(payload.shape) != (count, head.width):
            shape = None if payload is None else tuple(payload.shape)
            raise WireError(f"features are {shape}, their lessons say {(count, head.width)}")
        picked = payload[torch.tensor(rows, device=payload.device)]
        features = head.features(picked.to(device=head.device, dtype=head.dtype))
        place, slot = (torch.tensor(one, device=head.device) for one in (positions, slots))
        head.remember(features, place, slot, self._kv)

    def _wipe(self, pages: Sequence[int]) -> None:
        """Clear freed pages, so that NaN rows of one sequence never reach the attention of another one."""
        for page in pages:
            self._kv.clear_page(page)


def offer_paths(best: Best, levels: int, nodes: int, sequences: Sequence[DraftSequence]) -> Candidates:
    """Return trees of the `nodes` likeliest paths through the tokens of the first `levels` places.

    Candidates that a sequence's grammar forbids are barred.
    """
    scores, tokens = (each[:, :levels].tolist() for each in best)
    trees = [likeliest_paths(*each, nodes) for each in zip(scores, tokens)]
    return filter_candidates(align_levels(trees), sequences, nodes)
