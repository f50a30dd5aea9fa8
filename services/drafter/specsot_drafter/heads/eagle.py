"""What EAGLE's heads have in common, whatever their generation.

Refuses to know what a head computes from its features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specsot.model.attention import AttentionPlan
from specsot.model.kv import KVPages
from specsot_drafter.heads.fusion import Fusion
from specsot_drafter.heads.shapes import HeadShape, Kind


class EagleHead(ABC):
    """A head loaded against its base; see `DraftHead` for what the attributes mean."""

    kind: Kind

    def __init__(self, shape: HeadShape, positions: int, fusion: Fusion, table: Tensor) -> None:
        """positions: how many its base has. table: embeddings [V, hidden]."""
        self.fusion, self.taps, self.width = fusion, fusion.taps, fusion.width
        self.hidden, self.layers = shape.hidden, shape.layers
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.group = shape.heads // shape.kv_heads
        self.draft_vocab, self.positions = shape.vocab, positions
        self.dtype, self.device = table.dtype, table.device

    @property
    def row_bytes(self) -> int:
        return (2 * self.layers * self.kv_heads * self.head_dim + self.hidden) * self.dtype.itemsize

    def tap_slices(self) -> dict[int, Tensor]:
        return self.fusion.slices()

    def features(self, fused: Tensor) -> Tensor:
        return self.fusion.features(fused)

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan | None,
        kv: KVPages,
        asked: Tensor | None = None,
    ) -> Tensor: ...

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] outputs of `forward` to [rows, draft vocabulary]."""

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Over the draft vocabulary alone, in fp32."""
        return torch.log_softmax(self.logits(outputs).float(), dim=-1)

    def to_target(self, ids: Tensor) -> Tensor:
        return ids
