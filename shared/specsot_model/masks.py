"""Attention masks: which columns of a page read the rows of a frame must not see.

A *read* (`PageRead`) is what one product of attention reads: some rows of the batch, some columns of a page.
A mask in this file is true where a row must not see a column.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot_kernels.segments import PageRead, ReadGroup, tail_seen

Bools = NDArray[np.bool_]


def as_mask(cut: Bools, reading: PageRead, g: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return the additive mask of a read, [cells, 1 or kv_heads, rows of a cell * g, columns].

    cut: True where a row must not see a column, [rows, columns] for all heads, or [rows, kv_heads, columns].
    g: Number of query heads per KV head; each row's mask is repeated g times.

    # one cell, cut [[0 1]] and g 2 -> [[0 -inf], [0 -inf]]
    """
    by_head = cut[None] if cut.ndim == 2 else cut.transpose(1, 0, 2)
    mask = np.where(np.repeat(by_head, g, 1), np.float32(-np.inf), np.float32(0))
    shaped = mask.reshape(reading.cells, -1, reading.rows * g, reading.columns)
    return torch.from_numpy(shaped).to(device=device, dtype=dtype)


def blind_rows(cut: Bools, device: torch.device | str) -> Tensor | None:
    """Return which rows see no column at all, bool [rows, 1 or kv_heads, 1]; None if every row sees some."""
    blind: Bools = np.logical_and.reduce(cut, axis=-1)
    return torch.from_numpy(blind.reshape(len(cut), -1, 1)).to(device) if blind.any() else None


def hidden_columns(hidden: Bools | None, lead: int, reading: PageRead) -> Bools | None:
    """Cut the mask of one read, [rows, columns], out of a group's mask.

    hidden: The group's mask from column `lead` on, as `hidden_columns_of` returns it.
    lead: All rows of the group see columns 0 .. lead - 1.

    Return None if the read lies before `lead`, so that nothing is hidden.
    """
    end = reading.at + reading.columns
    if hidden is None or end <= lead:
        return None
    rows = slice(reading.first, reading.first + reading.cells * reading.rows)
    cut = hidden[rows, max(reading.at - lead, 0) : end - lead]
    if lead <= reading.at:
        return cut
    whole = np.zeros((len(cut), reading.columns), dtype=bool)
    whole[:, lead - reading.at :] = cut
    return whole


def hidden_columns_of(group: ReadGroup) -> Bools | None:
    """Return the mask of a group from column `lead` on, [rows, width - lead]; None if nothing is hidden.

    # two prompt rows after 3 columns: lead 4, width 5 -> [[True], [False]]
    """
    lead = group.lead
    width = group.width
    if lead == width:
        return None
    hidden = np.ones((group.rows, width - lead), dtype=bool)
    first = 0
    for span in group.spans:
        rows = hidden[first : first + span.rows]
        first += span.rows
        rows[:, : span.lead - lead] = False
        if span.lead < span.total:
            rows[:, span.lead - lead : span.total - lead] = ~tail_seen(span)[:, span.lead - span.base :]
    return hidden
