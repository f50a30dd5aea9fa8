"""Which columns of a reading the rows of a frame must not see, as masks of attention."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot_kernels.segments import PageRead, ReadGroup, tail_seen

Bools = NDArray[np.bool_]


def as_mask(cut: Bools, reading: PageRead, g: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Hidden columns, of all heads or of each, as what is added to the scores of each of g queries."""
    by_head = cut[None] if cut.ndim == 2 else cut.transpose(1, 0, 2)
    mask = np.where(np.repeat(by_head, g, 1), np.float32(-np.inf), np.float32(0))
    shaped = mask.reshape(reading.cells, -1, reading.rows * g, reading.columns)
    return torch.from_numpy(shaped).to(device=device, dtype=dtype)


def blind_rows(cut: Bools, device: torch.device | str) -> Tensor | None:
    """Rows that see none of the columns, as [rows, 1 or heads, 1]; None where there are none."""
    blind: Bools = np.logical_and.reduce(cut, axis=-1)
    return torch.from_numpy(blind.reshape(len(cut), -1, 1)).to(device) if blind.any() else None


def hidden_columns(hidden: Bools | None, lead: int, reading: PageRead) -> Bools | None:
    """What a reading's rows [rows, columns] must not see; None where they see it all."""
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


def hidden_behind(group: ReadGroup) -> Bools | None:
    """[rows, width - lead]: whether a row must not see column lead + c; None where nothing is hidden."""
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
