"""Runs quantized decoder layers on a CPU in one kernel call, in which a row does not depend on its batch.

Layers of another structure run as `Block` does, over the same quantized products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot_kernels.segments import RowSpan
from specsot_model.attention import AttentionPlan
from specsot_model.fused import can_fuse
from specsot_model.kv import KVPages
from specsot_model.layers import AnyNorm, Block, Norm, add_tap
from specsot_model.linear import Linear, Packed, multiply_wide
from specsot_model.mlp import GatedMlp
from specsot_model.rotary import Rotary

if TYPE_CHECKING:
    from specsot_kernels.cpu.running import ColumnPlan, KernelFrame

# Type of the KV cache of these layers.
ROWS_IN = torch.float16
# Positions. The rotary table grows by at least this many. Untuned.
TURNS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The products and norms of one layer.

    qkv: Queries, keys and values as one product.
    out: The product after attention.
    gate_up: Gate and up projections of the MLP as one product.
    down: The MLP's last product.
    input_norm: The norm before `qkv`; None if the layer reads other inputs than its residual stream.
    mlp_norm: The norm before `gate_up`.
    head_norms: Norms of query and key heads; empty if there are none.
    """

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: Norm | None
    mlp_norm: Norm
    head_norms: tuple[Norm, ...]

    @property
    def table(self) -> NDArray[np.int64]:
        """Return the layer as the kernel reads it: int64 [layout.LAYER_FIELDS], addresses and sizes; see
        `layout.LAYER_FIELDS`.
        """
        products = (self.qkv, self.out, self.gate_up, self.down)
        norms = (self.input_norm, self.mlp_norm, *(self.head_norms or (None, None)))
        addresses = [norm.weight.data_ptr() if norm else 0 for norm in norms]
        tables = [packed_of(product).weight.table for product in products]
        return np.concatenate((*tables, np.array(addresses, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes that all layers share.

    inputs: Number of inputs of `LayerParts.qkv`.
    intermediate: Width of the MLP.
    heads: Number of query heads.
    kv_heads: Number of KV heads.
    head_dim: Numbers of a head.
    query_scalar: Number by whose square root attention scores are divided; None means head_dim.
    """

    inputs: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    query_scalar: float | None = None

    @property
    def width(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def fit_vectors(self) -> bool:
        """Tell whether the kernels can read these sizes as whole vectors and quantization groups."""
        return not (
            self.head_dim % 16 or any(size % 32 for size in (self.inputs, self.intermediate, self.width))
        )


class PackedLayers:
    """Consecutive layers that a CPU kernel runs in one call."""

    def __init__(self, parts: Sequence[LayerParts], sizes: LayerSizes, rotaries: Sequence[Rotary]) -> None:
        """Tabulate the layers for the kernel.

        parts: The products and norms of each layer.
        sizes: Sizes that all layers share.
        rotaries: The rotary embedding of each layer.
        """
        self._sizes_of = sizes
        self._rotaries = tuple(rotaries)
        self._eps = parts[0].mlp_norm.eps
        # The tables hold addresses of these parts' memory, so the parts must stay alive.
        self._parts_of = parts
        self._tables = np.stack([part.table for part in parts])
        self._widest = max(sizes.inputs, sizes.intermediate, sizes.width)
        self._turns = dict.fromkeys(rotaries, torch.empty(0, 2, sizes.head_dim))

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        """Return the attention plan of a frame, which holds the columns that each row sees.

        spans: One span per segment of the frame, in row order.
        page_rows: Rows (tokens) of a KV page.
        """
        from specsot_kernels.cpu.running import plan_columns

        row_bytes = ROWS_IN.itemsize * self._sizes_of.head_dim
        columns = plan_columns(spans, page_rows, row_bytes, self._sizes_of.kv_heads)
        return AttentionPlan((), (), None, None, columns=columns)

    def run_tapped(
        self, hidden: Tensor, taps: Mapping[int, Linear | Tensor], fused: Tensor | None,
        positions: Tensor, slots: Tensor, plans: Sequence[AttentionPlan], kv: KVPages,
    ) -> Tensor | None:  # fmt: skip
        """Run hidden states [rows, H] through all layers, in place, and return the sum of the taps.

        AssertionError is raised for a tap before a layer that is no `Linear` in packed form. With no taps
        `fused` is returned as it is, perhaps None.

        taps: By index of the layer among these, the weight [Hd, H] that multiplies the layer's input. The
            index after the last layer means the output.
        fused: [rows, Hd], the sum of earlier taps, changed in place; None: no earlier taps.
        hidden: [rows, H], the residual stream.
        positions: LongTensor [rows], the position of each row in its sequence.
        slots: LongTensor [rows], the KV slot of each row.
        plans: One plan per layer, as `plan` of this class makes it.
        kv: The KV cache of the layer range.

        Return `fused` plus the taps, [rows, Hd]. The taps run within the kernel call of the layers; as calls
        of their own they took a tenth of a step of SmolLM2.
        """
        tap_addresses = np.zeros((len(self._parts_of), 2), np.int64)
        parts = dict[int, Tensor]()
        rows = len(hidden)
        for layer, tap in taps.items():
            if layer < len(tap_addresses):
                assert isinstance(tap, Linear), "packed layers need a tap that `Decoder.hold_tap` prepared"
                weight = packed_of(tap).weight
                parts[layer] = torch.empty(rows, weight.outputs)
                tap_addresses[layer] = weight.table.ctypes.data, parts[layer].data_ptr()
        self.runner(positions, slots, plans, kv, tap_addresses)(hidden, range(len(tap_addresses)))
        for layer, tap in sorted(taps.items()):
            part = parts[layer][:, : tap.shape[0]] if layer in parts else add_tap(hidden, tap, None)
            fused = part if fused is None else fused.add_(part)
        return fused

    def runner(
        self, positions: Tensor, slots: Tensor, plans: Sequence[AttentionPlan], kv: KVPages,
        tap_addresses: NDArray[np.int64] | None = None,
    ) -> Callable[[Tensor, range], None]:  # fmt: skip
        """Return a function that runs hidden states [rows, H], in place, through a range of these layers.

        AssertionError is raised for a plan that another class made. An empty range changes nothing.

        positions: LongTensor [rows], the position of each row in its sequence; at least one row.
        slots: LongTensor [rows], the KV slot of each row.
        plans: One plan per layer. One kernel call runs all consecutive layers with the same plan object and
            rotary embedding.
        kv: The KV cache of the layer range.
        tap_addresses: int64 [layers, 2], addresses of each layer's tap and of its result, 0 without a tap;
            see `layout.TAPS`. None: no layer has a tap.
        """
        from specsot_kernels.cpu import layout

        longest = max(_columns(plan).longest for plan in plans)
        frame = self._frame(positions, slots, kv, longest)
        num_positions = int(positions.max()) + 1
        kinds = [(id(plan), rotary) for plan, rotary in zip(plans, self._rotaries)]

        def run(hidden: Tensor, layers: range) -> None:
            """Run hidden states through some layers, in place.

            hidden: fp32 [rows, H], contiguous, the residual stream.
            layers: Indices of the layers among these.
            """
            frame.point(layout.HIDDEN, hidden)
            for _, alike in groupby(layers, key=kinds.__getitem__):
                part = tuple(alike)
                self._set_columns(frame, plans[part[0]], kv, part[0])
                self._set_turns(frame, part[0], num_positions)
                if tap_addresses is not None:
                    frame.put(layout.TAPS, tap_addresses[part[0] :].ctypes.data)
                frame.run(self._tables[part[0]], len(part))

        return run

    def forward(
        self, inputs: Tensor, residual: Tensor, layer: int, plan: AttentionPlan,
        positions: Tensor, slots: Tensor, kv: KVPages,
    ) -> Tensor:  # fmt: skip
        """Run one layer that reads other inputs than its residual stream; return the new residual stream
        [rows, H].

        The layer's keys and values are stored as well.

        inputs: [rows, sizes.inputs], what the layer's projections read.
        residual: [rows, H], to which the layer's two updates are added; not changed.
        layer: Index of the layer among these.
        plan: The attention plan of the frame.
        positions: LongTensor [rows], the position of each row in its sequence.
        slots: LongTensor [rows], the KV slot of each row.
        kv: The KV cache of the layer range.
        """
        from specsot_kernels.cpu import layout

        frame = self._frame(positions, slots, kv, _columns(plan).longest)
        hidden = residual.clone(memory_format=torch.contiguous_format)
        frame.point(layout.HIDDEN, hidden)
        frame.point(layout.X, inputs.contiguous())
        self._set_turns(frame, layer, int(positions.max()) + 1)
        self._set_columns(frame, plan, kv, layer)
        frame.run(self._tables[layer], 1)
        return hidden

    def store_kv(self, inputs: Tensor, layer: int, positions: Tensor, slots: Tensor, kv: KVPages) -> None:
        """Store keys and values of some inputs, and compute nothing else of the layer.

        inputs: [rows, sizes.inputs], what the layer's projections read.
        layer: Index of the layer among these.
        positions: LongTensor [rows], the position of each row in its sequence.
        slots: LongTensor [rows], the KV slot of each row.
        kv: The KV cache of the layer range.
        """
        from specsot_kernels.cpu import layout

        frame = self._frame(positions, slots, kv, None)
        frame.point(layout.X, inputs.contiguous())
        self._set_turns(frame, layer, int(positions.max()) + 1)
        self._set_kv(frame, kv, layer)
        frame.run(self._tables[layer], layout.STORE_KV)

    def _frame(self, positions: Tensor, slots: Tensor, kv: KVPages, max_columns: int | None) -> KernelFrame:
        """Return the kernel's argument block for a batch, without what differs from layer to layer.

        positions: LongTensor [rows], the position of each row in its sequence.
        slots: LongTensor [rows], the KV slot of each row.
        kv: The KV cache of the layer range.
        max_columns: Largest number of columns that a row sees; None if no attention runs.
        """
        from specsot_kernels.cpu import layout
        from specsot_kernels.cpu.running import KernelFrame

        sizes = self._sizes_of
        rows = len(positions)
        frame = KernelFrame(rows, self._widest, self._eps)
        counts = sizes.heads, sizes.kv_heads, sizes.head_dim, kv.page_rows
        for field, count in zip((layout.HEADS, layout.KV_HEADS, layout.HEAD_DIM, layout.PAGE_ROWS), counts):
            frame.put(field, count)
        frame.put_float(layout.QUERY_SCALE, 1 / np.sqrt(np.float32(sizes.query_scalar or sizes.head_dim)))
        frame.point(layout.POSITIONS, positions.contiguous())
        frame.point(layout.SLOTS, slots.contiguous())
        frame.make(layout.PROJECTED, rows * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim * 4)
        if max_columns is not None:
            frame.make(layout.ATTENDED, rows * sizes.width * 4)
            frame.make(layout.INNER, rows * 2 * sizes.intermediate * 4)
            frame.make_attention(max_columns, sizes.head_dim, sizes.heads // sizes.kv_heads)
        return frame

    def _set_columns(self, frame: KernelFrame, plan: AttentionPlan, kv: KVPages, layer: int) -> None:
        """Let the kernel read the visible columns of a plan, and the KV cache from a layer on.

        frame: The kernel's argument block.
        plan: The attention plan of the frame.
        kv: The KV cache of the layer range.
        layer: Index of the first layer that runs.
        """
        from specsot_kernels.cpu import layout

        columns = _columns(plan)
        frame.put(layout.VISIBLE_COLUMNS, columns.sight.ctypes.data)
        frame.put(layout.VISIBLE_HEADS, columns.sight.shape[1])
        self._set_kv(frame, kv, layer)

    def _set_kv(self, frame: KernelFrame, kv: KVPages, layer: int) -> None:
        """Let the kernel write keys and values to the KV cache from a layer on.

        frame: The kernel's argument block.
        kv: The KV cache of the layer range.
        layer: Index of the first layer that runs.
        """
        from specsot_kernels.cpu import layout

        pages = kv.layers[layer]
        frame.put(layout.KEYS, pages.data_ptr())
        frame.put(layout.VALUES, pages.data_ptr() + pages[0].nbytes)
        frame.put(layout.LAYERS_APART, pages.nbytes)

    def _set_turns(self, frame: KernelFrame, layer: int, positions: int) -> None:
        """Let the kernel read the rotary table of a layer, fp32 [positions, 2, head_dim].

        It holds cosines and signed sines; a pair (x, y) uses [c c] and [-s s]. The table is kept and grows to
        the next power of two, and to at least TURNS_AT_ONCE positions.

        frame: The kernel's argument block.
        layer: Index of the layer among these.
        positions: Number of positions that are needed, from 0 on.
        """
        from specsot_kernels.cpu import layout

        rotary = self._rotaries[layer]
        if len(self._turns[rotary]) < positions:
            count = max(TURNS_AT_ONCE, 2 ** (positions - 1).bit_length())
            angles = torch.arange(count).float()[:, None] * rotary.frequencies
            cosines, sines = (table.float() for table in (angles.double().cos(), angles.double().sin()))
            signed = torch.stack((-sines, sines), -1).flatten(1)
            self._turns[rotary] = torch.stack((cosines.repeat_interleave(2, 1), signed), 1).contiguous()
        frame.point(layout.ROTATIONS, self._turns[rotary])


def _columns(plan: AttentionPlan) -> ColumnPlan:
    """Return the visible columns of a plan that `PackedLayers.plan` made.

    plan: An attention plan.
    """
    assert plan.columns is not None, "packed layers need a plan that PackedLayers.plan made"
    return plan.columns


def packed_of(linear: Linear) -> Packed:
    """Return the packed weight of a quantized CPU product.

    linear: The product, which must be packed.
    """
    assert isinstance(linear.multiply, Packed)
    return linear.multiply


def pack_layers(
    blocks: Sequence[Block], rotaries: Sequence[Rotary], dtype: torch.dtype
) -> PackedLayers | None:
    """Return the layers for the CPU kernel, or None if the kernel does not support them.

    It needs packed int8 or int4 weights, fp32 activations, and layers as `can_pack` says.

    blocks: The layers of a range, at least one, whose weights are shared.
    rotaries: The rotary embedding of each layer.
    dtype: Type of activations.
    """
    packed = all(isinstance(block.qkv.multiply, Packed) for block in blocks)
    if not (packed and dtype == torch.float32 and can_pack(blocks[0].config)):
        return None
    parts = [_parts_of(block) for block in blocks]
    return PackedLayers(parts, _sizes_of(blocks[0].config), rotaries)


def _parts_of(block: Block) -> LayerParts:
    """Return the products and norms of a layer.

    AssertionError is raised if the MLP is not gated, and ValueError if a norm is not an RMSNorm.

    block: A layer that `can_pack` supports.
    """
    mlp = block.mlp
    norms = (block.input_norm, block.mlp_norm)
    assert isinstance(mlp, GatedMlp)
    input_norm, mlp_norm = (norm for norm in norms if isinstance(norm, Norm))
    return LayerParts(block.qkv, block.out, mlp.gate_up, mlp.down, input_norm, mlp_norm, block.head_norms)


def _sizes_of(config: ModelConfig) -> LayerSizes:
    """Return the sizes of a model's layers.

    config: The model's config.
    """
    heads = config.heads, config.kv_heads, config.head_dim
    return LayerSizes(config.hidden, config.intermediate, *heads, config.query_scalar)


def can_pack(config: ModelConfig) -> bool:
    """Tell whether the CPU kernel supports a model's layers.

    It needs Numba, layers as Llama and Qwen have them, and sizes of whole vectors. It supports no rotary
    stretch or slope, because it rotates queries a second time for the sinks of windows.

    config: The model's config.
    """
    plain = can_fuse(config) and config.rope.stretch == 1.0 and not config.rope.slope
    return plain and _sizes_of(config).fit_vectors and find_spec("numba") is not None


def row_itemsize(config: ModelConfig, itemsize: int, packed: bool) -> int:
    """Return the bytes of a number of the KV cache, if the cache is not int8.

    itemsize: Bytes of the model's dtype.
    packed: Whether the weights are packed; see `uses_packed_kernels`.
    config: The model's config.
    """
    return ROWS_IN.itemsize if packed and itemsize == 4 and can_pack(config) else itemsize


def logits_of(head: Linear, norm: AnyNorm, hidden: Tensor) -> Tensor:
    """Return the logits [rows, V] of hidden states [rows, H].

    A packed lm_head computes each row by itself. The result is fp32 if the library returns fp32 without extra
    cost (`multiply_wide`), else in the type of `hidden`. A bias of the lm_head is added if there is one.

    head: The lm_head, [hidden] -> vocab.
    norm: The norm before the lm_head.
    hidden: [rows, H], the output of the last layer.
    """
    if isinstance(head.multiply, Packed) and isinstance(norm, Norm) and hidden.dtype == torch.float32:
        return head.multiply(hidden, (norm.weight, norm.eps))
    x = norm(hidden)
    return head(x) if head.weight is None else multiply_wide(x, head.weight, head.bias)


def best_tokens(
    head: Linear,
    norm: Norm | None,
    outputs: Tensor,
    count: int,
    offsets: Tensor | None,
    num_ids: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return log-probabilities and ids of each row's best tokens, both [rows, count], best first.

    There is a kernel for a packed lm_head, fp32 `outputs` and a `count` of at most V, if the packed weight
    needed no padding.

    norm: Norm before the lm_head; None: there is none.
    offsets: [V], the number that turns each output's index into a token id of the base model (d2t) when it is
        added to the index; None: the index is the token id.
    head: The lm_head, [hidden] -> vocab.
    outputs: [rows, H], hidden states.
    count: How many tokens to return per row, at least 1.
    num_ids: Only the first so many outputs are computed, a multiple of 16. None: all outputs.

    Return None if no kernel does this for the given head; the caller then computes all logits.
    """
    multiply = head.multiply
    if not isinstance(multiply, Packed) or outputs.dtype != torch.float32:
        return None
    from specsot_kernels.cpu import running

    weight = multiply.weight
    if num_ids is not None and num_ids < head.shape[0]:
        weight = weight.first(num_ids)
    if weight.shape != (weight.outputs, weight.inputs) or count > weight.outputs:
        return None
    return running.choose(outputs, weight, (norm.weight, norm.eps) if norm else None, count, offsets)
