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
    """Write the KV of all rows; returns [asked, hidden], outputs of the asked stretches' last rows."""
    device = head.device
    slots = torch.tensor(_slots(memory, stretches), device=device)
    tokens = torch.tensor([token for stretch in stretches for token in stretch.tokens], device=device)
    positions = torch.tensor([row for s in stretches for row in range(s.first, s.stop)], device=device)
    asked = torch.tensor(_asked_rows(stretches), dtype=torch.long, device=device)
    plan = _plan(head, memory, [stretch for stretch in stretches if stretch.asked])
    return head.forward(tokens, memory.recall(slots), positions, slots, plan, memory.kv, asked)


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


def _plan(head: DraftHead, memory: Memory, asked: Sequence[Stretch]) -> AttentionPlan | None:
    """One query row per asked stretch: its last, which sees all rows before it."""
    if not asked:
        return None
    table, kv = memory.table, memory.kv
    spans = [Span(1, s.stop - 1, 1, table.pages(s.sequence)[: table.pages_for(s.stop)], None) for s in asked]
    return plan_attention(spans, kv.page_rows, head.group, "batched", head.dtype, head.device)
