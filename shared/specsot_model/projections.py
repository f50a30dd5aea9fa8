"""Loads projections that read the same input (query, key, value; gate, up) as one fused product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Latent
from specsot.errors import ModelError
from specsot_model.decoding import Codes
from specsot_model.gguf_tensors import StoredRows, join_rows
from specsot_model.linear import Linear, Packed
from specsot_model.rotary import interleave
from specsot_model.weights import Fetch


def fuse_projections(fetch: Fetch, names: Sequence[str], shape: tuple[int, int], bias: bool) -> Linear:
    """Load projections of equal shape as one product: [in] -> the outputs of all projections, one after
    another.

    fetch: Reads tensors from the model's files.
    names: Module names of the projections, in the order of their outputs.
    shape: (out, in) of each projection.
    bias: Whether the modules have biases.

    Raises ModelError if the files hold some of the projections quantized and others not.
    """
    return _fuse(fetch, [(name, shape) for name in names], bias, _join)


def fuse_qkv(fetch: Fetch, prefix: str, config: ModelConfig, inputs: int) -> Linear:
    """Return the query, key and value projections of the module `prefix` as one product, with its weights
    loaded.

    The outputs are `heads` query heads, `kv_heads` key heads and `kv_heads` value heads; if the model gates
    its query heads, `heads` gates follow. Of a layer that reads the keys and values of another one, they are
    the query heads alone. Query and key rows are interleaved for `rotary.rotate`. A model
    whose files hold the three in one tensor (`config.names.qkv`) is read from that tensor. Biases are loaded
    if `config.qkv_bias`. ModelError is raised if a tensor is missing or has another shape, or if only some
    projections are quantized.

    fetch: Reads tensors from the model's files.
    prefix: Name of the attention module, without a dot at the end.
    config: The model's config: numbers and sizes of heads, biases, and how the files name the projections.
    inputs: Number of inputs of the projections.
    """
    joint_name = config.names.qkv
    heads = config.heads
    kv_heads = config.kv_heads
    queries = heads * 2 if config.gated_heads else heads
    # Values that are keys are computed once more by the same weight, since they are neither normed with a
    # weight nor rotated.
    values = "k_proj" if config.keys_as_values else "v_proj"
    sizes = [("q_proj", queries), ("k_proj", kv_heads), (values, kv_heads)]
    if joint_name:
        sizes = [(joint_name, heads + 2 * kv_heads)]
    if not config.stores_kv:
        sizes = sizes[:1]
    shapes = [(f"{prefix}.{name}", (size * config.head_dim, inputs)) for name, size in sizes]
    return _fuse(fetch, shapes, config.qkv_bias, partial(_join_qkv, config))


def fuse_latent_inputs(fetch: Fetch, prefix: str, config: ModelConfig, latent: Latent) -> Linear:
    """Return what latent attention projects from the hidden states as one product, with its weights loaded.

    The outputs are the vector from which queries are projected, or the queries themselves if there is none,
    and then the row [rotated key, latent vector] that the pages store. ModelError is raised if a tensor is
    missing or has another shape, or if only some projections are quantized.

    fetch: Reads tensors from the model's files.
    prefix: Name of the attention module, without a dot at the end.
    config: The model's config: hidden size and number of heads.
    latent: Sizes of the attention.
    """

    def join(queries: Tensor, row: Tensor) -> Tensor:
        """Return the rows of both projections, reordered as the product's outputs.

        queries: [query_rank or heads * Latent.query, ...], as the files order them.
        row: [rank + rotated, ...], the latent vector's rows before those of the rotated key.
        """
        if latent.query_rank is None:
            queries = _rotated_first(queries, latent, latent.unrotated)
        return torch.cat((queries, _rotated_first(row, latent, latent.rank)))

    queries = ("q_proj", config.heads * latent.query)
    if latent.query_rank is not None:
        queries = ("q_a_proj", latent.query_rank)
    sizes = queries, ("kv_a_proj_with_mqa", latent.row)
    return _fuse(fetch, [(f"{prefix}.{name}", (size, config.hidden)) for name, size in sizes], False, join)


def fuse_latent_queries(fetch: Fetch, prefix: str, config: ModelConfig, latent: Latent) -> Linear:
    """Return the product [query_rank] -> heads * Latent.query, with its weight loaded. The rotated elements
    of each head come first.

    ModelError is raised if the tensor is missing or has another shape.

    fetch: Reads tensors from the model's files.
    prefix: Name of the attention module, without a dot at the end.
    config: The model's config, for the number of heads.
    latent: Sizes of the attention. AssertionError is raised without a `query_rank`.
    """
    assert latent.query_rank is not None, "queries are projected from the hidden states"
    shape = config.heads * latent.query, latent.query_rank
    join = partial(_rotated_first, latent=latent, unrotated=latent.unrotated)
    return _fuse(fetch, [(f"{prefix}.q_b_proj", shape)], False, join)


def _rotated_first(rows: Tensor, latent: Latent, unrotated: int) -> Tensor:
    """Return the rows of a projection with the rotated ones of each head first, ordered for `rotary.rotate`.

    rows: [heads * (unrotated + rotated), ...], as the files order them.
    latent: Sizes of the attention: how many rows of a head are rotated, and how their pairs lie.
    unrotated: Number of a head's other rows, which come first in the files.

    # unrotated 2, rotated 2: rows of two heads [0 1 | 2 3 || 4 5 | 6 7] -> [2 3 | 0 1 || 6 7 | 4 5]
    """
    heads = rows.unflatten(0, (-1, unrotated + latent.rotated))
    joined = torch.cat((heads[:, unrotated:], heads[:, :unrotated]), 1).flatten(0, 1)
    head_dim = unrotated + latent.rotated
    return joined if latent.interleaved else interleave(joined, head_dim, latent.rotated)


def _join_qkv(config: ModelConfig, *parts: Tensor) -> Tensor:
    """Return query, key and value rows as one tensor, with gate rows at the end if the model gates its query
    heads.

    config: The model's config: numbers and sizes of heads, and how the files order the rows. `gated_heads`
        models have twice as many query rows: a gate of head_dim rows after each head's query rows.
    parts: Three tensors [rows, ...] (queries, keys, values), one tensor with all rows, or one of queries for
        a layer that reads the keys and values of another one. A single tensor
        lists all queries, then all keys, then all values or, with `qkv_by_head`, the query, key and value of
        head 0, those of head 1, and so on.
    """
    head_dim, rotated = config.head_dim, config.rope.rotated(config.head_dim)
    if not config.stores_kv:
        return interleave(parts[0], head_dim, rotated)
    if len(parts) == 1 and not config.names.qkv_by_head:
        parts = parts[0].split(
            [count * head_dim for count in (config.heads, config.kv_heads, config.kv_heads)]
        )
    elif len(parts) == 1:
        parts = tuple(part.flatten(0, 1) for part in parts[0].unflatten(0, (-1, 3, head_dim)).unbind(1))
    q, k, v = parts
    gates: tuple[Tensor, ...] = ()
    # The gate rows of each query head follow the head's query rows.
    if config.gated_heads:
        q, gate = (part.flatten(0, 1) for part in q.unflatten(0, (-1, 2, head_dim)).unbind(1))
        gates = (gate,)
    return torch.cat((interleave(q, head_dim, rotated), interleave(k, head_dim, rotated), v, *gates))


def _join(*parts: Tensor) -> Tensor:
    """Return the parts one after another along the outputs; a single part is returned as it is.

    parts: Tensors [outputs, ...].
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fuse(
    fetch: Fetch, shapes: Sequence[tuple[str, tuple[int, int]]], bias: bool, join: Callable[..., Tensor]
) -> Linear:
    """Return projections joined into one product, with their weights loaded.

    The product is stored in the form of the first projection. Of a GGUF file, a packed product is kept in a
    file, from which later processes map it. ModelError is also raised if a tensor is
    missing or has another shape.

    fetch: Reads tensors from the model's files.
    shapes: Module name and shape (out, in) of each projection. At least one.
    bias: Whether the modules have biases; if not, the product has none.
    join: Joins weights, biases or codes along the outputs.

    Raises ModelError if the files hold some of the projections quantized and others not.
    """
    first = f"{shapes[0][0]}.weight"
    form = fetch.form(first)
    shape = sum(outputs for _, (outputs, _) in shapes), shapes[0][1][1]
    if packed := fetch.find_packed(first, shape, form):
        return Linear(packed)
    weights = [fetch.matrix(f"{name}.weight", shape) for name, shape in shapes]
    biases = [fetch(f"{name}.bias", shape[:1]) for name, shape in shapes] if bias else []
    linear = Linear(
        _join_weights(weights, [name for name, _ in shapes], join), join(*biases) if biases else None, form
    )
    return (
        Linear(fetch.keep_packed(first, linear.multiply)) if isinstance(linear.multiply, Packed) else linear
    )


def _join_weights(
    weights: Sequence[Tensor | Codes | StoredRows], names: Iterable[str], join: Callable[..., Tensor]
) -> Tensor | Codes | StoredRows:
    """Return the weights of projections joined into one.

    weights: The weights, in the form in which the files have them.
    names: Module names of the projections, for the error message.
    join: Joins weights or codes along the outputs.

    Raises ModelError if the files hold some of the projections quantized and others not.
    """
    codes = [weight for weight in weights if isinstance(weight, Codes)]
    blocks = [weight for weight in weights if isinstance(weight, StoredRows)]
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(blocks) == len(weights):
        return join_rows(blocks, join)
    if len(codes) == len(weights):
        return Codes(*(join(*parts) for parts in zip(*codes)))
    if len(floats) == len(weights):
        return join(*floats)
    raise ModelError(
        f"the projections {', '.join(names)} run as one product, but only some of them are quantized;"
        " set --dtype, which decodes the quantized ones"
    )
