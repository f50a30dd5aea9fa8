"""Loads projections that read the same input (query, key, value; gate, up) as one fused product."""

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
    """Load projections of equal shape [out, in] as one product: [in] -> the outputs one after another."""
    return _fuse(fetch, dict.fromkeys(names, shape), bias, _join)


def fuse_qkv(fetch: Fetch, prefix: str, config: ModelConfig, inputs: int) -> Linear:
    """Load the query, key and value projections of the module `prefix` as one product.

    The outputs are `heads` query heads, `kv_heads` key heads and `kv_heads` value heads; if the model gates
    its query heads, `heads` gates follow. Query and key rows are interleaved for `rotary.rotate`.
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
    """Join query, key and value rows; `parts` are three tensors [rows, ...], or one tensor with all rows.

    A single tensor lists all queries, then all keys, then all values or, with `qkv_by_head`, the query, key
    and value of head 0, those of head 1, and so on.
    """
    dim, rotated = config.head_dim, config.rope.rotated(config.head_dim)
    if len(parts) == 1 and not config.names.qkv_by_head:
        parts = parts[0].split([many * dim for many in (config.heads, config.kv_heads, config.kv_heads)])
    elif len(parts) == 1:
        parts = tuple(part.flatten(0, 1) for part in parts[0].unflatten(0, (-1, 3, dim)).unbind(1))
    q, k, v = parts
    gates: tuple[Tensor, ...] = ()
    # The gate rows of each query head follow the head's query rows.
    if config.gated_heads:
        q, gate = (part.flatten(0, 1) for part in q.unflatten(0, (-1, 2, dim)).unbind(1))
        gates = (gate,)
    return torch.cat((interleave(q, dim, rotated), interleave(k, dim, rotated), v, *gates))


def _join(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fuse(
    fetch: Fetch, shapes: Mapping[str, tuple[int, int]], bias: bool, join: Callable[..., Tensor]
) -> Linear:
    """Load projections and join them.

    shapes: Shape of each projection, by module name.
    join: Joins weights, biases or codes along the outputs.

    Raises ModelError if the files hold some of the projections quantized and others not.
    """
    weights = [fetch.matrix(f"{name}.weight", shape) for name, shape in shapes.items()]
    codes = [weight for weight in weights if isinstance(weight, Codes)]
    if 0 < len(codes) < len(weights):
        raise ModelError(f"{', '.join(shapes)}: quantized and others as one product; a --dtype decodes them")
    weight = Codes(*(join(*each) for each in zip(*codes))) if codes else join(*weights)
    biases = [fetch(f"{name}.bias", shape[:1]) for name, shape in shapes.items()] if bias else []
    return Linear(weight, join(*biases) if biases else None, fetch.form(f"{next(iter(shapes))}.weight"))
