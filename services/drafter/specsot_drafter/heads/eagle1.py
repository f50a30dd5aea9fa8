"""EAGLE-1's head, which EAGLE-2 drafts larger trees with: it imitates the base's last normed state.

Refuses to know trees and sequences, and in which layout a head was published.

z = fc([embedding, feature]) is input and residual of the first layer, which has no input norm (HASS gives
it one, and norms both of fc's inputs); the output is the next feature, and the base's own lm_head reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.model.attention import AttentionPlan
from specsot.model.kv import KVPages
from specsot.model.layers import Norm
from specsot.model.linear import Linear
from specsot_drafter.heads.eagle import EagleHead
from specsot_drafter.heads.fusion import FinalHidden
from specsot_drafter.heads.layers import HeadLayers
from specsot_drafter.heads.shapes import HeadShape


@dataclass(frozen=True, slots=True)
class Eagle1Parts:
    """All that an EAGLE-1 head computes with. table: embeddings [V, hidden]. Norms may be absent."""

    fusion: FinalHidden
    table: Tensor
    fc: Linear
    layers: HeadLayers
    lm_head: Linear
    token_norm: Norm | None = None
    feature_norm: Norm | None = None
    input_norm: Norm | None = None


class Eagle1Head(EagleHead):
    """A head loaded against its base."""

    kind = "eagle1"

    def __init__(self, shape: HeadShape, positions: int, parts: Eagle1Parts) -> None:
        """positions: how many its base has."""
        super().__init__(shape, positions, parts.fusion, parts.table)
        self._parts = parts

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan | None,
        kv: KVPages,
        asked: Tensor | None = None,
    ) -> Tensor:
        """One step for each row; returns the features that follow."""
        parts = self._parts
        embedded = F.embedding(tokens, parts.table)
        if parts.token_norm is not None:
            embedded = parts.token_norm(embedded)
        if parts.feature_norm is not None:
            features = parts.feature_norm(features)
        mixed = parts.fc(torch.cat((embedded, features), 1))
        inputs = mixed if parts.input_norm is None else parts.input_norm(mixed)
        return parts.layers.forward(inputs, mixed, positions, slots, plan, kv, asked)

    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocabulary]; an output stands for a normed state, so no norm here."""
        return self._parts.lm_head(outputs)
