"""One decoder layer: norm, attention, norm, gated MLP, in as few passes as eager torch allows.

Refuses to know other layers, embeddings, sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.model.attention import AttentionPlan, attend
from specsot.model.config import ModelConfig
from specsot.model.kv import KVPages, Places
from specsot.model.linear import Linear
from specsot.model.rotary import interleave, rotate

Fetch = Callable[[str, tuple[int, ...]], Tensor]  # a tensor by name that must have this shape


class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 inside.

    torch has no fused one for the CPU; there ||x|| and hypot(||x||, sqrt(n eps)) do it in four short
    passes instead of seven.
    """

    __slots__ = ("_eps", "_floor", "_scaled", "_shape", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self._weight, self._eps, self._shape = weight, eps, (size,)
        self._scaled = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div(torch.hypot(length, self._floor)).mul_(self._scaled).to(x.dtype)


def fuse_qkv(fetch: Fetch, prefix: str, config: ModelConfig, inputs: int) -> Linear:
    """Query, key and value projections of `prefix` as one: [inputs] -> heads, kv_heads, kv_heads.

    Query and key rows are interleaved for `rotary.rotate`.
    """
    dim = config.head_dim
    sizes = {"q_proj": config.heads * dim, "k_proj": config.kv_heads * dim, "v_proj": config.kv_heads * dim}
    weights = [
        _turned(fetch(f"{prefix}.{name}.weight", (size, inputs)), name, dim) for name, size in sizes.items()
    ]
    if not config.qkv_bias:
        return Linear(torch.cat(weights))
    biases = [_turned(fetch(f"{prefix}.{name}.bias", (size,)), name, dim) for name, size in sizes.items()]
    return Linear(torch.cat(weights), torch.cat(biases))


def _turned(rows: Tensor, name: str, head_dim: int) -> Tensor:
    return rows if name == "v_proj" else interleave(rows, head_dim)


def fuse_gate_up(fetch: Fetch, prefix: str, config: ModelConfig) -> Linear:
    """Gate and up projections of `prefix` as one: [hidden] -> intermediate, intermediate."""
    size, inputs = config.intermediate, config.hidden
    names = ("gate_proj", "up_proj")
    weight = torch.cat([fetch(f"{prefix}.{name}.weight", (size, inputs)) for name in names])
    biases = [fetch(f"{prefix}.{name}.bias", (size,)) for name in names] if config.mlp_bias else []
    return Linear(weight, torch.cat(biases) if biases else None)


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * intermediate]."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up.narrow(-1, 0, half)).mul_(gate_up.narrow(-1, half, half))


class Block:
    """Layer `index` of a Llama-like model, fetched under its published names."""

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig) -> None:
        prefix, hidden, width = f"model.layers.{index}", config.hidden, config.heads * config.head_dim
        self._config = config
        self._input_norm = Norm(fetch(f"{prefix}.input_layernorm.weight", (hidden,)), config.eps)
        self._qkv = fuse_qkv(fetch, f"{prefix}.self_attn", config, hidden)
        self._head_norms = _head_norms(fetch, f"{prefix}.self_attn", config)
        self._out = _linear(fetch, f"{prefix}.self_attn.o_proj", (hidden, width), config.out_bias)
        self._mlp_norm = Norm(fetch(f"{prefix}.post_attention_layernorm.weight", (hidden,)), config.eps)
        self._gate_up = fuse_gate_up(fetch, f"{prefix}.mlp", config)
        self._down = _linear(fetch, f"{prefix}.mlp.down_proj", (hidden, config.intermediate), config.mlp_bias)

    def forward(
        self, hidden: Tensor, table: Tensor, places: Places, plan: AttentionPlan, kv: KVPages, layer: int
    ) -> None:
        """Add this layer's two updates to the residual stream [rows, hidden], in place.

        table: rotations of the rows; places: where their KV goes; layer: which of `kv`'s layers.
        """
        q = self._project(self._input_norm(hidden), table, places, kv, layer)
        hidden.add_(self._out(attend(q, kv.layers[layer], plan)))
        hidden.add_(self._down(gate(self._gate_up(self._mlp_norm(hidden)))))

    def _project(self, x: Tensor, table: Tensor, places: Places, kv: KVPages, layer: int) -> Tensor:
        """Queries [rows, kv_heads, g, head_dim]; keys and values go to their places."""
        config, rows = self._config, x.shape[0]
        heads = self._qkv(x).view(rows, -1, config.head_dim)
        turned = heads.narrow(1, 0, config.heads + config.kv_heads)
        if self._head_norms is not None:
            for part, norm in zip(turned.split((config.heads, config.kv_heads), 1), self._head_norms):
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


def _linear(fetch: Fetch, prefix: str, shape: tuple[int, int], bias: bool) -> Linear:
    return Linear(fetch(f"{prefix}.weight", shape), fetch(f"{prefix}.bias", shape[:1]) if bias else None)
