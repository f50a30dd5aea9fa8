"""Gated delta layers (linear attention) of Qwen3-Next and Qwen3.5 over pages.

A row's page holds what the layer reads of the row: the state after any row follows from the rows before it.
So forks, kept drafts, trees, shared prefixes and repairs are those of KV pages, and exact. Some states are
kept beside the pages (`specsot.core.replays`), so that a lap computes only what follows the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.core.replays import CHUNK, KeptStates, PathReplay, states_for
from specsot.core.segments import RowSpan
from specsot.members import KvDtype, Range
from specsot.model.attention import AttentionPlan
from specsot.model.config import ModelConfig
from specsot.model.families import Delta
from specsot.model.kv import KVPages, Moves, Places, indices, untouched_zeros
from specsot.model.layers import Block, fetch_norm
from specsot.model.linear import Linear
from specsot.model.mlp import fetch_mlp
from specsot.model.projections import fuse
from specsot.model.weights import Fetch

EPS = 1e-6  # of the L2 norms of queries and keys


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Replays of as many chunks each, as tensors; once a frame, shared by its layers.

    slots:   [replays, history + chunks * CHUNK]; negative where there is no row.
    states:  [replays], where they begin.
    places:  [wanted] rows of [replays * chunks * CHUNK], whose outputs are rows `targets` of the frame.
    saves:   by chunk: which replays' states are kept, and where, [few] both.
    """

    slots: Tensor
    states: Tensor
    places: Tensor
    targets: Tensor
    saves: Mapping[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, replays: Sequence[PathReplay], history: int, begun: int, device: torch.device) -> ReplayBatch:
        """begun: the state of a text that begins."""
        width = _chunks(replays[0], history) * CHUNK
        slots = [one.slots + (-1,) * (history + width - len(one.slots)) for one in replays]
        states = [begun if one.state is None else one.state for one in replays]
        outputs = [(run * width + at, row) for run, one in enumerate(replays) for row, at in one.outputs]
        saves: dict[int, list[tuple[int, int]]] = {}
        for run, one in enumerate(replays):
            for chunk, state in one.saves:
                saves.setdefault(chunk, []).append((run, state))
        pairs = [list(each) for part in (outputs, *saves.values()) for each in zip(*part)]
        parts = [[slot for one in slots for slot in one], states, *pairs]
        sent = indices([number for part in parts for number in part], device)
        rows, first, places, targets, *kept = sent.split([len(part) for part in parts])
        by_chunk = {chunk: (kept[2 * n], kept[2 * n + 1]) for n, chunk in enumerate(saves)}
        return cls(rows.view(len(replays), -1), first, places, targets, by_chunk)


def _chunks(replay: PathReplay, history: int) -> int:
    return -(-(len(replay.slots) - history) // CHUNK)


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
        shape = config.delta or Delta()
        self._inputs = KVPages(delta.count(True), pages, page_rows, 1, shape.half, dtype, device)
        self._places = [(one, delta[:layer].count(one)) for layer, one in enumerate(delta)]
        both = self.layers, self._inputs.layers
        self.layers = tuple(both[one][index] for one, index in self._places)
        many = states_for(pages * page_rows)
        self._history, self._kept = shape.kernel - 1, KeptStates(many - 1, page_rows)
        self.batches: tuple[ReplayBatch, ...] = ()
        sizes = many, shape.value_heads, shape.key_dim, shape.value_dim
        self._states = untouched_zeros((delta.count(True), *sizes), torch.float32, device)

    @property
    def bytes(self) -> int:
        return super().bytes + self._inputs.bytes + self._states.nbytes

    def arrange(self, spans: Sequence[RowSpan]) -> None:
        """Before the layers run a frame's rows: what is run again of each text."""
        by_chunks: dict[int, list[PathReplay]] = {}
        for one in self._kept.plan(spans, self._history) if len(self._states) else ():
            by_chunks.setdefault(_chunks(one, self._history), []).append(one)
        given = self._history, self._kept.count, self._states.device
        self.batches = tuple(ReplayBatch.of(alike, *given) for alike in by_chunks.values())

    def inputs(self, layer: int, slots: Tensor) -> Tensor:
        """Rows at slots [replays, rows] -> [replays, rows, 2 * half], zeros where slots are negative."""
        rows = self.layers[layer].flatten(1, 3)[:, slots.clamp_min(0).flatten()]
        found = rows.transpose(0, 1).reshape(*slots.shape, -1)
        return found.masked_fill(slots.unsqueeze(-1) < 0, 0)

    def states(self, layer: int) -> Tensor:
        """[states, value_heads, key_dim, value_dim], fp32."""
        return self._states[self._places[layer][1]]

    def finish(self, layer: int) -> None:
        """A layer has run; with the last one its states may be used."""
        if self._places[layer][1] == len(self._states) - 1:
            self._kept.commit()

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        delta, index = self._places[layer]
        if delta:
            self._inputs.put(index, places, kv)
        else:
            super().put(index, places, kv)

    def move(self, moves: Moves) -> None:
        super().move(moves)
        self._inputs.move(moves)
        self._forget_rows([target for _, target in moves])

    def copy_page(self, source: int, target: int, rows: int) -> None:
        super().copy_page(source, target, rows)
        self._inputs.copy_page(source, target, rows)
        if copied := self._kept.copy(source, target, rows):
            self._states[:, copied[1]] = self._states[:, copied[0]]

    def clear_rows(self, slots: Sequence[int]) -> None:
        super().clear_rows(slots)
        self._inputs.clear_rows(slots)
        self._forget_rows(slots)

    def clear_page(self, page: int) -> None:
        super().clear_page(page)
        self._inputs.clear_page(page)
        self._kept.forget(page)

    def _forget_rows(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._kept.forget(*divmod(slot, self.page_rows))


class DeltaBlock(Block):
    """A layer whose attention is a gated delta rule."""

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig, delta: Delta) -> None:
        names, hidden = config.names, config.hidden
        layer = names.layer.format(index)
        mixer, exact = f"{layer}.linear_attn", replace(fetch, dtype=torch.float32)
        self.config, self._delta = config, delta
        self.input_norm = fetch_norm(fetch, f"{layer}.{names.input_norm}", config)
        self._inputs = Linear(_fetch_inputs(fetch, mixer, hidden, delta), None, fetch.quantization)
        taps = exact(f"{mixer}.conv1d.weight", (delta.mixed, 1, delta.kernel))
        self._filter = taps.squeeze(1).T.contiguous()
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
        assert isinstance(kv, DeltaPages), "make_kv makes them"
        delta = self._delta
        inputs, gate = self._inputs(self.input_norm(hidden)).split((delta.row, delta.values), -1)
        row = F.pad(inputs, (0, 2 * delta.half - delta.row))
        kv.put(layer, places, row.reshape(len(hidden), 2, 1, delta.half))
        mixed = self._mix(kv, layer, len(hidden)).to(hidden.dtype)
        hidden.add_(self.out(self._gate(mixed, gate.unflatten(-1, mixed.shape[1:])).flatten(1)))
        hidden.add_(self.mlp(self.mlp_norm(hidden)))

    def _gate(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """The normed output of each head [rows, heads, value_dim], times silu of its gate."""
        wide = mixed.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return (self._norm * normed.to(mixed.dtype) * F.silu(gate.float())).to(mixed.dtype)

    def _mix(self, kv: DeltaPages, layer: int, rows: int) -> Tensor:
        """Outputs of a frame's rows, fp32 [rows, value_heads, value_dim]."""
        states = kv.states(layer)
        begun = [states[batch.states] for batch in kv.batches]  # before others are kept in their places
        out = states.new_empty(rows, self._delta.value_heads, self._delta.value_dim)
        for batch, state in zip(kv.batches, begun):
            found, after = apply_delta_rule(*self._prepare(kv.inputs(layer, batch.slots)), state)
            out[batch.targets] = found.transpose(1, 2).flatten(0, 1)[batch.places]
            for chunk, (replays, kept) in batch.saves.items():
                states[kept] = after[chunk][replays]
        kv.finish(layer)
        return out

    def _prepare(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs of rows [replays, history + rows, ...] as `apply_delta_rule` takes them.

        The convolution is a plain sum: a row's is the same in any company, bit for bit.
        """
        delta, history = self._delta, self._delta.kernel - 1
        rows = inputs.shape[1] - history
        mixed, b, a = inputs[..., : delta.row].split((delta.mixed, delta.value_heads, delta.value_heads), -1)
        mixed, b, a = mixed.float(), b[:, history:].float(), a[:, history:].float()
        parts = [mixed[:, at : at + rows] * tap for at, tap in enumerate(self._filter)]
        summed = sum(parts[1:], parts[0])
        q, k, v = (summed * _sigmoid(summed)).split((delta.keys, delta.keys, delta.values), -1)
        group = delta.value_heads // delta.key_heads
        q, k = (
            _unit(each.unflatten(-1, (delta.key_heads, -1))).repeat_interleave(group, 2) for each in (q, k)
        )
        decay = self._decay * _softplus(a + self._dt_bias)
        heads = q * delta.key_dim**-0.5, k, v.unflatten(-1, (delta.value_heads, -1)), decay, _sigmoid(b)
        # In one order, whether it is of one replay or of several: products would differ in their last bits.
        q, k, v, decay, beta = (each.transpose(1, 2).contiguous() for each in heads)
        return q, k, v, decay, beta


def _sigmoid(x: Tensor) -> Tensor:
    """By exp: on a CPU torch's own differs in its last bit with a number's place in memory."""
    return (1 + (-x).exp()).reciprocal()


def _softplus(x: Tensor) -> Tensor:
    """In the same way."""
    return x.clamp_min(0) + (-x.abs()).exp().log1p()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def _fetch_inputs(fetch: Fetch, mixer: str, hidden: int, delta: Delta) -> Tensor:
    """One product of what pages hold of a row (queries, keys, values, b, a), then of gates; published apart,
    or with one key head's parts side by side."""
    if delta.apart:
        rows = {"qkv": delta.mixed, "b": delta.value_heads, "a": delta.value_heads, "z": delta.values}
        return torch.cat(
            [fetch(f"{mixer}.in_proj_{name}.weight", (many, hidden)) for name, many in rows.items()]
        )
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


def apply_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gated delta rule (arXiv 2412.06464), by chunks: after S := exp(decay) S, S += k (beta (v - S^T k))^T, a
    row's output is S^T q.

    q, k: fp32 [replays, heads, rows, key_dim]; v: [replays, heads, rows, value_dim]; decay (of the
    logarithm), beta: [replays, heads, rows]; rows: whole chunks. state: [replays, heads, key_dim, value_dim].
    Returns [replays, heads, rows, value_dim], and the state after every chunk.
    """
    out, states = list[Tensor](), list[Tensor]()
    for queries, keys, values, steps, rates in zip(
        *(each.split(CHUNK, 2) for each in (q, k, v, decay, beta))
    ):
        total = steps.cumsum(-1)
        pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
        grown, rates = total.exp().unsqueeze(-1), rates.unsqueeze(-1)
        system = (keys * rates @ keys.mT) * pairs
        known = (keys * rates * grown) @ state
        new = torch.linalg.solve_triangular(system, values * rates - known, upper=False, unitriangular=True)
        out.append((queries * grown) @ state + ((queries @ keys.mT) * pairs) @ new)
        left = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = state * grown[..., -1:, :] + (keys * left).mT @ new
        states.append(state)
    return torch.cat(out, 2), states
