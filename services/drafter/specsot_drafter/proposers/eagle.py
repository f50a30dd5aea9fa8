"""Proposes with an EAGLE head: one layer or a few over the base's own features."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specsot.core.frames import FeatureBatch, Features, Opening
from specsot.core.kv_plan import window_of
from specsot.members import TreeShape
from specsot.model.cuda_graphs import GraphCapture
from specsot_drafter.core.selection import Candidates, KeepGrowing, pad_rows
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DraftPages, EagleKv, FollowedSequence, compute_rows
from specsot_drafter.grammar import filter_candidates, make_guide
from specsot_drafter.graph_growth import GraphInput, TreeGraphs
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.fused import fuse_head

WARMUP_ROWS = (512, 128, 32, 8, 1)  # rows of made-up prompts


class EagleProposer:
    """See `Drafter`. A text whose features were missed once is drafted no more."""

    def __init__(self, head: DraftHead, shape: TreeShape, pages: int, page_rows: int) -> None:
        self.widths = (shape.top_k,) * shape.depth
        self._head, self._top_k, self._max_nodes = head, shape.top_k, shape.nodes - 1
        self._kv = EagleKv(head, pages, page_rows)
        self._graphs: TreeGraphs | None = None
        if graphs := _graphs(head, self._kv.pages, shape):
            self._warm_up()
            self._graphs = graphs
            self._warm_up()

    @property
    def free_pages(self) -> int:
        return self._kv.pages.table.free

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        return self._kv.due

    def open(self, sequence: DraftSequence) -> None:
        self._kv.open(sequence)

    def observe(self, batch: Features) -> None:
        self._kv.store_batch(batch)

    def close(self, sequence: int) -> None:
        self._kv.close(sequence)

    def catch_up(self) -> None:
        self._kv.catch_up(())

    def max_levels(self, sequence: DraftSequence) -> int:
        """A node at depth room - 1, or at the base's last position, is the last that can be of use."""
        if sequence.id not in self._kv.sequences:
            return 0
        depth = min(
            sequence.remaining - 1, sequence.max_tokens(self._head.positions) - 1 - sequence.committed
        )
        return max(min(len(self.widths) + 1, depth), 0)

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        found = [self._reserve(text) for text in sequences]
        growing = [(stream, ground) for stream, ground in found if stream and ground]
        if not growing:
            return None
        followed, rooms = [stream for stream, _ in growing], [ground for _, ground in growing]
        own = [stream.sequence for stream in followed]
        candidates = self._grow_by_graph(followed, rooms, levels)
        if candidates is not None:
            candidates = filter_candidates(candidates, own, self._max_nodes)
        else:
            last, guide = self._kv.catch_up(followed), make_guide(self._head, own)
            growth = TreeGrowth(self._head, self._kv.pages.kv, rooms, self._top_k, guide)
            candidates = growth.run(last, levels, keep_growing)
        return pad_rows(candidates, [bool(stream and ground) for stream, ground in found])

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Follow made-up texts and draft for them: what a GPU compiles and loads for such rows is there when
        somebody waits, and no clock takes it for what drafts cost.
        """
        for rows in WARMUP_ROWS:
            sequence = DraftSequence(Opening(0, prompt=rows, limit=rows))
            self.open(sequence)
            for told in (rows, 1):
                lesson = FeatureBatch(0, sequence.committed, (0,) * told, 0, 1)
                sequence.observe(lesson)
                payload = torch.zeros(told, self._head.width, dtype=self._head.dtype)
                self.observe(Features(0, 0, lessons=(lesson,), rows=payload))
                self.propose([sequence], min(2, len(self.widths) + 1))
            self.close(sequence.id)

    def _grow_by_graph(
        self, followed: Sequence[FollowedSequence], rooms: Sequence[TreeRoom], levels: int
    ) -> Candidates | None:
        """All of it in one graph, where there is one. A level more costs less than asking whether it pays,
        and a wrong guess less than asking a grammar between levels.
        """
        graphs, kv = self._graphs, self._kv
        windows = any(window_of(stream.sequence.opening) for stream in followed)
        if graphs is None or windows:
            return None
        if any(stream.due > graphs.due for stream in followed) or kv.due > sum(s.due for s in followed):
            kv.catch_up(())  # what no graph has room for; the last row of each is due again
        due = kv.take_due(followed)
        candidates = graphs.run([GraphInput(*each) for each in zip(due, rooms)], levels)
        if candidates is None:
            compute_rows(self._head, kv.pages, due)
        return candidates

    def _reserve(self, sequence: DraftSequence) -> tuple[FollowedSequence | None, TreeRoom | None]:
        followed = self._kv.sequences.get(sequence.id)
        room = self._kv.reserve_tree(followed, sum(self.widths)) if followed else None
        return followed, room


def _graphs(head: DraftHead, memory: DraftPages, shape: TreeShape) -> TreeGraphs | None:
    """Where this head, on this machine, can be captured."""
    fused = fuse_head(head)
    if fused is None:
        return None
    from specsot.kernels.gpu.growing import grow

    return TreeGraphs(fused, memory, shape.top_k, shape.depth + 1, GraphCapture(), grow)
