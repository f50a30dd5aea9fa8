"""One decoder layer in fused GPU kernels.

Layers built otherwise run as `Block` has them. Everything runs on the device's own time, so a graph of many
layers can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specsot.errors import InvalidRequest
from specsot.model.attention import AttentionPlan, attend
from specsot.model.config import ModelConfig
from specsot.model.kv import KVPages
from specsot.model.layers import AnyNorm, Block, GatedMlp, Norm, frequencies
from specsot.model.linear import Linear, product_of

if TYPE_CHECKING:
    from specsot.kernels.gpu.rows import Turning


Attention = Callable[[Tensor], Tensor]  # of fused queries, keys and values [rows, ...]


class FusedBlock:
    """The layer of a `Block`, over the same weights."""

    def __init__(self, block: Block, turning: Turning, invariant: bool = False) -> None:
        """invariant: one row goes the way of many, through products that are `InvariantProduct`s."""
        mlp = block.mlp
        assert isinstance(mlp, GatedMlp)
        self._turning, self._invariant, config = turning, invariant, block.config
        self._input_norm, self._mlp_norm = _rms(block.input_norm), _rms(block.mlp_norm)
        linears = block.qkv, block.out, mlp.gate_up, mlp.down
        self._qkv, self._out, self._gate_up, self._down = (product_of(each, invariant) for each in linears)
        self._heads = (config.kv_heads, config.heads // config.kv_heads, config.head_dim)

    def forward(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, plan: AttentionPlan, kv: KVPages, layer: int
    ) -> None:
        """Add this layer's two updates to the residual stream [rows, hidden], in place.

        slots: of the rows' KV; a row whose slot is negative leaves none.
        """
        from specsot.kernels.gpu.rows import turn_and_store

        def attention(qkv: Tensor) -> Tensor:
            kv_heads, group, dim = self._heads
            heads = qkv.view(qkv.shape[0], -1, dim)
            turn_and_store(heads, positions, slots, kv.layers[layer], self._turning)
            queries = heads.narrow(1, 0, kv_heads * group).unflatten(1, (kv_heads, group))
            return attend(queries, kv.layers[layer], plan)

        step = self._one if hidden.shape[0] == 1 and not self._invariant else self._many
        step(hidden, attention)

    def _one(self, hidden: Tensor, attention: Attention) -> None:
        from specsot.kernels.gpu.products import multiply_row

        norm, other = self._input_norm, self._mlp_norm
        qkv = multiply_row(hidden, self._qkv.weight, (norm.weight, norm.eps), self._qkv.bias)
        multiply_row(attention(qkv), self._out.weight, add=hidden, into=hidden)
        inner = multiply_row(hidden, self._gate_up.weight, (other.weight, other.eps), gated=True)
        multiply_row(inner, self._down.weight, add=hidden, into=hidden)

    def _many(self, hidden: Tensor, attention: Attention) -> None:
        from specsot.kernels.gpu.rows import norm_rows

        norm, other = self._input_norm, self._mlp_norm
        qkv = self._qkv(norm_rows(hidden, norm.weight, norm.eps))
        self._out.add_to(hidden, attention(qkv))
        inner = self._gate_up(norm_rows(hidden, other.weight, other.eps), gated=True)
        self._down.add_to(hidden, inner)


def fuse_blocks(blocks: Sequence[Block], invariant: bool = False) -> tuple[FusedBlock, ...] | None:
    """The same layers fused; None where these, or this machine, have no kernels for it."""
    on_gpu = all(_weight_is_on_gpu(block.qkv) for block in blocks)
    if not on_gpu or find_spec("triton") is None or not all(can_fuse(block.config) for block in blocks):
        return None
    return tuple(FusedBlock(block, turning_of(block), invariant) for block in blocks)


def can_fuse(config: ModelConfig) -> bool:
    """Layers as Llama and Qwen have them."""
    plain = config.norm == "rms" and config.mlp == "gated" and config.activation == "silu"
    return plain and not (config.parallel or config.out_bias or config.mlp_bias)


def turning_of(block: Block) -> Turning:
    """How this layer's queries and keys turn."""
    from specsot.kernels.gpu.rows import Turning

    config, norms = block.config, block.head_norms
    turns = frequencies(config.rope, config.head_dim).to(product_of(block.qkv).weight.device)
    weights = (norms[0].weight, norms[1].weight) if norms else None
    return Turning(config.heads, config.kv_heads, turns, config.head_dim**-0.5, weights, config.eps)


def check_invariant(config: ModelConfig, device: torch.device, rounded: bool) -> None:
    """Whether what a row gets can be kept from depending on its company. Raises InvalidRequest: not here.

    rounded: matrices or KV rows are held in fewer bits.
    """
    wants = {
        "a GPU and Triton, or --quantization int8 or int4 and fp32: other sums group by rows": runs_kernels(
            device
        ),
        "matrices and KV rows in --dtype: rounded ones have other kernels": not rounded,
        "layers as Llama and Qwen have them: others run in PyTorch's own operations": can_fuse(config),
    }
    lacking = next((want for want, there in wants.items() if not there), None)
    if lacking:
        raise InvalidRequest(f"--batch-invariant needs {lacking}", field="batch_invariant")


def can_capture(config: ModelConfig, kernels: bool, rounded: bool) -> bool:
    """Whether a range of such layers runs as captured graphs. kernels: there are some where it runs."""
    return can_fuse(config) and kernels and not rounded


def runs_kernels(device: torch.device) -> bool:
    """Whether there are kernels for it."""
    return device.type == "cuda" and find_spec("triton") is not None


def _weight_is_on_gpu(linear: Linear) -> bool:
    return linear.weight is not None and linear.weight.is_cuda


def _rms(norm: AnyNorm) -> Norm:
    assert isinstance(norm, Norm)
    return norm
