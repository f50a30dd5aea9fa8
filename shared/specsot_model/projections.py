"""Projections that the same rows read, loaded as one product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.errors import ModelError
from specsot_model.decoding import Codes
from specsot_model.linear import Linear
from specsot_model.rotary import interleave
from specsot_model.weights import Fetch


def fuse(fetch: Fetch, names: Sequence[str], shape: tuple[int, int], bias: bool) -> Linear:
    """Projections of equal shape [out, in], read by the same rows, as one: [in] -> out, out, ..."""
    return _fuse(fetch, dict.fromkeys(names, shape), bias, _join)


def fuse_qkv(fetch: Fetch, prefix: str, config: ModelConfig, inputs: int) -> Linear:
    """Query, key and value projections of `prefix` as one: [inputs] -> heads, kv_heads, kv_heads.

    Behind them gates of query heads, where there are any. Query and key rows are interleaved
    for `rotary.rotate`.
    """
    fused = config.names.qkv
    heads = config.heads
    kv_heads = config.kv_heads
    queries = heads * 2 if config.gated_heads else heads
    sizes = {"q_proj": queries, "k_proj": kv_heads, "v_proj": kv_heads}
    if fused:
        sizes = {fused: heads + 2 * kv_heads}
    shapes = {f"{prefix}.{name}": (size * config.head_dim, inputs) for name, size in sizes.items()}
    return _fuse(fetch, shapes, config.qkv_bias, partial(_join_qkv, config))


def _join_qkv(config: ModelConfig, *parts: Tensor) -> Tensor:
    """Rows of queries, keys, values: of three tensors [rows, ...], or of one of all."""
    dim, rotated = config.head_dim, config.rope.rotated(config.head_dim)
    if len(parts) == 1 and not config.names.qkv_by_head:
        parts = parts[0].split([many * dim for many in (config.heads, config.kv_heads, config.kv_heads)])
    elif len(parts) == 1:
        parts = tuple(part.flatten(0, 1) for part in parts[0].unflatten(0, (-1, 3, dim)).unbind(1))
    q, k, v = parts
    gates: tuple[Tensor, ...] = ()
    if config.gated_heads:  # of each query head behind its rows
        q, gate = (part.flatten(0, 1) for part in q.unflatten(0, (-1, 2, dim)).unbind(1))
        gates = (gate,)
    return torch.cat((interleave(q, dim, rotated), interleave(k, dim, rotated), v, *gates))


def _join(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fuse(
    fetch: Fetch, shapes: Mapping[str, tuple[int, int]], bias: bool, join: Callable[..., Tensor]
) -> Linear:
    """shapes: of projections, by name. Raises ModelError where others rounded some of them and not all."""
    weights = [fetch.matrix(f"{name}.weight", shape) for name, shape in shapes.items()]
    codes = [weight for weight in weights if isinstance(weight, Codes)]
    if 0 < len(codes) < len(weights):
        raise ModelError(f"{', '.join(shapes)}: quantized and others as one product; a --dtype decodes them")
    weight = Codes(*(join(*each) for each in zip(*codes))) if codes else join(*weights)
    biases = [fetch(f"{name}.bias", shape[:1]) for name, shape in shapes.items()] if bias else []
    return Linear(weight, join(*biases) if biases else None, fetch.form(f"{next(iter(shapes))}.weight"))
