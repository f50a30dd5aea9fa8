"""EAGLE-3's head: decoder layers over token embeddings and fused features of the base.

Refuses to know trees and sequences, and in which layout a head was published.

e = input_layernorm(embedding), g = hidden_norm(feature); q, k, v read [e, g]; the un-normed feature is the
residual (`norm_before_residual`: g is); the un-normed output is the next feature (`norm_output`: the
normed one is).
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
from specsot_drafter.heads.fusion import Fusion
from specsot_drafter.heads.layers import HeadLayers
from specsot_drafter.heads.shapes import HeadShape


@dataclass(frozen=True, slots=True)
class Eagle3Parts:
    """All that an EAGLE-3 head computes with.

    table: embeddings [V, hidden]. lm_head: [hidden] -> draft vocabulary. offsets: from draft ids to the
    base's; None where they are the same.
    """

    fusion: Fusion
    table: Tensor
    token_norm: Norm
    feature_norm: Norm
    layers: HeadLayers
    norm: Norm
    lm_head: Linear
    offsets: Tensor | None
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Head(EagleHead):
    """A head loaded against its base."""

    kind = "eagle3"

    def __init__(self, shape: HeadShape, positions: int, parts: Eagle3Parts) -> None:
        """positions: how many its base has."""
        super().__init__(shape, positions, parts.fusion, parts.table)
        self.shape, self.parts = shape, parts

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
        parts = self.parts
        normed = parts.feature_norm(features)
        inputs = torch.cat((parts.token_norm(F.embedding(tokens, parts.table)), normed), 1)
        residual = normed if parts.norm_before_residual else features
        outputs = parts.layers.forward(inputs, residual, positions, slots, plan, kv, asked)
        return parts.norm(outputs) if parts.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] to [rows, draft vocabulary]."""
        parts = self.parts
        return parts.lm_head(outputs if parts.norm_output else parts.norm(outputs))

    def to_target(self, ids: Tensor) -> Tensor:
        """d2t holds offsets: base id = draft id + d2t[draft id]."""
        offsets = self.parts.offsets
        return ids if offsets is None else ids + offsets[ids]
