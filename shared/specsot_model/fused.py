"""Decoder layers for CUDA graphs, which never wait for the host.

`FusedBlock` runs layers as Llama and Qwen have them in fused kernels. `CapturedBlock` runs any other layer as
`Block` does, with kernels for norms, products, rotary, KV and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from importlib.util import find_spec
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
from specsot_model.fp8 import Fp8, NormWeight, ShortRows, Unscaled
from specsot_model.fused_delta import FusedDelta
from specsot_model.kv import KVPages
from specsot_model.layers import AnyNorm, Block, Norm
from specsot_model.linear import CapturedProduct, Linear, RowProduct, captured_product
from specsot_model.mlp import Experts, GatedMlp, GroupedExperts, UngatedMlp, can_group
from specsot_model.rotary import frequencies, query_growth

if TYPE_CHECKING:
    from specsot_kernels.gpu.rows import Turning


class Adding(Protocol):
    """A product whose result is added to the residual stream."""

    def add_to(
        self, hidden: Tensor, x: Tensor | ShortRows, following: NormWeight | None = None
    ) -> ShortRows | None:
        """Add the product of x [rows, in] to hidden [rows, out], in place.

        following: The norm of the next product; see `Fp8.add_to`.
        """
        ...


class FusedBlock:
    """Runs the layer of a `Block` in fused kernels, over the same weights."""

    def __init__(
        self,
        block: Block,
        turning: Turning,
        invariant: bool = False,
        adding: Callable[[Linear], Adding] | None = None,
    ) -> None:
        """
        turning: How queries and keys rotate; see `turning_of`.
        invariant: Products are batch-invariant (`InvariantRowProduct`).
        adding: Makes the two products that are added to the residual stream. It is called for attention's
            output first, then for the MLP's.
        """
        adding = adding or partial(_product, invariant=invariant)
        self._turning = turning
        config = block.config
        self._rope = config.rope
        self._input_norm = _rms(block.input_norm)
        self._qkv = _product(block.qkv, invariant)
        self._out = adding(block.out)
        self._add_mlp = _added(block, invariant, adding)
        self._heads = (config.kv_heads, config.heads // config.kv_heads)
        self._mlp_norm = _rms(block.mlp_norm) if isinstance(block.mlp, GatedMlp) else None
        self._following: NormWeight | None = None

    def precede(self, block: FusedBlock) -> None:
        """Name the layer that follows. If it multiplies in fp8, this layer hands it normed rows in fp8."""
        if isinstance(block._qkv, Fp8):
            self._following = block._input_norm

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        rows: ShortRows | None = None,
    ) -> ShortRows | None:
        """Add this layer's attention and MLP updates to the residual stream [rows, hidden], in place.

        positions: [rows], the position of each row in its sequence.
        slots: [rows], the KV slot of each row; a row with a negative slot writes no KV.
        layer: Index of this layer within `kv`.
        rows: The normed rows of `hidden` in 8 bits, if the previous layer returned them.

        Return the normed rows for the next layer in 8 bits, or None.
        """
        kv_heads, group = self._heads
        heads: Tensor | Unscaled = self._qkv.heads(hidden, self._input_norm, rows)
        heads = turn_heads(heads, positions, slots, kv.layers[layer], self._turning, self._rope)
        queries = heads.narrow(1, 0, kv_heads * group).unflatten(1, (kv_heads, group))
        attended = attend(queries, kv.layers[layer], plan)
        return self._add_mlp(hidden, self._out.add_to(hidden, attended, self._mlp_norm), self._following)


AddMlp = Callable[[Tensor, ShortRows | None, NormWeight | None], ShortRows | None]


def _added(block: Block, invariant: bool, adding: Callable[[Linear], Adding]) -> AddMlp:
    """Return a function that adds the layer's MLP update to the residual stream, as `Adding.add_to` does.

    Experts run in PyTorch's own operations.
    """
    norm = block.mlp_norm
    mlp = block.mlp
    if not isinstance(mlp, GatedMlp):

        def add_experts(hidden: Tensor, rows: ShortRows | None, following: NormWeight | None) -> None:
            hidden.add_(mlp(norm(hidden)))

        return add_experts
    weight = _rms(norm)
    gate_up, down = _product(mlp.gate_up, invariant), adding(mlp.down)
    return lambda hidden, rows, following: down.add_to(hidden, gate_up.gated(hidden, weight, rows), following)


class CapturedBlock:
    """Runs a layer as its `Block` does, over the same weights, without ever waiting for the host."""

    def __init__(self, block: Block) -> None:
        self._turning = turning_of(block)
        self._block = copy(block)
        if not block.config.whole_qk_norm:
            # The kernel that rotates queries and keys applies the head norms as well.
            self._block.head_norms = None
        for name in ("input_norm", "mlp_norm", "after_attention", "after_mlp"):
            setattr(self._block, name, _norm_by_kernel(getattr(block, name)))
        self._block.qkv = _by_kernels(block.qkv)
        self._block.out = _by_kernels(block.out)
        self._block.mlp = mlp = copy(block.mlp)
        if isinstance(mlp, UngatedMlp):
            mlp.up, mlp.down = _by_kernels(mlp.up), _by_kernels(mlp.down)
        elif isinstance(mlp, GatedMlp):
            mlp.gate_up, mlp.down = _by_kernels(mlp.gate_up), _by_kernels(mlp.down)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        rows: ShortRows | None = None,
    ) -> None:
        """Add this layer's two updates to the residual stream; see `FusedBlock.forward`."""

        def keep(heads: Tensor) -> None:
            turn_heads(heads, positions, slots, kv.layers[layer], self._turning, self._block.config.rope)

        self._block.update(hidden, keep, kv.layers[layer], plan)


def turn_heads(
    heads: Tensor | Unscaled,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,
    turning: Turning,
    rope: Rope | None = None,
) -> Tensor:
    """Rotate queries and keys in place, and store keys and values in the KV cache.

    heads: The product of the query, key and value projections, perhaps without its scales.
    kv_layer: One layer of the KV cache.
    rope: Scales queries by position if it has a slope; None: queries are not scaled.

    Return all heads [rows, heads, head_dim], queries first.
    """
    from specsot_kernels.gpu.rows import turn_and_store

    product, scales = (heads.product, heads[1:]) if isinstance(heads, Unscaled) else (heads, None)
    rows = product.view(len(product), -1, 2 * len(turning.frequencies))
    turn_and_store(rows, positions, slots, kv_layer, turning, scales)
    if rope and rope.slope:
        rows.narrow(1, 0, turning.heads).mul_(query_growth(rope, positions)[:, None, None])
    return rows


OnDevice = FusedBlock | CapturedBlock | FusedDelta


def fuse_blocks(blocks: Sequence[Block], invariant: bool = False) -> tuple[OnDevice, ...] | None:
    """Return layers for CUDA graphs, fused if all layers have the form that the fused kernels support.

    Return None if there are no kernels for these layers, or for this machine.
    """
    if not all(runs_kernels(block.device) and _has_kernels(block, invariant) for block in blocks):
        return None
    if all(can_fuse(block.config, experts=True) for block in blocks):
        return in_a_row([FusedBlock(block, turning_of(block), invariant) for block in blocks])
    plain = not invariant and all(_has_kernels(block, plain=True) for block in blocks)
    return tuple(map(capture_block, blocks)) if plain else None


def capture_block(block: Block) -> OnDevice:
    """Return a layer for CUDA graphs that runs `block` without ever waiting for the host."""
    if not isinstance(block, DeltaBlock):
        return CapturedBlock(block)
    norm = _norm_by_kernel(block.mlp_norm)
    mlp = block.mlp
    if isinstance(mlp, GatedMlp) and block.config.activation == "silu":
        add = _added(block, False, _product)
        return FusedDelta(block, lambda hidden: add(hidden, None, None))
    return FusedDelta(block, lambda hidden: hidden.add_(mlp(norm(hidden))))


def in_a_row(blocks: Sequence[FusedBlock]) -> tuple[FusedBlock, ...]:
    """Connect layers that follow one another, so that each can hand normed rows to the next."""
    for block, following in pairwise(blocks):
        block.precede(following)
    return tuple(blocks)


def fused_logits(head: Linear, norm: AnyNorm, hidden: Tensor, invariant: bool) -> Tensor | None:
    """Return the fp32 logits [rows, V] of hidden states [rows, H].

    Return None if there is no kernel for this norm and lm_head.
    """
    product = captured_product(head, invariant)
    if product is None or not isinstance(norm, Norm):
        return None
    return product.wide(hidden, (norm.weight, norm.eps))


def can_fuse(config: ModelConfig, experts: bool = False) -> bool:
    """Tell whether the fused kernels support a model's layers: those of Llama and Qwen.

    experts: Accept layers with experts as well.
    """
    gated = config.mlp == "gated" or (experts and config.mlp == "experts")
    plain = config.norm == "rms" and gated and config.activation == "silu" and config.clamp is None
    names = config.names
    gates = config.gated_heads
    plain = plain and not (config.whole_qk_norm or names.sinks or names.after_mlp)
    plain = plain and not (gates or config.norm_offset or config.attention_softcap)
    return plain and not (config.parallel or config.out_bias or config.mlp_bias)


def turning_of(block: Block) -> Turning:
    """Return how this layer's queries and keys are normed, rotated and scaled, for the kernels."""
    from specsot_kernels.gpu.rows import Turning

    config = block.config
    norms = block.head_norms
    rope = block.rope
    turns = frequencies(rope, config.head_dim).to(block.device)
    weights = (norms[0].weight, norms[1].weight) if norms and not config.whole_qk_norm else None
    plain = (config.query_scalar or config.head_dim) ** -0.5
    heads = (config.heads, config.kv_heads)
    turned = rope.rotated(config.head_dim) // 2
    return Turning(*heads, turns, plain * rope.stretch**2, weights, config.eps, turned, plain)


def check_invariant(
    config: ModelConfig, device: torch.device, quantization: Quantization | None, kept: KvDtype
) -> None:
    """Raise InvalidRequest if the GPU kernels cannot run this model batch-invariantly on this device.

    quantization: Form of the matrices; None and int8 are possible.
    kept: Type of the KV cache; only "auto" is possible.
    """
    rounded = quantization not in (None, "int8") or kept != "auto"
    wants = {
        "a GPU and Triton, or --quantization int8 or int4 and fp32: other sums group by rows": runs_kernels(
            device
        ),
        "matrices in --dtype or int8, and KV rows in --dtype: others have other kernels": not rounded,
        "layers as Llama and Qwen have them: others run in PyTorch's own operations": can_fuse(config),
    }
    lacking = next((want for want, there in wants.items() if not there), None)
    if lacking:
        raise InvalidRequest(f"--batch-invariant needs {lacking}", field="batch_invariant")


def can_capture(
    config: ModelConfig,
    kernels: bool,
    rounded: bool,
    eight: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> bool:
    """Tell whether a range of a model's layers runs in CUDA graphs, before its weights are loaded.

    kernels: The device has GPU kernels (`runs_kernels`).
    rounded: Something is quantized.
    eight: Matrices are in 8 bits, nothing else is rounded, and the GPU multiplies 8-bit numbers.
    dtype: Type of activations. Experts are captured in bf16 only; see `_has_kernels`.
    """
    if eight:
        return kernels and can_fuse(config) and eight_fits(config)
    grouped = config.routing is None or (dtype == torch.bfloat16 and can_group(config, config.routing, dtype))
    return grouped and kernels and not rounded


def eight_fits(config: ModelConfig) -> bool:
    """Tell whether a GPU can multiply matrices of this model's sizes in 8 bits: multiples of 16."""
    heads = config.heads, config.heads + 2 * config.kv_heads
    sizes = config.hidden, config.intermediate, *(many * config.head_dim for many in heads)
    return not any(size % 16 for size in sizes)


def runs_kernels(device: torch.device) -> bool:
    """Tell whether the GPU kernels run on this device."""
    return device.type == "cuda" and find_spec("triton") is not None


def _has_kernels(block: Block, invariant: bool = False, plain: bool = False) -> bool:
    """Tell whether every product of a layer can be captured.

    Experts can if they are one grouped product in bf16; otherwise they wait for the host.

    plain: Quantized products do not count.
    """
    linears = [block.qkv, block.out]
    mlp = block.mlp
    if isinstance(mlp, GatedMlp):
        linears += mlp.gate_up, mlp.down
    elif isinstance(mlp, UngatedMlp):
        linears += mlp.up, mlp.down
    else:
        run = mlp.run if isinstance(mlp, Experts) else None
        if invariant or not isinstance(run, GroupedExperts) or run.waits:
            return False
    products = [captured_product(each, invariant) for each in linears]
    return all(isinstance(each, RowProduct) if plain else each is not None for each in products)


def _by_kernels(linear: Linear) -> Linear:
    """Return a copy of a product that runs in kernels for CUDA graphs, over the same weight."""
    swift = copy(linear)
    product = captured_product(linear)
    assert isinstance(product, RowProduct), "see fuse_blocks"
    swift.multiply = product
    return swift


def _product(linear: Linear, invariant: bool = False) -> CapturedProduct:
    """Return the form of a product for CUDA graphs; `fuse_blocks` has checked that there is one."""
    product = captured_product(linear, invariant)
    assert product is not None, "see fuse_blocks"
    return product


def _norm_by_kernel(norm: AnyNorm) -> AnyNorm:
    """Return a norm that runs in a kernel if it is an RMSNorm; other norms are returned as they are."""
    if not isinstance(norm, Norm):
        return norm
    from specsot_kernels.gpu.rows import norm_rows

    return partial(norm_rows, weight=norm.weight, eps=norm.eps)


def _rms(norm: AnyNorm) -> NormWeight:
    """Return weight and epsilon of an RMSNorm."""
    assert isinstance(norm, Norm)
    return norm.weight, norm.eps
