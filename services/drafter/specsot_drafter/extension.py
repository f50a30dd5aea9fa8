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
from specsot_drafter.memory import DraftPages


@dataclass(frozen=True, slots=True)
class DueRows:
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


def compute_rows(head: DraftHead, pages: DraftPages, due: Sequence[DueRows]) -> Tensor:
    """Write the KV of all rows; returns [asked, hidden], outputs of the asked stretches' last rows.

    Where a head has several layers, each reads every row of the one before: then all rows are asked for.
    """
    device = head.device
    slots = torch.tensor(_slots(pages, due), device=device)
    tokens = torch.tensor([token for stretch in due for token in stretch.tokens], device=device)
    positions = torch.tensor([row for s in due for row in range(s.first, s.stop)], device=device)
    asked = torch.tensor(_asked_rows(due), dtype=torch.long, device=device)
    features = pages.load_features(slots)
    if head.layers > 1:
        plan = _plan(head, pages, [_span_of(pages, stretch, stretch.first) for stretch in due])
        return head.forward(tokens, features, positions, slots, plan, pages.kv)[asked]
    plan = _plan(head, pages, [_span_of(pages, s, s.stop - 1) for s in due if s.asked])
    return head.forward(tokens, features, positions, slots, plan, pages.kv, asked)


def _slots(pages: DraftPages, due: Sequence[DueRows]) -> list[int]:
    table = pages.table
    return [slot for s in due for slot in table.slots(s.sequence, s.first, s.stop)]


def _asked_rows(due: Sequence[DueRows]) -> list[int]:
    rows: list[int] = []
    stop = 0
    for stretch in due:
        stop += len(stretch.tokens)
        if stretch.asked:
            rows.append(stop - 1)
    return rows


def _span_of(pages: DraftPages, due: DueRows, first: int) -> Span:
    """A stretch's rows from `first` on as query rows; each sees all rows before it."""
    rows, table = due.stop - first, pages.table
    column = table.column(due.sequence, first)
    return Span(rows, column, rows, table.pages(due.sequence)[: table.pages_for(column + rows)])


def _plan(head: DraftHead, pages: DraftPages, spans: Sequence[Span]) -> AttentionPlan | None:
    if not spans:
        return None
    rows = pages.kv.page_rows
    return plan_attention(spans, rows, head.group, "batched", head.dtype, head.device)
