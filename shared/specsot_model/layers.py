"""Decoder layers in plain torch, their norms, and the embedding, final norm and lm_head around them.

Numerics follow Hugging Face's eager modules unless a docstring says otherwise. Shapes: `rows` is the number
of tokens in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.errors import ModelError
from specsot.members import Quantization
from specsot_model.attention import AttentionPlan, attend
from specsot_model.kv import KVPages, Places
from specsot_model.latent import LatentHeads
from specsot_model.linear import Linear, Packed, Table, hold_table
from specsot_model.mlp import ACTS, Act, Experts, ParallelExperts, fetch_gated, fetch_mlp
from specsot_model.norms import Norm
from specsot_model.projections import fuse_latent_inputs, fuse_projections, fuse_qkv
from specsot_model.rotary import interleave, rotate
from specsot_model.stored_form import lm_head_quantization
from specsot_model.weights import Fetch

# A part of a model: an embedding, a norm or an lm_head.
Part = TypeVar("Part")
# A norm, [rows, ..., size] -> the same shape.
AnyNorm = Callable[[Tensor], Tensor]
# Applies rotary embedding to the queries and keys of [rows, heads + 2 * kv_heads, head_dim], in place, and
# stores keys and values in the KV cache. In a layer that reads another one's KV, the argument is [rows,
# heads, head_dim], queries alone, and nothing is stored.
RotateAndStore = Callable[[Tensor], None]


def fetch_norm(fetch: Fetch, name: str, config: ModelConfig) -> AnyNorm:
    """Return a norm over the hidden size, with its weight loaded: RMSNorm or LayerNorm, as the model has it.

    A model with `norm_offset` gets an RMSNorm in fp32 whose weight is the stored one plus the offset.
    ModelError is raised if a tensor is missing or has another shape.

    fetch: Reads tensors from the model's files.
    name: Name of the norm's module, such as "model.norm".
    config: The model's config: kind of norm, hidden size, epsilon, and the offset that is added to the
        weight.
    """
    if config.norm_offset:
        # Weight + offset is near 1 and would have few bits left in a 16-bit type.
        exact = replace(fetch, dtype=torch.float32)
        return Norm(exact(f"{name}.weight", (config.hidden,)) + config.norm_offset, config.eps)
    weight = fetch(f"{name}.weight", (config.hidden,))
    if config.norm == "rms":
        return Norm(weight, config.eps)
    bias = fetch(f"{name}.bias", (config.hidden,))
    return partial(F.layer_norm, normalized_shape=[config.hidden], weight=weight, bias=bias, eps=config.eps)


class Block:
    """A decoder layer of a model: attention and MLP, in plain torch.

    fetch: Reads tensors from the model's files; its dtype and device are those of the layer.
    index: Index of the layer in the whole model, by which its tensors are named.
    config: The model's config: sizes, tensor names of its family, and kinds of norm, MLP and so on.
    """

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig) -> None:
        """Load the layer's tensors.

        Head norms, attention sinks and norms before or after attention or MLP are loaded only if the model
        has them.
        ModelError is raised if a tensor is missing or has another shape.

        fetch: Reads tensors from the model's files; its dtype and device are those of the layer.
        index: Index of the layer in the whole model, by which its tensors are named.
        config: The model's config: sizes, tensor names of its family, and kinds of norm, MLP and so on.
        """
        rope = config.rope_of(index)
        config = config.of_layer(index)
        names = config.names
        hidden = config.hidden
        latent = config.latent
        width = config.heads * (latent.value if latent else config.head_dim)
        layer = names.layer.format(index)
        attention = f"{layer}.{names.attention}"
        self.config = config
        self.device = torch.device(fetch.device)
        self.rope = rope
        self.latent_heads = LatentHeads.fetch(fetch, attention, config, latent) if latent else None
        self.qkv = (
            fuse_latent_inputs(fetch, attention, config, latent)
            if latent
            else fuse_qkv(fetch, attention, config, hidden)
        )
        spans = (config.heads, config.kv_heads) if config.whole_qk_norm else (1, 1)
        # A layer that reads the keys of another one norms its queries alone.
        spans = spans if config.stores_kv else spans[:1]
        dim = config.head_dim
        options = config.eps, config.rope.rotated(dim), spans, config.norm_offset
        self.head_norms = fetch_head_norms(fetch, attention, dim, *options) if config.qk_norm else ()
        norms_values = config.values_normed and config.stores_kv
        self.value_norm = _unweighted_norm(config.head_dim, fetch, config) if norms_values else None
        self.out = fuse_projections(fetch, [f"{attention}.{names.out}"], (hidden, width), config.out_bias)
        self.sinks = fetch_sinks(fetch, f"{attention}.{names.sinks}", config) if names.sinks else None
        self.mlp = fetch_mlp(fetch, layer, config, index)
        if names.parallel_norms and isinstance(self.mlp, Experts):
            norms = [fetch_norm(fetch, f"{layer}.{name}", config) for name in names.parallel_norms]
            router_norm = _unweighted_norm(hidden, fetch, config)
            self.mlp = ParallelExperts(fetch_gated(fetch, layer, config), self.mlp, norms, router_norm)
        self.input_norm, self.mlp_norm, self.after_attention, self.after_mlp = (
            fetch_norm(fetch, f"{layer}.{name}", config) if name else unchanged
            for name in (names.input_norm, names.mlp_norm, names.after_attention, names.after_mlp)
        )
        self.scale = fetch(f"{layer}.{names.layer_scale}", (1,)) if names.layer_scale else None
        self.input_gate = (
            LayerGate.fetch(fetch, layer, config, names.layer_input)
            if config.layer_input_size and names.layer_input
            else None
        )

    def forward(
        self,
        hidden: Tensor,
        table: Tensor,
        places: Places,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        layer_input: Tensor | None = None,
    ) -> None:
        """Add this layer's attention and MLP updates to the residual stream [rows, hidden], in place, and
        then the update of its per-layer input if it has one.

        layer: Index of this layer within `kv`, which starts at the first layer of the range.
        layer_input: [rows, size], the layer's per-layer input, see `LayerInputs`; None: it has none.
        hidden: [rows, hidden], the residual stream.
        table: Rotations of the rows' queries and keys; see `Rotary.table`.
        places: Page and offset at which the KV of each row is stored; see `KVPages.locate`.
        plan: The attention plan of the frame.
        kv: The KV cache of the layer range.
        """
        self.update(hidden, self.kv_writer(table, places, kv, layer), kv.layers[layer], plan, layer_input)

    def kv_writer(self, table: Tensor, places: Places, kv: KVPages, layer: int) -> RotateAndStore:
        """Return a function that rotates queries and keys in place and stores keys and values in the KV
        cache.

        The function takes [rows, heads + 2 * kv_heads, head_dim]: queries, keys and values of the batch; with
        latent attention [rows, heads + 1, head_dim], queries and the row that is stored; in a layer that
        reads another one's KV, [rows, heads, head_dim], queries alone, which it rotates without storing
        anything.

        table: Rotations of the rows' queries and keys; see `Rotary.table`.
        places: Page and offset at which the KV of each row is stored; see `KVPages.locate`.
        kv: The KV cache of the layer range.
        layer: Index of this layer within `kv`.
        """
        config = self.config

        def rotate_and_store(heads: Tensor) -> None:
            """Rotate queries and keys in place, and store keys and values in the KV cache.

            heads: [rows, heads + 2 * kv_heads, head_dim], queries, keys and values of the batch; in a layer
                that reads another one's KV, [rows, heads, head_dim], queries alone, and nothing is stored.
            """
            if not config.stores_kv:
                rotate(heads, table.narrow(1, 0, config.heads))
                return
            rotate(heads.narrow(1, 0, config.heads + config.kv_heads), table)
            stored = heads.narrow(1, config.heads, config.stored_tensors * config.kv_heads)
            kv.put(layer, places, stored.unflatten(1, (config.stored_tensors, config.kv_heads)))

        return rotate_and_store

    def update(
        self,
        hidden: Tensor,
        rotate_and_store: RotateAndStore,
        kv_layer: Tensor,
        plan: AttentionPlan,
        layer_input: Tensor | None = None,
    ) -> None:
        """Add this layer's attention and MLP updates to the residual stream, in place, and then the update of
        its own input; None skips that update.

        A parallel model (`config.parallel`) computes the MLP from the hidden states before attention; every
        other model from those after it. Norms after attention and MLP are applied if the model has them.

        hidden: [rows, hidden], the residual stream.
        rotate_and_store: Called between the projections and attention with queries, keys and values, [rows,
            heads + 2 * kv_heads, head_dim]; rotates queries and keys in place and stores keys and values. In
            a layer that reads another one's KV, it is called with [rows, heads, head_dim], queries alone.
        kv_layer: [2, pages, kv_heads, page_rows, head_dim], the KV pages of this layer, or of the one whose
            keys and values it reads.
        plan: The attention plan of the frame.
        layer_input: [rows, size], the layer's per-layer input; None: no update of it.
        """
        update = self.attention(hidden, rotate_and_store, kv_layer, plan)
        if self.config.parallel:
            update.add_(self.mlp(self.mlp_norm(hidden)))
            hidden.add_(update)
        else:
            hidden.add_(update)
            hidden.add_(self.after_mlp(self.mlp(self.mlp_norm(hidden))))
        if self.input_gate is not None and layer_input is not None:
            hidden.add_(self.input_gate(hidden, layer_input))
        if self.scale is not None:
            hidden.mul_(self.scale)

    def attention(
        self, hidden: Tensor, rotate_and_store: RotateAndStore, kv_layer: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """Return the attention update, [rows, hidden], without adding it to the residual stream.

        If the model gates its query heads, each head's output is multiplied by the sigmoid of its gate. With
        latent attention, queries are projected to the stored rows, and outputs from them; see `LatentHeads`.

        hidden: [rows, hidden], the residual stream; not changed.
        rotate_and_store: Rotates queries and keys in place and stores keys and values; see `update`.
        kv_layer: [2, pages, kv_heads, page_rows, head_dim], the KV pages of this layer, or of the one whose
            keys and values it reads.
        plan: The attention plan of the frame.
        """
        projected = self.qkv(self.input_norm(hidden))
        if self.latent_heads is None:
            heads = projected.view(len(hidden), -1, self.config.head_dim)
        else:
            heads = self.latent_heads.project(projected)
        self._norm_heads(heads)
        rotate_and_store(heads)
        queries = heads.narrow(1, 0, self.config.heads).unflatten(1, (self.config.kv_heads, -1))
        values_from = 0 if self.latent_heads is None else self.latent_heads.latent.rotated
        attended = attend(queries, kv_layer, plan, self.sinks, self.config.attention_softcap, values_from)
        if self.latent_heads is not None:
            attended = self.latent_heads.expand(attended)
        if self.config.gated_heads:
            attended = attended * heads.narrow(1, -self.config.heads, self.config.heads).flatten(1).sigmoid()
        return self.after_attention(self.out(attended))

    def _norm_heads(self, heads: Tensor) -> None:
        """Normalize the queries and keys of each row, and the values if the model norms them, in place.

        Queries and keys are not changed if the model has no head norms (QK norm).

        heads: [rows, heads + 2 * kv_heads, head_dim], queries, keys and values in this order; in a layer that
            reads another one's KV, [rows, heads, head_dim], queries alone.
        """
        config = self.config
        if self.value_norm is not None:
            values = heads.narrow(1, config.heads + config.kv_heads, config.kv_heads)
            values.copy_(self.value_norm(values))
        counts = (config.heads, config.kv_heads) if config.stores_kv else (config.heads,)
        parts = heads.narrow(1, 0, sum(counts)).split(counts, 1)
        for part, norm in zip(parts, self.head_norms):
            part.copy_(norm(part.flatten(1)).view_as(part) if config.whole_qk_norm else norm(part))


@dataclass(frozen=True, slots=True)
class LayerGate:
    """Computes norm(project(act(gate(hidden)) * input)), which a per-layer input adds to the hidden states.

    gate: Linear layer from hidden_size to size.
    project: Linear layer from size to hidden_size.
    norm: The norm over what is added.
    activate: The model's activation function.
    """

    gate: Linear
    project: Linear
    norm: AnyNorm
    activate: Act

    @classmethod
    def fetch(cls, fetch: Fetch, layer: str, config: ModelConfig, names: tuple[str, str, str]) -> LayerGate:
        """Load the tensors of one layer.

        fetch: Reads tensors from the model's files.
        layer: Name of the layer, without a dot at the end.
        config: The model's config: sizes and activation function.
        names: Names of gate, projection and norm inside the layer.

        Raises ModelError if a tensor is missing or has another shape.
        """
        gate, project, norm = (f"{layer}.{name}" for name in names)
        size = config.layer_input_size
        return cls(
            fuse_projections(fetch, [gate], (size, config.hidden), bias=False),
            fuse_projections(fetch, [project], (config.hidden, size), bias=False),
            fetch_norm(fetch, norm, config),
            ACTS[config.activation],
        )

    def __call__(self, hidden: Tensor, layer_input: Tensor) -> Tensor:
        """Return what is added to the residual stream, [rows, hidden].

        hidden: [rows, hidden], the residual stream; not changed.
        layer_input: [rows, size], the layer's per-layer input.
        """
        return self.norm(self.project(self.activate(self.gate(hidden)) * layer_input))


def unchanged(rows: Tensor) -> Tensor:
    """Return the rows themselves: stands for a norm or product that a model or a draft head does not have.

    rows: [rows, hidden].
    """
    return rows


def _unweighted_norm(size: int, fetch: Fetch, config: ModelConfig) -> Norm:
    """Return an RMSNorm without a weight.

    size: Numbers of what is normed.
    fetch: Its device is that of the norm.
    config: The model's config, for the epsilon.
    """
    return Norm(torch.ones(size, device=fetch.device), config.eps)


def fetch_sinks(fetch: Fetch, name: str, config: ModelConfig) -> Tensor:
    """Return the attention sinks, loaded: one score per query head, fp32 [kv_heads, query heads per KV head];
    see `attend`.

    fetch: Reads tensors from the model's files.
    name: Name of the tensor [heads].
    config: The model's config, for its numbers of heads.
    """
    return fetch(name, (config.heads,)).float().view(config.kv_heads, -1)


def fetch_head_norms(
    fetch: Fetch,
    prefix: str,
    head_dim: int,
    eps: float,
    rotated: int | None = None,
    spans: tuple[int, ...] = (1, 1),
    offset: float = 0.0,
) -> tuple[Norm, ...]:
    """Return the norms of queries and keys, as RMSNorms (query norm, key norm), with their weights loaded.

    fetch: Reads tensors from the model's files.
    prefix: Name of the attention module, without a dot at the end.
    head_dim: Numbers of a head.
    eps: Epsilon of both norms.
    rotated: How many numbers of a head rotate; None: all. The weights are reordered as `interleave` does it.
    spans: How many query heads, and how many key heads, one norm covers at once: (1, 1) normalizes each head
        by itself, (heads, kv_heads) all heads together. A single number: only the norm of queries is loaded.
    offset: Number added to the weights, which are then kept in fp32; 0: the weights keep the type of `fetch`.
    """
    exact = replace(fetch, dtype=torch.float32) if offset else fetch
    sizes = [(name, heads * head_dim) for name, heads in zip(("q_norm", "k_norm"), spans)]
    weights = [exact(f"{prefix}.{name}.weight", (size,)) for name, size in sizes]
    return tuple(Norm(interleave(weight, head_dim, rotated) + offset, eps) for weight in weights)


# Returns a weight that an earlier process kept or, if there is none, makes and perhaps keeps it. Called with
# a name that differs for all weights, the weight's shape (out, in), the form in which it is stored (None:
# floats), and a function that makes it.
Keep = Callable[[str, tuple[int, int], Quantization | None, Callable[[], Table]], Table]


def make_anew(
    name: str, shape: tuple[int, int], form: Quantization | None, make: Callable[[], Table]
) -> Table:
    """Make a weight and return it; nothing is kept. See `Keep`."""
    return make()


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
    keep: Keeps a packed weight that was computed from these parts for later processes; see `Keep`.
    """

    config: ModelConfig
    embedding: Callable[[], Table]
    final_norm: Callable[[], AnyNorm]
    lm_head: Callable[[], Linear]
    lm_head_rows: Callable[[Tensor | None], Tensor]
    keep: Keep = make_anew


def present(part: Part | None, name: str) -> Part:
    """Return `part`, or raise ModelError if this range of layers does not have it.

    part: A part of the model (embedding, norm, lm_head) or None.
    name: Name of the part, for the error.
    """
    if part is None:
        raise ModelError(f"this range of layers holds no {name}")
    return part


def add_tap(hidden: Tensor, weight: Tensor | Linear, fused: Tensor | None) -> Tensor:
    """Return `fused` [rows, Hd] plus the product of the hidden states and a tap's weight.

    hidden: [rows, H], the input of the tapped layer.
    weight: [Hd, H], the tap's weight, or a product with it.
    fused: [rows, Hd], the sum of earlier taps; changed in place. None means zero.
    """
    part = F.linear(hidden, weight) if isinstance(weight, Tensor) else weight(hidden)
    return part if fused is None else fused.add_(part)


def stored_edges(config: ModelConfig, fetch: Fetch) -> Edges:
    """Return the edges of a base model that runs in another process, read from its files when needed.

    Each call of one of its functions reads the files again. ModelError is raised by that call if a tensor is
    missing.

    config: The base model's config.
    fetch: Reads tensors from the base model's files.
    """
    source = fetch, config
    return Edges(
        config,
        partial(fetch_embedding, *source),
        partial(fetch_final_norm, *source),
        partial(fetch_lm_head, *source),
        partial(_fetch_lm_head_rows, *source),
        partial(_fetch_kept, fetch),
    )


def _fetch_kept(
    fetch: Fetch, name: str, shape: tuple[int, int], form: Quantization | None, make: Callable[[], Table]
) -> Table:
    """Return a weight that an earlier process kept next to the base model's, or make and keep it; see `Keep`.

    fetch: Reads tensors from the base model's files.
    name: Name of the weight.
    shape: (out, in) of the weight.
    form: Form in which the weight is stored; None: floats, which are not kept.
    make: Makes the weight.
    """
    if packed := fetch.find_packed(name, shape, form):
        return packed
    table = make()
    return fetch.keep_packed(name, table) if isinstance(table, Packed) else table


def fetch_embedding(fetch: Fetch, config: ModelConfig, head: Linear | None = None) -> Table:
    """Return the embedding [vocab, hidden], loaded or shared with the lm_head.

    It is int8 if weights are packed for a CPU, and otherwise not quantized. ModelError is raised if the files
    lack the weight, or it has another shape.

    fetch: Reads tensors from the model's files.
    config: The model's config: tensor names, sizes, and whether embedding and lm_head are tied.
    head: The lm_head, if it is loaded, else None. In a tied model it is the same table and is shared, unless
        it was rounded to int4.
    """
    name = _name_of_embedding(fetch, config)
    if head is not None and name == _name_of_lm_head(fetch, config):
        if isinstance(head.multiply, Packed) and not (_is_short(fetch) and head.multiply.weight.bits == 4):
            return head.multiply
        if head.weight is not None:
            return head.weight
    return _fetch_table(fetch, config, name)


def fetch_final_norm(fetch: Fetch, config: ModelConfig) -> AnyNorm:
    """Load the norm that precedes the lm_head. If the model divides its logits by a number, the norm's weight
    is divided by it instead, in fp32.

    fetch: Reads tensors from the model's files.
    config: The model's config: the norm's name, kind and size.
    """
    if config.logit_divisor == 1:
        return fetch_norm(fetch, config.names.norm, config)
    weight = replace(fetch, dtype=torch.float32)(f"{config.names.norm}.weight", (config.hidden,))
    return Norm(weight / config.logit_divisor, config.eps)


def fetch_lm_head(fetch: Fetch, config: ModelConfig, embedding: Table | None = None) -> Linear:
    """Return the lm_head, [hidden] -> vocab, with its weight loaded or shared with the embedding.

    It is stored in int8 where other matrices are int4. With `fetch.short_lm_head`, packed weights of 8 bits
    (those of the CPU kernels) are stored in int4 instead, and not shared with the embedding, which stays in
    8 bits.
    ModelError is raised if the files lack the weight.

    fetch: Reads tensors from the model's files.
    config: The model's config: tensor names, sizes, and whether embedding and lm_head are tied.
    embedding: The embedding, if it is loaded, else None; a tied model shares it.
    """
    name = _name_of_lm_head(fetch, config)
    short = _is_short(fetch)
    short_name = f"{name}.weight.int4"
    if short and (kept := fetch.find_packed(short_name, (config.vocab, config.hidden), "int4")):
        return Linear(kept)
    if embedding is None or name != _name_of_embedding(fetch, config):
        embedding = _fetch_table(fetch, config, name)
    if short and isinstance(embedding, Packed) and embedding.weight.bits == 8:
        return Linear(fetch.keep_packed(short_name, embedding.in_4_bits()))
    return Linear(embedding, None, lm_head_quantization(fetch.quantization))


def _is_short(fetch: Fetch) -> bool:
    """Tell whether the lm_head is rounded to int4.

    fetch: Reads tensors from the model's files.
    """
    return fetch.short_lm_head and fetch.quantization == "int4"


def _fetch_lm_head_rows(fetch: Fetch, config: ModelConfig, ids: Tensor | None) -> Tensor:
    """Load the lm_head's weight and return its rows [ids, hidden], or all rows for ids None.

    fetch: Reads tensors from the model's files.
    config: The model's config.
    ids: LongTensor [ids] of token ids, or None.
    """
    name = f"{_name_of_lm_head(fetch, config)}.weight"
    shape = config.vocab, config.hidden
    if ids is None:
        return fetch(name, shape)
    fetch.files.check(name, shape)
    return fetch.files.rows(name, ids.cpu()).to(fetch.device, fetch.dtype)


def rows_of_linear(linear: Linear, ids: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return weight rows of a loaded product, [ids, in].

    A packed product has no weight to index; multiplying the identity matrix recovers it. With `ids` None, a
    product with a weight returns the weight itself, not a copy.

    linear: The product [in] -> out.
    ids: LongTensor [ids], numbers of outputs; None: all rows.
    dtype: Type in which a packed product is multiplied.
    device: Device of a packed product.
    """
    if linear.weight is not None:
        return linear.weight if ids is None else linear.weight[ids]
    columns = linear(torch.eye(linear.shape[1], dtype=dtype, device=device))  # [in, out]
    return columns.T.contiguous() if ids is None else columns.T[ids]


def _name_of_embedding(fetch: Fetch, config: ModelConfig) -> str:
    """Return the tensor name of the embedding: the lm_head's if a tied model is published only with that.

    fetch: Knows which tensors the files have.
    config: The model's config: tensor names, and whether embedding and lm_head are tied.
    """
    names = config.names
    return names.head if config.tied and f"{names.embedding}.weight" not in fetch else names.embedding


def _name_of_lm_head(fetch: Fetch, config: ModelConfig) -> str:
    """Return the tensor name of the lm_head: the embedding's if the model is tied and has no lm_head.

    If a model has an lm_head, it is used even if the config says that the weights are tied, as in
    Transformers.

    fetch: Knows which tensors the files have.
    config: The model's config: tensor names, and whether embedding and lm_head are tied.
    """
    names = config.names
    return names.embedding if config.tied and f"{names.head}.weight" not in fetch else names.head


def _fetch_table(fetch: Fetch, config: ModelConfig, name: str) -> Table:
    """Return an embedding or lm_head, [vocab, hidden]: in packed int8 if weights are packed, else in floats.

    fetch: Reads tensors from the model's files.
    config: The model's config, for the sizes.
    name: Name of the module that has the weight.
    """
    name = f"{name}.weight"
    shape = config.vocab, config.hidden

    def make() -> Table:
        """Read the weight, and pack it if weights are packed."""
        return hold_table(fetch.blocks(name, shape, "int8") or fetch(name, shape), fetch.quantization)

    return _fetch_kept(fetch, name, shape, "int8", make)
