"""A layer's MLP: gated, plain, or a mixture of experts with its router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Activation, Routing
from specsot_model.linear import Linear
from specsot_model.projections import fuse_projections
from specsot_model.weights import Fetch

# [rows, hidden] -> [rows, hidden].
Mlp = Callable[[Tensor], Tensor]

# An activation function, element by element.
Act = Callable[[Tensor], Tensor]

# [rows, 2 * width], gates followed by ups -> [rows, width].
Gate = Callable[[Tensor], Tensor]

# The function of each activation.
ACTS: Mapping[Activation, Act] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def fetch_mlp(fetch: Fetch, layer: str, config: ModelConfig, index: int) -> Mlp:
    """Return the MLP of layer `index`, whose tensor names begin with `layer`, with its weights loaded.

    The result is a mixture of experts if the model has experts in this layer, an `UngatedMlp` if `config.mlp`
    is "plain", and a `GatedMlp` otherwise. ModelError is raised if a tensor is missing from the files or has
    another shape.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    layer: Name of the layer, such as "model.layers.3", without a dot at the end.
    config: The model's config: sizes, tensor names, activation, biases.
    index: Index of the layer in the whole model; some models have experts only in some layers.
    """
    if config.routing is not None and config.sparse(index):
        return fetch_experts(fetch, layer, config, config.routing)
    return (_fetch_ungated if config.mlp == "plain" else fetch_gated)(fetch, layer, config)


def gate(gate_up: Tensor, act: Act = F.silu) -> Tensor:
    """Return act(gate) * up, [rows, intermediate].

    gate_up: [rows, 2 * intermediate], gates followed by ups; its gates are overwritten if `act` works in
        place.
    act: Activation function.
    """
    half = gate_up.shape[-1] // 2
    return act(gate_up.narrow(-1, 0, half)).mul_(gate_up.narrow(-1, half, half))


def gate_clamped(gate_up: Tensor, limit: float, gain: float) -> Tensor:
    """Return gate * sigmoid(gain * gate) * (up + 1), [rows, intermediate], as gpt-oss has it.

    gate_up: [rows, 2 * intermediate], gates followed by ups. It is not modified.
    limit: The gate is limited to at most `limit`, and up to the range from -limit to limit.
    gain: Factor of the gate within the sigmoid.
    """
    gated, up = gate_up.chunk(2, -1)
    gated = gated.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (gated * torch.sigmoid(gated * gain)).mul_(up + 1)


def gate_of(config: ModelConfig) -> Gate:
    """Return the gate function of a model's MLPs: [rows, 2 * intermediate] -> [rows, intermediate].

    A clamped gate is `gate_clamped`, and any other is `gate` with the model's activation.

    config: The model's config: its activation, or the limit and gain of a clamped gate.
    """
    if config.clamp is None:
        return partial(gate, act=ACTS[config.activation])
    limit, gain = config.clamp
    return partial(gate_clamped, limit=limit, gain=gain)


@dataclass(slots=True, eq=False)
class GatedMlp:
    """down(act(gate(x)) * up(x)), with gate and up as one product.

    gate_up: Product [hidden] -> 2 * intermediate, gates followed by ups.
    down: Product [intermediate] -> hidden.
    gate: Combines gates and ups: [rows, 2 * intermediate] -> [rows, intermediate].
    """

    gate_up: Linear
    down: Linear
    gate: Gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP's output [rows, hidden].

        x: [rows, hidden], normalized.
        """
        return self.down(self.gate(self.gate_up(x)))


@dataclass(slots=True, eq=False)
class UngatedMlp:
    """down(act(up(x))).

    up: Product [hidden] -> intermediate.
    down: Product [intermediate] -> hidden.
    act: Activation function, element by element.
    """

    up: Linear
    down: Linear
    act: Act

    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP's output [rows, hidden].

        x: [rows, hidden], normalized.
        """
        return self.down(self.act(self.up(x)))


# Runs rows [pairs, hidden] through one expert each, given the expert numbers [pairs] in ascending order.
# Returns [pairs, hidden].
RunExperts = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True, eq=False)
class Router:
    """Chooses the experts of each row and their weights; scores are computed in fp32.

    weight: [experts, hidden], the product that scores the experts.
    routing: How scores become weights, and how many experts a row gets.
    bias: [experts], added to the scores before softmax or sigmoid; None: no bias.
    correction: fp32 [experts], added to the scores for the choice of experts, not for their weights; None: no
        correction.
    factors: fp32 [experts], factors of the weights of each expert; None: there are none.
    """

    weight: Tensor
    routing: Routing
    bias: Tensor | None = None
    correction: Tensor | None = None
    factors: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the chosen experts, both [rows, chosen].

        The chosen experts of a row are in descending order of their score, correction included. With several
        groups, only experts of the best groups are chosen. Weights are fp32 scores without the correction,
        divided by their sum if `routing.normalised`, and multiplied by `routing.scale`.

        x: [rows, hidden], normalized.
        """
        routing = self.routing
        logits = F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()
        scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
        ranked = scores if self.correction is None else scores + self.correction
        if routing.groups > 1:
            ranked = _close_groups(ranked, routing)
        weights, experts = ranked.topk(routing.chosen, -1)
        if ranked is not scores:
            weights = scores.gather(-1, experts)
        if routing.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.factors is not None:
            weights = weights * self.factors[experts]
        return (weights if routing.scale == 1 else weights * routing.scale), experts


def _close_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Return the scores [rows, experts] with minus infinity outside of each row's best groups.

    A group's score is the sum of its `routing.summed` best experts; the best `open_groups` groups stay open.

    ranked: [rows, experts], the scores by which experts are chosen. Not modified. A group has at least two
        experts.
    routing: Numbers of groups, and of groups that stay open.
    """
    groups = ranked.unflatten(-1, (routing.groups, -1))
    group_scores = groups.topk(routing.summed, -1).values.sum(-1)
    closed = torch.ones_like(group_scores, dtype=torch.bool)
    closed.scatter_(-1, group_scores.topk(routing.open_groups, -1).indices, False)
    return groups.masked_fill(closed[..., None], -torch.inf).flatten(-2)


@dataclass(slots=True, eq=False)
class Experts:
    """A mixture of experts: the weighted sum of each row's chosen experts, plus a shared MLP if there is one.

    Pairs (row, expert) are sorted by expert, so that the rows of one expert are adjacent:

        # 2 rows, 2 experts each: experts [3 0 | 0 2] -> order [1 2 3 0], rows [0 1 1 0], experts [0 0 2 3]

    router: Chooses the experts of each row.
    run: Runs rows through one expert each; see `RunExperts`.
    shared: MLP that every row runs in addition to its experts; None: there is none.
    """

    router: Router
    run: RunExperts
    shared: Mlp | None = None

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each row's experts, plus the shared MLP, [rows, hidden].

        The sum is rounded to the type of `x`. The shared MLP's output is added if there is a shared MLP.

        x: [rows, hidden], normalized. At least one row if the experts run one after another
            (`LoopedExperts`).
        routed: [rows, hidden], what the router reads; None: it reads `x`.
        """
        weights, experts = self.router(x if routed is None else routed)
        chosen = experts.shape[1]
        experts = experts.flatten()
        order = experts.argsort(stable=True)
        expert_outputs = self.run(x[order // chosen], experts[order])
        out = torch.empty_like(expert_outputs)
        out[order] = expert_outputs
        mixed = (out.view(-1, chosen, x.shape[1]) * weights[..., None]).sum(1).to(x.dtype)
        return mixed if self.shared is None else mixed.add_(self.shared(x))


@dataclass(slots=True, eq=False)
class ParallelExperts:
    """The sum of an MLP and of experts that read the same residual stream, each through norms of its own, as
    in Gemma 4.

    mlp: The MLP.
    experts: The experts.
    norms: Four norms: before and after the MLP, and before and after the experts.
    router_norm: The norm before the router of the experts.
    """

    mlp: Mlp
    experts: Experts
    norms: Sequence[Mlp]
    router_norm: Mlp

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the sum of both outputs, [rows, hidden].

        hidden: [rows, hidden], the residual stream; it is not modified.
        """
        before_mlp, after_mlp, before_experts, after_experts = self.norms
        mixed = self.experts(before_experts(hidden), self.router_norm(hidden))
        return after_mlp(self.mlp(before_mlp(hidden))).add_(after_experts(mixed))


@dataclass(slots=True, eq=False)
class SigmoidGatedMlp:
    """An MLP whose output is multiplied by a sigmoid gate per row.

    gate: [1, hidden], the weight of the gate.
    mlp: The MLP whose output is multiplied.
    """

    gate: Tensor
    mlp: Mlp

    def __call__(self, x: Tensor) -> Tensor:
        """Return the gated output [rows, hidden].

        x: [rows, hidden], normalized.
        """
        return self.mlp(x).mul_(F.linear(x, self.gate).sigmoid())


@dataclass(slots=True, eq=False)
class GroupedExperts:
    """All experts as one grouped matrix product.

    gate_up: [experts, 2 * width, hidden], gates followed by ups.
    down: [experts, hidden, width], the last product of each expert.
    gate: Combines gates and ups: [pairs, 2 * width] -> [pairs, width].
    biases: Those of both products, [experts, outputs] each; None: there are none.
    """

    gate_up: Tensor
    down: Tensor
    gate: Gate = gate
    biases: tuple[Tensor, Tensor] | None = None

    @property
    def waits_for_host(self) -> bool:
        """Tell whether the product makes the host wait until it has read the number of rows per expert, on a
        GPU.
        """
        return self.down.dtype != torch.bfloat16

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return each row's output of its expert, [pairs, hidden].

        The experts' biases are added to both products if there are any. An expert without rows is allowed.

        rows: [pairs, hidden], sorted by expert.
        experts: Integers [pairs], the expert of each row, ascending.
        """
        every = torch.arange(len(self.down), device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        inner = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        down = self.down.transpose(1, 2)
        if self.biases is None:
            return F.grouped_mm(self.gate(inner), down, offs=ends)
        first, last = self.biases
        return F.grouped_mm(self.gate(inner + first[experts]), down, offs=ends) + last[experts]


@dataclass(slots=True, eq=False)
class LoopedExperts:
    """Experts that run one after another: quantized ones, and shapes that grouped products do not support.

    experts: The MLP of each expert, in the order of their numbers.
    """

    experts: Sequence[Mlp]

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return each row's output of its expert, [pairs, hidden].

        rows: [pairs, hidden], sorted by expert; at least one row.
        experts: Integers [pairs], the expert of each row, ascending.
        """
        counts = experts.bincount(minlength=len(self.experts)).tolist()
        parts = zip(self.experts, rows.split(counts))
        return torch.cat([expert(part) for expert, part in parts if len(part)])


def fetch_experts(fetch: Fetch, layer: str, config: ModelConfig, routing: Routing) -> Experts:
    """Return the experts of the layer whose tensor names begin with `layer`, with router and shared MLP
    loaded.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    layer: Name of the layer, such as "model.layers.3", without a dot at the end.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    source = fetch, layer, config, routing
    return Experts(_fetch_router(*source), _fetch_run(*source), _fetch_shared(*source))


def _fetch_run(fetch: Fetch, layer: str, config: ModelConfig, routing: Routing) -> RunExperts:
    """Return a function that runs a layer's experts, loaded from whichever of the published layouts the files
    have.

    The layouts are tried in this order: gate and up of all experts in one tensor as in Qwen3.5, alternating
    gates and ups of all experts in one tensor as in gpt-oss, and tensors of their own for each expert. The
    last layout is assumed if none of the tensor names exists; a missing tensor then raises ModelError. The
    experts run as one grouped product if the sizes allow it and the weights are not quantized, and otherwise
    one after another.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    layer: Name of the layer, such as "model.layers.3", without a dot at the end.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    names = config.names
    whole = f"{layer}.{names.whole_experts[0]}" if names.whole_experts else ""
    inputs_first = names.whole_experts == names.stacked and _has_inputs_first(fetch, whole, config)
    if names.whole_experts and whole in fetch and not inputs_first:
        return _fetch_joint(fetch, [f"{layer}.{name}" for name in names.whole_experts], config, routing)
    named = [
        [f"{layer}.{module_name.format(expert)}" for module_name in names.experts]
        for expert in range(routing.experts)
    ]
    if names.stacked is not None and f"{named[0][0]}.weight" not in fetch:
        return _fetch_stacked(fetch, [f"{layer}.{name}" for name in names.stacked], config, routing)
    fetch_all = _fetch_grouped if _groups_loaded(fetch, config, routing) else _fetch_looped
    return fetch_all(fetch, named, config, routing)


def _has_inputs_first(fetch: Fetch, name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of all experts has the shape [experts, inputs, outputs]. False if there is no
    such tensor, and for weights that are not here, which have as many bytes in either shape.

    fetch: Reads tensors from the model's files.
    name: Name of the tensor of gates and ups.
    config: The model's config, whose hidden size is the number of inputs.
    """
    with suppress(KeyError):
        return name in fetch and fetch.files.shape(name)[1] == config.hidden
    return False


def _fetch_stacked(
    fetch: Fetch, names: Sequence[str], config: ModelConfig, routing: Routing
) -> GroupedExperts | LoopedExperts:
    """Return experts that are published as in gpt-oss and Qwen3-VL: weights [experts, inputs, outputs], and
    biases (if any) [experts, outputs].

    Gate and up outputs alternate in the files if `names.alternating`. The result is a grouped product if the
    sizes allow it and the weights are not quantized, and otherwise experts that run one after another.

    fetch: Reads tensors from the model's files.
    names: Tensor names of the gate_up and the down weights. The names of their biases end in "_bias".
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    num_experts = routing.experts
    hidden = config.hidden
    width = routing.width
    # The decoded tensors are reordered expert by expert, so that only one expert is in memory twice.
    gate_up = fetch(names[0], (num_experts, hidden, 2 * width)).transpose(1, 2).contiguous()
    for expert in gate_up if config.names.alternating else ():
        expert.copy_(_in_halves(expert))
    down = fetch(names[1], (num_experts, width, hidden)).transpose(1, 2).contiguous()
    biases = None
    if routing.biased:
        first = fetch(f"{names[0]}_bias", (num_experts, 2 * width))
        first = _in_halves(first.T).T.contiguous() if config.names.alternating else first
        biases = first, fetch(f"{names[1]}_bias", (num_experts, hidden))
    return _experts_of(fetch, config, routing, gate_up, down, biases)


def _fetch_joint(
    fetch: Fetch, names: Sequence[str], config: ModelConfig, routing: Routing
) -> GroupedExperts | LoopedExperts:
    """Return experts that are published as in Qwen3.5: weights [experts, outputs, inputs], gates before ups,
    no biases.

    The result is a grouped product if the sizes allow it and the weights are not quantized, and otherwise
    experts that run one after another.

    fetch: Reads tensors from the model's files.
    names: Tensor names of the gate_up and the down weights.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    num_experts = routing.experts
    gate_up = fetch(names[0], (num_experts, 2 * routing.width, config.hidden))
    down = fetch(names[1], (num_experts, config.hidden, routing.width))
    return _experts_of(fetch, config, routing, gate_up, down)


def _experts_of(
    fetch: Fetch,
    config: ModelConfig,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
) -> GroupedExperts | LoopedExperts:
    """Return experts whose weights are loaded: a grouped product if the sizes allow it and the weights are
    not to be quantized, and otherwise experts that run one after another.

    fetch: Has loaded the weights; says how they are to be quantized.
    config: The model's config: sizes, activation.
    routing: The config's expert routing.
    gate_up: [experts, 2 * width, hidden], gates followed by ups.
    down: [experts, hidden, width].
    biases: Those of both products, [experts, outputs] each; None: there are none.
    """
    if _groups_loaded(fetch, config, routing):
        return GroupedExperts(gate_up, down, gate_of(config), biases)
    kind = fetch.quantization
    firsts, lasts = biases or ([None] * len(down), [None] * len(down))
    return LoopedExperts(
        [
            GatedMlp(Linear(up, first, kind), Linear(out, last, kind), gate_of(config))
            for up, first, out, last in zip(gate_up, firsts, down, lasts)
        ]
    )


def _in_halves(alternating: Tensor) -> Tensor:
    """Reorder alternating gate and up rows to gates before ups, [2 * width, ...].

    alternating: [2 * width, ...], a gate row, its up row, the next gate row, and so on.

    # [g0 u0 g1 u1] -> [g0 g1 u0 u1]
    """
    return torch.cat((alternating[::2], alternating[1::2]))


def _fetch_router(fetch: Fetch, layer: str, config: ModelConfig, routing: Routing) -> Router:
    """Return a layer's router with its weights loaded: in fp32 if scores are sigmoids, as in GLM, and
    otherwise in the type of `fetch`.

    A row's best sigmoid scores may be so close that rounding would change the choice. A bias is loaded only
    if `routing.biased`, and a correction, always in fp32, only if `routing.corrected`. Factors of the
    router's inputs (`router_scale`) are multiplied into its weight, which is then fp32.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    layer: Name of the layer, such as "model.layers.3", without a dot at the end.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    names = config.names
    exact = replace(fetch, dtype=torch.float32)
    fetch_scores = exact if routing.score == "sigmoid" or names.router_scale else fetch
    weight = fetch_scores(f"{layer}.{names.router}.weight", (routing.experts, config.hidden))
    if names.router_scale:
        weight = weight * exact(f"{layer}.{names.router_scale}", (config.hidden,)) * config.hidden**-0.5
    shape = (routing.experts,)
    bias = fetch_scores(f"{layer}.{names.router}.bias", shape) if routing.biased else None
    correction = exact(f"{layer}.{names.correction}", shape) if routing.corrected else None
    factors = exact(f"{layer}.{names.expert_scale}", shape) if names.expert_scale else None
    return Router(weight, routing, bias, correction, factors)


def _fetch_shared(fetch: Fetch, layer: str, config: ModelConfig, routing: Routing) -> Mlp | None:
    """Return the shared MLP, which every row runs in addition to its experts, with its weights loaded.

    Return None if `routing.shared`, the shared MLP's width, is 0 or the model has no names for its tensors.
    If the model has a shared gate, the MLP's output is multiplied by the sigmoid of that gate.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    layer: Name of the layer, such as "model.layers.3", without a dot at the end.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    names = config.names
    if not routing.shared or names.shared is None:
        return None
    mlp = _fetch_modules(fetch, [f"{layer}.{name}" for name in names.shared], routing.shared, config)
    if not names.shared_gate:
        return mlp
    return SigmoidGatedMlp(fetch(f"{layer}.{names.shared_gate}.weight", (1, config.hidden)), mlp)


def can_group(config: ModelConfig, routing: Routing, dtype: torch.dtype) -> bool:
    """Tell whether PyTorch's grouped product supports these sizes: `config.hidden` and the experts' width
    must be multiples of 16 bytes.

    False also if this PyTorch has no `grouped_mm`.

    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    dtype: Type of the weights.
    """
    sizes = config.hidden, routing.width
    return hasattr(F, "grouped_mm") and not any(size * dtype.itemsize % 16 for size in sizes)


def _groups_loaded(fetch: Fetch, config: ModelConfig, routing: Routing) -> bool:
    """Tell whether the experts that are loaded can run as a grouped product.

    fetch: Its dtype and quantization are those of the experts; quantized experts cannot be grouped.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    return fetch.quantization is None and can_group(config, routing, fetch.dtype)


def _fetch_grouped(
    fetch: Fetch, named: Sequence[Sequence[str]], config: ModelConfig, routing: Routing
) -> GroupedExperts:
    """Return experts that are published one by one, loaded into grouped tensors; only one expert is in memory
    twice.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    named: By expert, the module names of its gate, up and down projections.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    hidden = config.hidden
    width = routing.width
    gate_up = torch.empty(len(named), 2 * width, hidden, dtype=fetch.dtype, device=fetch.device)
    down = torch.empty(len(named), hidden, width, dtype=fetch.dtype, device=fetch.device)
    for expert, names in enumerate(named):
        places = gate_up[expert, :width], gate_up[expert, width:], down[expert]
        for name, place in zip(names, places):
            place.copy_(fetch(f"{name}.weight", tuple(place.shape)))
    return GroupedExperts(gate_up, down, gate_of(config), _fetch_biases(fetch, named, config, routing))


def _fetch_biases(
    fetch: Fetch, named: Sequence[Sequence[str]], config: ModelConfig, routing: Routing
) -> tuple[Tensor, Tensor] | None:
    """Return the experts' biases, [experts, 2 * width] with gates before ups and [experts, hidden]; None if
    `routing.biased` is false.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    named: By expert, the module names of its gate, up and down projections.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    if not routing.biased:
        return None
    sizes = routing.width, routing.width, config.hidden
    parts = [[fetch(f"{name}.bias", (size,)) for name, size in zip(names, sizes)] for names in named]
    return torch.stack([torch.cat(part[:2]) for part in parts]), torch.stack([part[2] for part in parts])


def _fetch_looped(
    fetch: Fetch, named: Sequence[Sequence[str]], config: ModelConfig, routing: Routing
) -> LoopedExperts:
    """Return experts that are published one by one as MLPs that run one after another, with their weights
    loaded.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    named: By expert, the module names of its gate, up and down projections.
    config: The model's config: sizes, tensor names, activation, biases.
    routing: The config's expert routing: numbers of experts, how scores are computed, and which biases exist.
    """
    return LoopedExperts(
        [_fetch_modules(fetch, names, routing.width, config, routing.biased) for names in named]
    )


def fetch_gated(fetch: Fetch, layer: str, config: ModelConfig) -> GatedMlp:
    """Return a gated MLP with its weights loaded: from two tensors if the model publishes gate and up as one,
    and otherwise from three.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    layer: Name of the layer, such as "model.layers.3", without a dot at the end.
    config: The model's config: sizes, tensor names, activation, biases.
    """
    names = config.names
    ups = (names.gate_up,) if names.gate_up else (names.gate, names.up)
    modules = [f"{layer}.{name}" for name in (*ups, names.down)]
    return _fetch_modules(fetch, modules, config.intermediate, config)


def _fetch_modules(
    fetch: Fetch, named: Sequence[str], width: int, config: ModelConfig, bias: bool = False
) -> GatedMlp:
    """Return a gated MLP with its weights loaded from the modules that publish them.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    named: Module names of gate, up and down, or of gate and up as one module, and down.
    width: Number of gates, and of ups.
    config: The model's config: sizes, tensor names, activation, biases.
    bias: True if the modules have biases, although `config.mlp_bias` does not say so.
    """
    *ups, last = named
    shape = 2 * width // len(ups), config.hidden
    gate_up = fuse_projections(fetch, ups, shape, bias or config.mlp_bias)
    down = fuse_projections(fetch, [last], (config.hidden, width), bias or config.mlp_bias)
    return GatedMlp(gate_up, down, gate_of(config))


def _fetch_ungated(fetch: Fetch, layer: str, config: ModelConfig) -> UngatedMlp:
    """Return an MLP without a gate, with its weights loaded.

    fetch: Reads tensors from the model's files, in the range's dtype, device and quantization.
    layer: Name of the layer, such as "model.layers.3", without a dot at the end.
    config: The model's config: sizes, tensor names, activation, biases.
    """
    names = config.names
    inner = config.intermediate
    hidden = config.hidden
    up = fuse_projections(fetch, [f"{layer}.{names.up}"], (inner, hidden), config.mlp_bias)
    down = fuse_projections(fetch, [f"{layer}.{names.down}"], (hidden, inner), config.mlp_bias)
    return UngatedMlp(up, down, ACTS[config.activation])
