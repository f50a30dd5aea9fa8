"""The interface of draft heads that growth and proposers use, for every family of heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specsot_model.attention import AttentionPlan, RowSpan, plan_attention
from specsot_model.kv import KVPages


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Positions, slots and attention of the rows of one forward pass.

    positions: [rows] position of each row.
    slots: [rows] slot of `kv` in which each row's keys and values are written.
    plan: Attention plan with one query row for each asked row; None if no output is needed.
    kv: The KV pages.
    asked: [asked] indices of the rows whose outputs are needed; None: all rows. For a head of several layers
        all rows must be asked.
    """

    positions: Tensor
    slots: Tensor
    plan: AttentionPlan | None
    kv: KVPages
    asked: Tensor | None = None


class DraftHead(ABC):
    """A small model that predicts the next token from a token and the base model's feature before it.

    taps:       Layers of the base model whose inputs the head reads, ascending; the number of layers stands
                for the output of the last layer. Empty: the head reads no features.
    width:      Columns of a fused row, as it arrives from the stages: the sum over the taps of slice @ state.
    hidden:     Columns of a feature, and of the head's own output.
    layers:     Number of layers.
    kv_heads:   Number of KV heads of a layer.
    head_dim:   Columns of an attention head.
    group:      Number of query heads per KV head.
    draft_vocab: Number of token ids that the head can draft.
    positions:  Number of positions that the head can draft for.
    dtype:      Type of the head's numbers.
    device:     Where the head computes.
    """

    taps: tuple[int, ...] = ()
    width: int = 0
    hidden: int
    layers: int
    kv_heads: int
    head_dim: int
    group: int
    draft_vocab: int
    positions: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one position: its keys and values, and its feature."""
        feature = self.hidden if self.taps else 0
        return self.make_kv(1, 1).bytes + feature * self.dtype.itemsize

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        """Return empty KV pages for the head's layers."""
        heads = self.kv_heads, self.head_dim
        return KVPages(self.layers, pages, page_rows, *heads, self.dtype, self.device)

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        """Return the attention plan of one forward pass over these spans. See `plan_attention`."""
        return plan_attention(spans, page_rows, self.group, "batched", self.dtype, self.device)

    def tap_slices(self) -> dict[int, Tensor]:
        """Return the matrix of each tap, [width, base width]: a fused row is the sum of matrix @ state."""
        return {}

    def features(self, fused: Tensor) -> Tensor:
        """Convert fused rows, [rows, width], to features as `forward` takes them, [rows, hidden]."""
        return fused

    @abstractmethod
    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass: write the KV of all rows, and return the outputs of the asked rows.

        An output is the head's prediction of the next feature.
        tokens: [rows]. features: [rows, hidden], each of the position before its token. Returns [asked,
        hidden].
        """

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of the outputs of `forward`: [rows, hidden] to [rows, draft vocabulary]."""

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of the outputs of `forward`, fp32 [rows, draft vocabulary]."""
        return torch.log_softmax(self.logits(outputs).float(), dim=-1)

    def choose(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the `count` likeliest tokens of each row: log-probabilities and ids, both [rows, count].

        The tokens are ordered best first, and the ids are those of the base model. Return None if no kernel
        computes logits and selection together; the caller then uses `log_probs`.
        """
        return None

    def to_target(self, ids: Tensor) -> Tensor:
        """Convert ids of the draft vocabulary to ids of the base model; a tensor of any shape."""
        return ids


class GraphHead(Protocol):
    """A head whose forward pass can be captured in a CUDA graph.

    A pass never waits for the host. Keys and values of rows with negative slots are not written.

    layers, kv_heads, group, device: As in `DraftHead`.
    offsets: What is added to a draft id to get the base model's id, [draft vocabulary]; None: the ids are
        equal.
    window: Number of positions that each row can attend to; None: all positions.
    asks_alone: True if only the asked ones of the due rows take part in attention; False if all do.
    """

    @property
    def layers(self) -> int: ...

    @property
    def asks_alone(self) -> bool: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def offsets(self) -> Tensor | None: ...

    @property
    def window(self) -> int | None: ...

    def step(self, tokens: Tensor, features: Tensor, origins: Tensor, rows: HeadRows) -> Tensor:
        """Run `DraftHead.forward`, with features[origins[i]] as the feature of row i."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """See `DraftHead.logits`."""
        ...
