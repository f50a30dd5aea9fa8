"""One decoder layer: norm, attention, norm, MLP, in as few passes as eager torch allows.

Refuses to know other layers, embeddings, sequences.
"""

from __future__ import annotations

from torch import Tensor

from specsot.model.attention import AttentionPlan, attend
from specsot.model.config import ModelConfig
from specsot.model.kv import KVPages, Places
from specsot.model.mlp import fetch_mlp
from specsot.model.norms import Norm, fetch_norm
from specsot.model.projections import fuse, fuse_qkv
from specsot.model.rotary import interleave, rotate
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
