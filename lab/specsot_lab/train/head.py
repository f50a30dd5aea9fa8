"""An EAGLE-3 head that can learn: the published layout's tensors as parameters.

What it computes is what `specsot_drafter.heads.eagle` computes
from the same tensors; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYER = "midlayer"
NAMES = (
    "fc.weight",
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.hidden_norm.weight",
    f"{LAYER}.post_attention_layernorm.weight",
    *(f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "norm.weight",
    "lm_head.weight",
)


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """hidden: the base's. states: columns of the tapped states side by side. vocab: ids it drafts."""

    hidden: int
    states: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    theta: float
    eps: float


@dataclass(slots=True)
class Memory:
    """Keys and values of the steps so far, [batch, kv_heads, length, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list[Tensor])
    values: list[Tensor] = field(default_factory=list[Tensor])


class LearningHead(nn.Module):
    """Its parameters are those of NAMES, as heads are published."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(sizes.states, sizes.hidden, bias=False)
        self.midlayer = _Layer(sizes)
        self.norm = _Norm(sizes.hidden, sizes.eps)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def step(self, embeddings: Tensor, features: Tensor, memory: Memory) -> Tensor:
        """One step of the training-time test for all rows; returns the features that follow.

        embeddings, features: [batch, length, hidden]. memory: the steps before; this one is added.
        """
        return self.midlayer(embeddings, features, memory)

    def logits(self, outputs: Tensor) -> Tensor:
        """[.., hidden] to [.., draft vocabulary]."""
        return self.lm_head(self.norm(outputs))


class _Norm(nn.Module):
    """RMSNorm, in fp32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _Layer(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.input_layernorm = _Norm(sizes.hidden, sizes.eps)
        self.hidden_norm = _Norm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = _Norm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes)
        self.mlp = _Mlp(sizes)

    def forward(self, embeddings: Tensor, features: Tensor, memory: Memory) -> Tensor:
        inputs = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), -1)
        x = features + self.self_attn(inputs, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        width, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.sizes = sizes
        self.q_proj = nn.Linear(2 * sizes.hidden, width, bias=False)
        self.k_proj = nn.Linear(2 * sizes.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(2 * sizes.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)

    def forward(self, inputs: Tensor, memory: Memory) -> Tensor:
        """Step k of a row at position j stands at j + k. It sees the first step's rows up to j, which are
        the text, and of the further steps its own row alone: the drafts it follows.
        """
        turns = _turns(inputs.shape[1], len(memory.keys), self.sizes, inputs.device)
        q = _turn(self._heads(self.q_proj(inputs)), turns)
        memory.keys.append(_turn(self._heads(self.k_proj(inputs)), turns))
        memory.values.append(self._heads(self.v_proj(inputs)))
        group = self.sizes.heads // self.sizes.kv_heads
        out = _attend(q.unflatten(1, (-1, group)), memory)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, width] to [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _attend(q: Tensor, memory: Memory) -> Tensor:
    """q: [batch, kv_heads, group, length, head_dim]; returns the same shape."""
    length = q.shape[-2]
    (text, *drafts), (told, *said) = (
        [part.unsqueeze(2) for part in parts] for parts in (memory.keys, memory.values)
    )
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ text.transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
    scores += [(q * keys).sum(-1, keepdim=True) for keys in drafts]
    shares = torch.softmax(torch.cat(scores, -1).float() * q.shape[-1] ** -0.5, -1).to(told.dtype)
    out = shares[..., :length] @ told
    for place, values in enumerate(said):
        out = out + shares[..., length + place, None] * values
    return out


def _turns(length: int, first: int, sizes: HeadSizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions first .. first + length - 1, [length, head_dim]."""
    exponents = torch.arange(0, sizes.head_dim, 2, device=device).float() / sizes.head_dim
    angles = torch.arange(first, first + length, device=device).float()[:, None] / sizes.theta**exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def _turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [.., length, head_dim]: dimension i turns with i + head_dim / 2."""
    cosines, sines = turns
    wide = x.float()
    left, right = wide.chunk(2, -1)
    return (wide * cosines + torch.cat((-right, left), -1) * sines).to(x.dtype)


@torch.no_grad()
def begin(head: LearningHead, lm_head: Tensor, norm: Tensor | None, seed: int) -> None:
    """First weights: the base's own lm_head [draft vocabulary, hidden] and last norm, and small noise."""
    dice = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2:
            spread = parameter.shape[1] ** -0.5 * (0.1 if "o_proj" in name or "down_proj" in name else 0.5)
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * spread)
    head.lm_head.weight.copy_(lm_head)
    if norm is not None:
        head.norm.weight.copy_(norm)


@torch.no_grad()
def take(head: LearningHead, tensors: Mapping[str, Tensor], here: Tensor, there: Tensor) -> None:
    """Weights by their published names.

    here, there: which ids of either vocabulary the other has, too; the others begin as their mean.
    A wider MLP computes the same at first: nothing comes of the columns it has more.
    """
    for name, parameter in head.named_parameters():
        given = tensors[name]
        if name == "lm_head.weight":
            parameter.copy_(given.mean(0).expand_as(parameter))
            parameter[here] = given[there]
            continue
        if "down_proj" in name:
            parameter.zero_()
        parameter[tuple(slice(size) for size in given.shape)] = given
