"""Decoder layers in plain torch, their norms, and the embedding, final norm and lm_head around them.

Numerics follow Hugging Face's eager modules unless a docstring says otherwise. Shapes: `rows` is the number
of tokens in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.errors import ModelError
from specsot_model.attention import AttentionPlan, attend
from specsot_model.kv import KVPages, Places
from specsot_model.linear import Linear, Packed, Table, hold_table, of_lm_head
from specsot_model.mlp import fetch_mlp
from specsot_model.projections import fuse, fuse_qkv
from specsot_model.rotary import interleave, rotate
from specsot_model.weights import Fetch

Part = TypeVar("Part")
AnyNorm = Callable[[Tensor], Tensor]  # [rows, ..., size] -> the same shape
# Applies rotary embedding to the queries and keys of [rows, heads + 2 * kv_heads, head_dim], in place, and
# stores keys and values in the KV cache.
Keep = Callable[[Tensor], None]


class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 inside.

    torch has no fused RMSNorm for the CPU. There, the norm is computed as
    x / hypot(||x||, sqrt(n * eps)) * (weight * sqrt(n)), in four short passes instead of seven.
    """

    __slots__ = ("_floor", "_scaled", "_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.weight = weight
        self.eps = eps
        self._shape = (size,)
        self._scaled = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.weight.dtype in (x.dtype, torch.float32):
            return F.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div(torch.hypot(length, self._floor)).mul_(self._scaled).to(x.dtype)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


def fetch_norm(fetch: Fetch, name: str, config: ModelConfig) -> AnyNorm:
    """Load the norm called `name` over the hidden size: RMSNorm or LayerNorm, as the model has it."""
    if config.norm_offset:
        # Weight + offset is near 1 and would have few bits left in a 16-bit type.
        exact = replace(fetch, dtype=torch.float32)
        return Norm(exact(f"{name}.weight", (config.hidden,)) + config.norm_offset, config.eps)
    weight = fetch(f"{name}.weight", (config.hidden,))
    if config.norm == "rms":
        return Norm(weight, config.eps)
    return LayerNorm(weight, fetch(f"{name}.bias", (config.hidden,)), config.eps)


class Block:
    """Layer `index` of a model, loaded under the tensor names of its family."""

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig) -> None:
        names = config.names
        hidden = config.hidden
        width = config.heads * config.head_dim
        layer = names.layer.format(index)
        attention = f"{layer}.{names.attention}"
        self.config = config
        self.device = torch.device(fetch.device)
        self.rope = (config.sliding_rope if index in config.windowed else None) or config.rope
        self.input_norm = fetch_norm(fetch, f"{layer}.{names.input_norm}", config)
        self.qkv = fuse_qkv(fetch, attention, config, hidden)
        self.head_norms: tuple[Norm, Norm] | None = None
        if config.qk_norm:
            spans = (config.heads, config.kv_heads) if config.whole_qk_norm else (1, 1)
            dim = config.head_dim
            rotated = config.rope.rotated(config.head_dim)
            self.head_norms = fetch_head_norms(
                fetch, attention, dim, config.eps, rotated, spans, config.norm_offset
            )
        self.out = fuse(fetch, [f"{attention}.{names.out}"], (hidden, width), config.out_bias)
        self.sinks = fetch_sinks(fetch, f"{attention}.{names.sinks}", config) if names.sinks else None
        self.mlp_norm = fetch_norm(fetch, f"{layer}.{names.mlp_norm}", config)
        self.mlp = fetch_mlp(fetch, layer, config, index)
        self.after_attention, self.after_mlp = (
            fetch_norm(fetch, f"{layer}.{name}", config) if name else _unchanged
            for name in (names.after_attention, names.after_mlp)
        )

    def forward(
        self, hidden: Tensor, table: Tensor, places: Places, plan: AttentionPlan, kv: KVPages, layer: int
    ) -> None:
        """Add this layer's attention and MLP updates to the residual stream [rows, hidden], in place.

        table: Rotations of the rows; see `Rotary.table`.
        places: Where the KV of the rows is stored; see `KVPages.locate`.
        layer: Index of this layer within `kv`, which starts at the first layer of the range.
        """
        self.update(hidden, self.keeping(table, places, kv, layer), kv.layers[layer], plan)

    def keeping(self, table: Tensor, places: Places, kv: KVPages, layer: int) -> Keep:
        """Return a function that rotates queries and keys by `table` and stores keys and values."""
        config = self.config

        def keep(heads: Tensor) -> None:
            rotate(heads.narrow(1, 0, config.heads + config.kv_heads), table)
            stored = heads.narrow(1, config.heads, 2 * config.kv_heads)
            kv.put(layer, places, stored.view(len(heads), 2, config.kv_heads, config.head_dim))

        return keep

    def update(self, hidden: Tensor, keep: Keep, kv_layer: Tensor, plan: AttentionPlan) -> None:
        """Do what `forward` does, with `keep` as the work between the projections and attention."""
        update = self.attention(hidden, keep, kv_layer, plan)
        if self.config.parallel:
            update.add_(self.mlp(self.mlp_norm(hidden)))
            hidden.add_(update)
        else:
            hidden.add_(update)
            hidden.add_(self.after_mlp(self.mlp(self.mlp_norm(hidden))))

    def attention(self, hidden: Tensor, keep: Keep, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the attention update, [rows, hidden], without adding it to the residual stream."""
        heads = self.qkv(self.input_norm(hidden)).view(len(hidden), -1, self.config.head_dim)
        self._norm_heads(heads)
        keep(heads)
        queries = heads.narrow(1, 0, self.config.heads).unflatten(1, (self.config.kv_heads, -1))
        found = attend(queries, kv_layer, plan, self.sinks, self.config.attention_softcap)
        if self.config.gated_heads:
            found = found * heads.narrow(1, -self.config.heads, self.config.heads).flatten(1).sigmoid()
        return self.after_attention(self.out(found))

    def _norm_heads(self, heads: Tensor) -> None:
        """Normalize the queries and keys in [rows, heads + 2 * kv_heads, head_dim], in place.

        Without head norms (QK norm) it changes nothing.
        """
        config = self.config
        turned = heads.narrow(1, 0, config.heads + config.kv_heads).split((config.heads, config.kv_heads), 1)
        for part, norm in zip(turned, self.head_norms or ()):
            part.copy_(norm(part.flatten(1)).view_as(part) if config.whole_qk_norm else norm(part))


def _unchanged(update: Tensor) -> Tensor:
    return update


def fetch_sinks(fetch: Fetch, name: str, config: ModelConfig) -> Tensor:
    """Load the attention sinks, one score per query head: fp32 [kv_heads, g]; see `attend`."""
    return fetch(name, (config.heads,)).float().view(config.kv_heads, -1)


def fetch_head_norms(
    fetch: Fetch,
    prefix: str,
    dim: int,
    eps: float,
    rotated: int | None = None,
    spans: tuple[int, int] = (1, 1),
    offset: float = 0.0,
) -> tuple[Norm, Norm]:
    """Load the norms of queries and keys.

    dim: Head size.
    rotated: How many numbers of a head rotate; None: all. See `interleave`.
    spans: How many query heads, and how many key heads, one norm covers at once: (1, 1) normalizes each
        head by itself, (heads, kv_heads) all heads together.
    offset: Number added to the weights.
    """
    exact = replace(fetch, dtype=torch.float32) if offset else fetch
    q, k = (
        interleave(exact(f"{prefix}.{name}.weight", (heads * dim,)), dim, rotated)
        for name, heads in zip(("q_norm", "k_norm"), spans)
    )
    return Norm(q + offset, eps), Norm(k + offset, eps)


@dataclass(frozen=True, slots=True)
class Edges:
    """The parts before a base model's first layer and after its last, which a draft head may share.

    Each part is loaded or looked up when its function is called, and raises ModelError if it is missing.

    config: The base model's config.
    embedding: Returns the table [vocab, hidden].
    final_norm: Returns the norm that precedes the lm_head.
    lm_head: Returns the product [hidden] -> vocab.
    lm_head_rows: Returns the rows [ids, hidden] of the lm_head's weight for token ids [ids], or all rows for
        None.
    """

    config: ModelConfig
    embedding: Callable[[], Table]
    final_norm: Callable[[], AnyNorm]
    lm_head: Callable[[], Linear]
    lm_head_rows: Callable[[Tensor | None], Tensor]


def held(part: Part | None, name: str) -> Part:
    """Return `part`, or raise ModelError with its `name` if this range of layers does not have it."""
    if part is None:
        raise ModelError(f"this range of layers holds no {name}")
    return part


def add_tap(hidden: Tensor, weight: Tensor | Linear, fused: Tensor | None) -> Tensor:
    """Return `fused` [rows, Hd] plus hidden [rows, H] times a tap's weight [Hd, H].

    `fused` is changed in place; None means zero.
    """
    part = F.linear(hidden, weight) if isinstance(weight, Tensor) else weight(hidden)
    return part if fused is None else fused.add_(part)


def stored_edges(config: ModelConfig, fetch: Fetch) -> Edges:
    """Return the edges of a base model that runs in another process, read from its files when needed."""
    given = fetch, config
    return Edges(
        config,
        partial(fetch_embedding, *given),
        partial(fetch_final_norm, *given),
        partial(fetch_lm_head, *given),
        partial(_fetch_lm_head_rows, *given),
    )


def fetch_embedding(fetch: Fetch, config: ModelConfig, head: Linear | None = None) -> Table:
    """Load the embedding [vocab, hidden].

    head: The lm_head, if it is loaded. In a tied model it is the same table and is shared, unless its
        packed form cannot be read by rows.
    """
    name = _name_of_embedding(fetch, config)
    if head is not None and name == _name_of_lm_head(fetch, config):
        if isinstance(head.multiply, Packed):
            return head.multiply
        if head.weight is not None:
            return head.weight
    return hold_table(_fetch_table(fetch, config, name), fetch.quantization)


def fetch_final_norm(fetch: Fetch, config: ModelConfig) -> AnyNorm:
    """Load the norm that precedes the lm_head."""
    return fetch_norm(fetch, config.names.norm, config)


def fetch_lm_head(fetch: Fetch, config: ModelConfig, embedding: Table | None = None) -> Linear:
    """Load the lm_head, [hidden] -> vocab.

    embedding: The embedding, if it is loaded; a tied model shares it.
    """
    name = _name_of_lm_head(fetch, config)
    if embedding is None or name != _name_of_embedding(fetch, config):
        embedding = _fetch_table(fetch, config, name)
    return Linear(embedding, None, of_lm_head(fetch.quantization))


def _fetch_lm_head_rows(fetch: Fetch, config: ModelConfig, ids: Tensor | None) -> Tensor:
    table = _fetch_table(fetch, config, _name_of_lm_head(fetch, config))
    return table if ids is None else table[ids]


def rows_of_linear(linear: Linear, ids: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight rows [ids, in] of a loaded product, or all rows for ids None.

    A packed product has no weight to index; multiplying the identity matrix recovers it.
    """
    if linear.weight is not None:
        return linear.weight if ids is None else linear.weight[ids]
    columns = linear(torch.eye(linear.shape[1], dtype=dtype, device=device))  # [in, out]
    return columns.T.contiguous() if ids is None else columns.T[ids]


def _name_of_embedding(fetch: Fetch, config: ModelConfig) -> str:
    """Return the tensor name of the embedding: the lm_head's if a tied model is published only with that."""
    own = config.names.embedding
    other = config.names.head
    return other if config.tied and f"{own}.weight" not in fetch else own


def _name_of_lm_head(fetch: Fetch, config: ModelConfig) -> str:
    """Return the tensor name of the lm_head: the embedding's if the model is tied and has no lm_head.

    If a model has an lm_head, it is used even if the config says that the weights are tied, as in
    Transformers.
    """
    own = config.names.head
    other = config.names.embedding
    return other if config.tied and f"{own}.weight" not in fetch else own


def _fetch_table(fetch: Fetch, config: ModelConfig, name: str) -> Tensor:
    return fetch(f"{name}.weight", (config.vocab, config.hidden))
