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

# A mask; True where a row must not see a column.
Bools = NDArray[np.bool_]


def as_mask(
    hidden_mask: Bools, reading: PageRead, heads_per_kv: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return the additive mask of a read: [cells, 1 or kv_heads, rows of a cell * heads_per_kv, columns].

    An entry is minus infinity where a row must not see a column, and 0 elsewhere.

    hidden_mask: true where a row must not see a column; [rows, columns] for all heads, or [rows, kv_heads,
        columns].
    reading: the read: how many cells it has, and how many rows and columns each cell has.
    heads_per_kv: number of query heads per KV head; each row's mask is repeated so many times.
    dtype: type of the result.
    device: device of the result.

        # one cell, hidden_mask [[0 1]] and heads_per_kv 2 -> [[0 -inf], [0 -inf]]
    """
    by_head = hidden_mask[None] if hidden_mask.ndim == 2 else hidden_mask.transpose(1, 0, 2)
    mask = np.where(np.repeat(by_head, heads_per_kv, 1), np.float32(-np.inf), np.float32(0))
    shaped = mask.reshape(reading.cells, -1, reading.rows * heads_per_kv, reading.columns)
    return torch.from_numpy(shaped).to(device=device, dtype=dtype)


def blind_rows(hidden_mask: Bools, device: torch.device | str) -> Tensor | None:
    """Return which rows see no column at all, bool [rows, 1 or kv_heads, 1]; None if every row sees some
    column.

    hidden_mask: true where a row must not see a column; [rows, columns] for all heads, or [rows, kv_heads,
        columns].
    device: device of the result.
    """
    sees_nothing: Bools = np.logical_and.reduce(hidden_mask, axis=-1)
    return (
        torch.from_numpy(sees_nothing.reshape(len(hidden_mask), -1, 1)).to(device)
        if sees_nothing.any()
        else None
    )


def hidden_columns(group_mask: Bools | None, lead: int, reading: PageRead) -> Bools | None:
    """Return the mask of one read, bool [rows, columns], cut out of a group's mask; true where a row must not
    see a column.

    None is returned if the read lies before column `lead` or the group has no mask, so that nothing is
    hidden. A read that begins before column `lead` and ends after it hides nothing before `lead`.

    group_mask: the group's mask from column `lead` on, as `hidden_columns_of` returns it; None if the group
        hides nothing.
    lead: number of first columns that all rows of the group see.
    reading: the read, which gives the rows and columns to cut out.
    """
    end = reading.at + reading.columns
    if group_mask is None or end <= lead:
        return None
    rows = slice(reading.first, reading.first + reading.cells * reading.rows)
    read_mask = group_mask[rows, max(reading.at - lead, 0) : end - lead]
    if lead <= reading.at:
        return read_mask
    padded_mask = np.zeros((len(read_mask), reading.columns), dtype=bool)
    padded_mask[:, lead - reading.at :] = read_mask
    return padded_mask


def hidden_columns_of(group: ReadGroup) -> Bools | None:
    """Return the mask of a group from column `lead` on, bool [rows, width - lead]; None if nothing is hidden.

    Columns after a shorter span's own end are hidden from its rows.

    group: spans that are read together; its `lead` first columns are seen by every row, and its `width` is
        the number of columns of the longest span.

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
