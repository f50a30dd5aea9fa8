"""The decoder layers of a head, from names and shapes that are already checked."""

from __future__ import annotations

import torch
from torch import Tensor

from specsot.model.attention import attend
from specsot.model.kv import KVPages
from specsot.model.layers import Norm, Rotary, fuse, gate, interleave, rotate
from specsot.model.linear import Linear
from specsot.model.weights import Fetch
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.checkpoint import HeadShape


class HeadLayers:
    """All decoder layers: the first reads what its head makes for it, the others are Llama's."""

    def __init__(self, fetch: Fetch, shape: HeadShape, rotary: Rotary, eps: float) -> None:
        self.first, *rest = (HeadLayer(fetch, shape, rotary, eps, index) for index in range(shape.layers))
        norms = (
            fetch_norm(fetch, f"layers.{index}.input_layernorm", shape.hidden, eps)
            for index in range(1, shape.layers)
        )
        self.rest = tuple(zip(norms, rest))

    def forward(self, inputs: Tensor, residual: Tensor, rows: HeadRows) -> Tensor:
        """[rows, inputs] and what the first layer's updates are added to, [rows, hidden]; see `DraftHead`."""
        x = self.first.forward(inputs, residual, rows)
        for norm, layer in self.rest:
            x = layer.forward(norm(x), x, rows)
        return x


class HeadLayer:
    """Layer `index`: attention over `inputs`, added to a residual, and a gated MLP behind it."""

    def __init__(self, fetch: Fetch, shape: HeadShape, rotary: Rotary, eps: float, index: int) -> None:
        prefix = f"layers.{index}"
        self._index, self.shape, self.rotary = index, shape, rotary
        self.qkv, self._kv = _projections(fetch, f"{prefix}.self_attn", shape, index)
        self.head_norms = _head_norms(fetch, f"{prefix}.self_attn", shape, eps)
        hidden, inner = shape.hidden, shape.intermediate
        self.out = _fuse(fetch, f"{prefix}.self_attn", ("o_proj",), (hidden, shape.heads * shape.head_dim))
        self.mlp_norm = fetch_norm(fetch, f"{prefix}.post_attention_layernorm", hidden, eps)
        self.gate_up = _fuse(fetch, f"{prefix}.mlp", ("gate_proj", "up_proj"), (inner, hidden))
        self.down = _fuse(fetch, f"{prefix}.mlp", ("down_proj",), (hidden, inner))

    def forward(self, inputs: Tensor, residual: Tensor, rows: HeadRows) -> Tensor:
        """Rows' KV into their slots; returns the residual [rows or few, hidden] with both updates."""
        kv, asked, positions, slots = rows.kv, rows.asked, rows.positions, rows.slots
        if asked is not None and len(asked) < len(inputs):
            self._write(inputs, positions, slots, kv)
            inputs, residual = inputs[asked], residual[asked]
            positions, slots = positions[asked], slots[asked]
        if rows.plan is None:
            return residual
        q = self._project(inputs, positions, slots, kv)
        x = residual + self.out(attend(q, kv.layers[self._index], rows.plan))
        return x.add_(self.down(gate(self.gate_up(self.mlp_norm(x)))))

    def _project(self, inputs: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> Tensor:
        """Queries [rows, kv_heads, group, head_dim]; keys and values go to their slots."""
        heads, pairs = self.shape.heads, self.shape.kv_heads
        parts = self.qkv(inputs).view(inputs.shape[0], -1, self.shape.head_dim)
        if self.head_norms is not None:
            for part, norm in zip(parts.split((heads, pairs, pairs), 1), self.head_norms):
                part.copy_(norm(part))
        rotate(parts.narrow(1, 0, heads + pairs), self.rotary.table(positions))
        kv.write(self._index, slots, parts.narrow(1, heads, 2 * pairs).unflatten(1, (2, pairs)))
        return parts.narrow(1, 0, heads).unflatten(1, (pairs, heads // pairs))

    def _write(self, inputs: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> None:
        """Keys and values alone: a row whose output nobody asks for needs no more."""
        pairs = self.shape.kv_heads
        parts = self._kv(inputs).view(inputs.shape[0], -1, self.shape.head_dim)
        keys = parts.narrow(1, 0, pairs)
        if self.head_norms is not None:
            keys.copy_(self.head_norms[1](keys))
        rotate(keys, self.rotary.table(positions)[:, -pairs:])
        kv.write(self._index, slots, parts.unflatten(1, (2, pairs)))


def fetch_norm(fetch: Fetch, name: str, size: int, eps: float) -> Norm:
    return Norm(fetch(f"{name}.weight", (size,)), eps)


def find_norm(fetch: Fetch, name: str, size: int, eps: float) -> Norm | None:
    """None where the head has no such norm."""
    return fetch_norm(fetch, name, size, eps) if f"{name}.weight" in fetch else None


def _fuse(fetch: Fetch, prefix: str, parts: tuple[str, ...], shape: tuple[int, int]) -> Linear:
    """Projections of one shape as one product, with biases where there are any."""
    names = [f"{prefix}.{part}" for part in parts]
    return fuse(fetch, names, shape, any(f"{name}.bias" in fetch for name in names))


def _projections(fetch: Fetch, prefix: str, shape: HeadShape, index: int) -> tuple[Linear, Linear]:
    """Queries, keys and values as one product, and keys and values as another; rows turned for `rotate`."""
    columns = shape.hidden if index else shape.inputs
    biased = f"{prefix}.q_proj.bias" in fetch
    weight = torch.cat(_turned(fetch, prefix, "weight", (columns,), shape))
    bias = torch.cat(_turned(fetch, prefix, "bias", (), shape)) if biased else None
    first, kind = shape.heads * shape.head_dim, fetch.quantization
    keys = Linear(weight[first:], None if bias is None else bias[first:], kind)
    return Linear(weight, bias, kind), keys


def _turned(fetch: Fetch, prefix: str, kind: str, columns: tuple[int, ...], shape: HeadShape) -> list[Tensor]:
    dim, pairs = shape.head_dim, shape.kv_heads
    rows = {"q_proj": shape.heads, "k_proj": pairs, "v_proj": pairs}
    parts = {name: fetch(f"{prefix}.{name}.{kind}", (heads * dim, *columns)) for name, heads in rows.items()}
    return [part if name == "v_proj" else interleave(part, dim) for name, part in parts.items()]


def _head_norms(fetch: Fetch, prefix: str, shape: HeadShape, eps: float) -> tuple[Norm, Norm] | None:
    """Qwen3's norms over each query and key head."""
    if f"{prefix}.q_norm.weight" not in fetch:
        return None
    dim = shape.head_dim
    q, k = (interleave(fetch(f"{prefix}.{name}.weight", (dim,)), dim) for name in ("q_norm", "k_norm"))
    return Norm(q, eps), Norm(k, eps)
