"""The EAGLE-1 (also EAGLE-2's) and EAGLE-3 draft heads.

EAGLE-1 imitates the base's last normed state; EAGLE-3 runs decoder layers over token embeddings and fused
features of the base.

EAGLE-1: z = fc([embedding, feature]) is input and residual of the first layer, which has no input norm
(HASS gives it one, and norms both of fc's inputs); the output is the next feature, and the base's own
lm_head reads it.

EAGLE-3: e = input_layernorm(embedding), g = hidden_norm(feature); q, k, v read [e, g]; the un-normed
feature is the residual (`norm_before_residual`: g is); the un-normed output is the next feature
(`norm_output`: the normed one is).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.model.layers import Norm
from specsot.model.linear import Linear
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.heads.checkpoint import HeadShape, Kind
from specsot_drafter.heads.fusion import FinalHidden, Fusion
from specsot_drafter.heads.layers import HeadLayers


class EagleHead(DraftHead):
    """A head loaded against its base."""

    kind: Kind

    def __init__(self, shape: HeadShape, positions: int, fusion: Fusion, table: Tensor) -> None:
        """positions: how many its base has. table: embeddings [V, hidden]."""
        self.fusion, self.taps, self.width = fusion, fusion.taps, fusion.width
        self.hidden, self.layers = shape.hidden, shape.layers
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.group = shape.heads // shape.kv_heads
        self.draft_vocab, self.positions = shape.vocab, positions
        self.dtype, self.device = table.dtype, table.device

    def tap_slices(self) -> dict[int, Tensor]:
        return self.fusion.slices()

    def features(self, fused: Tensor) -> Tensor:
        return self.fusion.features(fused)


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

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """One step for each row; returns the features that follow."""
        parts = self._parts
        embedded = F.embedding(tokens, parts.table)
        if parts.token_norm is not None:
            embedded = parts.token_norm(embedded)
        if parts.feature_norm is not None:
            features = parts.feature_norm(features)
        mixed = parts.fc(torch.cat((embedded, features), 1))
        inputs = mixed if parts.input_norm is None else parts.input_norm(mixed)
        return parts.layers.forward(inputs, mixed, rows)

    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocabulary]; an output stands for a normed state, so no norm here."""
        return self._parts.lm_head(outputs)


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

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """One step for each row; returns the features that follow."""
        parts = self.parts
        normed = parts.feature_norm(features)
        inputs = torch.cat((parts.token_norm(F.embedding(tokens, parts.table)), normed), 1)
        residual = normed if parts.norm_before_residual else features
        outputs = parts.layers.forward(inputs, residual, rows)
        return parts.norm(outputs) if parts.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] to [rows, draft vocabulary]."""
        parts = self.parts
        return parts.lm_head(outputs if parts.norm_output else parts.norm(outputs))

    def to_target(self, ids: Tensor) -> Tensor:
        """d2t holds offsets: base id = draft id + d2t[draft id]."""
        offsets = self.parts.offsets
        return ids if offsets is None else ids + offsets[ids]
