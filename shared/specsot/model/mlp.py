"""A layer's MLP: gated, plain, or experts and their router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.model.config import ModelConfig
from specsot.model.families import Activation
from specsot.model.linear import Linear
from specsot.model.projections import fuse
from specsot.model.weights import Fetch

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
