"""An EAGLE-3 or P-EAGLE head in training, and its directory, which has the published EAGLE-3 layout.

`specsot_drafter.heads.loading` and other systems read what is written here. A head of this layout can also be
read back, to be trained further.
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
FIRST_LAYER = "midlayer"
# Tensors that every head has.
TENSOR_NAMES = (
    "fc.weight",
    f"{FIRST_LAYER}.input_layernorm.weight",
    f"{FIRST_LAYER}.hidden_norm.weight",
    f"{FIRST_LAYER}.post_attention_layernorm.weight",
    *(f"{FIRST_LAYER}.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"{FIRST_LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "norm.weight",
)
# Tensor of a head that has an lm_head of its own. It is absent if the head uses the base model's lm_head.
OWN_LM_HEAD = "lm_head.weight"
# Tensors that some heads have: their own lm_head, and the projections of a head that is narrower than its
# base model.
OPTIONAL_TENSORS = (OWN_LM_HEAD, "embed_proj.weight", "lm_proj.weight")


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of a head.

    hidden: Width of the head.
    base_hidden: Width of the base model. It may be larger than that of the head.
    states: Columns of the tapped states next to each other; a multiple of base_hidden.
    heads: Number of query heads.
    kv_heads: Number of key and value heads.
    head_dim: Width of an attention head.
    intermediate: Width of the MLP.
    vocab: Number of token ids that the head drafts.
    theta: Base of the rotary frequencies.
    eps: Epsilon of the norms.
    shares_lm_head: True if the logits are computed with the base model's lm_head rows of the draft ids. False
        if the head has an lm_head of its own.
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
        """Return True if the head is narrower than its base model. Then a projection leads from the base
        model's embeddings to the head, and one from the head to a shared lm_head.
        """
        return self.hidden != self.base_hidden


@dataclass(slots=True)
class StepKV:
    """Keys and values of one layer, one tensor for each step so far.

    keys: Keys, [batch, kv_heads, length, head_dim] for each step.
    values: Values, [batch, kv_heads, length, head_dim] for each step.
    """

    keys: list[Tensor] = field(default_factory=list[Tensor])
    values: list[Tensor] = field(default_factory=list[Tensor])


class LearningHead(nn.Module):
    """An EAGLE-3 head in training, whose parameters have their published names (TENSOR_NAMES and
    OPTIONAL_TENSORS).

    A P-EAGLE head has further layers and a mask.

    base_lm_head: [vocab, base_hidden] rows of the base model's lm_head for the draft ids, of a head that
        shares it; empty until `initialise` sets them. They are not learned.
    """

    base_lm_head: Tensor

    def __init__(self, sizes: HeadSizes, num_layers: int = 1, mask_id: int | None = None) -> None:
        """Make the layers. Their weights mean nothing until `initialise` sets them.

        sizes: Sizes of the head.
        num_layers: Number of layers: 1 for EAGLE-3, more for P-EAGLE.
        mask_id: Token id that a P-EAGLE head reads in place of tokens that are not known yet. None for
            EAGLE-3.

        A head that is narrower than its base model gets `embed_proj`. A head without a shared lm_head gets
        `lm_head`; a narrow head that shares the base model's gets `lm_proj` instead. Modules that a head does
        not need are None, and so is `mask_hidden` if `mask_id` is None; otherwise it is a learned parameter
        of zeros.
        """
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(sizes.states, sizes.hidden, bias=False)
        self.midlayer = _Layer(sizes)
        self.layers = nn.ModuleDict({str(index): OrdinaryLayer(sizes) for index in range(1, num_layers)})
        self.norm = RmsNorm(sizes.hidden, sizes.eps)
        self.embed_proj = self.lm_proj = self.lm_head = None
        if sizes.is_narrow:
            self.embed_proj = nn.Linear(sizes.base_hidden, sizes.hidden, bias=False)
        if not sizes.shares_lm_head:
            self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        elif sizes.is_narrow:
            self.lm_proj = nn.Linear(sizes.hidden, sizes.base_hidden, bias=False)
        # A buffer moves to the device with the head. It is not part of the head's file.
        self.register_buffer("base_lm_head", torch.empty(0, sizes.base_hidden), persistent=False)
        self.mask = mask_id
        self.mask_hidden = None if mask_id is None else nn.Parameter(torch.zeros(1, 1, sizes.states))

    def empty_kv(self) -> list[StepKV]:
        """Return an empty `StepKV` for each layer, with which the steps of a batch begin."""
        return [StepKV() for _ in range(1 + len(self.layers))]

    def features(self, states: Tensor) -> Tensor:
        """Return the features that the first step reads, [.., hidden].

        states: [.., states] inputs of the tapped layers, next to each other.
        """
        return self.fc(states)

    def mask_inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and features that a step after the first one reads. An EAGLE-3 head reads them as
        they are. A P-EAGLE head reads its mask and the learned features of the mask in their place.

        tokens: [batch, length] token ids.
        features: [batch, length, hidden] outputs of the step before.

        Both results have the shapes of the arguments; the features of a P-EAGLE head are the same in every
        row, the mask's features after `fc`.
        """
        if self.mask is None or self.mask_hidden is None:
            return tokens, features
        return torch.full_like(tokens, self.mask), self.fc(self.mask_hidden).expand_as(features)

    def forward_step(self, embeddings: Tensor, features: Tensor, kv_by_layer: Sequence[StepKV]) -> Tensor:
        """Compute one step of the training-time test for all rows, and return the features that follow,
        [batch, length, hidden].

        embeddings: [batch, length, base_hidden] entries of the base model's embedding table.
        features: [batch, length, hidden] features that the step reads.
        kv_by_layer: Keys and values of the earlier steps, for each layer. Those of this step are appended.

        The first layer reads the embeddings and the features; each further layer (P-EAGLE only) reads the
        output of the layer before it. The last norm is not applied here, but by `logits`.
        """
        if self.embed_proj is not None:
            embeddings = self.embed_proj(embeddings)
        x = self.midlayer(embeddings, features, kv_by_layer[0])
        for layer, kv in zip(self.layers.values(), kv_by_layer[1:]):
            x = layer(x, kv)
        return x

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., draft_vocab_size].

        outputs: [.., hidden] features that `forward_step` returned.

        The outputs are normed first. A head with an lm_head of its own uses that. Otherwise the base model's
        lm_head rows are used, after `lm_proj` if the head is narrow. Fails with an AssertionError if the head
        shares the base model's lm_head and `initialise` has not set its rows.
        """
        normed = self.norm(outputs)
        if self.lm_head is not None:
            return self.lm_head(normed)
        assert len(self.base_lm_head), "`initialise` sets the rows of the base model's lm_head"
        if self.lm_proj is not None:
            normed = self.lm_proj(normed)
        return F.linear(normed, self.base_lm_head.to(normed.dtype))


class RmsNorm(nn.Module):
    """RMSNorm that computes in fp32.

    size: Size of the last dimension.
    eps: Epsilon that is added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        """Make a norm whose weights are ones.

        size: Size of the last dimension.
        eps: Epsilon that is added to the mean square.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed input in fp32, of the same shape.

        x: [.., size] the input.
        """
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class _Layer(nn.Module):
    """The first layer of a head, which reads embeddings and features.

    sizes: Sizes of the head.
    """

    def __init__(self, sizes: HeadSizes) -> None:
        """Make the two input norms, the norm before the MLP, an attention that reads 2 * hidden columns
        (embeddings next to features), and the MLP.

        sizes: Sizes of the head.
        """
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes, 2 * sizes.hidden)
        self.mlp = Mlp(sizes)

    def forward(self, embeddings: Tensor, features: Tensor, kv: StepKV) -> Tensor:
        """Return the layer's output, [batch, length, hidden].

        embeddings: [batch, length, hidden] embeddings, projected to the head's width.
        features: [batch, length, hidden] features of the same rows.
        kv: Keys and values of this layer's earlier steps. Those of this step are appended.

        Both inputs are normed, and stand next to each other in the attention's input, the embeddings first.
        The features are added to the attention's output.
        """
        inputs = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), -1)
        x = features + self.self_attn(inputs, kv)
        return x + self.mlp(self.post_attention_layernorm(x))


class OrdinaryLayer(nn.Module):
    """A layer that reads the output of the layer before it, as those of a base model do.

    sizes: Sizes of the head.
    """

    def __init__(self, sizes: HeadSizes, qkv_bias: bool = False, qk_norm: bool = False) -> None:
        """Make the two norms, an attention that reads as many columns as the head is wide, and the MLP.

        sizes: Sizes of the head.
        qkv_bias: True if the query, key and value projections have biases.
        qk_norm: True if each query head and each key head is normed.
        """
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes, sizes.hidden, qkv_bias, qk_norm)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, kv: StepKV) -> Tensor:
        """Return the layer's output, [batch, length, hidden].

        x: [batch, length, hidden] output of the layer before.
        kv: Keys and values of this layer's earlier steps. Those of this step are appended.
        """
        x = x + self.self_attn(self.input_layernorm(x), kv)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    """Attention of one layer.

    sizes: Sizes of the head.
    input_width: Columns of its input.
    """

    def __init__(
        self, sizes: HeadSizes, input_width: int, qkv_bias: bool = False, qk_norm: bool = False
    ) -> None:
        """Make the query, key, value and output projections.

        sizes: Sizes of the head.
        input_width: Columns of the attention's input.
        qkv_bias: True if the query, key and value projections have biases.
        qk_norm: True if each query head and each key head is normed.
        """
        super().__init__()
        width = sizes.heads * sizes.head_dim
        kv_width = sizes.kv_heads * sizes.head_dim
        self.sizes = sizes
        self.q_proj = nn.Linear(input_width, width, bias=qkv_bias)
        self.k_proj = nn.Linear(input_width, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(input_width, kv_width, bias=qkv_bias)
        self.q_norm = RmsNorm(sizes.head_dim, sizes.eps) if qk_norm else nn.Identity()
        self.k_norm = RmsNorm(sizes.head_dim, sizes.eps) if qk_norm else nn.Identity()
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)

    def forward(self, inputs: Tensor, kv: StepKV) -> Tensor:
        """Return the attention's output for one step, [batch, length, hidden].

        In step k the row at index j has the position j + k. It sees the rows 0 .. j of the first step, which
        are the sequence, and of the further steps its own row alone, which holds the drafts that it follows.

        inputs: [batch, length, input_width] normed input of the layer.
        kv: Keys and values of the earlier steps. Those of this step are appended.

        k is the number of steps that `kv` holds before the call, 0 for the first step.
        """
        num_steps = len(kv.keys)
        angles = angles_at(
            torch.arange(num_steps, num_steps + inputs.shape[1], device=inputs.device), self.sizes
        )
        queries, keys, values = (
            self._heads(project(inputs)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(self.q_norm(queries).to(queries.dtype), angles)
        kv.keys.append(rotate(self.k_norm(keys).to(keys.dtype), angles))
        kv.values.append(values)
        group = self.sizes.heads // self.sizes.kv_heads
        out = _attend(q.unflatten(1, (-1, group)), kv)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """Return a projection with its heads apart: [batch, length, heads * head_dim] -> [batch, heads,
        length, head_dim].

        x: [batch, length, heads * head_dim] queries, keys or values.
        """
        return x.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    """A gated MLP.

    sizes: Sizes of the head.
    """

    def __init__(self, sizes: HeadSizes) -> None:
        """Make the gate, up and down projections, without biases.

        sizes: Sizes of the head.
        """
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, [.., hidden].

        x: [.., hidden] the input.
        """
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _attend(q: Tensor, kv: StepKV) -> Tensor:
    """Return the attention's output, of the shape of the queries.

    q: [batch, kv_heads, group, length, head_dim] queries of the present step; the heads of a group share a KV
        head.
    kv: Keys and values of all steps, the present one included. Row j sees the rows 0 .. j of the first step,
        and its own row of each other step.

    The output has the data type of the values. The softmax is computed in fp32, and the scores are scaled by
    head_dim ** -0.5.
    """
    length = q.shape[-2]
    (text_keys, *draft_keys), (text_values, *draft_values) = (
        [part.unsqueeze(2) for part in parts] for parts in (kv.keys, kv.values)
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
    """Return the cosines and the sines of the rotary angles, [.., head_dim] each.

    positions: [..] positions.
    sizes: Sizes of the head, for the width of a head and the base of the frequencies.

    The second half of the head_dim columns repeats the first half, as `rotate` expects. Both are fp32.
    """
    exponents = torch.arange(0, sizes.head_dim, 2, device=positions.device).float() / sizes.head_dim
    angles = positions.float()[..., None] / sizes.theta**exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys with rotary positions, of the same shape and type. Dimension i is rotated
    together with dimension i + head_dim / 2.

    x: [.., length, head_dim] queries or keys.
    angles: Cosines and sines as `angles_at` returns them, [.., length, head_dim] each.

    The rotation is computed in fp32 and converted back to the type of `x`.
    """
    cosines, sines = angles
    wide = x.float()
    left, right = wide.chunk(2, -1)
    return (wide * cosines + torch.cat((-right, left), -1) * sines).to(x.dtype)


@torch.no_grad()
def initialise_small(
    head: nn.Module, last_norm: RmsNorm, base_norm: Tensor | None, seed: int
) -> torch.Generator:
    """Set the first weights: small noise for matrices, and the base model's last norm for the head's last
    norm. Other vectors stay as they are. Return the generator of the noise.

    head: The head, whose matrices are set.
    last_norm: The head's last norm.
    base_norm: [hidden] weight of the base model's last norm. None: the head's last norm stays as it is.
    seed: Seed of the noise.

    Matrices whose name contains "o_proj" or "down_proj" get noise with a standard deviation of 0.1 /
    sqrt(number of columns), all other matrices 0.5 / sqrt(number of columns). Tensors of one or three
    dimensions get no noise.
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
    """Set the first weights of a head: from noise, and from the base model's last norm and lm_head if the
    head is as wide as the base model.

    head: The head.
    lm_head: [draft_vocab_size, base_hidden] the base model's lm_head rows of the draft ids. A head that
        shares them stores a copy.
    base_norm: [base_hidden] weight of the base model's last norm. None: the head's last norm stays as it is.
    seed: Seed of the noise.

    Further cases: the head's last norm stays as it is also if the head is narrower than the base model.
    `mask_hidden` of a P-EAGLE head gets noise with a standard deviation of 1. A head with an lm_head of its
    own begins with a copy of `lm_head` if it is as wide as the base model, and with noise if it is narrower.
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
    head: LearningHead, source_tensors: Mapping[str, Tensor], shared_rows: Tensor, source_shared_rows: Tensor
) -> None:
    """Set the weights of a head from those of another head, by their published names.

    If the MLP is wider, the head computes the same as the other one at first, because the output weights of
    the additional columns are zero. Ids that only this head drafts begin with the mean of all lm_head rows.

    head: The head whose weights are set.
    source_tensors: Weights of the other head, by their published names.
    shared_rows: Bool [draft_vocab_size of this head], True for draft ids that the other head drafts, too.
    source_shared_rows: Bool [draft_vocab_size of the other head], True for draft ids that this head drafts,
        too. Both vocabularies ascend, so the n-th True of one is the n-th True of the other.

    Columns and rows that the other head lacks keep the values that they have, except in the MLP's down
    projection, where they become 0. Tensors of `source_tensors` that this head lacks are ignored. Raises
    KeyError if the other head lacks a tensor of this head. If the head shares the base model's lm_head,
    `shared_rows` and `source_shared_rows` are not used.
    """
    for name, parameter in head.named_parameters():
        source = source_tensors[name]
        if name == "lm_head.weight":
            parameter.copy_(source.mean(0).expand_as(parameter))
            parameter[shared_rows] = source[source_shared_rows]
            continue
        if "down_proj" in name:
            parameter.zero_()
        parameter[tuple(slice(size) for size in source.shape)] = source


# Epsilon of the norms if the config of a head names none, as in the loader.
DEFAULT_NORM_EPS = 1e-6
# Tensors of published heads that are not weights to continue from.
IGNORED_TENSORS = {"d2t", "t2d", "embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """The properties of a head that are fixed before training.

    sizes: Widths and counts.
    taps: Layers of the base model whose inputs the head reads, ascending.
    draft_ids: [draft_vocab_size] token ids that the head drafts, ascending.
    layers: Number of layers of the head: 1 for EAGLE-3, more for P-EAGLE.
    mask: Token id that a P-EAGLE head reads in place of tokens that are not known yet. None for EAGLE-3.
    depth: Number of tokens that a P-EAGLE head learns to draft. None: the config does not store it.
    """

    sizes: HeadSizes
    taps: tuple[int, ...]
    draft_ids: Tensor
    layers: int = 1
    mask: int | None = None
    depth: int | None = None


def new_format(base_config: ModelConfig, draft_ids: Tensor, plan: HeadPlan) -> HeadFormat:
    """Return the format of a new EAGLE-3 head that is shaped like one layer of its base model.

    base_config: Config of the base model.
    draft_ids: [draft_vocab_size] token ids that the head drafts, ascending.
    plan: Format that the user asked for. Fields that are None take the base model's values.
    Raises InvalidRequest if the taps or the width cannot be used, or if the base model has too few layers for
    the usual taps and none are named.

    The taps must ascend without duplicates, lie within 0 .. layers of the base model, and not begin with 1.
    `plan.width`, if it differs from the base model's width, must be a multiple of the base model's head_dim
    and smaller than the base model's width. A narrower head has width / head_dim query heads, and the
    greatest common divisor of that number and of the base model's KV heads as its number of KV heads. A
    `plan.taps`, `plan.width` or `plan.intermediate` that is empty or 0 counts as None. The format always has
    one layer, no mask and no depth.
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
        # Loaders read a published list that begins with 1 as a list of outputs, so it cannot name inputs.
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
    """Return the format of a head that continues another one, with a vocabulary of its own and perhaps a
    wider MLP.

    head_format: Format of the head to continue from.
    draft_ids: [draft_vocab_size] token ids that the new head drafts, ascending.
    plan: Format that the user asked for. Fields that are None take the values of the other head.
    Raises InvalidRequest for a narrower MLP, other taps or another width.

    `plan.taps` and `plan.width` are accepted if they equal those of the other head. `plan.intermediate` may
    be equal or larger; 0 counts as None. `plan.shared_lm_head` is not read: the new head shares the base
    model's lm_head if the other head does. The format has one layer, no mask and no depth.
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

    directory: Directory of the head; it is created if missing.
    head: The head.
    head_format: Format of the head.
    base_config: Config of the base model.
    dtype: Data type of the weights in the file.

    Besides the weights, the file holds `d2t` (the token id of each draft id minus the draft id) and `t2d`
    (Bool [vocab], True for the token ids that the head drafts). The base model's lm_head rows are not
    written. Files that exist already are replaced.
    """
    draft_ids = head_format.draft_ids.cpu()
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

    directory: Directory of the head; it is created if missing.
    weights: The weights by their published names.
    config: The config of the head.
    dtype: Data type to which the weights are converted.
    integer_tensors: Further tensors by name, which keep their data type. None: there are none.

    model.safetensors is replaced first, config.json second, so that an interruption in between leaves new
    weights with the old config, or with none. `integer_tensors` must be on the CPU already.
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
    """Return the config of a head as it is published.

    head_format: Format of the head.
    base_config: Config of the base model.
    dtype: Data type of the weights in the file.

    Some fields are left out: the taps if they are the usual ones for the base model's number of layers,
    "target_hidden_size" if the head is as wide as the base model, the lm_head flag if the head has an lm_head
    of its own, "mask_token_id" and "pard_token" if the mask is None, and "para_depths" if the depth is None.
    "vocab_size" is that of the base model, "draft_vocab_size" that of the head.
    """
    sizes = head_format.sizes
    optional_fields: dict[str, Any] = (
        {} if head_format.taps == _usual_taps(base_config.layers) else {TAPS_FIELD: list(head_format.taps)}
    )
    # These names are those of speculators and of vLLM.
    if head_format.mask is not None:
        optional_fields |= {"mask_token_id": head_format.mask, "pard_token": head_format.mask}
    if head_format.depth is not None:
        optional_fields["para_depths"] = head_format.depth
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
    } | optional_fields


def read_head(directory: Path, base_config: ModelConfig) -> tuple[HeadFormat, dict[str, Tensor]]:
    """Return a head to continue from: its format, and its weights in fp32 by their published names.

    directory: Directory of the head.
    base_config: Config of its base model.
    Raises HeadMismatch if the head has another structure than those that are written here.

    HeadMismatch is raised for heads that are not EAGLE-3, have missing or additional tensors (d2t, t2d and
    embed_tokens.weight are allowed and ignored), are narrower than the base model without `embed_proj.weight`
    or have it without being narrower, or set "rope_scaling" or "norm_before_residual". Errors of the loader,
    for a directory without a checkpoint or a config that is not supported, pass through. If the head has no
    d2t, the draft ids are 0 .. draft_vocab_size - 1. A config without "rope_theta" has 10000, one without
    "rms_norm_eps" has DEFAULT_NORM_EPS. A head without an lm_head of its own is read as one that shares the
    base model's.
    """
    checkpoint = Checkpoint.open(directory)
    check_supported(checkpoint)
    shape = read_shape(checkpoint, base_config)
    fields = checkpoint.settings
    optional = [name for name in OPTIONAL_TENSORS if name in checkpoint]
    names = {name: name.replace(f"{FIRST_LAYER}.", "layers.0.") for name in (*TENSOR_NAMES, *optional)}
    is_plain = kind_of(checkpoint) == "eagle3" and set(checkpoint.names()) - IGNORED_TENSORS == set(
        names.values()
    )
    is_narrow = shape.hidden != base_config.hidden
    if (
        not is_plain
        or is_narrow != ("embed_proj.weight" in optional)
        or fields.get("rope_scaling")
        or checkpoint.flag("norm_before_residual")
    ):
        raise HeadMismatch(f"{directory}: only heads that `specsot train` wrote can be continued from")
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
        eps=float(fields.get("rms_norm_eps", DEFAULT_NORM_EPS)),
        shares_lm_head=OWN_LM_HEAD not in optional,
    )
    tensors = {
        name: checkpoint.tensor(source_name, torch.float32, "cpu") for name, source_name in names.items()
    }
    return HeadFormat(sizes, taps, draft_ids), tensors


def _usual_taps(layers: int) -> tuple[int, ...] | None:
    """Return the taps of the reference implementation; None if the base model has too few layers for them.

    layers: Number of layers of the base model.
    """
    return (2, layers // 2, layers - 3) if layers >= MIN_LAYERS else None
