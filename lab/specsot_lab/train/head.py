"""A head's directory: written in the published EAGLE-3 layout, read back to go on from.

`specsot_drafter.heads.loading` reads what is written here; so do others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specsot.checkpoint.config import ModelConfig
from specsot.errors import HeadMismatch, InvalidRequest
from specsot_drafter.heads.checkpoint import (
    SHARES_LM_HEAD,
    Checkpoint,
    check_supported,
    kind_of,
    read_offsets,
    read_shape,
)
from specsot_drafter.heads.eagle import MIN_LAYERS, TAPS_FIELD, choose_taps
from specsot_lab.train.settings import HeadPlan

LAYER = "midlayer"
# Tensors of every head. `lm_head.weight` is absent where the head uses the base's lm_head, and a head that is
# narrower than its base has the projections of OPTIONAL.
NAMES = (
    "fc.weight",
    f"{LAYER}.input_layernorm.weight",
    f"{LAYER}.hidden_norm.weight",
    f"{LAYER}.post_attention_layernorm.weight",
    *(f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"{LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "norm.weight",
)
OWN_LM_HEAD = "lm_head.weight"
OPTIONAL = (OWN_LM_HEAD, "embed_proj.weight", "lm_proj.weight")


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of an EAGLE-3 head.

    hidden: width of the head. base_hidden: width of the base, which may be larger.
    states: columns of the tapped states side by side, a multiple of base_hidden.
    vocab: number of token ids that the head drafts.
    shares_lm_head: the head's logits are those of the base's lm_head rows for its draft ids.
    """

    hidden: int
    base_hidden: int
    states: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    theta: float
    eps: float
    shares_lm_head: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether embeddings, and a shared lm_head, are reached through projections."""
        return self.hidden != self.base_hidden


@dataclass(slots=True)
class Memory:
    """Keys and values of the steps so far, [batch, kv_heads, length, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list[Tensor])
    values: list[Tensor] = field(default_factory=list[Tensor])


class LearningHead(nn.Module):
    """An EAGLE-3 head whose parameters have their published names (NAMES and OPTIONAL).

    A P-EAGLE head has further layers and a mask.
    """

    base_lm_head: Tensor

    def __init__(self, sizes: HeadSizes, layers: int = 1, mask: int | None = None) -> None:
        """mask: see `HeadFormat`; with states that stand in for those of the base that are not known yet."""
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(sizes.states, sizes.hidden, bias=False)
        self.midlayer = _Layer(sizes)
        self.layers = nn.ModuleDict({str(index): _UncompiledLayer(sizes) for index in range(1, layers)})
        self.norm = RmsNorm(sizes.hidden, sizes.eps)
        self.embed_proj = self.lm_proj = self.lm_head = None
        if sizes.is_narrow:
            self.embed_proj = nn.Linear(sizes.base_hidden, sizes.hidden, bias=False)
        if not sizes.shares_lm_head:
            self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        elif sizes.is_narrow:
            self.lm_proj = nn.Linear(sizes.hidden, sizes.base_hidden, bias=False)
        # Rows [vocab, base_hidden] of the base's lm_head; not learned, and not part of the head's file.
        self.register_buffer("base_lm_head", torch.empty(0, sizes.base_hidden), persistent=False)
        self.mask = mask
        self.mask_hidden = None if mask is None else nn.Parameter(torch.zeros(1, 1, sizes.states))

    def memories(self) -> list[Memory]:
        """One for each layer, of a text that begins."""
        return [Memory() for _ in range(1 + len(self.layers))]

    def hide(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What a further step reads in place of [batch, length] tokens and the features that follow."""
        if self.mask is None or self.mask_hidden is None:
            return tokens, features
        return torch.full_like(tokens, self.mask), self.fc(self.mask_hidden).expand_as(features)

    def step(self, embeddings: Tensor, features: Tensor, memories: Sequence[Memory]) -> Tensor:
        """One step of the training-time test for all rows; returns the features that follow.

        embeddings: [batch, length, base_hidden] of the base's table; features: [batch, length, hidden].
        memories: the steps before; this one is added.
        """
        if self.embed_proj is not None:
            embeddings = self.embed_proj(embeddings)
        x = self.midlayer(embeddings, features, memories[0])
        for layer, memory in zip(self.layers.values(), memories[1:]):
            x = layer(x, memory)
        return x

    def logits(self, outputs: Tensor) -> Tensor:
        """[.., hidden] to [.., draft vocabulary]."""
        normed = self.norm(outputs)
        if self.lm_head is not None:
            return self.lm_head(normed)
        assert len(self.base_lm_head), "`begin` sets the rows of the base's lm_head"
        if self.lm_proj is not None:
            normed = self.lm_proj(normed)
        return F.linear(normed, self.base_lm_head.to(normed.dtype))


class RmsNorm(nn.Module):
    """RMSNorm, in fp32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _Layer(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes, 2 * sizes.hidden)
        self.mlp = Mlp(sizes)

    def forward(self, embeddings: Tensor, features: Tensor, memory: Memory) -> Tensor:
        inputs = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), -1)
        x = features + self.self_attn(inputs, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class _UncompiledLayer(nn.Module):
    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes, sizes.hidden)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, sizes: HeadSizes, columns: int) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_dim
        narrow = sizes.kv_heads * sizes.head_dim
        self.sizes = sizes
        self.q_proj = nn.Linear(columns, width, bias=False)
        self.k_proj = nn.Linear(columns, narrow, bias=False)
        self.v_proj = nn.Linear(columns, narrow, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)

    def forward(self, inputs: Tensor, memory: Memory) -> Tensor:
        """Step k of a row at position j stands at j + k. It sees the first step's rows up to j, which are
        the text, and of the further steps its own row alone: the drafts it follows.
        """
        first = len(memory.keys)
        turns = turns_at(torch.arange(first, first + inputs.shape[1], device=inputs.device), self.sizes)
        q = rotate(self._heads(self.q_proj(inputs)), turns)
        memory.keys.append(rotate(self._heads(self.k_proj(inputs)), turns))
        memory.values.append(self._heads(self.v_proj(inputs)))
        group = self.sizes.heads // self.sizes.kv_heads
        out = _attend(q.unflatten(1, (-1, group)), memory)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, length, width] to [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
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


def turns_at(positions: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [..], [.., head_dim]."""
    exponents = torch.arange(0, sizes.head_dim, 2, device=positions.device).float() / sizes.head_dim
    angles = positions.float()[..., None] / sizes.theta**exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [.., length, head_dim]: dimension i turns with i + head_dim / 2."""
    cosines, sines = turns
    wide = x.float()
    left, right = wide.chunk(2, -1)
    return (wide * cosines + torch.cat((-right, left), -1) * sines).to(x.dtype)


@torch.no_grad()
def begin_small(head: nn.Module, last: RmsNorm, norm: Tensor | None, seed: int) -> torch.Generator:
    """First weights: small noise, and the base's last norm, if there is one. Returns the dice."""
    dice = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2:
            spread = parameter.shape[1] ** -0.5 * (0.1 if "o_proj" in name or "down_proj" in name else 0.5)
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * spread)
    if norm is not None:
        last.weight.copy_(norm)
    return dice


@torch.no_grad()
def begin(head: LearningHead, lm_head: Tensor, norm: Tensor | None, seed: int) -> None:
    """First weights of a head, from noise and the base's last norm and lm_head where their widths agree.

    lm_head: [draft vocabulary, base_hidden], the base's rows of the draft ids. norm: [base_hidden] or None.
    """
    sizes = head.sizes
    dice = begin_small(head, head.norm, None if sizes.is_narrow else norm, seed)
    if head.mask_hidden is not None:
        head.mask_hidden.copy_(torch.randn(head.mask_hidden.shape, generator=dice))
    if sizes.shares_lm_head:
        head.base_lm_head = lm_head.clone()
    elif head.lm_head is not None and not sizes.is_narrow:
        head.lm_head.weight.copy_(lm_head)


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


EPS = 1e-6  # where a head's config names none, as in the loader
IGNORED = {"d2t", "t2d", "embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """What of a head is not learned. drafted: its vocabulary, ascending ids of the base. mask: P-EAGLE's, the
    id that stands for tokens that are not known yet. depth: how many tokens that one learns to draft.
    """

    sizes: HeadSizes
    taps: tuple[int, ...]
    drafted: Tensor
    layers: int = 1
    mask: int | None = None
    depth: int | None = None


def frame_new(base: ModelConfig, drafted: Tensor, plan: HeadPlan) -> HeadFormat:
    """A new head, shaped like one layer of its base. Raises InvalidRequest for taps that cannot be."""
    chosen = plan.taps or _usual(base.layers)
    if chosen is None:
        raise InvalidRequest(
            f"the base has only {base.layers} layers: name those to tap with --aux-layers", field="aux_layers"
        )
    if (
        list(chosen) != sorted(set(chosen))
        or not 0 <= chosen[0] <= chosen[-1] <= base.layers
        or chosen[0] == 1
    ):
        # A published list that begins with 1 means outputs, so that taps from 1 on cannot be written.
        raise InvalidRequest(
            f"aux_layers must ascend within 0..{base.layers} and not begin with 1, got {list(chosen)}",
            field="aux_layers",
        )
    hidden = plan.width or base.hidden
    heads = base.heads
    if hidden != base.hidden:
        heads, rest = divmod(hidden, base.head_dim)
        if rest or not 0 < hidden < base.hidden:
            raise InvalidRequest(
                f"head_width must be a multiple of the base's head size {base.head_dim} and below its width "
                f"{base.hidden}, got {hidden}",
                field="head_width",
            )
    sizes = HeadSizes(
        hidden=hidden,
        base_hidden=base.hidden,
        states=len(chosen) * base.hidden,
        heads=heads,
        kv_heads=gcd(heads, base.kv_heads),
        head_dim=base.head_dim,
        intermediate=plan.intermediate or base.intermediate,
        vocab=len(drafted),
        theta=base.rope.theta,
        eps=base.eps,
        shares_lm_head=plan.shared_lm_head,
    )
    return HeadFormat(sizes, chosen, drafted)


def frame_like(given: HeadFormat, drafted: Tensor, plan: HeadPlan) -> HeadFormat:
    """The same, with this vocabulary, and as wide as planned. Raises InvalidRequest for a narrower one."""
    had = given.sizes.intermediate
    width = plan.intermediate or had
    same_width = plan.width in (None, given.sizes.hidden)
    if width < had or plan.taps not in (None, given.taps) or not same_width:
        raise InvalidRequest(
            f"a head to start from keeps its width {given.sizes.hidden}, its taps {list(given.taps)} and its "
            f"MLP's {had} at least",
            field="start",
        )
    return HeadFormat(replace(given.sizes, intermediate=width, vocab=len(drafted)), given.taps, drafted)


def write_head(
    directory: Path, head: LearningHead, frame: HeadFormat, base: ModelConfig, dtype: torch.dtype
) -> None:
    """config.json and model.safetensors, each whole or not at all."""
    drafted = frame.drafted.cpu()
    maps = {"d2t": drafted - torch.arange(len(drafted)), "t2d": torch.isin(torch.arange(base.vocab), drafted)}
    write_directory(directory, head.state_dict(), _config(frame, base, dtype), dtype, maps)


def write_directory(
    directory: Path,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    maps: Mapping[str, Tensor] | None = None,
) -> None:
    """config.json and model.safetensors, each whole or not at all. maps: tensors that keep their type."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    fresh = directory / "model.safetensors.new"
    save_file(tensors | dict(maps or {}), fresh, metadata={"format": "pt"})
    fresh.replace(directory / "model.safetensors")
    fresh = directory / "config.json.new"
    fresh.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    fresh.replace(directory / "config.json")


def _config(frame: HeadFormat, base: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    sizes = frame.sizes
    own: dict[str, Any] = {} if frame.taps == _usual(base.layers) else {TAPS_FIELD: list(frame.taps)}
    if frame.mask is not None:  # speculators' names, and vLLM's
        own |= {"mask_token_id": frame.mask, "pard_token": frame.mask}
    if frame.depth is not None:
        own["para_depths"] = frame.depth
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": frame.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": base.vocab,
        **({"target_hidden_size": base.hidden} if sizes.is_narrow else {}),
        **({SHARES_LM_HEAD: True} if sizes.shares_lm_head else {}),
        "draft_vocab_size": sizes.vocab,
        "max_position_embeddings": base.max_positions,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | own


def read_head(directory: Path, base: ModelConfig) -> tuple[HeadFormat, dict[str, Tensor]]:
    """A head to go on from, and its weights by their published names.

    Raises HeadMismatch for one that is built otherwise than those written here.
    """
    found = Checkpoint.open(directory)
    check_supported(found)
    shape = read_shape(found, base)
    fields = found.settings
    optional = [name for name in OPTIONAL if name in found]
    names = {name: name.replace(f"{LAYER}.", "layers.0.") for name in (*NAMES, *optional)}
    plain = kind_of(found) == "eagle3" and set(found.names()) - IGNORED == set(names.values())
    narrow = shape.hidden != base.hidden
    if (
        not plain
        or narrow != ("embed_proj.weight" in optional)
        or fields.get("rope_scaling")
        or found.flag("norm_before_residual")
    ):
        raise HeadMismatch(f"{directory}: only heads as `specsot train` writes them can be gone on from")
    taps = choose_taps(found, base.layers, None)
    offsets = read_offsets(found, shape, base, "cpu")
    drafted = torch.arange(shape.vocab) + (0 if offsets is None else offsets)
    sizes = HeadSizes(
        hidden=shape.hidden,
        base_hidden=base.hidden,
        states=len(taps) * base.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        theta=float(fields.get("rope_theta", 10000.0)),
        eps=float(fields.get("rms_norm_eps", EPS)),
        shares_lm_head=OWN_LM_HEAD not in optional,
    )
    tensors = {name: found.tensor(there, torch.float32, "cpu") for name, there in names.items()}
    return HeadFormat(sizes, taps, drafted), tensors


def _usual(layers: int) -> tuple[int, ...] | None:
    """The reference's taps, for bases that are deep enough."""
    return (2, layers // 2, layers - 3) if layers >= MIN_LAYERS else None
