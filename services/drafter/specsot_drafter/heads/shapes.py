"""What an EAGLE-3 head's tensors say about its shape, and whether that fits a base.

Refuses to know values of weights; the config is asked only for what no tensor tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specsot.errors import HeadMismatch, ModelError
from specsot.model.config import ModelConfig
from specsot.model.weights import WeightFiles

LEAST_LAYERS = 7  # below, the taps 2, L // 2, L - 3 are not three different layers
ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """hidden: its own width; vocab: ids it can draft."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


def fit_shape(files: WeightFiles, settings: Mapping[str, Any], base: ModelConfig, source: Path) -> HeadShape:
    """The shape of a head that fits `base`; HeadMismatch names both shapes where it does not."""
    shape = _read_shape(files, settings, source)
    _expect(source, "fc.weight", files.shape("fc.weight"), (shape.hidden, 3 * base.hidden))
    for name, wanted in _wanted(shape).items():
        _expect(source, name, files.shape(name), wanted)
    if base.layers < LEAST_LAYERS:
        raise HeadMismatch(f"{source}: EAGLE-3 taps three layers, the base has only {base.layers} layers")
    _check_vocabulary(files, shape, base, source)
    return shape


def _read_shape(files: WeightFiles, settings: Mapping[str, Any], source: Path) -> HeadShape:
    hidden, _ = files.shape("fc.weight")
    queries, _ = files.shape(f"{ATTENTION}.q_proj.weight")
    keys, _ = files.shape(f"{ATTENTION}.k_proj.weight")
    intermediate, _ = files.shape(f"{MLP}.gate_proj.weight")
    vocab, _ = files.shape("lm_head.weight")
    heads = settings.get("num_attention_heads")
    if not isinstance(heads, int) or heads <= 0 or queries % heads:
        raise HeadMismatch(f"{source}: q_proj has {queries} rows, the config says {heads!r} heads")
    head_dim = queries // heads
    if head_dim % 2 or keys % head_dim or heads % max(keys // head_dim, 1):
        raise HeadMismatch(f"{source}: q_proj has {queries} rows for {heads} heads, k_proj has {keys}")
    return HeadShape(hidden, heads, keys // head_dim, head_dim, intermediate, vocab)


def _wanted(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Every other tensor's shape; the layer's projections read embedding and feature side by side."""
    hidden, keys = shape.hidden, shape.kv_heads * shape.head_dim
    queries = shape.heads * shape.head_dim
    return {
        f"{ATTENTION}.q_proj.weight": (queries, 2 * hidden),
        f"{ATTENTION}.k_proj.weight": (keys, 2 * hidden),
        f"{ATTENTION}.v_proj.weight": (keys, 2 * hidden),
        f"{ATTENTION}.o_proj.weight": (hidden, queries),
        f"{MLP}.gate_proj.weight": (shape.intermediate, hidden),
        f"{MLP}.up_proj.weight": (shape.intermediate, hidden),
        f"{MLP}.down_proj.weight": (hidden, shape.intermediate),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab, hidden),
    }


def _expect(source: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise HeadMismatch(f"{source}: {name} is {list(found)}, this base and head need {list(wanted)}")


def _check_vocabulary(files: WeightFiles, shape: HeadShape, base: ModelConfig, source: Path) -> None:
    """Every draft id must be an id of the base."""
    if "d2t" not in files:
        _expect(source, "lm_head.weight", (shape.vocab, shape.hidden), (base.vocab, shape.hidden))
        return
    _expect(source, "d2t", files.shape("d2t"), (shape.vocab,))
    targets = files.tensor("d2t", torch.long, "cpu") + torch.arange(shape.vocab)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= base.vocab:
        raise HeadMismatch(f"{source}: d2t names ids {low}..{high}, the base has {base.vocab}")
    if len(targets.unique()) != shape.vocab:
        raise ModelError(f"{source}: d2t names an id twice")
