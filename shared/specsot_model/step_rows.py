"""The inputs of one forward pass through a layer range: tokens, positions, slots and spans, and the tables
that CUDA graphs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from specsot.values import value
from specsot_model.attention import RowSpan
from specsot_model.kv import Moves, Numbers

# Hidden states [rows, H] after the range, and the features [rows, Hd] of its taps, or None without taps.
Outputs = tuple[Tensor, Tensor | None]


@value
class StepRows:
    """The rows (tokens of the batch) of one frame, as a layer range receives them.

    entry: token ids [rows] if the range starts with the embedding, else hidden states [rows, H].
    positions: position of each row in its sequence.
    slots: KV slot of each row, page * page_rows + offset.
    spans: one span per segment, in row order: what the rows of the segment attend to.
    moves: KV moves (source slot, target slot) to do before anything else.
    """

    entry: Sequence[int] | Tensor
    positions: Sequence[int]
    slots: Sequence[int]
    spans: Sequence[RowSpan]
    moves: Moves = ()


@value
class FilledStep:
    """A frame together with the CUDA graphs that run it and the tables that the graphs read.

    rows: the frame's rows.
    steps: the captured graphs of the chosen bucket, one per device.
    numbers: the int32 tables in the order in which they are sent to the device; the first array holds moves,
        token ids, positions and slots, see `cuda_graphs._CapturedStep.fill`.
    """

    rows: StepRows
    steps: Sequence[Any]
    numbers: Sequence[Numbers]


def device_tree_entry(num_rows: int, roots: Sequence[int], nodes_per_tree: int) -> Numbers:
    """Return the token ids, int32 [num_rows], of a frame whose trees are still on the device: only root
    tokens are set.

    The device fills the other nodes of each tree, which are 0 in the result, before the frame runs. Without
    trees, `num_rows` equals the number of roots, and the result is the roots.

    num_rows: number of rows of the frame: all trees, each of `nodes_per_tree` nodes, followed by single rows.
    roots: the root token of every tree, then the tokens of the single rows.
    nodes_per_tree: number of nodes of every tree, the root included; at least 2.

        # num_rows 9, roots [r0 r1 r2], nodes_per_tree 4 -> [r0 0 0 0 r1 0 0 0 r2]; the device writes the
        zeros
    """
    entry = np.zeros(num_rows, np.int32)
    num_trees = (num_rows - len(roots)) // (nodes_per_tree - 1)
    single_rows = num_trees * nodes_per_tree
    entry[:single_rows:nodes_per_tree] = roots[:num_trees]
    entry[single_rows:] = roots[num_trees:]
    return entry
