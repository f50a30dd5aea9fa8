"""Catching up and growing whole trees as one captured CUDA graph; trees as `growth` grows them.

The host fills in numbers and reads one result. All passes over a tree read the same pages, so one table
serves them; what differs is which columns a row sees, and for grown rows the device says that itself. Trees
that must ask a grammar between levels grow in `growth`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specsot.kernels.attention_tables import room_for
from specsot.kernels.growing import WORD, CandidatePool, LevelFrontier
from specsot.model.attention import AttentionPlan, RowSpan, plan_with_kernel
from specsot.model.cuda_graphs import Capture, bucket_of
from specsot.model.kv import Numbers, Staging, size_of, views
from specsot.model.memory_fit import graph_bytes
from specsot_drafter.core.selection import Candidates
from specsot_drafter.eagle_kv import DraftPages, DueRows
from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_drafter.heads.fused import FusedHead

if TYPE_CHECKING:
    from specsot.kernels.gpu.attention import TreePlan

# Trees that graphs are captured for; more take several runs; not measured.
GRAPH_TREES = (1, 2, 4, 8, 16, 32, 64)

Grow = Callable[[Tensor, int, int, int, CandidatePool, LevelFrontier | None, Tensor | None], LevelFrontier]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """What one tree grows from: rows that are due, the last of them asked for, and room behind them."""

    due: DueRows
    room: TreeRoom


@dataclass(frozen=True, slots=True)
class GraphSize:
    """Of a graph: so many trees of `k` nodes a level, and `levels` levels, behind at most `due` rows each."""

    trees: int
    k: int
    levels: int
    due: int

    @property
    def rows(self) -> int:
        """Of one pass."""
        return self.trees * self.k

    @property
    def candidates(self) -> int:
        """Of one tree."""
        return self.k + (self.levels - 1) * self.k * self.k

    @property
    def grown(self) -> int:
        """Rows of one tree that are fed behind the due ones."""
        return (self.levels - 1) * self.k

    @property
    def words(self) -> int:
        """Of a row's bits."""
        return self.grown // WORD + 1


class TreeGraphs:
    """All graphs over one memory, by how many trees and levels."""

    @torch.inference_mode()
    def __init__(
        self,
        head: FusedHead,
        pages: DraftPages,
        k: int,
        levels: int,
        capture: Capture,
        grow: Grow,
        trees: Sequence[int] = GRAPH_TREES,
    ) -> None:
        """levels: at most. grow: a level's choice, see `kernels.growing`. Takes a second or two on a GPU."""
        self.due, self._pages = max_due_rows(k, levels), pages
        sizes = [
            GraphSize(many, k, deep, self.due)
            for many in sorted(trees, reverse=True)
            for deep in range(levels, 0, -1)
        ]
        self._graphs = {
            (size.trees, size.levels): _TreeGraph(head, pages, size, capture, grow) for size in sizes
        }
        self._trees = tuple(trees)
        self._staging = Staging(max(one.size for one in self._graphs.values()), head.device)

    @torch.inference_mode()
    def run(self, inputs: Sequence[GraphInput], levels: int) -> Candidates | None:
        """All candidates of `levels` levels, as `Growth` offers them; None where no graph has room."""
        most, offers = max(self._trees), list[Candidates]()
        for first in range(0, len(inputs), most):
            some = inputs[first : first + most]
            graph = self._graphs.get((bucket_of(len(some), self._trees) or 0, levels))
            offer = graph.run(some, self._staging) if graph else None
            if offer is None:
                return None
            offers.append(offer)
        return offers[0] if len(offers) == 1 else _stacked(offers)


def _stacked(offers: Sequence[Candidates]) -> Candidates:
    """One behind the other, of as many levels each."""
    tokens, scores, parents = (
        np.concatenate(parts) for parts in zip(*((one.tokens, one.scores, one.parents) for one in offers))
    )
    return Candidates(tokens, scores, parents, offers[0].depths)


def max_due_rows(k: int, levels: int) -> int:
    """Rows of a tree that its graphs can catch up with: all that a tree of as many levels brings."""
    return max(k, levels + 1)


def tree_graph_bytes(shape: HeadShape, itemsize: int, k: int, levels: int) -> int:
    """Bytes that a head's graphs of `k` nodes a level, and so many levels, take at most."""
    heads = shape.heads, shape.kv_heads, shape.head_dim
    stream = 8 * shape.hidden + 3 * shape.intermediate + 2 * shape.vocab
    own = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    caught_up = -(-max_due_rows(k, levels) // k) * (3 * shape.hidden + own)
    columns = stream + own + caught_up
    return graph_bytes(max(GRAPH_TREES) * k, heads, columns, itemsize)


class _TreeGraph:
    """One graph, with the numbers it reads and the candidates it writes."""

    def __init__(
        self, head: FusedHead, pages: DraftPages, size: GraphSize, capture: Capture, grow: Grow
    ) -> None:
        from specsot.kernels.gpu.attention import plan_over

        self._head, self._pages, self._size, self._grow = head, pages, size, grow
        rows, most_pages = size.rows, pages.kv.pages
        self._room = room_for(rows, most_pages + rows, head.group)
        pieces, _, _, _, starts, parts, named = self._room.shapes
        own = (4, size.trees * size.due), (2, size.trees), (2, rows), (2, size.levels - 1, rows)
        shapes = (*own, pieces, starts, parts, named)
        self.size = size_of(shapes)
        self._numbers = torch.zeros(self.size, dtype=torch.int32, device=head.device)
        self._due, self._asked, (self._bases, nothing), self._grown, *tables = views(self._numbers, shapes)
        self._due[2].fill_(-1)
        self._grown[1].fill_(-1)
        whole = [tables[0], self._bases, self._bases, nothing.view(1, -1), *tables[1:]]
        self._plan = plan_over(whole, self._room, pages.kv.page_rows, head.group)
        self._flat = torch.zeros(size.trees * size.candidates * 5, dtype=torch.int32, device=head.device)
        on_gpu = head.device.type == "cuda"
        self._host = torch.empty(self._flat.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._known: tuple[object, list[Numbers] | None] = ((), None)
        self._replay, _ = capture(lambda: (self._grow_trees(), None))

    def run(self, inputs: Sequence[GraphInput], staging: Staging) -> Candidates | None:
        filled = self._fill(inputs)
        if filled is None:
            return None
        staging.send(filled, self._numbers)
        self._replay()
        self._host.copy_(self._flat, non_blocking=True)
        if self._flat.is_cuda:
            torch.cuda.current_stream(self._flat.device).synchronize()
        pool, trees = _pool(self._host.clone(), self._size), len(inputs)
        tokens, scores, parents = (each[:trees].numpy() for each in (pool.tokens, pool.scores, pool.parents))
        return Candidates(tokens, scores, parents, _depths(self._size))

    def _grow_trees(self) -> Tensor:
        """What is captured: catch up, then level by level."""
        head, size, pool = self._head, self._size, _pool(self._flat, self._size)
        tokens, positions, slots, origins = self._due
        asked, leads = (
            self._asked.unsqueeze(2).expand(-1, -1, size.k).flatten(1)
        )  # the plan's rows: k of a tree
        bases = self._bases
        due = self._seen(leads, bases, None, leads)
        features, kv = self._pages.features, self._pages.kv
        outputs = head.step(tokens, features, origins, HeadRows(positions, slots, due, kv, asked))
        outputs = outputs.view(size.trees, size.k, -1)[:, 0].contiguous()
        frontier: LevelFrontier | None = None
        for level in range(size.levels):
            if frontier is not None:
                places = self._grown[0, level - 1], self._grown[1, level - 1]
                rows = HeadRows(*places, self._seen(bases, bases, frontier.bits, places[0] + 1), kv)
                outputs = head.step(frontier.tokens.flatten(), outputs, frontier.origins.flatten(), rows)
            frontier = self._grow(
                head.logits(outputs), size.k, level, size.words, pool, frontier, head.offsets
            )
        return self._flat

    def _seen(self, leads: Tensor, bases: Tensor, bits: Tensor | None, lengths: Tensor) -> AttentionPlan:
        """The plan, with what its rows see: columns before `leads`, and bits from `bases` on; of lines of so
        many rows the last ones alone, where the head has a window (of a tree all).
        """
        pieces, pages, _, _, nothing, *rest = self._plan.tables
        own = nothing.view(-1, 1) if bits is None else bits
        window = self._head.window
        sinces = None if window is None else (lengths - window).clamp_min(0)
        tables = pieces, pages, leads, bases, own, *rest
        plan: TreePlan = replace(self._plan, tables=tables, sinces=sinces)
        return plan_with_kernel(plan)

    def _fill(self, inputs: Sequence[GraphInput]) -> list[Numbers] | None:
        """All numbers of a run; None where a tree's due rows or the pages do not fit."""
        size = self._size
        tables = self._tables(inputs) if all(len(seed.due.tokens) <= size.due for seed in inputs) else None
        if tables is None:
            return None
        due, asked = np.zeros((4, size.trees * size.due), np.int32), np.zeros((2, size.trees), np.int32)
        rows, grown = np.zeros((2, size.rows), np.int32), np.zeros((2, size.levels - 1, size.rows), np.int32)
        due[2], grown[1] = -1, -1
        for tree, seed in enumerate(inputs):
            first, place = tree * size.due, slice(tree * size.k, (tree + 1) * size.k)
            last = _fill_due(due[:, first : first + size.due], seed, self._pages)
            asked[:, tree] = first + last, seed.due.stop
            rows[0, place] = seed.room.base
            grown[0, :, place] = seed.room.base + np.arange(size.levels - 1)[:, None]
            grown[1, :, place] = np.reshape(seed.room.slots[: size.grown], (-1, size.k))
        return [due, asked, rows, grown, *tables]

    def _tables(self, inputs: Sequence[GraphInput]) -> list[Numbers] | None:
        """Which pages are read; of whole pages, so that they stay the same for many laps."""
        from specsot.kernels.attention_tables import tabulate

        size, page_rows = self._size, self._pages.kv.page_rows
        floors = [seed.due.first // page_rows * page_rows for seed in inputs]
        known = [(floor, seed.room.pages) for floor, seed in zip(floors, inputs)]
        if known != self._known[0]:
            blank = (0,) * size.k
            spans = [RowSpan(size.k, at, len(pages) * page_rows - at, pages, blank) for at, pages in known]
            filled = self._room.fill(tabulate(spans, page_rows, self._room.tile_rows))
            self._known = known, filled and [filled[0], *filled[4:]]
        return self._known[1]


def _fill_due(rows: Numbers, entry: GraphInput, pages: DraftPages) -> int:
    """A tree's rows of tokens, positions, slots and origins; returns the number of the last."""
    due, many = entry.due, len(entry.due.tokens)
    at = np.arange(due.first, due.stop)
    rows[0, :many], rows[1, :many] = due.tokens, at
    rows[2, :many] = rows[3, :many] = pages.table.slots(due.sequence, due.first, due.stop)
    return many - 1


def _pool(flat: Tensor, size: GraphSize) -> CandidatePool:
    """Tokens and parents in 64 bits, scores in 32, one behind the other."""
    many = size.trees * size.candidates
    whole = flat[: 4 * many].view(torch.int64).view(2, size.trees, size.candidates)
    scores = flat[4 * many :].view(torch.float32).view(size.trees, size.candidates)
    return CandidatePool(whole[0], scores, whole[1])


def _depths(size: GraphSize) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.repeat(np.arange(1, size.levels + 1), [size.k] + [size.k * size.k] * (size.levels - 1))
