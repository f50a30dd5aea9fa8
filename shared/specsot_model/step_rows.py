"""The inputs of one step of a layer range: tokens, positions, slots and spans, and as CUDA graphs read them.

Names in this file say `step` for a step.
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

    entry: Token ids if the range starts with the embedding, else hidden states [rows, H].
    positions: Position of each row in its sequence.
    slots: KV slot of each row.
    spans: One span per segment, in row order.
    moves: KV moves (source slot, target slot) to do before anything else.
    """

    entry: Sequence[int] | Tensor
    positions: Sequence[int]
    slots: Sequence[int]
    spans: Sequence[RowSpan]
    moves: Moves = ()


@value
class FilledStep:
    """A frame together with the CUDA graph that runs it and the tables that the graph reads.

    rows: The frame.
    steps: The captured graphs of the chosen bucket, one per device.
    numbers: The tables in the order in which they are sent; the first one holds the token ids.
    """

    rows: StepRows
    steps: Sequence[Any]
    numbers: Sequence[Numbers]


def device_tree_entry(rows: int, roots: Sequence[int], nodes: int) -> Numbers:
    """Return the token ids of a frame whose trees are still on the device: only root tokens are filled in.

    rows: Number of rows: all trees, each of `nodes` nodes, followed by single rows.
    roots: First tokens of all trees, then the tokens of the single rows.

    # rows 9, roots [r0 r1 r2], nodes 4 -> [r0 0 0 0 r1 0 0 0 r2]; the device writes the zeros of the trees
    """
    entry = np.zeros(rows, np.int32)
    whole = (rows - len(roots)) // (nodes - 1)
    entry[: whole * nodes : nodes], entry[whole * nodes :] = roots[:whole], roots[whole:]
    return entry
