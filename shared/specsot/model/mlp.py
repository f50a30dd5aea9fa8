"""A layer's MLP: gated, plain, or several of which a router chooses for each row.

Refuses to know attention, residuals and other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def fetch_mlp(fetch: Fetch, layer: str, config: ModelConfig) -> Mlp:
    """The MLP of the layer whose tensors begin with `layer`."""
    if config.mlp == "plain":
        return _fetch_plain(fetch, layer, config)
    if config.mlp == "gated":
        return _fetch_gated(fetch, layer, config)
    router = fetch(f"{layer}.{config.names.router}.weight", (config.experts, config.hidden))
    experts = [_fetch_gated(fetch, layer, config, expert) for expert in range(config.experts)]
    return Experts(router, experts, config.chosen)


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


class Experts:
    """Each row's `chosen` most likely experts, weighted by the router's softmax over all of them,
    scaled so that the chosen ones' weights sum to 1 (Mixtral). Softmax and weights in fp32.
    """

    __slots__ = ("_chosen", "_experts", "_router")

    def __init__(self, router: Tensor, experts: list[GatedMlp], chosen: int) -> None:
        """router: [experts, hidden]."""
        self._router, self._experts, self._chosen = router, experts, chosen

    def __call__(self, x: Tensor) -> Tensor:
        likely = torch.softmax(F.linear(x, self._router).float(), -1)
        weights, experts = likely.topk(self._chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        experts = experts.flatten()
        pairs = experts.argsort(stable=True)  # (row, expert) pairs, one expert's side by side
        counts = experts.bincount(minlength=len(self._experts)).tolist()
        out = torch.zeros_like(x)
        for expert, mine in zip(self._experts, pairs.split(counts)):
            if len(mine):
                rows = mine // self._chosen
                part = expert(x[rows]) * weights[mine, None]
                out.index_add_(0, rows, part.to(out.dtype))
        return out


def _fetch_gated(fetch: Fetch, layer: str, config: ModelConfig, expert: int = 0) -> GatedMlp:
    """The one gated MLP, or that of one expert."""
    names, shape = config.names, (config.intermediate, config.hidden)
    gate_up = fuse(
        fetch, [f"{layer}.{name.format(expert)}" for name in (names.gate, names.up)], shape, config.mlp_bias
    )
    return GatedMlp(gate_up, _fetch_down(fetch, layer, expert, config), ACTS[config.activation])


def _fetch_plain(fetch: Fetch, layer: str, config: ModelConfig) -> PlainMlp:
    up = fuse(fetch, [f"{layer}.{config.names.up}"], (config.intermediate, config.hidden), config.mlp_bias)
    return PlainMlp(up, _fetch_down(fetch, layer, 0, config), ACTS[config.activation])


def _fetch_down(fetch: Fetch, layer: str, expert: int, config: ModelConfig) -> Linear:
    name = f"{layer}.{config.names.down.format(expert)}"
    return fuse(fetch, [name], (config.hidden, config.intermediate), config.mlp_bias)
