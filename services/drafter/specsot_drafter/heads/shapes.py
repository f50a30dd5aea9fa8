"""What a head's tensors say about its shape, and whether that fits a base.

Refuses to know values of weights; the config is asked only for what no tensor tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specsot.errors import HeadMismatch, ModelError
from specsot.model.config import ModelConfig
from specsot_drafter.heads.checkpoint import Checkpoint

Kind = Literal["eagle1", "eagle3"]  # EAGLE-2 is EAGLE-1's head: only the tree is another

BLOCK = "layers.0"
ATTENTION, MLP = "self_attn", "mlp"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """hidden: its own width; vocab: ids it can draft; layers: decoder layers.

    inputs: columns the first layer's projections read; the layers behind it read `hidden`.
    """

    hidden: int
    inputs: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int


def kind_of(checkpoint: Checkpoint) -> Kind:
    """EAGLE-3's first layer norms the feature and reads the token's embedding beside it."""
    if checkpoint.layers == 0:
        raise ModelError(
            f"{checkpoint.directory}: no EAGLE head, as there is no tensor {BLOCK}.{ATTENTION}.q_proj.weight"
        )
    hidden, columns = _hidden(checkpoint), _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.q_proj.weight")[1]
    if f"{BLOCK}.hidden_norm.weight" in checkpoint or columns == 2 * hidden:
        return "eagle3"
    if "fc.weight" not in checkpoint:
        raise ModelError(f"{checkpoint.directory}: no EAGLE head, as there is no tensor fc.weight")
    return "eagle1"


def read_shape(checkpoint: Checkpoint, base: ModelConfig) -> HeadShape:
    """The shape of a head whose decoder layers and vocabulary are whole and fit together and the base.

    Raises HeadMismatch with both shapes, ModelError for a tensor that is missing.
    """
    shape = _read(checkpoint, base)
    for layer in range(shape.layers):
        for name, wanted in _layer_shapes(shape, layer).items():
            checkpoint.check(f"layers.{layer}.{name}", wanted)
    return shape


def _read(checkpoint: Checkpoint, base: ModelConfig) -> HeadShape:
    kind, hidden = kind_of(checkpoint), _hidden(checkpoint)
    queries, _ = _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.q_proj.weight")
    keys, _ = _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.k_proj.weight")
    intermediate, _ = _matrix(checkpoint, f"{BLOCK}.{MLP}.gate_proj.weight")
    heads = checkpoint.settings.get("num_attention_heads")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads <= 0 or queries % heads:
        raise HeadMismatch(
            f"{checkpoint.directory}: q_proj has {queries} rows, the config says {heads!r} heads"
        )
    dim = queries // heads
    if dim % 2 or keys % dim or heads % max(keys // dim, 1):
        raise HeadMismatch(
            f"{checkpoint.directory}: q_proj has {queries} rows for {heads} heads, k_proj has {keys}"
        )
    inputs = 2 * hidden if kind == "eagle3" else hidden
    vocab = _vocabulary(checkpoint, base) if kind == "eagle3" else base.vocab
    return HeadShape(hidden, inputs, heads, keys // dim, dim, intermediate, vocab, checkpoint.layers)


def _hidden(checkpoint: Checkpoint) -> int:
    """The width that attention's output projection writes."""
    return _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.o_proj.weight")[0]


def _matrix(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    found = checkpoint.shape(name)
    if len(found) != 2 or 0 in found:
        name = checkpoint.published(name)
        raise HeadMismatch(f"{checkpoint.directory}: {name} is {list(found)}, which is no matrix")
    return found[0], found[1]


def _vocabulary(checkpoint: Checkpoint, base: ModelConfig) -> int:
    """Ids an EAGLE-3 head can draft: its own lm_head's, or the base's where it has none and no map."""
    if "lm_head.weight" in checkpoint or "d2t" in checkpoint:
        return _matrix(checkpoint, "lm_head.weight")[0]
    named = checkpoint.settings.get("draft_vocab_size")
    if named not in (None, base.vocab):
        raise ModelError(
            f"{checkpoint.directory}: no tensor lm_head.weight, and draft_vocab_size {named!r} is not the "
            f"base's {base.vocab}, whose lm_head could be shared"
        )
    return base.vocab


def _layer_shapes(shape: HeadShape, layer: int) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that each decoder layer has."""
    hidden, keys = shape.hidden, shape.kv_heads * shape.head_dim
    queries, inner = shape.heads * shape.head_dim, shape.intermediate
    inputs = hidden if layer else shape.inputs
    return {
        f"{ATTENTION}.q_proj.weight": (queries, inputs),
        f"{ATTENTION}.k_proj.weight": (keys, inputs),
        f"{ATTENTION}.v_proj.weight": (keys, inputs),
        f"{ATTENTION}.o_proj.weight": (hidden, queries),
        f"{MLP}.gate_proj.weight": (inner, hidden),
        f"{MLP}.up_proj.weight": (inner, hidden),
        f"{MLP}.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    } | ({"input_layernorm.weight": (hidden,)} if layer else {})


def read_offsets(
    checkpoint: Checkpoint, shape: HeadShape, base: ModelConfig, device: torch.device | str
) -> torch.Tensor | None:
    """d2t [draft vocabulary]: base id = draft id + d2t[draft id]. None: the ids are the base's own.

    Every draft id must be another id of the base. A head that drafts the whole vocabulary has no map,
    and one that comes along with it all the same says nothing (the reference drops it).
    """
    if shape.vocab == base.vocab:
        return None
    if "d2t" not in checkpoint:
        checkpoint.check("lm_head.weight", (base.vocab, shape.hidden))
    checkpoint.check("d2t", (shape.vocab,))
    offsets = checkpoint.tensor("d2t", torch.long, "cpu")
    targets = offsets + torch.arange(shape.vocab)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= base.vocab:
        raise HeadMismatch(f"{checkpoint.directory}: d2t names ids {low}..{high}, the base has {base.vocab}")
    if len(targets.unique()) != shape.vocab:
        raise ModelError(f"{checkpoint.directory}: d2t names an id twice")
    return offsets.to(device)


def check_supported(checkpoint: Checkpoint) -> None:
    """What a config says, no tensor would show, and no head here computes. Raises ModelError."""
    settings: Mapping[str, Any] = checkpoint.settings
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{checkpoint.source}: hidden_act {activation!r} is not supported, only silu")
    if "quantization_config" in settings:
        raise ModelError(f"{checkpoint.source}: quantized weights (quantization_config) are not supported")
