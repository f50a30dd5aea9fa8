"""Gated delta layers (linear attention) of Qwen3-Next and Qwen3.5 over pages, in plain torch.

A page stores, for each token, the inputs of the layer (queries, keys, values and gates of the delta rule).
The recurrent state after a token follows from the inputs of the tokens before. Forks, accepted drafts, trees,
shared prefixes and repairs therefore work as for KV pages, and exactly. Some states are stored as well
(`specsot_model.core.replays`), so that a step computes only what follows the last stored state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Delta
from specsot_model.attention import AttentionPlan
from specsot_model.core.replays import CHUNK
from specsot_model.delta_pages import DeltaPages
from specsot_model.kv import KVPages, Places
from specsot_model.layers import Block, fetch_norm
from specsot_model.linear import Linear
from specsot_model.mlp import fetch_mlp
from specsot_model.projections import fuse_projections
from specsot_model.weights import Fetch

# Added to the squared L2 norms of queries and keys. Precedent: Hugging Face's Qwen3-Next, 1e-6.
EPS = 1e-6


class DeltaBlock(Block):
    """A decoder layer whose token mixer is a gated delta rule instead of attention.

    fetch: Reads tensors from the model's files.
    index: Index of the layer in the whole model.
    config: The model's config.
    delta: Sizes of its gated delta layers.
    """

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig, delta: Delta) -> None:
        """Load the layer's tensors, with convolution, decay and bias in fp32.

        fetch: Reads tensors from the model's files.
        index: Index of the layer in the whole model.
        config: The model's config.
        delta: Sizes of its gated delta layers.
        """
        names = config.names
        hidden = config.hidden
        layer = names.layer.format(index)
        mixer = f"{layer}.linear_attn"
        fetch_fp32 = replace(fetch, dtype=torch.float32)
        self.config = config
        self.delta = delta
        self.device = torch.device(fetch.device)
        self.input_norm = fetch_norm(fetch, f"{layer}.{names.input_norm}", config)
        self.qkv = Linear(_fetch_inputs(fetch, mixer, hidden, delta), None, fetch.quantization)
        taps = fetch_fp32(f"{mixer}.conv1d.weight", (delta.mixed, 1, delta.kernel))
        self.taps = taps.squeeze(1).T.contiguous()
        heads = (delta.value_heads,)
        self.decay = -fetch_fp32(f"{mixer}.A_log", heads).exp()
        self.bias = fetch_fp32(f"{mixer}.dt_bias", heads)
        self.norm = fetch(f"{mixer}.norm.weight", (delta.value_dim,))
        self.out = fuse_projections(fetch, [f"{mixer}.out_proj"], (hidden, delta.values), False)
        self.mlp_norm = fetch_norm(fetch, f"{layer}.{names.mlp_norm}", config)
        self.mlp = fetch_mlp(fetch, layer, config, index)

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
        """Add this layer's two updates to the residual stream, in place.

        AssertionError is raised for pages of another class. After the last gated delta layer of the range,
        the states that the frame saves become valid.

        hidden: [rows, hidden], the residual stream.
        table: Not used; gated delta layers have no rotary embedding.
        places: Page and offset at which the inputs of each row are stored; see `KVPages.locate`.
        plan: Not used; what runs is in `kv.batches`.
        kv: The pages of the range, a `DeltaPages` that was arranged for the frame.
        layer: Index of this layer within `kv`.
        layer_input: Not used; gated delta layers have no per-layer inputs.
        """
        assert isinstance(kv, DeltaPages), "gated delta layers need the pages that Decoder.make_kv made"
        delta = self.delta
        inputs, gate = self.qkv(self.input_norm(hidden)).split((delta.row, delta.values), -1)
        stored = F.pad(inputs, (0, 2 * delta.half - delta.row))
        kv.put(layer, places, stored.reshape(len(hidden), 2, 1, delta.half))
        mixed = self._mix(kv, layer, len(hidden)).to(hidden.dtype)
        hidden.add_(self.out(self._gate(mixed, gate.unflatten(-1, mixed.shape[1:])).flatten(1)))
        hidden.add_(self.mlp(self.mlp_norm(hidden)))

    def _gate(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Return the normed output of each head times silu of its gate, [rows, heads, value_dim].

        mixed: [rows, heads, value_dim], the outputs of the delta rule.
        gate: [rows, heads, value_dim], the gates.
        """
        exact = mixed.float()
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return (self.norm * normed.to(mixed.dtype) * F.silu(gate.float())).to(mixed.dtype)

    def _mix(self, kv: DeltaPages, layer: int, rows: int) -> Tensor:
        """Run the replays of a frame and return its outputs, fp32 [rows, value_heads, value_dim].

        States that the frame saves are written to `kv`.

        kv: The pages, arranged for the frame.
        layer: Index of this layer within `kv`.
        rows: Number of rows of the frame.
        """
        states = kv.states(layer)
        # All start states are read before any state is overwritten.
        start_states = [states[batch.states] for batch in kv.batches]
        out = states.new_empty(rows, self.delta.value_heads, self.delta.value_dim)
        for batch, state in zip(kv.batches, start_states):
            outputs, chunk_states = apply_delta_rule(*self._prepare(kv.inputs(layer, batch.slots)), state)
            out[batch.targets] = outputs.transpose(1, 2).flatten(0, 1)[batch.places]
            for chunk, (replays, state_numbers) in batch.saves.items():
                states[state_numbers] = chunk_states[chunk][replays]
        kv.finish(layer)
        return out

    def _prepare(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return stored inputs [replays, history + rows, 2 * half] converted to the arguments of
        `apply_delta_rule`.

        The convolution is a plain sum in a fixed order, so a row's result does not depend on the batch. The
        result is queries, keys, values, decays and update rates, with heads before rows. Query and key heads
        are repeated to the number of value heads.

        inputs: [replays, history + rows, 2 * half], stored inputs, with as many preceding tokens as the
            convolution reads.
        """
        delta = self.delta
        history = self.delta.kernel - 1
        rows = inputs.shape[1] - history
        mixed, b, a = inputs[..., : delta.row].split((delta.mixed, delta.value_heads, delta.value_heads), -1)
        mixed = mixed.float()
        b = b[:, history:].float()
        a = a[:, history:].float()
        parts = [mixed[:, at : at + rows] * tap for at, tap in enumerate(self.taps)]
        summed = sum(parts[1:], parts[0])
        q, k, v = (summed * _sigmoid(summed)).split((delta.keys, delta.keys, delta.values), -1)
        group = delta.value_heads // delta.key_heads
        q, k = (
            _unit_vectors(part.unflatten(-1, (delta.key_heads, -1))).repeat_interleave(group, 2)
            for part in (q, k)
        )
        decay = self.decay * _softplus(a + self.bias)
        heads = q * delta.key_dim**-0.5, k, v.unflatten(-1, (delta.value_heads, -1)), decay, _sigmoid(b)
        # One memory layout for one replay and for several; else products would differ in their last bits.
        q, k, v, decay, beta = (part.transpose(1, 2).contiguous() for part in heads)
        return q, k, v, decay, beta


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x, by exp: on a CPU, torch.sigmoid's last bit depends on memory alignment.

    x: Any shape, fp32.
    """
    return (1 + (-x).exp()).reciprocal()


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), computed by exp for the same reason as `_sigmoid`.

    x: Any shape, fp32.
    """
    return x.clamp_min(0) + (-x.abs()).exp().log1p()


def _unit_vectors(x: Tensor) -> Tensor:
    """Return x divided by its L2 norm over the last dimension.

    x: [..., key_dim], fp32.
    """
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def _fetch_inputs(fetch: Fetch, mixer: str, hidden: int, delta: Delta) -> Tensor:
    """Return the input projections as one loaded weight, whose outputs are queries, keys, values, b, a, then
    gates z.

    Pages store all of these but the gates. Checkpoints publish the projections apart (`delta.apart`), or two
    tensors in which the parts of one key head lie side by side; of these, GGUF files have the one of b and a.
    ModelError is raised if a tensor is missing or has another shape.

    fetch: Reads tensors from the model's files.
    mixer: Name of the mixer's module, without a dot at the end.
    hidden: Hidden size of the model.
    delta: Sizes of the gated delta layers, and how the files store the projections.
    """
    if delta.apart:
        rows = {"qkv": delta.mixed, "b": delta.value_heads, "a": delta.value_heads, "z": delta.values}
        return torch.cat(
            [fetch(f"{mixer}.in_proj_{name}.weight", (count, hidden)) for name, count in rows.items()]
        )
    group = delta.value_heads // delta.key_heads
    values_per_head = group * delta.value_dim

    def fetch_by_head(name: str, *split: int) -> list[Tensor]:
        """Return the parts of a projection in which those of each key head lie side by side.

        name: Name of the projection.
        split: Outputs of each part of one key head.
        """
        weight = fetch(f"{mixer}.{name}.weight", (delta.key_heads * sum(split), hidden))
        by_head = weight.unflatten(0, (delta.key_heads, sum(split))).split(split, 1)
        return [part.flatten(0, 1) for part in by_head]

    b, a = fetch_by_head("in_proj_ba", group, group)
    if f"{mixer}.in_proj_qkv.weight" in fetch:
        mixed, z = (
            fetch(f"{mixer}.in_proj_{name}.weight", (count, hidden))
            for name, count in (("qkv", delta.mixed), ("z", delta.values))
        )
        return torch.cat((mixed, b, a, z))
    q, k, v, z = fetch_by_head("in_proj_qkvz", delta.key_dim, delta.key_dim, values_per_head, values_per_head)
    return torch.cat((q, k, v, b, a, z))


def apply_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Run the gated delta rule (arXiv 2412.06464) by chunks, and return outputs and states.

    For each row: S := exp(decay) S, then S += k (beta (v - S^T k))^T, and the output is S^T q.

    q: fp32 [replays, heads, rows, key_dim], queries; `rows` is a multiple of CHUNK.
    k: fp32 [replays, heads, rows, key_dim], keys.
    v: fp32 [replays, heads, rows, value_dim], values.
    decay: [replays, heads, rows], the logarithm of the factor by which the state shrinks.
    beta: [replays, heads, rows], the rate of each update.
    state: [replays, heads, key_dim, value_dim], the state before the first row.

    Return the outputs [replays, heads, rows, value_dim], and the state after every chunk.
    """
    out = list[Tensor]()
    states = list[Tensor]()
    for queries, keys, values, steps, rates in zip(
        *(tensor.split(CHUNK, 2) for tensor in (q, k, v, decay, beta))
    ):
        total = steps.cumsum(-1)
        pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
        grown = total.exp().unsqueeze(-1)
        rates = rates.unsqueeze(-1)
        system = (keys * rates @ keys.mT) * pairs
        known = (keys * rates * grown) @ state
        new = torch.linalg.solve_triangular(system, values * rates - known, upper=False, unitriangular=True)
        out.append((queries * grown) @ state + ((queries @ keys.mT) * pairs) @ new)
        left = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = state * grown[..., -1:, :] + (keys * left).mT @ new
        states.append(state)
    return torch.cat(out, 2), states
