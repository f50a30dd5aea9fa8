"""The EAGLE-1 (also EAGLE-2's) and EAGLE-3 draft heads.

EAGLE-1 predicts the base model's last normed hidden state; EAGLE-3 runs decoder layers over token embeddings
and fused hidden states of several layers of the base model.

EAGLE-1: z = fc([embedding, feature]) is both the input and the residual of the first layer, which has no
input norm (HASS adds one, and norms both inputs of fc). The output is the next feature, and the base model's
own lm_head reads the output.

EAGLE-3: e = input_layernorm(embedding) and g = hidden_norm(feature). The projections q, k, v read [e, g]. The
residual is the feature before its norm, or g with `norm_before_residual`. The next feature is the output
before the last norm, or the normed output with `norm_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specsot.errors import HeadMismatch, InvalidRequest
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.heads.checkpoint import Checkpoint, HeadShape, Kind
from specsot_kernels.segments import look_back
from specsot_model.attention import AttentionPlan, RowSpan, attend
from specsot_model.fp8 import runs_kernels
from specsot_model.fused import rotate_heads
from specsot_model.kv import KVPages
from specsot_model.layers import AnyNorm, Norm, fetch_head_norms, unchanged
from specsot_model.linear import Linear, Packed, ProjectedTable, Table, look_up
from specsot_model.mlp import gate
from specsot_model.packed import ROWS_IN, LayerParts, LayerSizes, PackedLayers, best_tokens
from specsot_model.projections import fuse_projections
from specsot_model.rotary import Rotary, interleave, rotate
from specsot_model.weights import Fetch


@dataclass(frozen=True, slots=True)
class HeadWindow:
    """Attention window of some layers of a head.

    rows: Number of rows that a row attends to, itself included.
    layers: Indices of the layers that have the window.
    """

    rows: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DraftMask:
    """Mask that a P-EAGLE head reads in place of a token and a feature that are not known yet.

    token: Token id of the mask.
    feature: Feature of the mask, [hidden].
    depth: Number of tokens that the head learned to draft in one pass. None: the head's config does not say.
    """

    token: int
    feature: Tensor
    depth: int | None = None

    def levels(self, max_levels: int) -> int:
        """Return the number of levels of a tree, bounded by what the head learned. Return `max_levels` if the
        head's config does not say what it learned.

        max_levels: Maximum number of levels that the caller allows.
        """
        return max_levels if self.depth is None else min(max_levels, self.depth)


@dataclass(kw_only=True, eq=False)
class EagleHead(DraftHead):
    """A draft head that was loaded for its base model.

    kind: Family of the head: "eagle1", "eagle3", "dflash" or "dspark". Set by each subclass.
    shape: The sizes of the head.
    positions: Number of positions that the head can draft for.
    fusion: Turns hidden states of the base model into features.
    table: Token embeddings, [vocabulary, hidden].
    decoder: The decoder layers.
    lm_head: Matrix product that maps an output, [hidden], to logits, [draft vocabulary].
    offsets: For each draft id, the difference between the base model's id and it, [draft vocabulary]. None if
        the ids are the same.
    """

    kind: ClassVar[Kind]

    shape: HeadShape
    positions: int
    fusion: Fusion
    table: Table | ProjectedTable
    decoder: HeadLayers
    lm_head: Linear
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        """Derive the fields of `DraftHead` from shape, fusion and table.

        Sets taps, width, hidden, layers, draft_vocab, kv_heads, head_dim, group, dtype and device.
        """
        shape = self.shape
        fusion = self.fusion
        table = self.table
        self.taps = fusion.taps
        self.width = fusion.width
        self.hidden = shape.hidden
        self.layers = shape.layers
        self.draft_vocab = shape.vocab
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.group = shape.heads // shape.kv_heads
        self.dtype, self.device = table.dtype, table.device  # pyrefly: ignore[read-only]

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        """Return empty KV pages for the head's layers. With packed layers the KV has the type of the CPU
        kernels.

        pages: Number of pages.
        page_rows: Number of slots of a page.
        """
        numbers = ROWS_IN if self.decoder.packed else self.dtype
        return KVPages(self.layers, pages, page_rows, self.kv_heads, self.head_dim, numbers, self.device)

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        """Return the attention plan of one forward pass. With a window, the plan also has a part for the
        layers that have the window.

        spans: For each sequence, its query rows and the KV that they see.
        page_rows: Number of slots of a KV page.

        The result's `sliding` is that further part; it is None without a window.
        """
        packed = self.decoder.packed
        window = self.decoder.window
        make = packed.plan if packed else super().plan
        whole = make(spans, page_rows)
        if window is None:
            return whole
        near = [part for span in spans for part in self.look_back(span, window.rows)]
        return replace(whole, sliding=make(near, page_rows))

    def look_back(self, span: RowSpan, window: int) -> Iterator[RowSpan]:
        """Yield the span's rows again, in one or more parts, with the KV that they see in layers with a
        window.

        span: Query rows of one sequence and the KV that they see without a window.
        window: Number of positions that a row attends to, itself included.
        """
        return look_back(span, window)

    def tap_slices(self) -> dict[int, Tensor]:
        """Return the matrix of each tap, [width, base width], by layer number: a fused row is the sum of
        matrix @ state.
        """
        return self.fusion.slices()

    def features(self, fused: Tensor) -> Tensor:
        """Convert fused rows to features, [rows, hidden].

        fused: Sums over the taps, [rows, width].
        """
        return self.fusion.features(fused)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of outputs, [rows, draft vocabulary].

        outputs: Outputs of `forward`, [rows, hidden].
        """
        return self.lm_head(outputs)

    def to_target(self, ids: Tensor) -> Tensor:
        """Convert draft ids to ids of the base model: id + offsets[id], as the tensor d2t defines them.
        Without `offsets`, the ids are returned unchanged.

        ids: Draft ids, a tensor of any shape.

        For example:

            # offsets [0 0 5], draft ids [0 2] -> base ids [0 7]
        """
        return ids if self.offsets is None else ids + self.offsets[ids]


@dataclass(kw_only=True, eq=False)
class Eagle1Head(EagleHead):
    """An EAGLE-1 or EAGLE-2 head; a HASS head if the norms are present.

    fc: Matrix product that maps embedding and feature, one after the other, [2 * hidden], to the input of the
        first layer, [hidden].
    lm_head: The base model's. An output predicts a normed state, so there is no norm before it.
    token_norm: Norm of the embedding before fc; `unchanged` if the head has none, and so for the others.
    feature_norm: Norm of the feature before fc.
    input_norm: Norm of the first layer's input.
    """

    kind = "eagle1"

    fc: Linear
    token_norm: AnyNorm
    feature_norm: AnyNorm
    input_norm: AnyNorm

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass, and return the outputs of the asked rows, [asked, hidden]; see
        `DraftHead.forward`.

        tokens: Token ids, [rows].
        features: Feature of the position before each token, [rows, hidden].
        rows: Positions, slots and attention of the rows.

        With None as the rows' asked indices, every row is asked for. Norms that the head does not have are
        left out. Keys and values of all rows are written to the KV pages.
        """
        embedded = self.token_norm(look_up(self.table, tokens))
        mixed = self.fc(torch.cat((embedded, self.feature_norm(features)), 1))
        return self.decoder.forward(self.input_norm(mixed), mixed, rows)


@dataclass(kw_only=True, eq=False)
class Eagle3Head(EagleHead):
    """An EAGLE-3 head, or a P-EAGLE head if `mask` is given.

    token_norm: Norm of the token's embedding, before the first layer.
    feature_norm: Norm of the feature, before the first layer.
    norm: Norm of the output, before lm_head.
    norm_before_residual: True if the residual of the first layer is the normed feature; False if it is the
        feature itself.
    norm_output: True if the next feature is the normed output; False if it is the output before the norm.
    mask: What is fed in place of unknown tokens, so that one pass drafts several tokens. None for EAGLE-3
        heads, which draft one token per pass.
    """

    kind = "eagle3"

    token_norm: Norm
    feature_norm: Norm
    norm: Norm
    norm_before_residual: bool = False
    norm_output: bool = False
    mask: DraftMask | None = None

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass, and return the outputs of the asked rows, [asked, hidden]; see
        `DraftHead.forward`.

        tokens: Token ids, [rows].
        features: Feature of the position before each token, [rows, hidden].
        rows: Positions, slots and attention of the rows.

        Keys and values of all rows are written to the KV pages. The outputs are normed if `norm_output` is
        True.
        """
        normed = self.feature_norm(features)
        inputs = torch.cat((self.token_norm(look_up(self.table, tokens)), normed), 1)
        residual = normed if self.norm_before_residual else features
        outputs = self.decoder.forward(inputs, residual, rows)
        return self.norm(outputs) if self.norm_output else outputs

    def store(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> None:
        """Write the KV of rows whose outputs are not needed; see `DraftHead.store`. On a GPU, two kernels and
        one product do this: prompts arrive one after the other, and the host would launch two dozen kernels
        for each.

        tokens: Token ids, [rows].
        features: Features by slot, [slots, hidden].
        rows: Positions and slots of the rows.

        On a CPU, and if the embedding table is not a tensor (as where it is quantized), `forward` is run.
        """
        if self.decoder.first.runs_kernels and isinstance(self.table, Tensor):
            from specsot_kernels.gpu.rows import join_rows

            norms = self.token_norm.weight, self.feature_norm.weight
            inputs, _ = join_rows(tokens, self.table, features, rows.slots, norms, self.token_norm.eps)
            self.decoder.first.remember(inputs, rows.positions, rows.slots, rows.kv)
        else:
            super().store(tokens, features, rows)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of outputs, [rows, draft vocabulary]. The norm is applied here unless the outputs
        are normed already.

        outputs: Outputs of `forward`, [rows, hidden].
        """
        return self.lm_head(outputs if self.norm_output else self.norm(outputs))

    def choose(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Return log-probabilities and base ids of the likeliest tokens of each row, [rows, count] each, best
        first. Return None if no CPU kernel computes logits and selection together.

        outputs: Outputs of `forward`, [rows, hidden].
        count: Number of tokens per row.
        """
        norm = None if self.norm_output else self.norm
        return best_tokens(self.lm_head, norm, outputs, count, self.offsets)


class HeadLayers:
    """All decoder layers of a head: the first reads what its head prepares, the others are like Llama's
    layers.

    layers: All layers, in order.
    first: The first layer.
    rest: Each further layer with the norm of its input, (norm, layer). Empty for a head with one layer.
    window: The attention window of some layers. None: no layer has one.
    packed: The layers in the form of the CPU kernels. None if these kernels do not support them.
    """

    def __init__(
        self, fetch: Fetch, shape: HeadShape, rotary: Rotary, eps: float, window: HeadWindow | None = None
    ) -> None:
        """Load all layers.

        fetch: Loads the head's tensors.
        shape: Sizes of the head.
        rotary: The rotary embedding.
        eps: Epsilon of the norms.
        window: The attention window of some layers. None: no layer has one.

        Sets `packed` on every layer, and marks the layers of the window. Raises ModelError if the head lacks
        a tensor of a layer.
        """
        self.layers = [HeadLayer(fetch, shape, rotary, eps, index) for index in range(shape.layers)]
        self.first, *rest = self.layers
        norms = (
            fetch_norm(fetch, f"layers.{index}.input_layernorm", shape.hidden, eps)
            for index in range(1, shape.layers)
        )
        self.rest = tuple(zip(norms, rest))
        self.window, self.packed = window, _pack(self.layers, fetch.dtype)
        for layer in self.layers:
            layer.packed = self.packed
        for index in window.layers if window else ():
            self.layers[index].near = True

    def forward(self, inputs: Tensor, residual: Tensor, rows: HeadRows) -> Tensor:
        """Run all layers and return the outputs of the asked rows, [asked, hidden].

        inputs: What the first layer reads, [rows, columns of the first layer].
        residual: What the updates of the first layer are added to, [rows, hidden].
        rows: Positions, slots and attention of the rows.

        The rows of the result are those of the last layer; keys and values of all rows are written.
        """
        x = self.first.forward(inputs, residual, rows)
        for norm, layer in self.rest:
            x = layer.forward(norm(x), x, rows)
        return x


def _pack(layers: Sequence[HeadLayer], dtype: torch.dtype) -> PackedLayers | None:
    """Return the layers in the form of the CPU kernels. Return None if these kernels do not support the
    layers.

    layers: All layers of the head. At least one.
    dtype: Type of the head's numbers.

    That is so for weights that are not packed, for numbers other than float32, and for the sizes that
    `can_pack` refuses.
    """
    first = layers[0]
    shape = layers[0].shape
    plain = dtype == torch.float32 and can_pack(shape, first.rotary.stretch)
    if not (isinstance(first.qkv.multiply, Packed) and plain):
        return None
    parts = [
        LayerParts(one.qkv, one.out, one.gate_up, one.down, None, one.mlp_norm, one.head_norms)
        for one in layers
    ]
    return PackedLayers(parts, _sizes(shape, shape.inputs), [one.rotary for one in layers])


def can_pack(shape: HeadShape, stretch: float) -> bool:
    """Return whether the CPU kernels support layers of these sizes when the weights are quantized: False if
    the sizes do not fill whole vectors, or if the rotary embedding stretches.

    shape: Sizes of the head.
    stretch: Factor by which the rotary embedding stretches queries and keys; only 1 is supported.
    """
    return stretch == 1.0 and all(
        _sizes(shape, inputs).fit_vectors for inputs in (shape.inputs, shape.hidden)
    )


def _sizes(shape: HeadShape, inputs: int) -> LayerSizes:
    """Return the sizes of a layer as the CPU kernels need them.

    shape: Sizes of the head.
    inputs: Columns that the layer's projections read.
    """
    return LayerSizes(inputs, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim)


class HeadLayer:
    """Decoder layer `index`: attention whose output is added to a residual, then a gated MLP.

    packed: Runs the whole layer in CPU kernels. None if these do not support the layer.
    near: True if the layer has an attention window.
    runs_kernels: True if the kernels for GPUs run on the layer's device.
    shape: Sizes of the head.
    rotary: Rotary embedding of queries and keys.
    qkv: Projections of queries, keys and values, as one matrix product.
    head_norms: Norms of each query head and each key head. Empty: the layer has none.
    out: Output projection of the attention.
    mlp_norm: Norm of the MLP's input.
    gate_up: Gate and up projections of the MLP, as one matrix product.
    down: Down projection of the MLP.
    """

    packed: PackedLayers | None = None
    near = False

    def __init__(self, fetch: Fetch, shape: HeadShape, rotary: Rotary, eps: float, index: int) -> None:
        """Load one layer.

        fetch: Loads the head's tensors.
        shape: Sizes of the head.
        rotary: The rotary embedding.
        eps: Epsilon of the norms.
        index: Number of the layer in the head.

        Raises ModelError if the head lacks a tensor of the layer. Norms of heads are used only if the head
        has them.
        """
        prefix = f"layers.{index}"
        self._index = index
        self.shape = shape
        self.rotary = rotary
        self.runs_kernels = runs_kernels(rotary.frequencies.device)
        self.qkv, self._kv = _projections(fetch, f"{prefix}.self_attn", shape, index)
        has_norms = f"{prefix}.self_attn.q_norm.weight" in fetch
        self.head_norms = (
            fetch_head_norms(fetch, f"{prefix}.self_attn", shape.head_dim, eps) if has_norms else ()
        )
        hidden = shape.hidden
        inner = shape.intermediate
        self.out = _fuse(fetch, f"{prefix}.self_attn", ("o_proj",), (hidden, shape.heads * shape.head_dim))
        self.mlp_norm = fetch_norm(fetch, f"{prefix}.post_attention_layernorm", hidden, eps)
        self.gate_up = _fuse(fetch, f"{prefix}.mlp", ("gate_proj", "up_proj"), (inner, hidden))
        self.down = _fuse(fetch, f"{prefix}.mlp", ("down_proj",), (hidden, inner))

    def forward(self, inputs: Tensor, residual: Tensor, rows: HeadRows) -> Tensor:
        """Write the keys and values of all rows, and return the residual with both updates, [asked, hidden].
        Only asked rows take part in attention and MLP.

        inputs: What the projections read, [rows, columns].
        residual: What the updates are added to, [rows, hidden].
        rows: Positions, slots and attention. Without a plan, the residual is returned unchanged.

        If all rows are asked for (`rows.asked` is None or names as many rows), none is left out. A layer
        with a window attends by the plan's `sliding` part.
        """
        kv = rows.kv
        asked = rows.asked
        positions = rows.positions
        slots = rows.slots
        if asked is not None and len(asked) < len(inputs):
            self.remember(inputs, positions, slots, kv)
            residual = residual[asked]
            if rows.plan is None:
                return residual
            inputs = inputs[asked]
            positions = positions[asked]
            slots = slots[asked]
        plan = (rows.plan.sliding or rows.plan) if rows.plan and self.near else rows.plan
        if plan is None:
            return residual
        if self.packed:
            return self.packed.forward(inputs, residual, self._index, plan, positions, slots, kv)
        q = self._project(inputs, positions, slots, kv)
        x = residual + self.out(attend(q, kv.layers[self._index], plan))
        return x.add_(self.down(gate(self.gate_up(self.mlp_norm(x)))))

    def _project(self, inputs: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> Tensor:
        """Return the rotated queries, [rows, kv_heads, group, head_dim]; write keys and values to the slots.

        inputs: What the projections read, [rows, columns].
        positions: Position of each row, [rows].
        slots: KV slot of each row, [rows].
        kv: The KV pages.

        Columns of one product: [queries of all heads | keys of all KV heads | values of all KV heads].

        Query and key heads are normed first if the layer has such norms.
        """
        heads = self.shape.heads
        pairs = self.shape.kv_heads
        parts = self.qkv(inputs).view(inputs.shape[0], -1, self.shape.head_dim)
        for part, norm in zip(parts.split((heads, pairs, pairs), 1), self.head_norms):
            part.copy_(norm(part))
        rotate(parts.narrow(1, 0, heads + pairs), self.rotary.table(positions))
        kv.write(self._index, slots, parts.narrow(1, heads, 2 * pairs).unflatten(1, (2, pairs)))
        return parts.narrow(1, 0, heads).unflatten(1, (pairs, heads // pairs))

    def remember(self, inputs: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> None:
        """Write the keys and values of rows to their slots, without computing outputs.

        inputs: What the projections read, [rows, columns].
        positions: Position of each row, LongTensor [rows].
        slots: KV slot of each row, LongTensor [rows].
        kv: The KV pages.

        Keys are normed, if the layer has norms for heads, and rotated. Packed layers do this in CPU kernels.
        On a GPU, one kernel does this after the product.
        """
        if self.packed:
            self.packed.store_kv(inputs, self._index, positions, slots, kv)
            return
        product = self._kv(inputs)
        if self.runs_kernels:
            rotate_heads(product, positions, slots, kv.layers[self._index], self.turning(0))
            return
        pairs = self.shape.kv_heads
        parts = product.view(inputs.shape[0], -1, self.shape.head_dim)
        keys = parts.narrow(1, 0, pairs)
        if self.head_norms:
            keys.copy_(self.head_norms[1](keys))
        rotate(keys, self.rotary.table(positions)[:, -pairs:])
        kv.write(self._index, slots, parts.unflatten(1, (2, pairs)))

    def turning(self, heads: int) -> Any:
        """Return how GPU kernels norm, rotate and scale the heads of a product, a
        `specsot_kernels.gpu.rows.Turning`. The result is not annotated as one, because that module can only
        be imported where Triton is installed.

        heads: Number of query heads of the product. 0 if the product has keys and values alone.
        """
        from specsot_kernels.gpu.rows import Turning

        weights = [norm.weight for norm in self.head_norms]
        norms = (weights[0], weights[1]) if weights else None  # of query heads and of key heads
        turns = self.rotary.frequencies, self.rotary.scale
        # All norms of a layer have the same epsilon, also those of heads.
        return Turning(heads, self.shape.kv_heads, *turns, norms, self.mlp_norm.eps)


def fetch_norm(fetch: Fetch, name: str, size: int, eps: float) -> Norm:
    """Load a norm and return it. Raises ModelError if the head does not have it.

    fetch: Loads the head's tensors.
    name: Name of the norm, without `.weight`.
    size: Number of columns.
    eps: Epsilon of the norm.
    """
    return Norm(fetch(f"{name}.weight", (size,)), eps)


def find_norm(fetch: Fetch, name: str, size: int, eps: float) -> AnyNorm:
    """Load a norm and return it. Return `unchanged` if the head does not have it.

    fetch: Loads the head's tensors.
    name: Name of the norm, without `.weight`.
    size: Number of columns.
    eps: Epsilon of the norm.
    """
    return fetch_norm(fetch, name, size, eps) if f"{name}.weight" in fetch else unchanged


def _fuse(fetch: Fetch, prefix: str, parts: tuple[str, ...], shape: tuple[int, int]) -> Linear:
    """Load projections of one shape, and return them as one matrix product, with biases if there are any.
    Raises ModelError if the head lacks one of them.

    fetch: Loads the head's tensors.
    prefix: Beginning of the tensors' names.
    parts: Names of the projections, whose rows are put one after the other.
    shape: Rows and columns of each projection.
    """
    names = [f"{prefix}.{part}" for part in parts]
    return fuse_projections(fetch, names, shape, any(f"{name}.bias" in fetch for name in names))


def _projections(fetch: Fetch, prefix: str, shape: HeadShape, index: int) -> tuple[Linear, Linear]:
    """Load and return two matrix products: queries, keys and values together, and keys and values alone.

    fetch: Loads the head's tensors.
    prefix: Beginning of the tensors' names.
    shape: Sizes of the head.
    index: Number of the layer. The first layer has other inputs.

    The second product is for rows whose outputs are not needed. The rows are ordered as `rotate` expects.

    Both have biases if the query projection has one, and both are quantized as the loader says.
    """
    columns = shape.hidden if index else shape.inputs
    biased = f"{prefix}.q_proj.bias" in fetch
    weight = torch.cat(_turned(fetch, prefix, "weight", (columns,), shape))
    bias = torch.cat(_turned(fetch, prefix, "bias", (), shape)) if biased else None
    first = shape.heads * shape.head_dim
    kind = fetch.quantization
    keys = Linear(weight[first:], None if bias is None else bias[first:], kind)
    return Linear(weight, bias, kind), keys


def _turned(fetch: Fetch, prefix: str, kind: str, columns: tuple[int, ...], shape: HeadShape) -> list[Tensor]:
    """Load and return the weights or biases of q, k and v, in this order. The rows of q and k are interleaved
    for `rotate`.

    fetch: Loads the head's tensors.
    prefix: Beginning of the tensors' names.
    kind: "weight" or "bias".
    columns: (columns,) of a weight; () for a bias.
    shape: Sizes of the head.

    Raises ModelError if the head lacks one of the tensors.
    """
    dim = shape.head_dim
    pairs = shape.kv_heads
    rows = {"q_proj": shape.heads, "k_proj": pairs, "v_proj": pairs}
    parts = {name: fetch(f"{prefix}.{name}.{kind}", (heads * dim, *columns)) for name, heads in rows.items()}
    return [part if name == "v_proj" else interleave(part, dim) for name, part in parts.items()]


class SummedTaps:
    """Fusion that runs fc in the stages, since fc([l, m, h]) = W1 l + W2 m + W3 h is a sum over the taps.

    Only the bias is added here.

    taps: Layers of the base model whose inputs are read, ascending.
    width: Columns of a fused row, which are those of a feature.
    """

    def __init__(self, taps: tuple[int, ...], weight: Tensor, bias: Tensor | None) -> None:
        """Split fc into slices.

        taps: Layers whose inputs are read, ascending.
        weight: fc, [hidden, taps * base width]; its column blocks are the slices.
        bias: [hidden], or None for an fc without bias.
        """
        self.taps = taps
        self.width = weight.shape[0]
        self._parts = weight.chunk(len(taps), dim=1)
        self._bias = bias

    def slices(self) -> dict[int, Tensor]:
        """Return the column block of fc of each tap, [hidden, base width], by layer."""
        return {tap: part.contiguous() for tap, part in zip(self.taps, self._parts)}

    def features(self, fused: Tensor) -> Tensor:
        """Return the fused rows with the bias added, [rows, hidden].

        fused: Sums over the taps, [rows, hidden].
        """
        return fused if self._bias is None else fused + self._bias


@dataclass(frozen=True, slots=True)
class ConcatenatedTaps:
    """Fusion that receives the states of all taps side by side, and runs norms and fc here.

    A norm before fc is not linear, so that fc cannot run in the stages.

    taps: Layers of the base model whose inputs are read, ascending.
    width: Columns of a fused row: those of all taps' states together.
    norms: One norm over all states together, or one norm per state.
    fc: From all states side by side to a feature; `unchanged` if the normed states are the feature.
    dtype: Type of the slices.
    """

    taps: tuple[int, ...]
    width: int
    norms: Sequence[AnyNorm]
    fc: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def slices(self) -> dict[int, Tensor]:
        """Return matrices, [width, base width], that place each tap's state in columns of its own, by layer
        number.
        """
        return identity_slices(self.taps, self.width // len(self.taps), self.dtype)

    def features(self, fused: Tensor) -> Tensor:
        """Norm the states and apply fc: [rows, hidden].

        fused: The states of all taps side by side, [rows, width].
        """
        parts = zip(self.norms, fused.chunk(len(self.norms), dim=1))
        return self.fc(torch.cat([norm(part) for norm, part in parts], dim=1))


class FinalHidden(ConcatenatedTaps):
    """Fusion that uses the base model's last hidden state alone, after the last norm, as the base's lm_head
    reads it. The only tap is the number of layers of the base model, and there is no fc.
    """


# Way to turn hidden states of the base model into features; one part runs in the stages (`slices`), one part
# here (`features`). `taps` are the layers whose inputs are read, ascending; the number of layers stands for
# the output of the last one. A fused row of `width` columns is the sum over the taps of slice @ state.
Fusion = SummedTaps | ConcatenatedTaps


def identity_slices(taps: tuple[int, ...], width: int, dtype: torch.dtype) -> dict[int, Tensor]:
    """Return matrices that place each tap's state in columns of its own: [taps * width, width] per tap.

    taps: The layers.
    width: Columns of a state.
    dtype: Type of the matrices.

    2 taps, width 2: the first slice is [[1 0] [0 1] [0 0] [0 0]], so the sum of slice @ state is [l, m].
    """
    parts = torch.eye(len(taps) * width, dtype=dtype).split(width, dim=1)
    return {tap: part.contiguous() for tap, part in zip(taps, parts)}


TAPS_FIELD = "eagle_aux_hidden_state_layer_ids"
# Layers of the base model. With fewer, the default taps 2, L // 2, L - 3 are not different and ascending.
MIN_LAYERS = 7


def choose_taps(
    head: Checkpoint, layers: int, wanted: tuple[int, ...] | None, given: list[Any] | None = None
) -> tuple[int, ...]:
    """Return the taps, ascending: those wanted, else those of the config, else the reference's defaults.

    head: The head's checkpoint.
    layers: Number of layers of the base model.
    wanted: Taps that the user named. None: none.
    given: Taps that the config names in another field, always as inputs. None: the usual field is read.

    A tap is a layer whose input is read. If the smallest number in the config is 1, the config names layers
    whose outputs are read, and each number is increased by one: [1, 15, 28] -> (2, 16, 29). Raises
    InvalidRequest for impossible wanted taps, and HeadMismatch for impossible taps of the config.

    The default taps are those of `_default_taps`, which raises HeadMismatch for a base model of fewer than
    MIN_LAYERS layers. Numbers in `given` are never increased by one. Impossible are an empty list, repeated
    or unordered numbers, a number below 0 and one above `layers`; numbers of the config are sorted first.
    """
    if wanted is not None:
        if complaint := _complaint(wanted, layers):
            raise InvalidRequest(f"aux_layers {complaint}", field="aux_layers")
        return wanted
    named: Any = head.settings.get(TAPS_FIELD) if given is None else given
    if named is None:
        return _default_taps(head, layers)
    if not isinstance(named, list) or not all(type(tap) is int for tap in named):
        raise HeadMismatch(f"{head.source}: {TAPS_FIELD} must be layer numbers, got {named!r}")
    taps = tuple(tap + (given is None and min(named) == 1) for tap in sorted(named))
    if complaint := _complaint(taps, layers):
        raise HeadMismatch(f"{head.source}: {TAPS_FIELD} {named}: {complaint}")
    return taps


def _default_taps(head: Checkpoint, layers: int) -> tuple[int, ...]:
    """Return the taps of the reference: 32 layers -> (2, 16, 29).

    head: The head's checkpoint, for messages.
    layers: Number of layers of the base model.

    Raises HeadMismatch for too few layers.
    """
    if layers < MIN_LAYERS:
        raise HeadMismatch(
            f"{head.directory}: EAGLE-3 taps three layers, the base has only {layers} layers; "
            "name them with --aux-layers"
        )
    return (2, layers // 2, layers - 3)


def _complaint(taps: tuple[int, ...], layers: int) -> str | None:
    """Return what is wrong with taps, as the end of a message. Return None if nothing is wrong.

    taps: Layers whose inputs are to be read.
    layers: Number of layers of the base model.

    Wrong are an empty tuple, repeated or unordered numbers, a number below 0, and one above `layers`; the
    number `layers` itself is allowed and stands for the output of the last layer.
    """
    if not taps or list(taps) != sorted(set(taps)):
        return f"must be different layers in ascending order, got {list(taps)}"
    if taps[0] < 0 or taps[-1] > layers:
        return f"must be in 0..{layers}, as the base has {layers} layers, got {list(taps)}"
    return None
