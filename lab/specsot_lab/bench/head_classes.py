"""What the attention heads of a model look at, measured over a text, and what each KV head should keep.

Refuses to know how a policy is served.

Of every row beyond the first ones: the attention it pays to the first SINKS tokens, to the LOCAL newest of
the others (its own among them), and the entropy of its attention in nats. Their means make a query head's
class; the most demanding query head of a group decides for its KV head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specsot.model.attention import AttentionPlan
from specsot.model.decoder import Decoder

SINKS, LOCAL, SKIPPED = 4, 8, 64  # tokens; rows before the last of these have too little to look at
PAGE_ROWS = 256
KEEPS = {  # by class: sinks and recent tokens
    "mixed": (4, 64),
    "sink_mixed": (4, 24),
    "sink_positional": (4, 8),
    "positional": (0, 8),
    "dead": (4, 0),
}


@dataclass(frozen=True, slots=True)
class Looks:
    """A query head's means. sink, local: shares of its attention, the latter of what sinks leave.
    entropy: nats. even: entropy over that of a head that looks at everything alike."""

    sink: float
    local: float
    entropy: float
    even: float

    @property
    def kind(self) -> str:
        """The class of the head; the first that fits."""
        if self.even > 0.9:
            return "dead"
        if self.entropy > 3:
            return "gathering"
        if self.sink > 0.3:
            return "sink_positional" if self.local > 0.6 else "sink_mixed"
        return "positional" if self.local > 0.6 else "mixed"


def measure_heads(decoder: Decoder, texts: Iterable[Sequence[int]]) -> list[list[Looks]]:
    """By layer and query head. Each text is one pass, no longer than the model's context."""
    sums: list[Tensor] | None = None
    rows = 0
    for tokens in texts:
        found = _sums(decoder, tokens)
        sums = found if sums is None else [a + b for a, b in zip(sums, found)]
        rows += len(tokens) - SKIPPED
    return [[Looks(*head) for head in (layer / rows).tolist()] for layer in sums or ()]


def keep_by_head(looks: Sequence[Looks], kv_heads: int, gathering: int | None) -> list[dict[str, Any]]:
    """What each KV head of a layer keeps, as `write_heads` wants it, with the classes of its group.

    gathering: how many recent tokens heads of that class keep beside the sinks; None: all.
    """
    group = len(looks) // kv_heads
    kinds = [[one.kind for one in looks[at : at + group]] for at in range(0, len(looks), group)]
    return [{"classes": each} | _keep(each, gathering) for each in kinds]


def _keep(kinds: Sequence[str], gathering: int | None) -> dict[str, Any]:
    if gathering is None and "gathering" in kinds:
        return {"sinks": 0, "recent": None}
    kept = [KEEPS.get(kind, (SINKS, gathering or 0)) for kind in kinds]
    return {"sinks": max(sinks for sinks, _ in kept), "recent": max(recent for _, recent in kept)}


def _sums(decoder: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Of each layer [query heads, 4], what `Looks` has, summed over the rows."""
    sums: list[Tensor] = []
    positions = torch.arange(len(tokens), device=decoder.device)
    kv = decoder.make_kv(-(-len(tokens) // PAGE_ROWS), PAGE_ROWS)
    plan = AttentionPlan((), (), None, None, partial(_attend, sums=sums))
    entry = decoder.embed(torch.tensor(tokens, device=decoder.device))
    decoder.forward(entry, positions, positions, plan, kv)
    return sums


def _attend(q: Tensor, layer: Tensor, sums: list[Tensor]) -> Tensor:
    """All rows over all of their text, [rows, heads * head_dim], and what they looked at."""
    count = len(q)
    keys, values = layer.transpose(2, 3).flatten(1, 2)[:, :count]  # [rows, kv_heads, head_dim]
    scores = torch.einsum("rhgd,chd->hgrc", q, keys).float()
    later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill_(later, -math.inf).softmax(-1)
    sums.append(_look(weights.flatten(0, 1)[:, SKIPPED:]))
    return torch.einsum("hgrc,chd->rhgd", weights.to(q.dtype), values).flatten(1)


def _look(weights: Tensor) -> Tensor:
    """Attention [heads, rows, columns] of rows from SKIPPED on -> [heads, 4]."""
    rows = torch.arange(SKIPPED, SKIPPED + weights.shape[1], device=weights.device)[:, None]
    columns = torch.arange(weights.shape[2], device=weights.device)[None]
    sink = weights[..., :SINKS].sum(-1)
    local = weights.masked_fill((columns <= rows - LOCAL) | (columns < SINKS), 0).sum(-1)
    entropy = torch.special.entr(weights).sum(-1)
    parts = sink, local / (1 - sink).clamp_min(1e-6), entropy, entropy / (rows[:, 0] + 1).log()
    return torch.stack([part.double().sum(-1) for part in parts], -1).cpu()
