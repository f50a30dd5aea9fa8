"""One decoder layer, and what stands before the first and behind the last: embedding, final norm, lm_head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from specsot.errors import ModelError
from specsot.model.attention import AttentionPlan, attend
from specsot.model.config import ModelConfig
from specsot.model.kv import KVPages, Places
from specsot.model.layers import AnyNorm, Norm, fetch_mlp, fetch_norm, fuse, fuse_qkv, interleave, rotate
from specsot.model.linear import Linear
from specsot.model.precision import of_lm_head
from specsot.model.weights import Fetch


class Block:
    """Layer `index` of a model, fetched under its family's names."""

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig) -> None:
        names, hidden, width = config.names, config.hidden, config.heads * config.head_dim
        layer = names.layer.format(index)
        attention = f"{layer}.{names.attention}"
        self.config = config
        self.input_norm = fetch_norm(fetch, f"{layer}.{names.input_norm}", config)
        self.qkv = fuse_qkv(fetch, attention, config, hidden)
        self.head_norms = _head_norms(fetch, attention, config)
        self.out = fuse(fetch, [f"{attention}.{names.out}"], (hidden, width), config.out_bias)
        self.mlp_norm = fetch_norm(fetch, f"{layer}.{names.mlp_norm}", config)
        self.mlp = fetch_mlp(fetch, layer, config)

    def forward(
        self, hidden: Tensor, table: Tensor, places: Places, plan: AttentionPlan, kv: KVPages, layer: int
    ) -> None:
        """Add this layer's two updates to the residual stream [rows, hidden], in place.

        table: rotations of the rows; places: where their KV goes; layer: which of `kv`'s layers.
        """
        q = self._project(self.input_norm(hidden), table, places, kv, layer)
        update = self.out(attend(q, kv.layers[layer], plan))
        if self.config.parallel:
            update.add_(self.mlp(self.mlp_norm(hidden)))
            hidden.add_(update)
        else:
            hidden.add_(update)
            hidden.add_(self.mlp(self.mlp_norm(hidden)))

    def _project(self, x: Tensor, table: Tensor, places: Places, kv: KVPages, layer: int) -> Tensor:
        """Queries [rows, kv_heads, g, head_dim]; keys and values go to their places."""
        config, rows = self.config, x.shape[0]
        heads = self.qkv(x).view(rows, -1, config.head_dim)
        turned = heads.narrow(1, 0, config.heads + config.kv_heads)
        if self.head_norms is not None:
            for part, norm in zip(turned.split((config.heads, config.kv_heads), 1), self.head_norms):
                part.copy_(norm(part))
        rotate(turned, table)
        stored = heads.narrow(1, config.heads, 2 * config.kv_heads)
        kv.put(layer, places, stored.view(rows, 2, config.kv_heads, config.head_dim))
        return heads.narrow(1, 0, config.heads).view(rows, config.kv_heads, -1, config.head_dim)


def _head_norms(fetch: Fetch, prefix: str, config: ModelConfig) -> tuple[Norm, Norm] | None:
    """Qwen3's norms over each query and key head."""
    if not config.qk_norm:
        return None
    dim = config.head_dim
    q, k = (interleave(fetch(f"{prefix}.{name}.weight", (dim,)), dim) for name in ("q_norm", "k_norm"))
    return Norm(q, config.eps), Norm(k, config.eps)


Part = TypeVar("Part")


class Edges(Protocol):
    """A base as its draft head sees it. Raises ModelError for what is not there."""

    @property
    def config(self) -> ModelConfig: ...

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        ...

    def final_norm(self) -> AnyNorm:
        """The norm between the last layer and lm_head."""
        ...

    def lm_head(self) -> Linear:
        """[hidden] -> vocab."""
        ...


@dataclass(frozen=True, slots=True)
class StoredEdges:
    """Edges of a base that is somewhere else: each is read when asked for."""

    config: ModelConfig
    fetch: Fetch

    def embedding(self) -> Tensor:
        return fetch_embedding(self.fetch, self.config)

    def final_norm(self) -> AnyNorm:
        return fetch_final_norm(self.fetch, self.config)

    def lm_head(self) -> Linear:
        return fetch_lm_head(self.fetch, self.config)


@dataclass(frozen=True, slots=True)
class HeldEdges:
    """Edges of a base in this process: shared, not copied. None: its range of layers has no such edge."""

    config: ModelConfig
    table: Tensor | None
    norm: AnyNorm | None
    head: Linear | None

    def embedding(self) -> Tensor:
        return _present(self.table, "embedding")

    def final_norm(self) -> AnyNorm:
        return _present(self.norm, "final norm")

    def lm_head(self) -> Linear:
        return _present(self.head, "lm_head")


def _present(part: Part | None, name: str) -> Part:
    if part is None:
        raise ModelError(f"this range of layers holds no {name}")
    return part


def fetch_embedding(fetch: Fetch, config: ModelConfig) -> Tensor:
    """[vocab, hidden]. Tied models may be published with either of the two tables."""
    own, other = config.names.embedding, config.names.head
    return _fetch_table(fetch, config, other if config.tied and f"{own}.weight" not in fetch else own)


def fetch_final_norm(fetch: Fetch, config: ModelConfig) -> AnyNorm:
    """The norm between the last layer and lm_head."""
    return fetch_norm(fetch, config.names.norm, config)


def fetch_lm_head(fetch: Fetch, config: ModelConfig) -> Linear:
    """[hidden] -> vocab. A table of its own counts, whatever the config says of tying, as in Transformers."""
    own, other = config.names.head, config.names.embedding
    name = other if config.tied and f"{own}.weight" not in fetch else own
    return Linear(_fetch_table(fetch, config, name), None, of_lm_head(fetch.quantization))


def _fetch_table(fetch: Fetch, config: ModelConfig, name: str) -> Tensor:
    return fetch(f"{name}.weight", (config.vocab, config.hidden))
