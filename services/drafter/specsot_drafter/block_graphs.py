"""Drafts the blocks of a DFlash head in one captured CUDA graph, up to the likeliest tokens per place."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.heads.dflash import BlockHead, BlockPlan
from specsot_kernels.attention_tables import room_for
from specsot_kernels.segments import RowSpan
from specsot_model.cuda_graphs import Capture, Outputs, bucket_of
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
        breadth: int,
        capture: Capture,
        blocks: Sequence[int] = GRAPH_BLOCKS,
    ) -> None:
        """Capture all graphs, which takes a fraction of a second on a GPU.

        head: The DFlash head.
        kv: Its KV pages, which must be empty.
        breadth: Number of tokens per place that are returned.
        capture: Captures a function as a graph.
        blocks: The numbers of blocks to capture graphs for.
        """
        # The largest graph is captured first, so that the others share its memory.
        descending = sorted(blocks, reverse=True)
        self._graphs = {many: _BlockGraph(head, kv, many, breadth, capture) for many in descending}
        self._staging = Staging(max(graph.size for graph in self._graphs.values()), head.device)

    def run(self, roots: Sequence[int], rooms: Sequence[TreeRoom]) -> Best | None:
        """Draft one block per root. Return what `best_of` returns, for all places, on the host. Return None
        if no graph has room for the pages.

        roots: Token id of each sequence's newest token. At least one.
        rooms: Where each block is stored.

        More blocks than the largest graph has are drafted in several runs.
        """
        max_blocks = max(self._graphs)
        found = list[Best]()
        for first in range(0, len(roots), max_blocks):
            part = slice(first, first + max_blocks)
            graph = self._graphs[bucket_of(len(roots[part]), tuple(self._graphs)) or max_blocks]
            best = graph.run(roots[part], rooms[part], self._staging)
            if best is None:
                return None
            found.append(best)
        scores, ids = zip(*found)
        return torch.cat(scores), torch.cat(ids)


class _BlockGraph:
    """One captured graph, with the index tables that it reads and the results that it writes.

    size: Number of int32 values in all index tables of the graph together.
    """

    def __init__(self, head: BlockHead, kv: KVPages, num_blocks: int, breadth: int, capture: Capture) -> None:
        """Allocate the tables, and capture the graph.

        head: The DFlash head.
        kv: Its KV pages.
        num_blocks: Number of blocks that the graph drafts.
        breadth: Number of tokens per place that are returned.
        capture: Captures a function as a graph.

        The breadth is bounded by the size of the draft vocabulary.
        """
        block = head.block
        breadth = min(breadth, head.draft_vocab)
        rows = num_blocks * block.rows
        self._block = block
        room = room_for(rows, kv.pages + rows, head.group, kv_heads=head.kv_heads)
        self._tables = FrameTables(room, kv.page_rows)
        self.size = 3 * rows + size_of(self._tables.shapes)
        numbers = torch.zeros(self.size, dtype=torch.int32, device=head.device)
        tokens, positions, slots = numbers[: 3 * rows].view(3, rows)
        plan = self._tables.plan(numbers[3 * rows :], head.group)
        best = numbers.new_zeros((2, num_blocks, block.drafts, breadth))
        on_gpu = head.device.type == "cuda"
        self._numbers = numbers
        self._best = best
        self._host = torch.empty(best.shape, dtype=best.dtype, pin_memory=on_gpu)

        def draft() -> Outputs:
            """Draft all blocks, write the likeliest tokens to the buffer, and return the buffer. This
            function is what the graph captures.
            """
            outputs = head.forward(tokens, tokens, HeadRows(positions, slots, plan, kv))
            scores, ids = best_of(head, outputs.view(num_blocks, block.rows, -1)[:, block.first :], breadth)
            best[0].view(torch.float32).copy_(scores)
            best[1].copy_(ids)
            return best, None

        self._replay, _ = capture(draft)

    def run(self, roots: Sequence[int], rooms: Sequence[TreeRoom], staging: Staging) -> Best | None:
        """Run the graph, and return what `best_of` returns, on the host. Return None if there is no room for
        the pages.

        roots: Token id of each sequence's newest token; at most as many as the graph has blocks.
        rooms: Where each block is stored.
        staging: Buffer by which tables are copied to the device.

        If there are fewer blocks than the graph has, the last block is repeated: its rows are written twice,
        with the same values.

        Both arrays are [roots, places, breadth]. The host waits for the device.
        """
        num_blocks = self._best.shape[1]
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
        self._host.copy_(self._best, non_blocking=True)
        if self._best.is_cuda:
            torch.cuda.current_stream(self._best.device).synchronize()
        found = self._host[:, :count].clone()
        return found[0].view(torch.float32), found[1]


def can_capture_block(head: DraftHead) -> bool:
    """Return whether a block's pass can be captured: True only for a DFlash head of which no layer has an
    attention window, False for any other head.

    head: Any draft head.
    """
    return isinstance(head, BlockHead) and head.decoder.window is None


def captured_blocks(head: DraftHead) -> BlockHead | None:
    """Return the head if its blocks can run in graphs on this machine. Return None on a CPU, without triton,
    for a head of another kind or with an attention window, and for quantized weights.

    head: Any draft head.

    Quantized are matrices without a plain weight and tables that are no tensor.
    """
    if head.device.type != "cuda" or find_spec("triton") is None or not can_capture_block(head):
        return None
    assert isinstance(head, BlockHead)
    layers = head.decoder.layers
    linears = [one for layer in layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    plain = all(linear.weight is not None for linear in (*linears, head.lm_head))
    return head if plain and isinstance(head.table, Tensor) else None


def block_graph_bytes(head: BlockHead) -> int:
    """Return an upper bound of the bytes of a head's graphs.

    head: The DFlash head.

    The bound is that of the largest of GRAPH_BLOCKS, because the graphs share memory.
    """
    shape = head.shape
    own = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    columns = 8 * shape.hidden + 3 * shape.intermediate + own + 4 * (4 // head.dtype.itemsize) * shape.vocab
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return graph_bytes(max(GRAPH_BLOCKS) * head.block.rows, heads, columns, head.dtype.itemsize)
