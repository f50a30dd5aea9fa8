"""Decoder layers for CUDA graphs, which never wait for the host.

`FusedBlock` runs layers as Llama and Qwen have them in fused kernels. `CapturedBlock` runs any other layer as
`Block` does, with kernels for norms, products, rotary, KV and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.rope import Rope
from specsot.errors import InvalidRequest
from specsot.members import KvDtype, Quantization
from specsot_model.attention import AttentionPlan, attend
from specsot_model.delta import DeltaBlock
from specsot_model.fp8 import Fp8, NormedRows, NormWeight, ShortRows, Unscaled, runs_kernels
from specsot_model.fused_delta import FusedDelta
from specsot_model.kv import KVPages
from specsot_model.latent import fits_tiles
from specsot_model.layers import AnyNorm, Block, Norm
from specsot_model.linear import (
    CapturedProduct,
    Linear,
    PartSums,
    RowProduct,
    SmallStepProduct,
    captured_product,
)
from specsot_model.mlp import Experts, GatedMlp, GroupedExperts, UngatedMlp, can_group
from specsot_model.rotary import frequencies, query_growth

if TYPE_CHECKING:
    from specsot_kernels.gpu.rows import Turning


class AddedProduct(Protocol):
    """A product whose result is added to the residual stream."""

    def add_to(
        self, hidden: Tensor, x: Tensor | ShortRows, next_norm: NormWeight | None = None
    ) -> NormedRows | None:
        """Add the product of x to the hidden states, in place. Return the rows of the result normed for the
        next product, or None if the kernel of this product does not norm them, or without `next_norm`.

        hidden: [rows, out], the residual stream.
        x: [rows, in], in floats or rounded to 8 bits already.
        next_norm: Weight and epsilon of the next product's norm; None: nothing is normed. See `Fp8.add_to`
            and `RowProduct.add_to`.
        """
        ...


# Returns the product of the query, key and value projections. Arguments: the residual stream [rows, hidden],
# the norm before the product, and the normed rows if they are computed already, otherwise None.
MakeHeads = Callable[[Tensor, NormWeight, NormedRows | None], Tensor | Unscaled | PartSums]


class FusedBlock:
    """Runs the layer of a `Block` in fused kernels, over the same weights."""

    def __init__(
        self,
        block: Block,
        head_turns: Turning,
        invariant: bool = False,
        make_product: Callable[[Linear], AddedProduct] | None = None,
        small_steps: bool = False,
    ) -> None:
        """Prepare the products and norms of a layer.

        AssertionError is raised if a product cannot be captured, or a norm before attention or a gated MLP is
        not an RMSNorm.

        block: The layer, whose weights are shared.
        head_turns: How queries and keys are normed, rotated and scaled; see `head_turns_of`.
        invariant: Products are batch-invariant (`InvariantRowProduct`).
        make_product: Makes the two products that are added to the residual stream. It is called for
            attention's output first, then for the MLP's. None: the products are those of a single device.
        small_steps: Products keep the bits of a row in small steps (`SmallStepProduct`).
        """
        own_product = partial(_product, invariant=invariant, small_steps=small_steps)
        make_product = make_product or own_product
        self._turning = head_turns
        config = block.config
        self._rope = block.rope
        self._input_norm = _norm_weight(block.input_norm)
        self._qkv = own_product(block.qkv)
        self._make_heads: MakeHeads = self._qkv.heads
        if isinstance(self._qkv, RowProduct) and head_turns.norms:
            # `heads` may leave the parts of the product to `turn_and_store`, which then cannot norm heads.
            # `normed` adds up the parts in a kernel of its own.
            self._make_heads = self._qkv.normed
        self._out = make_product(block.out)
        self._add_mlp = _mlp_adder(block, own_product, make_product)
        self._heads = (config.kv_heads, config.heads // config.kv_heads)
        self._mlp_norm = _norm_weight(block.mlp_norm) if isinstance(block.mlp, GatedMlp) else None
        # The norm before attention of the next layer, if this layer is to norm rows for it.
        self._next_norm: NormWeight | None = None

    def set_next_block(self, block: FusedBlock) -> None:
        """Connect this layer to the layer that follows, so that the last kernel of this layer may also norm
        the rows for the next one.

        block: The layer that runs next. If its first product is in fp8, `forward` of this layer returns rows
            in fp8; if the product is a `SmallStepProduct`, rows in floats. In all other cases nothing
            changes, and `forward` returns None.
        """
        if isinstance(block._qkv, Fp8 | SmallStepProduct):
            self._next_norm = block._input_norm

    def run_mlp_between_layers(self, hidden: Tensor) -> None:
        """Add this layer's MLP update to the residual stream, in place, and norm the rows as if a layer of
        the same form followed.

        `compile_steps` calls this method: it compiles the kernels by running a single layer, which launches
        no kernel that norms rows for a next layer.

        hidden: [rows, hidden], the residual stream, which is changed.
        """
        next_norm = self._input_norm if isinstance(self._qkv, Fp8 | SmallStepProduct) else None
        self._add_mlp(hidden, None, next_norm)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        rows: NormedRows | None = None,
    ) -> NormedRows | None:
        """Add this layer's attention and MLP updates to the residual stream, in place, and return the next
        layer's input.

        positions: [rows], the position of each row in its sequence.
        slots: [rows], the KV slot of each row; a row with a negative slot writes no KV.
        layer: Index of this layer within `kv`.
        rows: The normed rows of `hidden`, if the previous layer returned them; None: they are computed here.
        hidden: [rows, hidden], the residual stream.
        plan: The attention plan of the frame.
        kv: The KV cache of the layer range.

        Return the normed rows for the next layer. Return None if no layer was connected that reads such rows,
        or if the kernel of the MLP's last product does not norm them; then the next layer norms `hidden`
        itself.
        """
        kv_heads, group = self._heads
        heads = self._make_heads(hidden, self._input_norm, rows)
        heads = rotate_heads(heads, positions, slots, kv.layers[layer], self._turning, self._rope)
        queries = heads.narrow(1, 0, kv_heads * group).unflatten(1, (kv_heads, group))
        attended = attend(queries, kv.layers[layer], plan)
        mlp_rows = self._out.add_to(hidden, attended, self._mlp_norm)
        return self._add_mlp(hidden, mlp_rows, self._next_norm)


# Adds an MLP's update to the residual stream [rows, hidden], in place. Arguments: the stream, its rows normed
# for the MLP if they are computed already, and the norm of the next layer, or None. Returns the rows normed
# for the next layer, or None as `AddedProduct.add_to` does.
AddMlp = Callable[[Tensor, NormedRows | None, NormWeight | None], NormedRows | None]


def _mlp_adder(
    block: Block,
    make_gated_product: Callable[[Linear], CapturedProduct],
    make_product: Callable[[Linear], AddedProduct],
) -> AddMlp:
    """Return a function that adds the layer's MLP update to the residual stream, as `AddedProduct.add_to`
    does.

    Experts run in PyTorch's own operations. The function takes the residual stream, its normed rows or None,
    and the next layer's norm or None. For experts and MLPs without a gate it always returns None.

    block: The layer, whose MLP and MLP norm are used.
    make_gated_product: Makes the MLP's first product, of gate and up.
    make_product: Makes the MLP's last product, which is added to the residual stream.
    """
    norm = block.mlp_norm
    mlp = block.mlp
    if not isinstance(mlp, GatedMlp):

        def add_experts(hidden: Tensor, rows: NormedRows | None, next_norm: NormWeight | None) -> None:
            """Add the update of a layer's experts to the residual stream, in place, and return None.

            hidden: [rows, hidden], the residual stream.
            rows: Not used: experts read the rows in floats.
            next_norm: Not used: nothing is normed for the next layer.
            """
            hidden.add_(mlp(norm(hidden)))

        return add_experts
    weight = _norm_weight(norm)
    gate_up, down = make_gated_product(mlp.gate_up), make_product(mlp.down)
    return lambda hidden, rows, next_norm: down.add_to(hidden, gate_up.gated(hidden, weight, rows), next_norm)


class CapturedBlock:
    """Runs a layer as its `Block` does, over the same weights, without ever waiting for the host.

    block: The layer, whose weights are shared.
    """

    def __init__(self, block: Block, small_steps: bool = False) -> None:
        """Copy the layer with its norms and products replaced by kernels.

        AssertionError is raised if a product of attention, or of an MLP without experts, is not in floats.
        Without one norm over all heads, the kernel that rotates heads applies the head norms too.

        block: The layer, whose weights are shared; it is not changed.
        small_steps: Products keep the bits of a row in small steps (`SmallStepProduct`).
        """
        with_kernels = partial(_with_kernels, small_steps=small_steps)
        self._turning = head_turns_of(block)
        self._block = copy(block)
        if not block.config.whole_qk_norm:
            # The kernel that rotates queries and keys applies the head norms as well.
            self._block.head_norms = ()
        for name in ("input_norm", "mlp_norm", "after_attention", "after_mlp"):
            setattr(self._block, name, _norm_by_kernel(getattr(block, name)))
        self._block.qkv = with_kernels(block.qkv)
        self._block.out = with_kernels(block.out)
        self._block.mlp = mlp = copy(block.mlp)
        if isinstance(mlp, UngatedMlp):
            mlp.up, mlp.down = with_kernels(mlp.up), with_kernels(mlp.down)
        elif isinstance(mlp, GatedMlp):
            mlp.gate_up, mlp.down = with_kernels(mlp.gate_up), with_kernels(mlp.down)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        rows: NormedRows | None = None,
    ) -> None:
        """Add this layer's two updates to the residual stream, in place, and return None.

        hidden: [rows, hidden], the residual stream.
        positions: LongTensor [rows], the position of each row in its sequence.
        slots: LongTensor [rows], the KV slot of each row; a row with a negative slot writes no KV.
        plan: The attention plan of the frame.
        kv: The KV cache of the layer range.
        layer: Index of this layer within `kv`.
        rows: Not used; fused layers take normed rows.
        """

        def rotate_and_store(heads: Tensor) -> None:
            """Rotate queries and keys in place, and store keys and values in the KV cache.

            heads: [rows, heads, head_dim], queries, keys and values in this order.
            """
            rotate_heads(heads, positions, slots, kv.layers[layer], self._turning, self._block.rope)

        self._block.update(hidden, rotate_and_store, kv.layers[layer], plan)


def rotate_heads(
    heads: Tensor | Unscaled | PartSums,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,
    head_turns: Turning,
    rope: Rope | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values in the KV cache, and return the rotated queries.

    The result is [rows, num_heads, head_dim]. Its first heads are the queries. The heads after them, which
    must not be read, are those of keys and values; for `PartSums` there are none. The product itself is
    overwritten with the result, except for `PartSums`, which stay as they are.

    heads: The product of the query, key and value projections: complete, without its scales (`Unscaled`), or
        before its parts are added up (`PartSums`).
    positions: LongTensor [rows], the position of each row in its sequence.
    slots: LongTensor [rows], the KV slot of each row; a row with a negative slot writes no KV.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim], one layer of the KV cache.
    head_turns: How queries and keys are normed, rotated and scaled.
    rope: Scales queries by position if it has a slope; None, or a slope of 0: queries are not scaled.
    """
    from specsot_kernels.gpu.rows import turn_and_store

    head_dim = 2 * len(head_turns.frequencies)
    if isinstance(heads, PartSums):
        shape = len(positions), head_turns.heads, head_dim
        rows = heads.sums.new_empty(shape, dtype=heads.dtype)
        turn_and_store(rows, positions, slots, kv_layer, head_turns, sums=(heads.sums, heads.bias))
    else:
        product, scales = (heads.product, heads[1:]) if isinstance(heads, Unscaled) else (heads, None)
        rows = product.view(len(product), -1, head_dim)
        turn_and_store(rows, positions, slots, kv_layer, head_turns, scales)
    if rope and rope.slope:
        rows.narrow(1, 0, head_turns.heads).mul_(query_growth(rope, positions)[:, None, None])
    return rows


# A layer that runs without waiting for the host.
OnDevice = FusedBlock | CapturedBlock | FusedDelta


def fuse_blocks(
    blocks: Sequence[Block], invariant: bool = False, small_steps: bool = False
) -> tuple[OnDevice, ...] | None:
    """Return layers for CUDA graphs, fused if all layers have the form that the fused kernels support.

    Return None if there are no kernels for these layers (Gemma 4's), or for this machine. If all layers have
    the form of Llama and Qwen, perhaps with experts, the result is connected `FusedBlock`s. Otherwise it is
    what `capture_block` returns for each layer, which needs products in floats and `invariant` false.

    blocks: The layers of a range, whose weights are shared.
    invariant: True if a token's output must not depend on the rest of its batch.
    small_steps: True if it must not depend on the rest of a small step; see `Decoder.runs_small_steps`.
    """
    if blocks[0].config.values_normed:
        return None
    if not all(runs_kernels(block.device) and _has_kernels(block, invariant) for block in blocks):
        return None
    if all(can_fuse(block.config, experts=True) for block in blocks):
        return connect_blocks(
            [FusedBlock(block, head_turns_of(block), invariant, small_steps=small_steps) for block in blocks]
        )
    plain = not invariant and all(_has_kernels(block, floats_only=True) for block in blocks)
    return tuple(capture_block(block, small_steps) for block in blocks) if plain else None


def capture_block(block: Block, small_steps: bool = False) -> OnDevice:
    """Return a layer for CUDA graphs that runs `block` without ever waiting for the host.

    The result is a `FusedDelta` for a gated delta layer, and a `CapturedBlock` for every other layer. A gated
    delta layer has its gated silu MLP fused too; any other MLP runs in PyTorch's own operations.

    block: The layer, whose weights are shared.
    small_steps: Products of a `CapturedBlock` keep the bits of a row in small steps (`SmallStepProduct`).
    """
    if not isinstance(block, DeltaBlock):
        return CapturedBlock(block, small_steps)
    norm = _norm_by_kernel(block.mlp_norm)
    mlp = block.mlp
    if isinstance(mlp, GatedMlp) and block.config.activation == "silu":
        add_mlp = _mlp_adder(block, _product, _product)
        return FusedDelta(block, lambda hidden: add_mlp(hidden, None, None))
    return FusedDelta(block, lambda hidden: hidden.add_(mlp(norm(hidden))))


def connect_blocks(blocks: Sequence[FusedBlock]) -> tuple[FusedBlock, ...]:
    """Connect layers that follow one another, so that each can return normed rows for the next. Return them.

    blocks: The layers, in the order in which they run.
    """
    for block, next_block in pairwise(blocks):
        block.set_next_block(next_block)
    return tuple(blocks)


def fused_logits(
    head: Linear, norm: AnyNorm, invariant: bool, small_steps: bool = False
) -> Callable[[Tensor], Tensor] | None:
    """Return a function that computes the fp32 logits [rows, V] of hidden states [rows, H].

    Return None if there is no kernel for this norm and lm_head. There is one for an RMSNorm and an lm_head
    that `captured_product` accepts. Keep the function for all steps: making it takes longer than a launch.

    head: The lm_head, [hidden] -> vocab.
    norm: The norm before the lm_head.
    invariant: True if the product must be batch-invariant.
    small_steps: True if the product must keep the bits of a row in small steps (`SmallStepProduct`).
    """
    product = captured_product(head, invariant, small_steps)
    if product is None or not isinstance(norm, Norm):
        return None
    return partial(product.wide, norm=(norm.weight, norm.eps))


def can_fuse(config: ModelConfig, experts: bool = False) -> bool:
    """Tell whether the fused kernels support a model's layers: those of Llama and Qwen.

    They need an RMSNorm, an MLP gated by silu without limits, norms (if any) per head, and neither latent
    attention, attention sinks, gated heads, norm offsets, capped scores, norms after the MLP, parallel
    attention and MLP, nor biases of the output projection or the MLP.

    config: The model's config.
    experts: True accepts layers with experts as well.
    """
    gated = config.mlp == "gated" or (experts and config.mlp == "experts")
    plain = config.norm == "rms" and gated and config.activation == "silu" and config.clamp is None
    names = config.names
    gates = config.gated_heads
    plain = plain and not (config.whole_qk_norm or names.sinks or names.after_mlp)
    plain = plain and not (gates or config.norm_offset or config.attention_softcap)
    plain = plain and config.transformers is None and config.latent is None
    return plain and not (config.parallel or config.out_bias or config.mlp_bias)


def head_turns_of(block: Block) -> Turning:
    """Return how this layer's queries and keys are normed, rotated and scaled, for the kernels.

    Head norms are left out if the layer has none, or one over all heads at once.

    block: The layer.
    """
    from specsot_kernels.gpu.rows import Turning

    config = block.config
    norms = block.head_norms
    rope = block.rope
    turns = frequencies(rope, config.head_dim).to(block.device)
    weights = (norms[0].weight, norms[1].weight) if norms and not config.whole_qk_norm else None
    scale = (config.query_scalar or config.head_dim) ** -0.5
    heads = (config.heads, config.kv_heads)
    num_pairs = rope.rotated(config.head_dim) // 2
    return Turning(*heads, turns, scale * rope.stretch**2, weights, config.eps, num_pairs, scale)


def check_invariant(
    config: ModelConfig, device: torch.device, quantization: Quantization | None, kv_dtype: KvDtype
) -> None:
    """Raise InvalidRequest if the GPU kernels cannot run this model batch-invariantly on this device.

    The message names the first condition that is not met: kernels, then forms, then layers.

    config: The model's config.
    device: Device of the range.
    quantization: Form of the matrices; None and int8 are possible.
    kv_dtype: Type of the KV cache; only "auto" is possible.
    """
    rounded = quantization not in (None, "int8") or kv_dtype != "auto"
    conditions = {
        "a GPU and Triton, or --quantization int8 or int4 with --dtype fp32, because other kernels add up in"
        " an order that depends on the batch": runs_kernels(device),
        "matrices in --dtype or int8, and KV rows in --dtype, because only those have batch-invariant"
        " kernels": not rounded,
        "layers as Llama and Qwen have them, because other layers run in PyTorch's own operations": can_fuse(
            config
        ),
    }
    missing = next((condition for condition, present in conditions.items() if not present), None)
    if missing:
        raise InvalidRequest(f"--batch-invariant needs {missing}", field="batch_invariant")


def has_small_steps(config: ModelConfig) -> bool:
    """Tell whether small steps can compute the rows of a model's layers in one order; see
    `specsot_kernels.gpu.small_attention`.

    They cannot with latent attention, experts, gated delta rules, attention sinks or capped scores.

    config: The model's config.
    """
    known = config.transformers is None and config.latent is None
    return known and not (config.routing or config.delta or config.names.sinks or config.attention_softcap)


def resolve_draft_invariant(
    chosen: bool | None,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    kv_dtype: KvDtype,
    parts: int,
) -> bool:
    """Return whether a range is to compute small steps such that drafts change no token of a single sequence.

    False is returned if `chosen` is False. Only GPUs in 16 bits need it: on a CPU and in fp32 nothing is
    checked, True stays True, and None counts as False.

    chosen: The option --draft-invariant. None: True where the kernels can do it. Raises InvalidRequest if it
        is True and they cannot; the message names the first condition that is not met.
    config: The model's config.
    device: Device of the range.
    dtype: Type of activations.
    quantization: Form of the matrices; None is possible, and int8 for layers that are fused.
    kv_dtype: Type of the KV cache; only "auto" is possible.
    parts: Number of devices that every layer is split over; only 1 is possible.
    """
    if chosen is False or device.type != "cuda" or dtype.itemsize != 2:
        return bool(chosen)
    exact = quantization is None or (quantization == "int8" and can_fuse(config))
    conditions = {
        "Triton, because other kernels add up in an order that depends on the batch": runs_kernels(device),
        "one GPU per layer, not --tensor-parallel": parts == 1,
        "matrices in --dtype, or in int8 for layers as Llama and Qwen have them, and KV rows in --dtype": (
            exact and kv_dtype == "auto"
        ),
        "layers without experts, latent attention, delta rules, sinks and capped scores": has_small_steps(
            config
        ),
    }
    missing = next((condition for condition, present in conditions.items() if not present), None)
    if missing and chosen:
        raise InvalidRequest(f"--draft-invariant needs {missing}", field="draft_invariant")
    return not missing


def can_capture(
    config: ModelConfig,
    kernels: bool,
    any_quantized: bool,
    all_in_8_bits: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> bool:
    """Tell whether a range of a model's layers runs in CUDA graphs, before its weights are loaded.

    Experts must also have sizes that a grouped product supports. False for Gemma 4's layers, and for latent
    attention whose rows the kernel cannot read (`fits_tiles`).

    config: The model's config.
    kernels: True if the device has GPU kernels (`runs_kernels`); without them, False is returned.
    any_quantized: True if something is quantized; False is then returned unless `all_in_8_bits` is true.
    all_in_8_bits: True if matrices are in 8 bits, nothing else is rounded, and the GPU multiplies 8-bit
        numbers. The model must then have the fused kernels' form and sizes that are multiples of 16.
    dtype: Type of activations. Experts are captured in bf16 only; see `_has_kernels`.
    """
    if config.values_normed or (config.latent and not fits_tiles(config.latent)):
        return False
    if all_in_8_bits:
        return kernels and can_fuse(config) and sizes_fit_8_bits(config)
    grouped = config.routing is None or (dtype == torch.bfloat16 and can_group(config, config.routing, dtype))
    return grouped and kernels and not any_quantized and config.transformers is None


def sizes_fit_8_bits(config: ModelConfig) -> bool:
    """Tell whether a GPU can multiply matrices of this model's sizes in 8 bits: hidden size, MLP width and
    the sizes of all query heads and of all heads must be multiples of 16.

    config: The model's config.
    """
    heads = config.heads, config.heads + 2 * config.kv_heads
    sizes = config.hidden, config.intermediate, *(count * config.head_dim for count in heads)
    return not any(size % 16 for size in sizes)


def _has_kernels(block: Block, invariant: bool = False, floats_only: bool = False) -> bool:
    """Tell whether every product of a layer can be captured.

    Experts can if they are one grouped product in bf16; otherwise they wait for the host. False for experts
    if `invariant` is true. The shared MLP of a mixture of experts is not looked at.

    block: The layer.
    invariant: True if the products must be batch-invariant.
    floats_only: True if quantized products do not count.
    """
    linears = [block.qkv, block.out]
    mlp = block.mlp
    if isinstance(mlp, GatedMlp):
        linears += mlp.gate_up, mlp.down
    elif isinstance(mlp, UngatedMlp):
        linears += mlp.up, mlp.down
    else:
        run = mlp.run if isinstance(mlp, Experts) else None
        if invariant or not isinstance(run, GroupedExperts) or run.waits_for_host:
            return False
    products = [captured_product(product, invariant) for product in linears]
    return all(
        isinstance(product, RowProduct) if floats_only else product is not None for product in products
    )


def _with_kernels(linear: Linear, small_steps: bool) -> Linear:
    """Return a copy of a product that runs in kernels for CUDA graphs, over the same weight.

    linear: The product, in floats. AssertionError is raised for a quantized product, or one that is packed
        for a CPU.
    small_steps: True if the product must keep the bits of a row in small steps (`SmallStepProduct`).
    """
    captured = copy(linear)
    product = captured_product(linear, small_steps=small_steps)
    assert isinstance(product, RowProduct), "see fuse_blocks"
    captured.multiply = product
    return captured


def _product(linear: Linear, invariant: bool = False, small_steps: bool = False) -> CapturedProduct:
    """Return the form of a product for CUDA graphs; `fuse_blocks` has checked that there is one.

    linear: The product. AssertionError is raised if there is none.
    invariant: True if the product must be batch-invariant.
    small_steps: True if the product must keep the bits of a row in small steps (`SmallStepProduct`).
    """
    product = captured_product(linear, invariant, small_steps)
    assert product is not None, "see fuse_blocks"
    return product


def _norm_by_kernel(norm: AnyNorm) -> AnyNorm:
    """Return a norm that runs in a kernel if it is an RMSNorm; other norms are returned as they are.

    norm: The norm.
    """
    if not isinstance(norm, Norm):
        return norm
    from specsot_kernels.gpu.rows import norm_rows

    return partial(norm_rows, weight=norm.weight, eps=norm.eps)


def _norm_weight(norm: AnyNorm) -> NormWeight:
    """Return weight and epsilon of an RMSNorm.

    norm: The norm, which must be an RMSNorm.
    """
    assert isinstance(norm, Norm)
    return norm.weight, norm.eps
