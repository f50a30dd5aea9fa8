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

# Name of a head's first layer in its published tensors.
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
# Tensor that a head with an lm_head of its own has.
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

    def __init__(self, sizes: HeadSizes, num_layers: int = 1, mask_id: int | None = None) -> None:
        """Make the layers, with weights that `initialise` sets.

        sizes: of the head. num_layers: one for EAGLE-3; more for P-EAGLE. mask_id: token id that stands for
            tokens that are not known yet, see `HeadFormat`; None for EAGLE-3.
        """
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(sizes.states, sizes.hidden, bias=False)
        self.midlayer = _Layer(sizes)
        self.layers = nn.ModuleDict({str(index): _FurtherLayer(sizes) for index in range(1, num_layers)})
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
        self.mask = mask_id
        self.mask_hidden = None if mask_id is None else nn.Parameter(torch.zeros(1, 1, sizes.states))

    def memories(self) -> list[Memory]:
        """Return an empty memory for each layer, for a text that begins."""
        return [Memory() for _ in range(1 + len(self.layers))]

    def hide(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a further step reads in place of tokens [batch, length] and features [batch, length,
        hidden].

        Both are returned as they are unless the head has a mask; then the mask and its learned features
        replace them.
        """
        if self.mask is None or self.mask_hidden is None:
            return tokens, features
        return torch.full_like(tokens, self.mask), self.fc(self.mask_hidden).expand_as(features)

    def step(self, embeddings: Tensor, features: Tensor, memories: Sequence[Memory]) -> Tensor:
        """Compute one step of the training-time test for all rows; return the features that follow, [batch,
        length, hidden].

        embeddings: [batch, length, base_hidden] of the base's table. features: [batch, length, hidden].
            memories: of the steps before, one for each layer; this step is added.
        """
        if self.embed_proj is not None:
            embeddings = self.embed_proj(embeddings)
        x = self.midlayer(embeddings, features, memories[0])
        for layer, memory in zip(self.layers.values(), memories[1:]):
            x = layer(x, memory)
        return x

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., draft_vocab_size] of outputs [.., hidden]."""
        normed = self.norm(outputs)
        if self.lm_head is not None:
            return self.lm_head(normed)
        assert len(self.base_lm_head), "`begin` sets the rows of the base's lm_head"
        if self.lm_proj is not None:
            normed = self.lm_proj(normed)
        return F.linear(normed, self.base_lm_head.to(normed.dtype))


class RmsNorm(nn.Module):
    """RMSNorm, in fp32 inside. size: of the last dimension. eps: is added to the mean square."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x in fp32, of the same shape."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _Layer(nn.Module):
    """The first layer of a head, which reads embeddings and features. sizes: of the head."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes, 2 * sizes.hidden)
        self.mlp = Mlp(sizes)

    def forward(self, embeddings: Tensor, features: Tensor, memory: Memory) -> Tensor:
        """Return the features that follow, [batch, length, hidden].

        embeddings, features: [batch, length, hidden]. memory: this layer's; the step is added.
        """
        inputs = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), -1)
        x = features + self.self_attn(inputs, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class _FurtherLayer(nn.Module):
    """A further layer of a P-EAGLE head. sizes: of the head."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes, sizes.hidden)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Return the layer's output for x [batch, length, hidden]. memory: this layer's; the step
        is added.
        """
        x = x + self.self_attn(self.input_layernorm(x), memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    """Attention of one layer. sizes: of the head. input_width: columns of its input."""

    def __init__(self, sizes: HeadSizes, input_width: int) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_dim
        kv_width = sizes.kv_heads * sizes.head_dim
        self.sizes = sizes
        self.q_proj = nn.Linear(input_width, width, bias=False)
        self.k_proj = nn.Linear(input_width, kv_width, bias=False)
        self.v_proj = nn.Linear(input_width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)

    def forward(self, inputs: Tensor, memory: Memory) -> Tensor:
        """Return the attention's output for one step, [batch, length, hidden].

        Step k of a row at position j has the position j + k. It sees the first step's rows up to j, which are
        the text, and of the further steps its own row alone: the drafts it follows.

        inputs: [batch, length, input_width]. memory: keys and values of the steps before; this step is added.
        """
        first = len(memory.keys)
        angles = angles_at(torch.arange(first, first + inputs.shape[1], device=inputs.device), self.sizes)
        q = rotate(self._heads(self.q_proj(inputs)), angles)
        memory.keys.append(rotate(self._heads(self.k_proj(inputs)), angles))
        memory.values.append(self._heads(self.v_proj(inputs)))
        group = self.sizes.heads // self.sizes.kv_heads
        out = _attend(q.unflatten(1, (-1, group)), memory)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, length, width] as [batch, heads, length, head_dim]."""
        return x.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    """A gated MLP. sizes: of the head."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output for x [.., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _attend(q: Tensor, memory: Memory) -> Tensor:
    """Return the attention's output, shaped as q: [batch, kv_heads, group, length, head_dim].

    memory: keys and values of all steps, the present one included; the first step's are seen causally, of the
        others each row sees its own.
    """
    length = q.shape[-2]
    (text_keys, *draft_keys), (text_values, *draft_values) = (
        [part.unsqueeze(2) for part in parts] for parts in (memory.keys, memory.values)
    )
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ text_keys.transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
    scores += [(q * keys).sum(-1, keepdim=True) for keys in draft_keys]
    weights = torch.softmax(torch.cat(scores, -1).float() * q.shape[-1] ** -0.5, -1).to(text_values.dtype)
    out = weights[..., :length] @ text_values
    for index, values in enumerate(draft_values):
        out = out + weights[..., length + index, None] * values
    return out


def angles_at(positions: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [.., head_dim] of positions [..]."""
    exponents = torch.arange(0, sizes.head_dim, 2, device=positions.device).float() / sizes.head_dim
    angles = positions.float()[..., None] / sizes.theta**exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return x [.., length, head_dim] with rotary positions: dimension i is rotated with dimension i +
    head_dim / 2.

    angles: cosines and sines, [.., length, head_dim].
    """
    cosines, sines = angles
    wide = x.float()
    left, right = wide.chunk(2, -1)
    return (wide * cosines + torch.cat((-right, left), -1) * sines).to(x.dtype)


@torch.no_grad()
def initialise_small(
    head: nn.Module, last_norm: RmsNorm, base_norm: Tensor | None, seed: int
) -> torch.Generator:
    """Set first weights: small noise, and the base's last norm, if it is given. Return the generator of the
    noise.

    head: its matrices are set. last_norm: the head's last norm. base_norm: [hidden] or None. seed: of the
        noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2:
            scale = parameter.shape[1] ** -0.5 * (0.1 if "o_proj" in name or "down_proj" in name else 0.5)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    if base_norm is not None:
        last_norm.weight.copy_(base_norm)
    return generator


@torch.no_grad()
def initialise(head: LearningHead, lm_head: Tensor, base_norm: Tensor | None, seed: int) -> None:
    """Set first weights of a head, from noise and the base's last norm and lm_head where their widths agree.

    head: the head. lm_head: [draft_vocab_size, base_hidden], the base's rows of the draft ids. base_norm:
        [base_hidden] or None. seed: of the noise.
    """
    sizes = head.sizes
    generator = initialise_small(head, head.norm, None if sizes.is_narrow else base_norm, seed)
    if head.mask_hidden is not None:
        head.mask_hidden.copy_(torch.randn(head.mask_hidden.shape, generator=generator))
    if sizes.shares_lm_head:
        head.base_lm_head = lm_head.clone()
    elif head.lm_head is not None and not sizes.is_narrow:
        head.lm_head.weight.copy_(lm_head)


@torch.no_grad()
def copy_weights(
    head: LearningHead, tensors: Mapping[str, Tensor], shared_here: Tensor, shared_there: Tensor
) -> None:
    """Set weights from those of another head, by their published names.

    A wider MLP computes the same at first, since its further columns have zero outputs.

    head: is changed. tensors: weights of the other head. shared_here, shared_there: [draft_vocab_size] which
        ids of either vocabulary the other has, too; ids that only this head has begin as the mean of all
        rows.
    """
    for name, parameter in head.named_parameters():
        source = tensors[name]
        if name == "lm_head.weight":
            parameter.copy_(source.mean(0).expand_as(parameter))
            parameter[shared_here] = source[shared_there]
            continue
        if "down_proj" in name:
            parameter.zero_()
        parameter[tuple(slice(size) for size in source.shape)] = source


# Norms' epsilon where a head's config names none, as in the loader.
EPS = 1e-6  # where a head's config names none, as in the loader
# Tensors of published heads that are not weights to continue from.
IGNORED = {"d2t", "t2d", "embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """What of a head is not learned.

    sizes: widths and counts. taps: layers of the base whose inputs the head reads. drafted:
        [draft_vocab_size] ascending ids of the base that the head drafts. layers: 1 for EAGLE-3, more for
        P-EAGLE. mask: P-EAGLE's token id that stands for tokens that are not known yet; None: EAGLE-3. depth:
        tokens that a P-EAGLE head learns to draft; None: not stored.
    """

    sizes: HeadSizes
    taps: tuple[int, ...]
    drafted: Tensor
    layers: int = 1
    mask: int | None = None
    depth: int | None = None


def new_format(base_config: ModelConfig, draft_ids: Tensor, plan: HeadPlan) -> HeadFormat:
    """Return the format of a new head, shaped like one layer of its base.

    base_config: of the base. draft_ids: [draft_vocab_size] ascending ids of the base. plan: what was asked
        for.
    Raises InvalidRequest for taps or a width that cannot be.
    """
    taps_chosen = plan.taps or _usual_taps(base_config.layers)
    if taps_chosen is None:
        raise InvalidRequest(
            f"the base has only {base_config.layers} layers: name those to tap with --aux-layers",
            field="aux_layers",
        )
    if (
        list(taps_chosen) != sorted(set(taps_chosen))
        or not 0 <= taps_chosen[0] <= taps_chosen[-1] <= base_config.layers
        or taps_chosen[0] == 1
    ):
        # A published list that begins with 1 means outputs, so that taps from 1 on cannot be written.
        raise InvalidRequest(
            f"aux_layers must ascend within 0..{base_config.layers} and not begin with 1, "
            f"got {list(taps_chosen)}",
            field="aux_layers",
        )
    hidden = plan.width or base_config.hidden
    heads = base_config.heads
    if hidden != base_config.hidden:
        heads, remainder = divmod(hidden, base_config.head_dim)
        if remainder or not 0 < hidden < base_config.hidden:
            raise InvalidRequest(
                f"head_width must be a multiple of the base's head size {base_config.head_dim} and below its "
                f"width {base_config.hidden}, got {hidden}",
                field="head_width",
            )
    sizes = HeadSizes(
        hidden=hidden,
        base_hidden=base_config.hidden,
        states=len(taps_chosen) * base_config.hidden,
        heads=heads,
        kv_heads=gcd(heads, base_config.kv_heads),
        head_dim=base_config.head_dim,
        intermediate=plan.intermediate or base_config.intermediate,
        vocab=len(draft_ids),
        theta=base_config.rope.theta,
        eps=base_config.eps,
        shares_lm_head=plan.shared_lm_head,
    )
    return HeadFormat(sizes, taps_chosen, draft_ids)


def widened_format(head_format: HeadFormat, draft_ids: Tensor, plan: HeadPlan) -> HeadFormat:
    """Return a head's format with this vocabulary, and as wide an MLP as planned.

    head_format: of the head to start from. draft_ids: [draft_vocab_size] ascending ids of the base. plan:
        what was asked for.
    Raises InvalidRequest for a narrower MLP, or other taps or width.
    """
    old_intermediate = head_format.sizes.intermediate
    width = plan.intermediate or old_intermediate
    same_width = plan.width in (None, head_format.sizes.hidden)
    if width < old_intermediate or plan.taps not in (None, head_format.taps) or not same_width:
        raise InvalidRequest(
            f"a head to start from keeps its width {head_format.sizes.hidden}, its taps "
            f"{list(head_format.taps)} and its MLP's {old_intermediate} at least",
            field="start",
        )
    return HeadFormat(
        replace(head_format.sizes, intermediate=width, vocab=len(draft_ids)), head_format.taps, draft_ids
    )


def write_head(
    directory: Path, head: LearningHead, head_format: HeadFormat, base_config: ModelConfig, dtype: torch.dtype
) -> None:
    """Write config.json and model.safetensors of an EAGLE-3 or P-EAGLE head, each whole or not at all.

    directory: created if missing. head: the head. head_format: what is not learned. base_config: of the base.
        dtype: of the weights in the file.
    """
    draft_ids = head_format.drafted.cpu()
    maps = {
        "d2t": draft_ids - torch.arange(len(draft_ids)),
        "t2d": torch.isin(torch.arange(base_config.vocab), draft_ids),
    }
    write_directory(directory, head.state_dict(), _config(head_format, base_config, dtype), dtype, maps)


def write_directory(
    directory: Path,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    integer_tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors, each whole or not at all.

    directory: created if missing. weights: by name. config: the head's config. dtype: to which weights are
        converted. integer_tensors: tensors that keep their type; None: none.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    temporary = directory / "model.safetensors.new"
    save_file(tensors | dict(integer_tensors or {}), temporary, metadata={"format": "pt"})
    temporary.replace(directory / "model.safetensors")
    temporary = directory / "config.json.new"
    temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / "config.json")


def _config(head_format: HeadFormat, base_config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the head's config as it is published. head_format: of the head. base_config: of the base. dtype:
    of the weights.
    """
    sizes = head_format.sizes
    further: dict[str, Any] = (
        {} if head_format.taps == _usual_taps(base_config.layers) else {TAPS_FIELD: list(head_format.taps)}
    )
    if head_format.mask is not None:  # speculators' names, and vLLM's
        further |= {"mask_token_id": head_format.mask, "pard_token": head_format.mask}
    if head_format.depth is not None:
        further["para_depths"] = head_format.depth
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": head_format.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": base_config.vocab,
        **({"target_hidden_size": base_config.hidden} if sizes.is_narrow else {}),
        **({SHARES_LM_HEAD: True} if sizes.shares_lm_head else {}),
        "draft_vocab_size": sizes.vocab,
        "max_position_embeddings": base_config.max_positions,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | further


def read_head(directory: Path, base_config: ModelConfig) -> tuple[HeadFormat, dict[str, Tensor]]:
    """Return a head to continue from: its format, and its weights by their published names in fp32.

    directory: of the head. base_config: of its base.
    Raises HeadMismatch for a head that is built otherwise than those written here.
    """
    checkpoint = Checkpoint.open(directory)
    check_supported(checkpoint)
    shape = read_shape(checkpoint, base_config)
    fields = checkpoint.settings
    optional = [name for name in OPTIONAL if name in checkpoint]
    names = {name: name.replace(f"{LAYER}.", "layers.0.") for name in (*NAMES, *optional)}
    is_plain = kind_of(checkpoint) == "eagle3" and set(checkpoint.names()) - IGNORED == set(names.values())
    is_narrow = shape.hidden != base_config.hidden
    if (
        not is_plain
        or is_narrow != ("embed_proj.weight" in optional)
        or fields.get("rope_scaling")
        or checkpoint.flag("norm_before_residual")
    ):
        raise HeadMismatch(f"{directory}: only heads as `specsot train` writes them can be gone on from")
    taps = choose_taps(checkpoint, base_config.layers, None)
    offsets = read_offsets(checkpoint, shape, base_config, "cpu")
    draft_ids = torch.arange(shape.vocab) + (0 if offsets is None else offsets)
    sizes = HeadSizes(
        hidden=shape.hidden,
        base_hidden=base_config.hidden,
        states=len(taps) * base_config.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        theta=float(fields.get("rope_theta", 10000.0)),
        eps=float(fields.get("rms_norm_eps", EPS)),
        shares_lm_head=OWN_LM_HEAD not in optional,
    )
    tensors = {
        name: checkpoint.tensor(source_name, torch.float32, "cpu") for name, source_name in names.items()
    }
    return HeadFormat(sizes, taps, draft_ids), tensors


def _usual_taps(layers: int) -> tuple[int, ...] | None:
    """Return the reference's taps; None for bases that have too few layers for them."""
    return (2, layers // 2, layers - 3) if layers >= MIN_LAYERS else None
