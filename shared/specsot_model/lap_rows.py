"""A frame's rows as a layer range runs them (tokens, positions, slots, spans), and as graphs read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from specsot.values import value
from specsot_model.attention import RowSpan
from specsot_model.kv import Moves, Numbers

Outputs = tuple[Tensor, Tensor | None]


@value
class LapRows:
    """A frame's rows, as a range gets them.

    entry:  token ids where the range begins with the embedding, else hidden [rows, H].
    spans:  in row order.
    moves:  of KV rows, source and target, before anything else.
    """

    entry: Sequence[int] | Tensor
    positions: Sequence[int]
    slots: Sequence[int]
    spans: Sequence[RowSpan]
    moves: Moves = ()


@value
class FilledLap:
    """What graphs read of a frame. laps: a bucket's; numbers: tokens of its rows first, where those enter."""

    rows: LapRows
    laps: Sequence[Any]
    numbers: Sequence[Numbers]


def unread_entry(rows: int, roots: Sequence[int], nodes: int) -> Numbers:
    """Tokens of trees of so many nodes, but for their roots left open, and of single rows behind them."""
    entry = np.zeros(rows, np.int32)
    whole = (rows - len(roots)) // (nodes - 1)
    entry[: whole * nodes : nodes], entry[whole * nodes :] = roots[:whole], roots[whole:]
    return entry
