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

    positions: Position of each row, [rows].
    slots: Slot of `kv` in which each row's keys and values are written, [rows].
    plan: Attention plan with one query row for each asked row. None if no output is needed.
    kv: The KV pages that the pass reads and writes.
    asked: Indices of the rows whose outputs are needed, [asked]. None: all rows. For a head of several layers
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
    def asks_alone(self) -> bool:
        """True if only the asked ones of the rows of a pass take part in attention, and the other rows only
        write their KV; False if all rows must have a query row in the plan. That is so for several layers,
        because each layer reads all rows of the layer before.
        """
        return self.layers == 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one position: its keys and values, and its feature if the head reads features."""
        feature = self.hidden if self.taps else 0
        return self.make_kv(1, 1).bytes + feature * self.dtype.itemsize

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        """Return empty KV pages for the head's layers.

        pages: Number of pages.
        page_rows: Number of slots of a page.
        """
        heads = self.kv_heads, self.head_dim
        return KVPages(self.layers, pages, page_rows, *heads, self.dtype, self.device)

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        """Return the attention plan of one forward pass. See `plan_attention`.

        spans: For each sequence, its query rows and the KV that they see.
        page_rows: Number of slots of a KV page.
        """
        return plan_attention(spans, page_rows, self.group, "batched", self.dtype, self.device)

    def tap_slices(self) -> dict[int, Tensor]:
        """Return the matrix of each tap, [width, base width], by layer: a fused row is the sum of matrix @
        state. {} for a head that reads no features.
        """
        return {}

    def features(self, fused: Tensor) -> Tensor:
        """Convert fused rows to features as `forward` takes them, [rows, hidden]. The base class returns them
        unchanged.

        fused: Sums over the taps, as they arrive from the stages, [rows, width].
        """
        return fused

    @abstractmethod
    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass: write the KV of all rows, and return the outputs of the asked rows, [asked,
        hidden]. An output is the head's prediction of the next feature.

        tokens: Token ids, [rows].
        features: For each row, the feature of the position before its token, [rows, hidden].
        rows: Positions, slots and attention of the rows.
        """

    def store(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> None:
        """Write the KV of rows whose outputs are not needed. Call this only if `asks_alone` is True: in other
        heads, the KV of a row in a layer depends on the attention in the layers before.

        tokens: Token ids, [rows].
        features: Features by slot, [slots, hidden]. The feature of a row is in the row's own slot.
        rows: Positions and slots of the rows. No rows are asked, and the plan is None.
        """
        self.forward(tokens, features[rows.slots], rows)

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of outputs, [rows, draft vocabulary].

        outputs: Outputs of `forward`, [rows, hidden].
        """

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of outputs, fp32 [rows, draft vocabulary].

        outputs: Outputs of `forward`, [rows, hidden].
        """
        return torch.log_softmax(self.logits(outputs).float(), dim=-1)

    def choose(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the likeliest tokens of each row: log-probabilities and ids, both [rows, count], best first.
        The ids are those of the base model. Return None if no kernel computes logits and selection together;
        the caller then uses `log_probs`.

        outputs: Outputs of `forward`, [rows, hidden].
        count: Number of tokens per row.
        """
        return None

    def to_target(self, ids: Tensor) -> Tensor:
        """Convert ids of the draft vocabulary to ids of the base model, and return a tensor of the same
        shape. The base class has one vocabulary for both, and returns the ids unchanged.

        ids: Draft ids, a tensor of any shape.
        """
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
    def layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def asks_alone(self) -> bool:
        """True if only the asked ones of the due rows take part in attention; False if all do."""
        ...

    @property
    def kv_heads(self) -> int:
        """Number of KV heads of a layer."""
        ...

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        ...

    @property
    def offsets(self) -> Tensor | None:
        """What is added to a draft id to get the base model's id, [draft vocabulary]; None: equal ids."""
        ...

    @property
    def window(self) -> int | None:
        """Number of positions that each row can attend to; None: all positions."""
        ...

    def step(self, tokens: Tensor, features: Tensor, origins: Tensor, rows: HeadRows) -> Tensor:
        """Run `DraftHead.forward`, but gather the features: features[origins[i]] is the feature of row i.
        Return the outputs of the asked rows, [asked, hidden].

        tokens: Token ids, [rows].
        features: Features from which those of the rows are gathered, [n, hidden].
        origins: Index into `features` for each row, [rows].
        rows: Positions, slots and attention of the rows. Rows with negative slots are not written.
        """
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of outputs, [rows, draft vocabulary].

        outputs: Outputs of `step`, [rows, hidden].
        """
        ...
