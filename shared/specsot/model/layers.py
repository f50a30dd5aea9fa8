"""Decoder layers and their parts (norms, rotary positions, fused projections, MLP), and a base's edges.

Numerics follow Hugging Face's eager modules unless a docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.errors import ModelError
from specsot.model.attention import AttentionPlan, attend
from specsot.model.config import ModelConfig, Rope
from specsot.model.decoding import Codes
from specsot.model.families import Activation
from specsot.model.kv import KVPages, Places
from specsot.model.linear import Linear, Packed, Table, hold_table, of_lm_head
from specsot.model.weights import Fetch

AnyNorm = Callable[[Tensor], Tensor]  # [rows, ..., size] -> the same shape


class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 inside.

    torch has no fused one for the CPU; there ||x|| and hypot(||x||, sqrt(n eps)) do it in four short
    passes instead of seven.
    """

    __slots__ = ("_floor", "_scaled", "_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.weight, self.eps, self._shape = weight, eps, (size,)
        self._scaled = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div(torch.hypot(length, self._floor)).mul_(self._scaled).to(x.dtype)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps, self._shape = weight, bias, eps, tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


def fetch_norm(fetch: Fetch, name: str, config: ModelConfig) -> AnyNorm:
    """The norm called `name` over the hidden width, of the model's kind."""
    weight = fetch(f"{name}.weight", (config.hidden,))
    if config.norm == "rms":
        return Norm(weight, config.eps)
    return LayerNorm(weight, fetch(f"{name}.bias", (config.hidden,)), config.eps)


def interleave(rows: Tensor, head_dim: int, rotated: int | None = None) -> Tensor:
    """Reorder rows of a query or key projection [heads * head_dim, ...] (or its bias, or a norm weight
    [head_dim]): of each head the first d = `rotated` (all) as 0, d/2, 1, d/2 + 1, ..., the rest behind."""
    turns = head_dim if rotated is None else rotated
    heads = rows.unflatten(0, (-1, head_dim))
    pairs = heads[:, :turns].unflatten(1, (2, turns // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, heads[:, turns:]), 1).reshape(rows.shape)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]; pairs of the part that does not turn have 0.

    llama3: wavelengths beyond original / low are slowed by `factor`, those below original / high are
    kept, between them the two are blended (as published with Llama 3.1). yarn: the same, blended pair by
    pair between those that turn `high` and `low` times in the original positions.
    """
    rotated = rope.rotated(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return F.pad(_scaled(rope, 1.0 / rope.theta**exponents), (0, (head_dim - rotated) // 2))


def _scaled(rope: Rope, plain: Tensor) -> Tensor:
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original * plain / (2 * math.pi)
        blend = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    else:
        first, last = _blended_pairs(rope, len(plain))
        blend = 1 - ((torch.arange(len(plain)) - first) / (last - first)).clamp(0, 1)
    return plain / rope.factor * (1 - blend) + plain * blend


def _blended_pairs(rope: Rope, pairs: int) -> tuple[float, float]:
    """Yarn: pairs up to the first are kept, those from the last on slowed by the whole factor."""
    first, last = (
        pairs * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.theta)
        for turns in (rope.high, rope.low)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    return first, last + 0.001 * (first == last)


class Rotary:
    """Rotation tables for `heads` query heads and `kv_heads` key heads.

    The attention scale rides along in the query part of the table, so no pass is spent on it.
    """

    def __init__(
        self, rope: Rope, heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> None:
        self.frequencies, self.stretch = frequencies(rope, head_dim).to(device), rope.stretch
        self.scale = rope.stretch**2 * head_dim**-0.5
        scales = torch.ones(heads + kv_heads, 1)
        scales[:heads] = self.scale
        self._scales = scales.to(device)

    def table(self, positions: Tensor) -> Tensor:
        """Rotations for positions [rows]: complex64 [rows, heads + kv_heads, head_dim / 2]."""
        angles = positions.float()[:, None, None] * self.frequencies
        return torch.polar(
            self._scales.expand(*angles.shape[:1], -1, angles.shape[-1]),
            angles.expand(-1, self._scales.shape[0], -1),
        )

    def back(self, steps: Sequence[int]) -> Tensor:
        """Rotations that bring queries so many positions nearer to the keys before them: complex64
        [rows, head_dim / 2]."""
        angles = torch.tensor(steps, device=self.frequencies.device).float()[:, None] * -self.frequencies
        return torch.polar(torch.ones_like(angles), angles)


def rotate(qk: Tensor, table: Tensor) -> None:
    """Rotate interleaved heads [rows, heads + kv_heads, head_dim] in place; in fp32 whatever the dtype."""
    wide = qk.float()
    torch.view_as_complex(wide.view(*wide.shape[:2], -1, 2)).mul_(table)
    if wide is not qk:
        qk.copy_(wide)


def fuse(fetch: Fetch, names: Sequence[str], shape: tuple[int, int], bias: bool) -> Linear:
    """Projections of equal shape [out, in], read by the same rows, as one: [in] -> out, out, ..."""
    return _fuse(fetch, dict.fromkeys(names, shape), bias, _join)


def fuse_qkv(fetch: Fetch, prefix: str, config: ModelConfig, inputs: int) -> Linear:
    """Query, key and value projections of `prefix` as one: [inputs] -> heads, kv_heads, kv_heads.

    Query and key rows are interleaved for `rotary.rotate`.
    """
    fused, heads, kv_heads = config.names.qkv, config.heads, config.kv_heads
    sizes = {fused: 3 * heads} if fused else {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    shapes = {f"{prefix}.{name}": (size * config.head_dim, inputs) for name, size in sizes.items()}
    return _fuse(fetch, shapes, config.qkv_bias, partial(_join_qkv, config))


def _join_qkv(config: ModelConfig, *parts: Tensor) -> Tensor:
    """Rows of queries, keys, values: of three tensors [rows, ...], or of one [heads * 3 * head_dim, ...]."""
    dim, rotated = config.head_dim, config.rope.rotated(config.head_dim)
    if len(parts) == 1:
        parts = tuple(part.flatten(0, 1) for part in parts[0].unflatten(0, (-1, 3, dim)).unbind(1))
    q, k, v = parts
    return torch.cat((interleave(q, dim, rotated), interleave(k, dim, rotated), v))


def _join(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fuse(
    fetch: Fetch, shapes: Mapping[str, tuple[int, int]], bias: bool, join: Callable[..., Tensor]
) -> Linear:
    """shapes: of projections, by name. Raises ModelError where others rounded some of them and not all."""
    weights = [fetch.matrix(f"{name}.weight", shape) for name, shape in shapes.items()]
    codes = [weight for weight in weights if isinstance(weight, Codes)]
    if 0 < len(codes) < len(weights):
        raise ModelError(f"{', '.join(shapes)}: quantized and others as one product; a --dtype decodes them")
    weight = Codes(*(join(*each) for each in zip(*codes))) if codes else join(*weights)
    biases = [fetch(f"{name}.bias", shape[:1]) for name, shape in shapes.items()] if bias else []
    return Linear(weight, join(*biases) if biases else None, fetch.form(f"{next(iter(shapes))}.weight"))


Mlp = Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, hidden]
Act = Callable[[Tensor], Tensor]

ACTS: Mapping[Activation, Act] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def fetch_mlp(fetch: Fetch, layer: str, config: ModelConfig, index: int) -> Mlp:
    """The MLP of layer `index`, whose tensors begin with `layer`."""
    if config.sparse(index):
        return fetch_experts(fetch, layer, config)
    return (_fetch_plain if config.mlp == "plain" else _fetch_gated)(fetch, layer, config)


def gate(gate_up: Tensor, act: Act = F.silu) -> Tensor:
    """act(gate) * up of [rows, 2 * intermediate]."""
    half = gate_up.shape[-1] // 2
    return act(gate_up.narrow(-1, 0, half)).mul_(gate_up.narrow(-1, half, half))


class GatedMlp:
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    __slots__ = ("act", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, act: Act) -> None:
        self.gate_up, self.down, self.act = gate_up, down, act

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gate(self.gate_up(x), self.act))


class PlainMlp:
    """down(act(up(x)))."""

    __slots__ = ("_act", "_down", "_up")

    def __init__(self, up: Linear, down: Linear, act: Act) -> None:
        self._up, self._down, self._act = up, down, act

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._act(self._up(x)))


RunExperts = Callable[[Tensor, Tensor], Tensor]
"""Rows [pairs, hidden] through an expert each, [pairs] ascending -> [pairs, hidden]."""


class Experts:
    """Each row's `chosen` most likely experts, weighted by the router's softmax over all of them; weights
    of the chosen ones sum to 1 where `normalised`. Softmax and weights in fp32.
    """

    __slots__ = ("_chosen", "_normalised", "_router", "run")

    def __init__(self, router: Tensor, run: RunExperts, chosen: int, normalised: bool) -> None:
        """router: [experts, hidden]."""
        self._router, self.run, self._chosen, self._normalised = router, run, chosen, normalised

    def __call__(self, x: Tensor) -> Tensor:
        likely = torch.softmax(F.linear(x, self._router).float(), -1)
        weights, experts = likely.topk(self._chosen, -1)
        if self._normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        experts = experts.flatten()
        order = experts.argsort(stable=True)  # one expert's rows side by side
        found = self.run(x[order // self._chosen], experts[order])
        out = torch.empty_like(found)
        out[order] = found
        return (out.view(-1, self._chosen, x.shape[1]) * weights[..., None]).sum(1).to(x.dtype)


class GroupedExperts:
    """All experts as one grouped product, which waits for nothing on the host."""

    __slots__ = ("_act", "_down", "_gate_up")

    def __init__(self, gate_up: Tensor, down: Tensor, act: Act) -> None:
        """gate_up: [experts, 2 * width, hidden]; down: [experts, hidden, width]."""
        self._gate_up, self._down, self._act = gate_up, down, act

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        every = torch.arange(len(self._down), device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        inner = gate(F.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=ends), self._act)
        return F.grouped_mm(inner, self._down.transpose(1, 2), offs=ends)


class LoopedExperts:
    """One expert after the other: those in few bits, and of shapes that grouped products do not take."""

    __slots__ = ("_experts",)

    def __init__(self, experts: Sequence[Mlp]) -> None:
        self._experts = experts

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        counts = experts.bincount(minlength=len(self._experts)).tolist()
        parts = zip(self._experts, rows.split(counts))
        return torch.cat([expert(part) for expert, part in parts if len(part)])


def fetch_experts(fetch: Fetch, layer: str, config: ModelConfig) -> Experts:
    """Router and experts of the layer whose tensors begin with `layer`."""
    router = fetch(f"{layer}.{config.names.router}.weight", (config.experts, config.hidden))
    named = [
        [f"{layer}.{one.format(expert)}" for one in config.names.experts] for expert in range(config.experts)
    ]
    fetch_all = _fetch_grouped if _can_group(fetch, config) else _fetch_looped
    return Experts(router, fetch_all(fetch, named, config), config.chosen, config.normalised)


def _can_group(fetch: Fetch, config: ModelConfig) -> bool:
    """PyTorch takes rows of whole 16 bytes."""
    whole = not any(size * fetch.dtype.itemsize % 16 for size in (config.hidden, config.expert_width))
    return whole and fetch.quantization is None and hasattr(F, "grouped_mm")


def _fetch_grouped(fetch: Fetch, named: Sequence[Sequence[str]], config: ModelConfig) -> GroupedExperts:
    """Filled expert by expert, so that no more than one of them is there twice."""
    hidden, width = config.hidden, config.expert_width
    gate_up = torch.empty(len(named), 2 * width, hidden, dtype=fetch.dtype, device=fetch.device)
    down = torch.empty(len(named), hidden, width, dtype=fetch.dtype, device=fetch.device)
    for expert, names in enumerate(named):
        places = gate_up[expert, :width], gate_up[expert, width:], down[expert]
        for name, place in zip(names, places):
            place.copy_(fetch(f"{name}.weight", tuple(place.shape)))
    return GroupedExperts(gate_up, down, ACTS[config.activation])


def _fetch_looped(fetch: Fetch, named: Sequence[Sequence[str]], config: ModelConfig) -> LoopedExperts:
    return LoopedExperts([_fetch_three(fetch, names, config.expert_width, config) for names in named])


def _fetch_gated(fetch: Fetch, layer: str, config: ModelConfig) -> GatedMlp:
    names = config.names
    three = [f"{layer}.{name}" for name in (names.gate, names.up, names.down)]
    return _fetch_three(fetch, three, config.intermediate, config)


def _fetch_three(fetch: Fetch, named: Sequence[str], width: int, config: ModelConfig) -> GatedMlp:
    """named: gate, up, down."""
    gate_up = fuse(fetch, named[:2], (width, config.hidden), config.mlp_bias)
    down = fuse(fetch, named[2:], (config.hidden, width), config.mlp_bias)
    return GatedMlp(gate_up, down, ACTS[config.activation])


def _fetch_plain(fetch: Fetch, layer: str, config: ModelConfig) -> PlainMlp:
    names, inner, hidden = config.names, config.intermediate, config.hidden
    up = fuse(fetch, [f"{layer}.{names.up}"], (inner, hidden), config.mlp_bias)
    down = fuse(fetch, [f"{layer}.{names.down}"], (hidden, inner), config.mlp_bias)
    return PlainMlp(up, down, ACTS[config.activation])


class Block:
    """Layer `index` of a model, fetched under its family's names."""

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig) -> None:
        names, hidden, width = config.names, config.hidden, config.heads * config.head_dim
        layer = names.layer.format(index)
        attention = f"{layer}.{names.attention}"
        self.config = config
        self.input_norm = fetch_norm(fetch, f"{layer}.{names.input_norm}", config)
        self.qkv = fuse_qkv(fetch, attention, config, hidden)
        self.head_norms = None
        if config.qk_norm:
            self.head_norms = fetch_head_norms(fetch, attention, config.head_dim, config.eps)
        self.out = fuse(fetch, [f"{attention}.{names.out}"], (hidden, width), config.out_bias)
        self.mlp_norm = fetch_norm(fetch, f"{layer}.{names.mlp_norm}", config)
        self.mlp = fetch_mlp(fetch, layer, config, index)

    def forward(
        self, hidden: Tensor, table: Tensor, places: Places, plan: AttentionPlan, kv: KVPages, layer: int
    ) -> None:
        """Add this layer's two updates to the residual stream [rows, hidden], in place.

        table: rotations of the rows; places: where their KV goes; layer: which of `kv`'s layers.
        """
        q = self._project(self.input_norm(hidden), table, places, kv, layer)
        update = self.out(attend(q, kv.layers[layer], plan))
        if self.config.parallel:
            update.add_(self.mlp(self.mlp_norm(hidden)))
            hidden.add_(update)
        else:
            hidden.add_(update)
            hidden.add_(self.mlp(self.mlp_norm(hidden)))

    def _project(self, x: Tensor, table: Tensor, places: Places, kv: KVPages, layer: int) -> Tensor:
        """Queries [rows, kv_heads, g, head_dim]; keys and values go to their places."""
        config, rows = self.config, x.shape[0]
        heads = self.qkv(x).view(rows, -1, config.head_dim)
        turned = heads.narrow(1, 0, config.heads + config.kv_heads)
        if self.head_norms is not None:
            for part, norm in zip(turned.split((config.heads, config.kv_heads), 1), self.head_norms):
                part.copy_(norm(part))
        rotate(turned, table)
        stored = heads.narrow(1, config.heads, 2 * config.kv_heads)
        kv.put(layer, places, stored.view(rows, 2, config.kv_heads, config.head_dim))
        return heads.narrow(1, 0, config.heads).view(rows, config.kv_heads, -1, config.head_dim)


def fetch_head_norms(fetch: Fetch, prefix: str, dim: int, eps: float) -> tuple[Norm, Norm]:
    """Qwen3's norms over each query and key head."""
    q, k = (interleave(fetch(f"{prefix}.{name}.weight", (dim,)), dim) for name in ("q_norm", "k_norm"))
    return Norm(q, eps), Norm(k, eps)


@dataclass(frozen=True, slots=True)
class Edges:
    """The parts before a base's first layer and after its last, as its draft head sees it.

    Each part is found when it is asked for. Raises ModelError for what is not there.
    embedding: [vocab, hidden]. lm_head: [hidden] -> vocab; final_norm comes before it.
    """

    config: ModelConfig
    embedding: Callable[[], Table]
    final_norm: Callable[[], AnyNorm]
    lm_head: Callable[[], Linear]


def stored_edges(config: ModelConfig, fetch: Fetch) -> Edges:
    """Of a base that is somewhere else."""
    given = fetch, config
    return Edges(
        config,
        partial(fetch_embedding, *given),
        partial(fetch_final_norm, *given),
        partial(fetch_lm_head, *given),
    )


def fetch_embedding(fetch: Fetch, config: ModelConfig, head: Linear | None = None) -> Table:
    """[vocab, hidden]. head: the lm_head if it is loaded: a tied model's is this table, unless it is packed
    in another form.
    """
    name = _name_of_embedding(fetch, config)
    if head is not None and name == _name_of_lm_head(fetch, config):
        if isinstance(head.multiply, Packed):
            return head.multiply
        if head.weight is not None:
            return head.weight
    return hold_table(_fetch_table(fetch, config, name), fetch.quantization)


def fetch_final_norm(fetch: Fetch, config: ModelConfig) -> AnyNorm:
    """The norm between the last layer and lm_head."""
    return fetch_norm(fetch, config.names.norm, config)


def fetch_lm_head(fetch: Fetch, config: ModelConfig, embedding: Table | None = None) -> Linear:
    """[hidden] -> vocab. embedding: if it is loaded, as in `fetch_embedding`."""
    name = _name_of_lm_head(fetch, config)
    if embedding is None or name != _name_of_embedding(fetch, config):
        embedding = _fetch_table(fetch, config, name)
    return Linear(embedding, None, of_lm_head(fetch.quantization))


def _name_of_embedding(fetch: Fetch, config: ModelConfig) -> str:
    """Tied models may be published with either of the two tables."""
    own, other = config.names.embedding, config.names.head
    return other if config.tied and f"{own}.weight" not in fetch else own


def _name_of_lm_head(fetch: Fetch, config: ModelConfig) -> str:
    """A table of its own counts, whatever the config says of tying, as in Transformers."""
    own, other = config.names.head, config.names.embedding
    return other if config.tied and f"{own}.weight" not in fetch else own


def _fetch_table(fetch: Fetch, config: ModelConfig, name: str) -> Tensor:
    return fetch(f"{name}.weight", (config.vocab, config.hidden))
