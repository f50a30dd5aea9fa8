"""A DFlash head: drafts a block in one pass, over keys and values that it makes of the base's features.

A block is the newest committed token, which the base was not fed yet, and masks behind it. Its rows see the
text in front of them and each other; with `causal_head` (JetSpec) only those before them. A text's rows need
no pass: their keys and values are products of its features. As published by z-lab, and by vLLM's speculators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specsot.checkpoint.fields import Fields
from specsot.errors import HeadMismatch, ModelError
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.checkpoint import Checkpoint
from specsot_drafter.heads.eagle import EagleHead
from specsot_kernels.segments import RowSpan, VisibleColumns
from specsot_model.kv import KVPages
from specsot_model.layers import Norm
from specsot_model.linear import Linear, look_up

MOST_BLOCK = 64  # rows of a block; published ones have 7 to 16
MASK = "mask_hidden"  # the tensor that stands in for unknown states in a P-EAGLE head
MASKS = "mask_token_id", "pard_token", "ptd_token_id"  # names of the id of a row without a token


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """rows: of a block. mask: id of those behind the first. causal: a row sees only those before it; near: in
    layers with a window.

    first: of the rows that draft. The committed token's does not, unless the head is to sample from it.
    """

    rows: int
    mask: int
    causal: bool
    near: bool
    first: int

    @property
    def drafts(self) -> int:
        return self.rows - self.first


def block_plan(head: Checkpoint, vocabulary: int) -> BlockPlan:
    """What its config says. Raises ModelError, HeadMismatch for what cannot be drafted so.

    Where it does not say whether rows see those behind them, layers without a window are two-sided and those
    with one are not, as vLLM has it.
    """
    rows = head.settings.get("block_size")
    if not isinstance(rows, int) or not 2 <= rows <= MOST_BLOCK:
        raise ModelError(f"{head.source}: block_size must be in 2 .. {MOST_BLOCK}, got {rows!r}")
    said = next((name for name in ("causal_head", "is_causal", "causal") if name in head.settings), None)
    causal = said is not None and head.flag(said)
    near = causal if said else not head.flag("sliding_window_non_causal")
    first = 0 if head.flag("sample_from_anchor") else 1
    return BlockPlan(rows, mask_of(head, vocabulary), causal, near, first)


def mask_of(head: Checkpoint, vocabulary: int) -> int:
    """The id of rows whose token is not known. Raises HeadMismatch."""
    mask = next((head.settings[name] for name in MASKS if name in head.settings), None)
    if not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise HeadMismatch(f"{head.source}: mask_token_id {mask!r}, the base has {vocabulary} ids")
    return mask


def depth_of(head: Checkpoint) -> int | None:
    """How many tokens a P-EAGLE head learned to draft in one pass; None where its config does not say.

    Speculators names it `para_depths`, or says how many its proposals have, which are as many. Raises
    ModelError.
    """
    outer = head.settings.get("speculators_config")
    proposals = outer.get("proposal_methods") if isinstance(outer, dict) else None
    named = [("para_depths", head.settings), *(("speculative_tokens", one) for one in proposals or ())]
    said = [Fields(head.source, where).count(name) for name, where in named if name in where]
    return said[0] if said else None


def block_taps(head: Checkpoint) -> list[Any]:
    """Layers whose inputs are fused: z-lab names the layers whose outputs they are, speculators these."""
    fields = head.settings
    if (inputs := fields.get("aux_hidden_state_layer_ids")) is not None:
        return inputs if isinstance(inputs, list) else [inputs]
    outputs = fields.get("target_layer_ids")
    if not isinstance(outputs, list) or not all(type(each) is int for each in outputs):
        raise HeadMismatch(f"{head.source}: target_layer_ids must be layer numbers, got {outputs!r}")
    return [each + 1 for each in outputs]


@dataclass(kw_only=True, eq=False)
class BlockHead(EagleHead):
    """context_norm: of the fused features. offsets: see `Eagle3Head`."""

    kind = "dflash"

    block: BlockPlan
    context_norm: Norm
    input_norm: Norm
    norm: Norm
    lm_head: Linear
    offsets: Tensor | None

    @property
    def row_bytes(self) -> int:
        """No features are kept: they become keys and values as they come."""
        return self.make_kv(1, 1).bytes

    def features(self, fused: Tensor) -> Tensor:
        return self.context_norm(super().features(fused))

    def look_back(self, span: RowSpan, window: int) -> Iterator[RowSpan]:
        """All rows of a block see as far back as its first one; it was trained so."""
        seen = tuple((2 << row) - 1 for row in range(span.rows)) if self.block.near else span.seen
        nothing = (0,) * span.rows
        since = (max(span.base - window, 0),) * span.rows
        yield replace(span, visible=seen, sight=VisibleColumns(nothing, since, nothing))

    def remember(self, features: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> None:
        """Keys and values of rows of a text, [rows, hidden], in all layers."""
        for layer in self.decoder.layers:
            layer.remember(features, positions, slots, kv)

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Rows of blocks, which have no features of their own; what `logits` reads of each."""
        x = look_up(self.table, tokens)
        return self.norm(self.decoder.forward(self.input_norm(x), x, rows))

    def logits(self, outputs: Tensor) -> Tensor:
        return self.lm_head(outputs)

    def to_target(self, ids: Tensor) -> Tensor:
        return ids if self.offsets is None else ids + self.offsets[ids]
