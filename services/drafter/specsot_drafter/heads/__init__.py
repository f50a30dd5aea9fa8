"""Draft heads: the interface that growth and the engine use, for every family."""

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
    """Where the rows of one pass stand, and whose outputs are wanted.

    positions, slots: [rows]; their KV goes to these slots of `kv`.
    asked: [few] row numbers whose output is wanted, all where absent; a head of several layers is asked
           for all. plan: with one query row for each of them; None when none is wanted.
    """

    positions: Tensor
    slots: Tensor
    plan: AttentionPlan | None
    kv: KVPages
    asked: Tensor | None = None


class DraftHead(ABC):
    """A small model that guesses the next token from a token and the base's feature before it.

    taps:       layers of the base whose input it fuses, ascending (the number of layers: last output).
    width:      columns of a fused row, the sum of the taps' slices, as it arrives from the stages.
    hidden:     columns of a feature, of its own output too.
    layers, kv_heads, head_dim, group: of its KV and attention; group is query heads per KV head.
    draft_vocab: ids it can draft.
    positions:  how many positions its base has.
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
        """KV and feature bytes of one position."""
        feature = self.hidden if self.taps else 0
        return self.make_kv(1, 1).bytes + feature * self.dtype.itemsize

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        """Empty pages for its layers."""
        heads = self.kv_heads, self.head_dim
        return KVPages(self.layers, pages, page_rows, *heads, self.dtype, self.device)

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        """Of one pass over `spans`, over pages as its layers read them. See `plan_attention`."""
        return plan_attention(spans, page_rows, self.group, "batched", self.dtype, self.device)

    def tap_slices(self) -> dict[int, Tensor]:
        """For each tap its slice [width, base width]: the fused row is the sum of slice @ state."""
        return {}

    def features(self, fused: Tensor) -> Tensor:
        """[rows, width] as they arrive to [rows, hidden] as `forward` takes them."""
        return fused

    @abstractmethod
    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """One pass over tokens [rows] and features [rows, hidden]: writes the KV of all rows, returns the
        features that follow those that are asked for.
        """

    @abstractmethod
    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] outputs of `forward` to [rows, draft vocabulary]."""

    def log_probs(self, outputs: Tensor) -> Tensor:
        """The same as log-probabilities, fp32 [rows, draft vocabulary]."""
        return torch.log_softmax(self.logits(outputs).float(), dim=-1)

    def choose(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Of each row its `count` best tokens of the base by `log_probs`, best first: log-probabilities and
        ids, both [rows, count]. None where no kernel does all of that.
        """
        return None

    def to_target(self, ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary to ids of the base's, of any shape."""
        return ids


class GraphHead(Protocol):
    """What graphs run of a head: it waits for nothing on the host; rows of negative slots stay unwritten.

    layers, kv_heads, group: as in `DraftHead`. offsets: what is added to its ids to get those of the base.
    window: how many positions back each row sees the text; None: all of it.
    asks_alone: of due rows those that are asked attend alone; else all do.
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
        """See `DraftHead.forward`; row i is fed with features[origins[i]]."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """See `DraftHead`."""
        ...
