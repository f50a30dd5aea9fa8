"""Drafts the blocks of a DFlash or DSpark head in one captured CUDA graph, up to what their trees are made
of: the likeliest tokens per place, or the candidates of whole trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.heads.dflash import BlockHead, BlockPlan
from specsot_drafter.heads.dspark import DSparkHead
from specsot_drafter.markov_growth import CAPTURED_FRONTIER, MarkovGrowth, frontier_widths
from specsot_kernels.attention_tables import room_for
from specsot_kernels.segments import RowSpan
from specsot_model.cuda_graphs import Capture, Outputs, bucket_of
from specsot_model.fp8 import runs_kernels
from specsot_model.graph_tables import FrameTables
from specsot_model.inference import inference_mode
from specsot_model.kv import KVPages, Staging, size_of
from specsot_model.memory_fit import graph_bytes

# Blocks. The numbers of blocks that graphs are captured for; other numbers use the next larger graph.
# Untuned.
GRAPH_BLOCKS = (1, 2, 4, 8, 16)

# Log-probabilities, and ids in the base model's vocabulary, [sequences, places, breadth] each.
Best = tuple[Tensor, Tensor]


def best_of(head: DraftHead, outputs: Tensor, breadth: int) -> Best:
    """Return log-probabilities and ids of the likeliest tokens of every place, best first, [sequences,
    places, breadth] each.

    head: The head that made the outputs.
    outputs: Its outputs, [sequences, places, hidden].
    breadth: Number of tokens per place; at most the size of the draft vocabulary.
    """
    scores, ids = head.log_probs(outputs.flatten(0, 1)).topk(min(breadth, head.draft_vocab), -1)
    shape = (*outputs.shape[:2], -1)
    return scores.view(shape), head.to_target(ids).view(shape)


class PlaceReader:
    """Reader of DFlash heads: the likeliest tokens of every place, as `best_of` returns them.

    arrays: 2, log-probabilities and ids.
    shape: (places, breadth).
    """

    arrays = 2

    def __init__(self, head: BlockHead, breadth: int) -> None:
        """Bound the breadth by the size of the draft vocabulary.

        head: The DFlash head.
        breadth: Number of tokens per place.
        """
        self._head = head
        self.shape: tuple[int, ...] = (head.block.drafts, min(breadth, head.draft_vocab))

    def read(self, outputs: Tensor, roots: Tensor) -> Best:
        """Return log-probabilities and ids of the likeliest tokens, [blocks, places, breadth] each.

        outputs: The head's outputs at all rows of the blocks, [blocks, rows, hidden].
        roots: Ignored.
        """
        return best_of(self._head, outputs[:, self._head.block.first :], self.shape[1])


class CandidateReader:
    """Reader of DSpark heads: scores, tokens and parents of the candidates of a tree, as `MarkovGrowth` grows
    them.

    arrays: 3.
    shape: (candidates,).
    """

    arrays = 3

    def __init__(self, head: DSparkHead, top_k: int, nodes: int) -> None:
        """Compute the sizes of the levels.

        head: The DSpark head.
        top_k: Number of children of each node; bounded by the size of the draft vocabulary.
        nodes: Maximum number of nodes of a tree, without its root.
        """
        self._head = head
        self._top_k = min(top_k, head.draft_vocab)
        self._nodes = nodes
        widths = frontier_widths(head.block.drafts, self._top_k, nodes)
        # Candidates of each level.
        self.sizes = tuple(self._top_k * min(width, CAPTURED_FRONTIER) for width in (1, *widths))
        self.shape: tuple[int, ...] = (sum(self.sizes),)

    def read(self, outputs: Tensor, roots: Tensor) -> Sequence[Tensor]:
        """Return scores, tokens and parents of the candidates of all levels, [blocks, candidates] each.

        outputs: The head's outputs at all rows of the blocks, [blocks, rows, hidden].
        roots: Token id of each block's first row, [blocks].
        """
        levels = self._head.block.drafts
        growth = MarkovGrowth(self._head, outputs, roots, levels, self._top_k, self._nodes, captured=True)
        return growth.grow(growth.last, levels)


# Computes on the device, from the outputs of blocks, what their trees are made of: `arrays` results, each of
# `shape` for one block. The first has log-probabilities, the others have integers.
BlockReader = PlaceReader | CandidateReader


def span_of(block: BlockPlan, room: TreeRoom) -> RowSpan:
    """Return a block's rows as a span: each row attends to the whole sequence and to rows of its block.

    block: The layout of a block.
    room: Where the rows are stored.

    For example:

        # 3 rows: masks [0b111 0b111 0b111], or [0b001 0b011 0b111] for a causal block
    """
    visible = tuple((1 << (row + 1 if block.causal else block.rows)) - 1 for row in range(block.rows))
    return RowSpan(block.rows, room.base, block.rows, room.pages, visible)


class BlockGraphs:
    """The captured graphs of one head and its KV pages, by the number of blocks that they draft."""

    @inference_mode
    def __init__(
        self,
        head: BlockHead,
        kv: KVPages,
        reader: BlockReader,
        capture: Capture,
        blocks: Sequence[int] = GRAPH_BLOCKS,
    ) -> None:
        """Capture all graphs, which takes a fraction of a second on a GPU.

        head: The DFlash or DSpark head.
        kv: Its KV pages, which must be empty.
        reader: Reads the outputs, in the graphs.
        capture: Captures a function as a graph.
        blocks: The numbers of blocks to capture graphs for.
        """
        # The largest graph is captured first, so that the others share its memory.
        descending = sorted(blocks, reverse=True)
        self._graphs = {many: _BlockGraph(head, kv, many, reader, capture) for many in descending}
        self._staging = Staging(max(graph.size for graph in self._graphs.values()), head.device)

    def run(self, roots: Sequence[int], rooms: Sequence[TreeRoom]) -> tuple[Tensor, ...] | None:
        """Draft one block per root. Return the reader's results on the host. Return None if no graph has room
        for the pages.

        roots: Token id of each sequence's newest token. At least one.
        rooms: Where each block is stored.

        More blocks than the largest graph has are drafted in several runs.
        """
        max_blocks = max(self._graphs)
        found = list[tuple[Tensor, ...]]()
        for first in range(0, len(roots), max_blocks):
            part = slice(first, first + max_blocks)
            graph = self._graphs[bucket_of(len(roots[part]), tuple(self._graphs)) or max_blocks]
            results = graph.run(roots[part], rooms[part], self._staging)
            if results is None:
                return None
            found.append(results)
        return tuple(torch.cat(parts) for parts in zip(*found))


class _BlockGraph:
    """One captured graph, with the index tables that it reads and the results that it writes.

    size: Number of int32 values in all index tables of the graph together.
    """

    def __init__(
        self, head: BlockHead, kv: KVPages, num_blocks: int, reader: BlockReader, capture: Capture
    ) -> None:
        """Allocate the tables, and capture the graph.

        head: The DFlash or DSpark head.
        kv: Its KV pages.
        num_blocks: Number of blocks that the graph drafts.
        reader: Reads the outputs, in the graph.
        capture: Captures a function as a graph.
        """
        block = head.block
        rows = num_blocks * block.rows
        self._block = block
        room = room_for(rows, kv.pages + rows, head.group, kv_heads=head.kv_heads)
        self._tables = FrameTables(room, kv.page_rows)
        self.size = 3 * rows + size_of(self._tables.shapes)
        numbers = torch.zeros(self.size, dtype=torch.int32, device=head.device)
        tokens, positions, slots = numbers[: 3 * rows].view(3, rows)
        plan = self._tables.plan(numbers[3 * rows :], head.group)
        results = numbers.new_zeros((reader.arrays, num_blocks, *reader.shape))
        on_gpu = head.device.type == "cuda"
        self._numbers = numbers
        self._results = results
        self._host = torch.empty(results.shape, dtype=results.dtype, pin_memory=on_gpu)

        def draft() -> Outputs:
            """Draft all blocks, write the reader's results to the buffer, and return the buffer. This
            function is what the graph captures.
            """
            outputs = head.forward(tokens, tokens, HeadRows(positions, slots, plan, kv))
            blocks = outputs.view(num_blocks, block.rows, -1)
            scores, *integers = reader.read(blocks, tokens.view(num_blocks, -1)[:, 0])
            results[0].view(torch.float32).copy_(scores)
            for result, found in zip(results[1:], integers, strict=True):
                result.copy_(found)
            return results, None

        self._replay, _ = capture(draft)

    def run(
        self, roots: Sequence[int], rooms: Sequence[TreeRoom], staging: Staging
    ) -> tuple[Tensor, ...] | None:
        """Run the graph, and return the reader's results on the host. Return None if there is no room for the
        pages.

        roots: Token id of each sequence's newest token; at most as many as the graph has blocks.
        rooms: Where each block is stored.
        staging: Buffer by which tables are copied to the device.

        If there are fewer blocks than the graph has, the last block is repeated: its rows are written twice,
        with the same values.

        Each result is [roots, *shape]. The host waits for the device.
        """
        num_blocks = self._results.shape[1]
        count = len(roots)
        roots = [*roots, *[roots[-1]] * (num_blocks - count)]
        rooms = [*rooms, *[rooms[-1]] * (num_blocks - count)]
        tables = self._tables.fill([span_of(self._block, room) for room in rooms])
        if tables is None:
            return None
        rows = np.full((3, num_blocks, self._block.rows), self._block.mask, np.int32)
        rows[0, :, 0] = roots
        rows[1] = np.array([room.position for room in rooms])[:, None] + np.arange(self._block.rows)
        rows[2] = [room.slots for room in rooms]
        staging.send([rows, *tables], self._numbers)
        self._replay()
        self._host.copy_(self._results, non_blocking=True)
        if self._results.is_cuda:
            torch.cuda.current_stream(self._results.device).synchronize()
        scores, *integers = self._host[:, :count].clone()
        return scores.view(torch.float32), *integers


def can_capture_block(head: DraftHead) -> bool:
    """Return whether a block's pass can be captured: True only for a DFlash or DSpark head of which no layer
    has an attention window, False for any other head.

    head: Any draft head.
    """
    return isinstance(head, BlockHead) and head.decoder.window is None


def captured_blocks(head: DraftHead) -> BlockHead | None:
    """Return the head if its blocks can run in graphs on this machine. Return None on a CPU, without triton,
    for a head of another kind or with an attention window, and for quantized weights.

    head: Any draft head.

    Quantized are matrices without a plain weight and tables that are no tensor.
    """
    if not runs_kernels(head.device) or not can_capture_block(head):
        return None
    assert isinstance(head, BlockHead)
    layers = head.decoder.layers
    linears = [one for layer in layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    tables = [head.table]
    if isinstance(head, DSparkHead):
        linears.append(head.markov.projection)
        tables.append(head.markov.embedding)
    plain = all(linear.weight is not None for linear in (*linears, head.lm_head))
    return head if plain and all(isinstance(table, Tensor) for table in tables) else None


def block_graph_bytes(head: BlockHead) -> int:
    """Return an upper bound of the bytes of a head's graphs.

    head: The DFlash or DSpark head.

    The bound is that of the largest of GRAPH_BLOCKS, because the graphs share memory. A level of a DSpark
    head's trees has CAPTURED_FRONTIER rows per block, which may be more than a block has.
    """
    shape = head.shape
    own = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    logits = 4 * (4 // head.dtype.itemsize) * shape.vocab
    if isinstance(head, DSparkHead):
        logits += logits * CAPTURED_FRONTIER // head.block.rows
    columns = 8 * shape.hidden + 3 * shape.intermediate + own + logits
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return graph_bytes(max(GRAPH_BLOCKS) * head.block.rows, heads, columns, head.dtype.itemsize)
