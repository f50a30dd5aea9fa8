"""Layers of a CPU in few bits: each a single call of a kernel, in which a row is the same in any company.

Layers built otherwise run as `Block` has them, over the same products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specsot.core.segments import RowSpan
from specsot.model.attention import AttentionPlan
from specsot.model.config import ModelConfig
from specsot.model.fused import can_fuse
from specsot.model.kv import KVPages
from specsot.model.layers import AnyNorm, Block, GatedMlp, Norm, Rotary
from specsot.model.linear import Linear, Packed

if TYPE_CHECKING:
    from specsot.kernels.cpu.running import ColumnPlan

TURNS_AT_ONCE = 1024  # positions by which the table of rotations grows at least; not measured


class PackedLayers:
    """The layers of these blocks, over the same weights."""

    def __init__(self, blocks: Sequence[Block], rotary: Rotary) -> None:
        self._config, self._frequencies = blocks[0].config, rotary.frequencies
        self._blocks = blocks  # tables point into them
        self._tables = [_table(block) for block in blocks]
        self._widest = max(self._config.hidden, self._config.intermediate, _width(self._config))
        self._turns = torch.empty(0, 2, self._config.head_dim)

    def plan(self, spans: Sequence[RowSpan], page_rows: int) -> AttentionPlan:
        from specsot.kernels.cpu.running import plan_columns

        row_bytes = 4 * self._config.head_dim
        columns = plan_columns(spans, page_rows, row_bytes, self._config.kv_heads)
        return AttentionPlan((), (), None, None, columns=columns)

    def runner(
        self, positions: Tensor, slots: Tensor, plans: Sequence[AttentionPlan], kv: KVPages
    ) -> Callable[[Tensor, int], None]:
        """What runs hidden rows [rows, H] through one layer, in place."""
        from specsot.kernels.cpu import laps
        from specsot.kernels.cpu.running import KernelFrame

        config, rows = self._config, len(positions)
        frame = KernelFrame(rows, self._widest, config.eps)
        sizes = config.heads, config.kv_heads, config.head_dim, kv.page_rows
        for field, size in zip((laps.HEADS, laps.KV_HEADS, laps.HEAD_DIM, laps.PAGE_ROWS), sizes):
            frame.put(field, size)
        frame.point(laps.POSITIONS, positions)
        frame.point(laps.SLOTS, slots)
        frame.point(laps.TURNS, self._turns_to(int(positions.max()) + 1))
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        frame.make(laps.PROJECTED, rows, width)
        frame.make(laps.ATTENDED, rows, _width(config))
        frame.make(laps.INNER, rows, 2 * config.intermediate)
        longest = max(_columns(plan).longest for plan in plans)
        frame.make_attention(longest, config.head_dim, config.heads // config.kv_heads)

        def run(hidden: Tensor, layer: int) -> None:
            columns, pages = _columns(plans[layer]), kv.layers[layer]
            frame.point(laps.HIDDEN, hidden)
            frame.put(laps.SIGHT, columns.sight.ctypes.data)
            frame.put(laps.SEEN_BY, columns.sight.shape[1])
            frame.put(laps.KEYS, pages.data_ptr())
            frame.put(laps.VALUES, pages.data_ptr() + pages[0].nbytes)
            frame.run(self._tables[layer])

        return run

    def _turns_to(self, positions: int) -> Tensor:
        """Rotations of at least so many positions, cosines and signed sines: [positions, 2, head_dim]."""
        if len(self._turns) < positions:
            count = max(TURNS_AT_ONCE, 2 ** (positions - 1).bit_length())
            angles = torch.arange(count).float()[:, None] * self._frequencies
            cosines, sines = (each.float() for each in (angles.double().cos(), angles.double().sin()))
            signed = torch.stack((-sines, sines), -1).flatten(1)
            self._turns = torch.stack((cosines.repeat_interleave(2, 1), signed), 1).contiguous()
        return self._turns


def _columns(plan: AttentionPlan) -> ColumnPlan:
    assert plan.columns is not None, "planned by these layers"
    return plan.columns


def _width(config: ModelConfig) -> int:
    return config.heads * config.head_dim


def _table(block: Block) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """See `laps.LAYER`."""
    mlp, norms = block.mlp, (block.input_norm, block.mlp_norm, *(block.head_norms or ()))
    assert isinstance(mlp, GatedMlp)
    products = [_packed(each).weight.table for each in (block.qkv, block.out, mlp.gate_up, mlp.down)]
    places = [norm.weight.data_ptr() for norm in norms if isinstance(norm, Norm)]
    return np.concatenate((*products, np.array([*places, 0, 0][:4], dtype=np.int64)))


def _packed(linear: Linear) -> Packed:
    assert isinstance(linear.multiply, Packed)
    return linear.multiply


def pack_layers(blocks: Sequence[Block], rotary: Rotary, dtype: torch.dtype) -> PackedLayers | None:
    """None where these layers are not in few bits on a CPU, or not built as the kernel has them."""
    packed = all(isinstance(block.qkv.multiply, Packed) for block in blocks)
    fits = packed and dtype == torch.float32 and can_pack(blocks[0].config)
    return PackedLayers(blocks, rotary) if fits else None


def can_pack(config: ModelConfig) -> bool:
    """Layers as Llama and Qwen have them, of whole vectors, on a machine with Numba."""
    whole = not (
        config.head_dim % 16
        or any(size % 32 for size in (config.hidden, config.intermediate, _width(config)))
    )
    return can_fuse(config) and whole and find_spec("numba") is not None


def logits_of(head: Linear, norm: AnyNorm, hidden: Tensor) -> Tensor:
    """Hidden [rows, H] -> logits [rows, V], each row by itself where the head can."""
    if isinstance(head.multiply, Packed) and isinstance(norm, Norm) and hidden.dtype == torch.float32:
        return head.multiply(hidden, (norm.weight, norm.eps))
    return head(norm(hidden))
