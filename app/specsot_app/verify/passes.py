"""A whole text through base or head in one pass, in one page of its own.

Refuses to know what comes out is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specsot.model.attention import Span, plan_attention
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages
from specsot_drafter.heads.eagle import EagleHead


def read_base(base: Decoder, tokens: Tensor) -> Tensor:
    """The states [n, H] behind the last layer."""
    return _through_base(base, tokens, {})[0]


def feed_base(base: Decoder, tokens: Tensor, taps: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """The same, and the sum [n, Hd] over the taps."""
    hidden, fused = _through_base(base, tokens, taps)
    assert fused is not None
    return hidden, fused


def _through_base(base: Decoder, tokens: Tensor, taps: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
    rows = len(tokens)
    plan = base.plan([Span(rows, 0, rows, (0,))], rows, "packed")
    places = torch.arange(rows, device=base.device)
    slices = {layer: part.to(base.device, base.dtype) for layer, part in taps.items()}
    return base.forward(base.embed(tokens), places, places, plan, base.make_kv(1, rows), slices)


def feed_head(head: EagleHead, tokens: Tensor, features: Tensor, room: int = 0) -> tuple[Tensor, KVPages]:
    """Outputs [n, hidden] from features [n, hidden], and the KV in a page with `room` for more rows."""
    rows = len(tokens)
    kv = KVPages(head.layers, 1, rows + room, head.kv_heads, head.head_dim, head.dtype, head.device)
    span = Span(rows, 0, rows, (0,))  # every row sees itself and all before it
    plan = plan_attention([span], rows + room, head.group, "packed", head.dtype, head.device)
    places = torch.arange(rows, device=head.device)
    return head.forward(tokens, features, places, places, plan, kv), kv
