"""A base and an EAGLE head in plain torch: whole sequences, full masks, no caches, nothing of the product.

Tensors go by published names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Of attention and MLP. theta: rotary base; eps: of every norm."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    theta: float = 10000.0
    eps: float = 1e-5


@dataclass(frozen=True)
class Base:
    """A Llama, untied. known: the logits behind texts that were read before."""

    shape: Shape
    layers: int
    vocab: int
    tensors: Tensors
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Head:
    """An EAGLE head under the names of the newer layout (`layers.0.*`).

    kind: eagle3 or eagle1. taps: of eagle3, layers whose input it reads; empty: the last state, as eagle1.
    fusion: what stands before fc: "plain" nothing, "joint" one norm, "each" one per state, "none": no fc.
    """

    shape: Shape
    kind: str
    layers: int
    taps: tuple[int, ...]
    tensors: Tensors
    fusion: str = "plain"
    norm_before_residual: bool = False
    norm_output: bool = False


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [rows, heads, dim]: dimension i turns with i + dim / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def attend(x: Tensor, positions: Tensor, seen: Tensor, shape: Shape, tensors: Tensors, at: str) -> Tensor:
    """x: what q, k, v read. seen: [rows, rows] which row sees which."""
    parts = {}
    for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        part = linear(x, tensors, f"{at}.{name}_proj").view(len(x), heads, shape.head_dim)
        if f"{at}.{name}_norm.weight" in tensors:
            part = norm(part, tensors[f"{at}.{name}_norm.weight"], shape.eps)
        part = part if name == "v" else turn(part, positions, shape.theta)
        parts[name] = part.repeat_interleave(shape.heads // heads, 1).transpose(0, 1)
    scores = parts["q"] @ parts["k"].transpose(1, 2) * shape.head_dim**-0.5
    mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ parts["v"]
    return linear(mixed.transpose(0, 1).flatten(1), tensors, f"{at}.o_proj")


def mlp(x: Tensor, tensors: Tensors, at: str) -> Tensor:
    gated = F.silu(linear(x, tensors, f"{at}.gate_proj")) * linear(x, tensors, f"{at}.up_proj")
    return linear(gated, tensors, f"{at}.down_proj")


def update(
    x: Tensor, inputs: Tensor, positions: Tensor, seen: Tensor, shape: Shape, tensors: Tensors, at: str
) -> Tensor:
    """One decoder layer: attention over `inputs` and an MLP, both added to the residual x."""
    x = x + attend(inputs, positions, seen, shape, tensors, f"{at}.self_attn")
    normed = norm(x, tensors[f"{at}.post_attention_layernorm.weight"], shape.eps)
    return x + mlp(normed, tensors, f"{at}.mlp")


def run_base(
    base: Base, tokens: list[int], positions: Tensor, seen: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Residual streams in front of each layer and behind the last, the normed last one, logits."""
    x = base.tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
    states = [x]
    for layer in range(base.layers):
        at = f"model.layers.{layer}"
        inputs = norm(x, base.tensors[f"{at}.input_layernorm.weight"], base.shape.eps)
        x = update(x, inputs, positions, seen, base.shape, base.tensors, at)
        states.append(x)
    last = norm(x, base.tensors["model.norm.weight"], base.shape.eps)
    return states, last, last @ base.tensors["lm_head.weight"].T


def recorded_states(base: Base, head: Head, tokens: list[int], positions: Tensor, seen: Tensor) -> Tensor:
    """[rows, taps * H] side by side; the normed last state where the head reads that alone."""
    states, last, _ = run_base(base, tokens, positions, seen)
    return torch.cat([states[tap] for tap in head.taps], -1) if head.taps else last


def features(head: Head, states: Tensor) -> Tensor:
    """What an EAGLE-3 head makes of the states once, before its first step."""
    if head.kind == "eagle1" or head.fusion == "none":
        return states
    eps, tensors = head.shape.eps, head.tensors
    if head.fusion == "joint":
        states = norm(states, tensors["input_norm.weight"], eps)
    if head.fusion == "each":
        parts = states.chunk(len(head.taps), -1)
        states = torch.cat(
            [norm(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], -1
        )
    return linear(states, tensors, "fc")


def run_head(
    head: Head, base: Base, tokens: list[int], given: Tensor, positions: Tensor, seen: Tensor
) -> Tensor:
    """Outputs [rows, hidden], which are the next features, from features [rows, hidden]."""
    tensors, shape = head.tensors, head.shape
    table = tensors.get("embed_tokens.weight", base.tensors["model.embed_tokens.weight"])
    embedded = table[torch.tensor(tokens)]
    if head.kind == "eagle3":
        normed = norm(given, tensors["layers.0.hidden_norm.weight"], shape.eps)
        embedded = norm(embedded, tensors["layers.0.input_layernorm.weight"], shape.eps)
        x, inputs = normed if head.norm_before_residual else given, torch.cat((embedded, normed), -1)
    else:
        if "embedding_layernorm.weight" in tensors:
            embedded = norm(embedded, tensors["embedding_layernorm.weight"], shape.eps)
            given = norm(given, tensors["hidden_states_layernorm.weight"], shape.eps)
        x = linear(torch.cat((embedded, given), -1), tensors, "fc")
        weight = tensors.get("layers.0.input_layernorm.weight")
        inputs = x if weight is None else norm(x, weight, shape.eps)
    x = update(x, inputs, positions, seen, shape, tensors, "layers.0")
    for layer in range(1, head.layers):
        inputs = norm(x, tensors[f"layers.{layer}.input_layernorm.weight"], shape.eps)
        x = update(x, inputs, positions, seen, shape, tensors, f"layers.{layer}")
    return norm(x, tensors["norm.weight"], shape.eps) if head.norm_output else x


def head_logits(head: Head, base: Base, outputs: Tensor) -> Tensor:
    """[rows, draft vocabulary]."""
    if head.kind == "eagle3" and not head.norm_output:
        outputs = norm(outputs, head.tensors["norm.weight"], head.shape.eps)
    own = head.tensors.get("lm_head.weight") if head.kind == "eagle3" else None
    return outputs @ (base.tensors["lm_head.weight"] if own is None else own).T


def target_ids(head: Head) -> Any:
    """Draft id to base id."""
    offsets = head.tensors.get("d2t")
    return lambda draft: draft if offsets is None else draft + int(offsets[draft])


def causal(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()
