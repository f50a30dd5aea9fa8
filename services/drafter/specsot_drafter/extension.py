"""Computes draft rows from true features: many sequences, one pass of the head.

Refuses to know why rows are due and what grows from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsot.model.attention import AttentionPlan, Span, plan_attention
from specsot_drafter.heads import DraftHead
from specsot_drafter.memory import Memory


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows first .. first + len(tokens) - 1 of one sequence; row j is fed token j + 1.

    asked: whether the output of its last row is wanted.
    """

    sequence: int
    first: int
    tokens: tuple[int, ...]
    asked: bool

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)


def extend(head: DraftHead, memory: Memory, stretches: Sequence[Stretch]) -> Tensor:
    """Write the KV of all rows; returns [asked, hidden], outputs of the asked stretches' last rows.

    Where a head has several layers, each reads every row of the one before: then all rows are asked for.
    """
    device = head.device
    slots = torch.tensor(_slots(memory, stretches), device=device)
    tokens = torch.tensor([token for stretch in stretches for token in stretch.tokens], device=device)
    positions = torch.tensor([row for s in stretches for row in range(s.first, s.stop)], device=device)
    asked = torch.tensor(_asked_rows(stretches), dtype=torch.long, device=device)
    features = memory.recall(slots)
    if head.layers > 1:
        plan = _plan(head, memory, [_rows_of(memory, stretch, stretch.first) for stretch in stretches])
        return head.forward(tokens, features, positions, slots, plan, memory.kv)[asked]
    plan = _plan(head, memory, [_rows_of(memory, s, s.stop - 1) for s in stretches if s.asked])
    return head.forward(tokens, features, positions, slots, plan, memory.kv, asked)


def _slots(memory: Memory, stretches: Sequence[Stretch]) -> list[int]:
    table = memory.table
    return [slot for s in stretches for slot in table.slots(s.sequence, s.first, s.stop)]


def _asked_rows(stretches: Sequence[Stretch]) -> list[int]:
    rows: list[int] = []
    stop = 0
    for stretch in stretches:
        stop += len(stretch.tokens)
        if stretch.asked:
            rows.append(stop - 1)
    return rows


def _rows_of(memory: Memory, stretch: Stretch, first: int) -> Span:
    """A stretch's rows from `first` on as query rows; each sees all rows before it."""
    rows, table = stretch.stop - first, memory.table
    column = table.column(stretch.sequence, first)
    return Span(rows, column, rows, table.pages(stretch.sequence)[: table.pages_for(column + rows)])


def _plan(head: DraftHead, memory: Memory, spans: Sequence[Span]) -> AttentionPlan | None:
    if not spans:
        return None
    rows = memory.kv.page_rows
    return plan_attention(spans, rows, head.group, "batched", head.dtype, head.device)
