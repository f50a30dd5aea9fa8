"""Attention over a rectangle: every sequence of a batch has one page of its own, as long as all others.

Refuses to know layers and texts. For training and for writing many texts side by side: the product's
decoder runs with it, without a plan of readings for every forward.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.model.attention import AttentionPlan


def causal_plan(batch: int) -> AttentionPlan:
    """Rows are `batch` whole sequences, one behind the other, each over a page that it fills."""
    return AttentionPlan((), (), None, None, partial(_causal, batch=batch))


def next_plan(lengths: Tensor, columns: int) -> AttentionPlan:
    """One row a sequence, which sees the first `lengths` [batch] rows of its page: `columns` at most."""
    seen = torch.arange(columns, device=lengths.device) < lengths[:, None]
    return AttentionPlan((), (), None, None, partial(_next, seen=seen[:, None, None]))


def _causal(q: Tensor, kv_layer: Tensor, batch: int) -> Tensor:
    rows, kv_heads, group, dim = q.shape
    keys, values = (part[:batch, :, : rows // batch] for part in kv_layer)
    queries = q.reshape(batch, -1, kv_heads * group, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2).reshape(rows, -1)


def _next(q: Tensor, kv_layer: Tensor, seen: Tensor) -> Tensor:
    """A KV head's queries are rows of one product: they see the same.

    Spelled out, since torch's own may build a plan for every new number of columns, which takes longer.
    """
    batch, columns = q.shape[0], seen.shape[-1]
    keys, values = (part[:batch, :, :columns] for part in kv_layer)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1).to(q.dtype) @ values).reshape(batch, -1)
