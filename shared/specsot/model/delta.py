"""Gated delta layers (linear attention) of Qwen3-Next over pages.

A row's page holds what the layer reads of the row, not its state: the state after any row follows from the
rows before it. So forks, kept drafts, trees, shared prefixes and repairs are those of KV pages, and exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.members import KvDtype, Range
from specsot.model.attention import AttentionPlan, RowSpan
from specsot.model.config import ModelConfig
from specsot.model.families import Delta
from specsot.model.kv import KVPages, Moves, Places
from specsot.model.layers import Block, fetch_norm
from specsot.model.linear import Linear
from specsot.model.mlp import fetch_mlp
from specsot.model.projections import fuse
from specsot.model.weights import Fetch

CHUNK = 64  # rows whose updates are solved at once, as in Transformers; not measured
EPS = 1e-6  # of the L2 norms of queries and keys


class DeltaPages(KVPages):
    """Pages of a range with gated delta layers: KV where a layer attends, else the inputs of its rows."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Range,
        pages: int,
        page_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kept: KvDtype,
    ) -> None:
        delta = [config.recurrent(layer) for layer in range(layers.first, layers.last)]
        sizes = pages, page_rows, config.kv_heads, config.head_dim
        super().__init__(delta.count(False), *sizes, dtype, device, kept)
        half = config.delta.half if config.delta else 0
        self._inputs = KVPages(delta.count(True), pages, page_rows, 1, half, dtype, device)
        self._places = [(one, delta[:layer].count(one)) for layer, one in enumerate(delta)]
        both = self.layers, self._inputs.layers
        self.layers = tuple(both[one][index] for one, index in self._places)

    @property
    def bytes(self) -> int:
        return super().bytes + self._inputs.bytes

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        delta, index = self._places[layer]
        if delta:
            self._inputs.put(index, places, kv)
        else:
            super().put(index, places, kv)

    def move(self, moves: Moves) -> None:
        super().move(moves)
        self._inputs.move(moves)

    def copy_page(self, source: int, target: int, rows: int) -> None:
        super().copy_page(source, target, rows)
        self._inputs.copy_page(source, target, rows)

    def clear_rows(self, slots: Sequence[int]) -> None:
        super().clear_rows(slots)
        self._inputs.clear_rows(slots)

    def clear_page(self, page: int) -> None:
        super().clear_page(page)
        self._inputs.clear_page(page)


class DeltaBlock(Block):
    """A layer whose attention is a gated delta rule."""

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig, delta: Delta) -> None:
        names, hidden = config.names, config.hidden
        layer = names.layer.format(index)
        mixer, exact = f"{layer}.linear_attn", replace(fetch, dtype=torch.float32)
        self.config, self._delta = config, delta
        self.input_norm = fetch_norm(fetch, f"{layer}.{names.input_norm}", config)
        self._inputs = Linear(_fetch_inputs(fetch, mixer, hidden, delta), None, fetch.quantization)
        self._filter = fetch(f"{mixer}.conv1d.weight", (delta.mixed, 1, delta.kernel))
        heads = (delta.value_heads,)
        self._decay = -exact(f"{mixer}.A_log", heads).exp()
        self._dt_bias = exact(f"{mixer}.dt_bias", heads)
        self._norm = fetch(f"{mixer}.norm.weight", (delta.value_dim,))
        self.out = fuse(fetch, [f"{mixer}.out_proj"], (hidden, delta.values), False)
        self.mlp_norm = fetch_norm(fetch, f"{layer}.{names.mlp_norm}", config)
        self.mlp = fetch_mlp(fetch, layer, config, index)

    def forward(
        self, hidden: Tensor, table: Tensor, places: Places, plan: AttentionPlan, kv: KVPages, layer: int
    ) -> None:
        """As a `Block`'s."""
        delta = self._delta
        inputs, gate = self._inputs(self.input_norm(hidden)).split((delta.row, delta.values), -1)
        row = F.pad(inputs, (0, 2 * delta.half - delta.row))
        kv.put(layer, places, row.reshape(len(hidden), 2, 1, delta.half))
        mixed = torch.cat([self._mix(span, kv.layers[layer]) for span in plan.spans]).to(hidden.dtype)
        hidden.add_(self.out(self._gate(mixed, gate.unflatten(-1, mixed.shape[1:])).flatten(1)))
        hidden.add_(self.mlp(self.mlp_norm(hidden)))

    def _gate(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The normed output of each head [rows, heads, value_dim], times silu of its gate."""
        wide = mixed.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return (self._norm * normed.to(mixed.dtype) * F.silu(gate.float())).to(mixed.dtype)

    def _mix(self, span: RowSpan, pages: Tensor) -> Tensor:
        """Outputs of a span's rows, fp32 [rows, value_heads, value_dim]."""
        used = torch.tensor(span.pages[: span.depth(pages.shape[3])], device=pages.device)
        rows = pages[:, used, 0].permute(1, 2, 0, 3).reshape(-1, 2 * self._delta.half)[: span.total]
        if span.visible is None:
            return self._run(rows)[span.base :]
        out = torch.zeros(span.rows, self._delta.value_heads, self._delta.value_dim, device=pages.device)
        missing = (1 << span.rows) - 1
        while missing:
            seen = span.visible[missing.bit_length() - 1]
            path = torch.tensor([node for node in range(span.rows) if seen >> node & 1], device=pages.device)
            out[path] = self._run(torch.cat((rows[: span.base], rows[span.base + path])))[span.base :]
            missing &= ~seen
        return out

    def _run(self, rows: Tensor) -> Tensor:
        """Inputs of a sequence's rows from its first on -> fp32 [rows, value_heads, value_dim]."""
        delta = self._delta
        mixed, b, a = rows[:, : delta.row].split((delta.mixed, delta.value_heads, delta.value_heads), -1)
        before = F.pad(mixed.T, (delta.kernel - 1, 0))
        mixed = F.silu(F.conv1d(before[None], self._filter, groups=delta.mixed)[0]).T.float()
        q, k, v = mixed.split((delta.keys, delta.keys, delta.values), -1)
        group = delta.value_heads // delta.key_heads
        q, k = (
            _unit(each.unflatten(-1, (delta.key_heads, -1))).repeat_interleave(group, 1) for each in (q, k)
        )
        decay = self._decay * F.softplus(a.float() + self._dt_bias)
        heads = q * delta.key_dim**-0.5, k, v.unflatten(-1, (delta.value_heads, -1))
        parts = [each.transpose(0, 1) for each in (*heads, decay, b.sigmoid().float())]
        return apply_delta_rule(*parts).transpose(0, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def _fetch_inputs(fetch: Fetch, mixer: str, hidden: int, delta: Delta) -> Tensor:
    """One product of what pages hold of a row (queries, keys, values, b, a), then of gates; published with
    one key head's parts side by side."""
    group = delta.value_heads // delta.key_heads
    wide = group * delta.value_dim
    sizes = {"in_proj_qkvz": (delta.key_dim, delta.key_dim, wide, wide), "in_proj_ba": (group, group)}
    parts: list[Tensor] = []
    for name, split in sizes.items():
        whole = fetch(f"{mixer}.{name}.weight", (delta.key_heads * sum(split), hidden))
        by_head = whole.unflatten(0, (delta.key_heads, sum(split))).split(split, 1)
        parts += [part.flatten(0, 1) for part in by_head]
    q, k, v, z, b, a = parts
    return torch.cat((q, k, v, b, a, z))


def apply_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule (arXiv 2412.06464), by chunks: after S := exp(decay) S, S += k (beta (v - S^T k))^T, a
    row's output is S^T q.

    q, k: fp32 [heads, rows, key_dim]; v: [heads, rows, value_dim]; decay (of the logarithm), beta:
    [heads, rows]. Returns [heads, rows, value_dim].
    """
    state, out = v.new_zeros(v.shape[0], k.shape[-1], v.shape[-1]), list[Tensor]()
    for queries, keys, values, steps, rates in zip(
        *(each.split(CHUNK, 1) for each in (q, k, v, decay, beta))
    ):
        total = steps.cumsum(-1)
        pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
        grown, rates = total.exp().unsqueeze(-1), rates.unsqueeze(-1)
        system = (keys * rates @ keys.mT) * pairs
        known = (keys * rates * grown) @ state
        new = torch.linalg.solve_triangular(system, values * rates - known, upper=False, unitriangular=True)
        out.append((queries * grown) @ state + ((queries @ keys.mT) * pairs) @ new)
        left = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * grown[:, -1:] + (keys * left).mT @ new
    return torch.cat(out, 1)
