"""A DFlash head: drafts a block in one pass, over keys and values that are made of the base's features.

A block consists of the newest committed token, which the base model has not processed yet, and masks after
it. The rows of a block attend to the whole sequence before them and to each other; with `causal_head`
(JetSpec) only to the rows before them. The rows of the sequence need no forward pass: their keys and values
are projections of the features. The formats of z-lab and of vLLM's speculators are supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specsot.checkpoint.fields import Fields
from specsot.errors import HeadMismatch, ModelError
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.checkpoint import Checkpoint, kind_of
from specsot_drafter.heads.eagle import EagleHead
from specsot_kernels.segments import RowSpan, VisibleColumns
from specsot_model.kv import KVPages
from specsot_model.layers import Norm
from specsot_model.linear import look_up

# Rows. Bounds the size of a block. Published heads have 7 to 16.
MAX_BLOCK_ROWS = 64
# Name of the tensor that replaces unknown hidden states in a P-EAGLE head.
MASK = "mask_hidden"
# Config fields that may name the token id of rows whose token is unknown.
MASKS = "mask_token_id", "pard_token", "ptd_token_id"


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The layout of a block.

    Example: rows 4, first 1: tokens [t m m m] with the committed token t; the 3 masks draft one token each.

    rows: Number of rows.
    mask: Token id of the rows after the first.
    causal: True if a row attends only to itself and to the rows of its block before it. False if it attends
        to all rows of its block.
    near: Like `causal`, but for layers with an attention window.
    first: Index of the first row that drafts: 1, or 0 if the head also samples from the committed token's
        row.
    """

    rows: int
    mask: int
    causal: bool
    near: bool
    first: int

    @property
    def drafts(self) -> int:
        """Number of tokens that one block drafts."""
        return self.rows - self.first


def block_plan(head: Checkpoint, vocabulary: int) -> BlockPlan:
    """Return the layout of a block, from a head's config.

    head: The head's checkpoint.
    vocabulary: Number of token ids of the base model.

    If the config does not name the direction of attention, layers without a window are bidirectional and
    layers with a window are causal, as in vLLM. Raises ModelError for a bad block size, and HeadMismatch for
    a mask id that the base model does not have.

    A block size outside 2 .. MAX_BLOCK_ROWS is bad, and so is a missing one.
    """
    rows = head.settings.get("block_size")
    if not isinstance(rows, int) or not 2 <= rows <= MAX_BLOCK_ROWS:
        raise ModelError(f"{head.source}: block_size must be in 2 .. {MAX_BLOCK_ROWS}, got {rows!r}")
    named = next((name for name in ("causal_head", "is_causal", "causal") if name in head.settings), None)
    causal = named is not None and head.flag(named)
    near = causal if named else not head.flag("sliding_window_non_causal")
    return BlockPlan(rows, mask_of(head, vocabulary), causal, near, first_of(head))


def first_of(head: Checkpoint) -> int:
    """Return the index of the first row of a block that drafts: 0 if the committed token's row does, else 1.

    head: The head's checkpoint.

    The config field is `sample_from_anchor`. Without the field, the committed token's row of a DSpark head
    drafts, as in DeepSeek's code and SpecForge's, unless the config has speculators' layout, as in vLLM and
    llama.cpp; and that of a DFlash head does not.
    """
    settings = head.settings
    if "sample_from_anchor" in settings:
        return 0 if head.flag("sample_from_anchor") else 1
    is_dspark = kind_of(head) == "dspark" or "markov_rank" in settings
    return 0 if is_dspark and "aux_hidden_state_layer_ids" not in settings else 1


def mask_of(head: Checkpoint, vocabulary: int) -> int:
    """Return the token id of rows whose token is unknown, from the head's config.

    head: The head's checkpoint.
    vocabulary: Number of token ids of the base model.

    Raises HeadMismatch if the config names none, or one that is not below `vocabulary`.

    The first of the fields MASKS that is present counts. A value that is no integer, or negative, is
    refused, too.
    """
    mask = next((head.settings[name] for name in MASKS if name in head.settings), None)
    if not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise HeadMismatch(f"{head.source}: mask_token_id {mask!r}, the base has {vocabulary} ids")
    return mask


def depth_of(head: Checkpoint) -> int | None:
    """Return the number of tokens that a P-EAGLE head learned to draft in one pass. Return None if its config
    does not say.

    head: The head's checkpoint.

    The field is `para_depths`, or `speculative_tokens` of a proposal method in vLLM's speculators. Raises
    ModelError if the field is not a count.

    Of several fields, `para_depths` comes first.
    """
    config = head.settings.get("speculators_config")
    proposals = config.get("proposal_methods") if isinstance(config, dict) else None
    named = [("para_depths", head.settings), *(("speculative_tokens", one) for one in proposals or ())]
    counts = [Fields(head.source, where).count(name) for name, where in named if name in where]
    return counts[0] if counts else None


def block_taps(head: Checkpoint) -> list[Any]:
    """Return the numbers of the layers of the base model whose inputs are fused, from the head's config.

    head: The head's checkpoint.

    Speculators names these layers; z-lab names the layers before them: outputs of [1, 9] -> inputs of [2,
    10]. Raises HeadMismatch if z-lab's field is not a list of layer numbers.

    The first format has the field `aux_hidden_state_layer_ids`, whose single number counts as a list of one;
    its values are not checked here. Without both fields, HeadMismatch is raised.
    """
    fields = head.settings
    if (inputs := fields.get("aux_hidden_state_layer_ids")) is not None:
        return inputs if isinstance(inputs, list) else [inputs]
    outputs = fields.get("target_layer_ids")
    if not isinstance(outputs, list) or not all(type(each) is int for each in outputs):
        raise HeadMismatch(f"{head.source}: target_layer_ids must be layer numbers, got {outputs!r}")
    return [each + 1 for each in outputs]


@dataclass(kw_only=True, eq=False)
class BlockHead(EagleHead):
    """A DFlash head that was loaded for its base model.

    block: The layout of a block.
    context_norm: Norm of the fused features.
    input_norm: Norm of the embeddings, before the first layer.
    norm: Norm of the outputs, before lm_head.
    """

    kind = "dflash"

    block: BlockPlan
    context_norm: Norm
    input_norm: Norm
    norm: Norm

    @property
    def row_bytes(self) -> int:
        """The bytes of one position's keys and values; features are converted to these on arrival."""
        return self.make_kv(1, 1).bytes

    def features(self, fused: Tensor) -> Tensor:
        """Convert fused rows to normed features, [rows, hidden].

        fused: Sums over the taps, [rows, width].
        """
        return self.context_norm(super().features(fused))

    def look_back(self, span: RowSpan, window: int) -> Iterator[RowSpan]:
        """Yield the spans of a block in layers with a window. All rows reach back as far as the first one, as
        in training.

        span: The rows of the block.
        window: Number of positions before the block that are visible.

        One span is yielded. For a block that is causal in such layers, a row sees only itself and the rows
        before it in the block; otherwise it sees what it sees without a window. Positions are cut at 0.
        """
        seen = tuple((2 << row) - 1 for row in range(span.rows)) if self.block.near else span.seen
        nothing = (0,) * span.rows
        since = (max(span.base - window, 0),) * span.rows
        yield replace(span, visible=seen, sight=VisibleColumns(nothing, since, nothing))

    def remember(self, features: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> None:
        """Store keys and values of committed tokens in all layers.

        features: Features of the tokens, [rows, hidden].
        positions: Position of each token, [rows].
        slots: KV slot of each token, [rows].
        kv: The KV pages.
        """
        for layer in self.decoder.layers:
            layer.remember(features, positions, slots, kv)

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Run the rows of blocks. Return normed outputs, [rows, hidden].

        tokens: Token ids, the mask included, [rows].
        features: Ignored, because the features are in the KV pages already. A tensor of any shape.
        rows: Positions, slots and attention of the rows.
        """
        x = look_up(self.table, tokens)
        return self.norm(self.decoder.forward(self.input_norm(x), x, rows))
