"""Draft heads: what growth and the engine ask of one, whatever its family."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from specsot.model.attention import AttentionPlan
from specsot.model.kv import KVPages


class DraftHead(Protocol):
    """A small model that guesses the next token from a token and the base's feature before it.

    taps:       layers of the base whose input it fuses, ascending (the number of layers: last output).
    width:      columns of a fused row, the sum of the taps' slices, as it arrives from the stages.
    hidden:     columns of a feature, of its own output too.
    layers, kv_heads, head_dim, group: of its KV and attention; group is query heads per KV head.
    draft_vocab: ids it can draft.
    positions:  how many positions its base has.
    """

    taps: tuple[int, ...]
    width: int
    hidden: int
    layers: int
    kv_heads: int
    head_dim: int
    group: int
    draft_vocab: int
    positions: int

    @property
    def dtype(self) -> Any: ...

    @property
    def device(self) -> Any: ...

    @property
    def row_bytes(self) -> int:
        """KV and feature bytes of one position."""
        ...

    def tap_slices(self) -> dict[int, Tensor]:
        """For each tap its slice [width, base width]: the fused row is the sum of slice @ state."""
        ...

    def features(self, fused: Tensor) -> Tensor:
        """[rows, width] as they arrive to [rows, hidden] as `forward` takes them."""
        ...

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
        """One pass: writes the KV of all rows, returns the features that follow.

        tokens, positions, slots: [rows]; features: [rows, hidden]. asked: [few] row numbers whose
        output is wanted, all where absent; `plan` has one query row for each of them, and is None when
        none is wanted. A head of several layers is asked for all.
        Returns [rows or few, hidden].
        """
        ...

    def log_probs(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] outputs of `forward` to [rows, draft vocabulary] log-probabilities."""
        ...

    def to_target(self, ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary to ids of the base's."""
        ...
