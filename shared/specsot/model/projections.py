"""Published projections as the products a layer really computes: several fused, queries and keys reordered.

Refuses to know what is done with the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.model.config import ModelConfig
from specsot.model.linear import Linear
from specsot.model.rotary import interleave
from specsot.model.weights import Fetch


def fuse(fetch: Fetch, names: Sequence[str], shape: tuple[int, int], bias: bool) -> Linear:
    """Projections of equal shape [out, in], read by the same rows, as one: [in] -> out, out, ..."""
    weights = [fetch(f"{name}.weight", shape) for name in names]
    biases = [fetch(f"{name}.bias", shape[:1]) for name in names] if bias else []
    return Linear(_join(weights), _join(biases) if biases else None, fetch.quantization)


def fuse_qkv(fetch: Fetch, prefix: str, config: ModelConfig, inputs: int) -> Linear:
    """Query, key and value projections of `prefix` as one: [inputs] -> heads, kv_heads, kv_heads.

    Query and key rows are interleaved for `rotary.rotate`.
    """
    weight = _fetch_qkv(fetch, prefix, "weight", (inputs,), config)
    bias = _fetch_qkv(fetch, prefix, "bias", (), config) if config.qkv_bias else None
    return Linear(weight, bias, fetch.quantization)


def _fetch_qkv(fetch: Fetch, prefix: str, kind: str, inputs: tuple[int, ...], config: ModelConfig) -> Tensor:
    """Rows of queries, keys, values, each row [*inputs]: of three tensors, or of one [heads, 3, head_dim]."""
    dim, rotated = config.head_dim, config.rope.rotated(config.head_dim)
    if config.names.qkv:
        fused = fetch(f"{prefix}.{config.names.qkv}.{kind}", (3 * config.heads * dim, *inputs))
        q, k, v = (part.flatten(0, 1) for part in fused.unflatten(0, (config.heads, 3, dim)).unbind(1))
    else:
        sizes = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        q, k, v = (fetch(f"{prefix}.{name}.{kind}", (size * dim, *inputs)) for name, size in sizes.items())
    return torch.cat((interleave(q, dim, rotated), interleave(k, dim, rotated), v))


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
