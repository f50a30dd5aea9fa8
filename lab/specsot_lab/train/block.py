"""A DFlash head while it learns: blocks drafted in one pass from many places of a text, and its directory.

A block is the token at its anchor and masks behind it. Its rows see what the base showed of the text in front
of the anchor, and each other (with `causal`, JetSpec's `causal_head`, those before them); the row of a mask
says what stands in its place. The layout is z-lab's (github.com/z-lab/dflash), which
`specsot_drafter.heads.loading` reads, and so do others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsot.checkpoint.config import ModelConfig
from specsot.errors import InvalidRequest
from specsot_lab.train.head import HeadSizes, Mlp, RmsNorm, angles_at, rotate, write_directory
from specsot_lab.train.settings import HeadPlan
from specsot_lab.train.unrolling import Teacher, UnrolledBatch

# Layers of a new head. Published heads have 5, for bases of 30 times the size.
LAYERS = 3
# Taps of a new head. Precedent: published heads have 5.
TAPS = 5
# Positions of a row for each block that is learned from it. Untuned.
ANCHORS_SHARE = 16  # positions of a row for each block that is learned from it; not tuned
# Blocks of a row that are drafted at once when a head is measured. Untuned.
MEASURED_ANCHORS = 64  # blocks of a row that are drafted at once when a head is measured


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What of a block head is not learned.

    sizes: widths and counts. taps: layers of the base whose inputs the head reads. layers: of the head.
        block: rows of a block, its anchor included. mask: token id that all rows but the anchor have. causal:
        rows of a block see only those before them.
    """

    sizes: HeadSizes
    taps: tuple[int, ...]
    layers: int
    block: int
    mask: int
    causal: bool


def block_format(base_config: ModelConfig, plan: HeadPlan, depth: int, mask_id: int) -> BlockFormat:
    """Return the format of a new head for this base, that drafts `depth` tokens.

    base_config: of the base. plan: what was asked for. depth: drafts of a block. mask_id: token id that
        stands for tokens that are not known yet.
    Raises InvalidRequest for taps that cannot be.
    """
    taps = plan.taps or _usual_taps(base_config.layers)
    if list(taps) != sorted(set(taps)) or not 1 <= taps[0] <= taps[-1] <= base_config.layers:
        raise InvalidRequest(
            f"aux_layers must ascend within 1..{base_config.layers}, got {list(taps)}", "aux_layers"
        )
    sizes = HeadSizes(
        hidden=base_config.hidden,
        base_hidden=base_config.hidden,
        states=len(taps) * base_config.hidden,
        heads=base_config.heads,
        kv_heads=base_config.kv_heads,
        head_dim=base_config.head_dim,
        intermediate=plan.intermediate or base_config.intermediate,
        vocab=base_config.vocab,
        theta=base_config.rope.theta,
        eps=base_config.eps,
    )
    return BlockFormat(sizes, taps, plan.layers or LAYERS, depth + 1, mask_id, plan.causal_head)


def _usual_taps(layers: int) -> tuple[int, ...]:
    """Return taps that are spread evenly from the second layer's output to the third last's, as published
    heads have them.

    layers: of the base; a small base has fewer than TAPS different ones.
    """
    last = max(layers - 3, 1)
    return tuple(sorted({1 + round(1 + number * (last - 1) / (TAPS - 1)) for number in range(TAPS)}))


class LearningBlockHead(nn.Module):
    """A block head that learns. Its parameters have their published names. head_format: sizes, layers and
    taps.
    """

    def __init__(self, head_format: BlockFormat) -> None:
        super().__init__()
        sizes = head_format.sizes
        self.frame = head_format
        self.fc = nn.Linear(sizes.states, sizes.hidden, bias=False)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)
        self.layers = nn.ModuleList(_BlockLayer(head_format) for _ in range(head_format.layers))
        self.norm = RmsNorm(sizes.hidden, sizes.eps)

    def forward(self, embeddings: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """Return what lm_head reads, [batch, blocks, block, hidden].

        embeddings: [batch, blocks, block, hidden]. states: [batch, length, num_taps * hidden] of the base.
            anchors: [batch, blocks] positions of the blocks' first tokens.
        """
        features = self.hidden_norm(self.fc(states))
        x = embeddings
        for layer in self.layers:
            x = layer(x, features, anchors)
        return self.norm(x)


class _BlockLayer(nn.Module):
    """One layer of a block head. head_format: sizes of the head."""

    def __init__(self, head_format: BlockFormat) -> None:
        super().__init__()
        sizes = head_format.sizes
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _BlockAttention(head_format)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Return the layer's output, [batch, blocks, block, hidden].

        x: [batch, blocks, block, hidden]. features: [batch, length, hidden] of the text. anchors: [batch,
            blocks] positions.
        """
        x = x + self.self_attn(self.input_layernorm(x), features, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class _BlockAttention(nn.Module):
    """Attention of the rows of blocks to the text before their anchor and to each other. head_format: sizes,
    and whether blocks are causal.
    """

    def __init__(self, head_format: BlockFormat) -> None:
        super().__init__()
        sizes = head_format.sizes
        self.sizes = head_format.sizes
        self.causal = head_format.causal
        width = sizes.heads * sizes.head_dim
        kv_width = sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, width, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)
        self.q_norm = RmsNorm(sizes.head_dim, sizes.eps)
        self.k_norm = RmsNorm(sizes.head_dim, sizes.eps)

    def forward(self, inputs: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Return the attention's output, [batch, blocks, block, hidden].

        inputs: [batch, blocks, block, hidden]. features: [batch, length, hidden] of the text. anchors:
            [batch, blocks] positions; a block sees the text before its anchor.
        """
        blocks, block, length = *inputs.shape[1:3], features.shape[1]
        steps = torch.arange(block, device=inputs.device)
        block_angles = angles_at(anchors[..., None] + steps, self.sizes)  # [batch, blocks, block, head_dim]
        text_angles = angles_at(torch.arange(length, device=inputs.device), self.sizes)
        block_angles_of_heads = (block_angles[0][:, None], block_angles[1][:, None])
        q = rotate(self.q_norm(self._heads(self.q_proj(inputs))), block_angles_of_heads)
        block_keys = rotate(self.k_norm(self._heads(self.k_proj(inputs))), block_angles_of_heads)
        text_keys = rotate(self.k_norm(self._heads(self.k_proj(features))), text_angles)
        group = self.sizes.heads // self.sizes.kv_heads
        q = q.unflatten(1, (-1, group)).to(inputs.dtype)  # [batch, kv_heads, group, blocks, block, head_dim]
        precedes_anchor = (
            torch.arange(length, device=inputs.device) < anchors[..., None]
        )  # [batch, blocks, length]
        scores = q.flatten(3, 4) @ text_keys.unsqueeze(2).transpose(-1, -2).to(q.dtype)
        scores = scores.unflatten(3, (blocks, block)).float()
        scores = scores.masked_fill(~precedes_anchor[:, None, None, :, None], -torch.inf)
        block_scores = (q @ block_keys.unsqueeze(2).transpose(-1, -2).to(q.dtype)).float()
        if self.causal:
            block_scores = block_scores.masked_fill(steps > steps[:, None], -torch.inf)
        weights = torch.softmax(torch.cat((scores, block_scores), -1) * self.sizes.head_dim**-0.5, -1)
        text_values = self._heads(self.v_proj(features))
        block_values = self._heads(self.v_proj(inputs))
        weights = weights.to(text_values.dtype)
        out = (weights[..., :length].flatten(3, 4) @ text_values.unsqueeze(2)).unflatten(3, (blocks, block))
        out = out + weights[..., length:] @ block_values.unsqueeze(2)
        return self.o_proj(out.flatten(1, 2).movedim(1, -2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, .., width] as [batch, heads, .., head_dim]."""
        return x.unflatten(-1, (-1, self.sizes.head_dim)).movedim(-2, 1)


class BlockLearning:
    """A head and its base, as `trainer` uses them."""

    def __init__(
        self, head: LearningBlockHead, teacher: Teacher, lm_head: Tensor, mixed_precision: bool
    ) -> None:
        """Prepare losses and drafts.

        head: the head that learns. teacher: the base. lm_head: the base's, [vocab_size, hidden].
            mixed_precision: multiply in bf16.
        """
        self._head = head
        self._teacher = teacher
        self._mixed = mixed_precision
        self._lm_head = lm_head.to(
            torch.bfloat16 if mixed_precision else torch.float32
        ).clone()  # for a gradient
        self._depth = head.frame.block - 1

    def loss(self, batch: UnrolledBatch, decay: float) -> Tensor:
        """Return the cross-entropy to the base's distribution at every place of blocks behind random anchors;
        each further place of a block counts `decay` times as much.

        batch: tokens and which are learned. decay: weight of place k is decay**k.
        """
        training_batch = self._teacher.read(batch.tokens)
        anchors, valid = self._anchors(batch)
        places = anchors[..., None] + torch.arange(1, self._depth + 1, device=anchors.device)
        learned = valid[..., None] & self._learned(batch, places)
        weights = decay ** torch.arange(self._depth, device=anchors.device).expand(places.shape)[learned]
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand(places.shape)[learned]
        target_probs = (
            self._teacher.logits(training_batch.hidden[rows, places[learned] - 1]).clone().float().softmax(-1)
        )
        with self._numbers():
            outputs = self._draft(batch, training_batch.states, anchors)[..., 1:, :][learned]
            losses = F.cross_entropy(self._logits(outputs).float(), target_probs, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    @torch.no_grad()
    def hits(self, batch: UnrolledBatch) -> Tensor:
        """Return [batch, length, depth] as `Unrolling.hits`: a block is drafted behind every token.

        batch: tokens and which are learned.
        """
        training_batch = self._teacher.read(batch.tokens)
        (count, length) = batch.tokens.shape
        device = batch.tokens.device
        all_hits = torch.zeros(count, length, self._depth, dtype=torch.bool, device=device)
        for first in range(1, length, MEASURED_ANCHORS):
            anchors = torch.arange(first, min(first + MEASURED_ANCHORS, length), device=device)
            anchors = anchors.expand(count, -1)
            places = anchors[..., None] + torch.arange(1, self._depth + 1, device=device)
            rows = self._learned(batch, places)
            with self._numbers():
                outputs = self._draft(batch, training_batch.states, anchors)[..., 1:, :][rows]
                drafted_tokens = torch.zeros_like(places)
                drafted_tokens[rows] = torch.cat(
                    [self._logits(part).argmax(-1) for part in outputs.split(8192)]
                )
            is_hit = drafted_tokens == self._at(batch.tokens, places)
            all_hits[:, first - 1 : first - 1 + anchors.shape[1]] = is_hit & rows
        return all_hits

    def _draft(self, batch: UnrolledBatch, states: Tensor, anchors: Tensor) -> Tensor:
        """Return the head's outputs for blocks, [batch, blocks, depth + 1, hidden].

        batch: tokens. states: [batch, length, num_taps * hidden] of the base. anchors: [batch, blocks]
            positions.
        """
        ids = batch.tokens.new_full((*anchors.shape, self._depth + 1), self._head.frame.mask)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        embeddings = F.embedding(ids, self._teacher.embedding).clone().float()
        return self._head(embeddings, states.float(), anchors)

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] by the base's lm_head. outputs: [num_rows, hidden]."""
        return F.linear(outputs.to(self._lm_head.dtype), self._lm_head)

    def _anchors(self, batch: UnrolledBatch) -> tuple[Tensor, Tensor]:
        """Return [batch, blocks] positions that a learned token follows, and which of them are valid.

        The generator's seed is made of the batch, so that a run that was interrupted continues as it would
        have.
        """
        generator = torch.Generator(batch.tokens.device).manual_seed(int(batch.tokens.sum()))
        may_be_anchor = batch.learned.roll(-1, 1)
        may_be_anchor[:, -1] = may_be_anchor[:, 0] = False
        scores = torch.rand(
            may_be_anchor.shape, generator=generator, device=may_be_anchor.device
        ).masked_fill(~may_be_anchor, -1)
        best_scores, anchors = scores.topk(max(batch.tokens.shape[1] // ANCHORS_SHARE, 1), 1)
        return anchors, best_scores >= 0

    def _learned(self, batch: UnrolledBatch, places: Tensor) -> Tensor:
        """Return which places, with all before them in their block, are learned tokens. places: [batch,
        blocks, depth] positions.
        """
        is_inside = places < batch.tokens.shape[1]
        return (self._at(batch.learned, places) & is_inside).cumprod(-1).bool()

    def _at(self, values: Tensor, places: Tensor) -> Tensor:
        """Return values [batch, length] at [batch, blocks, depth] places; a place after the end gives the
        last value.
        """
        return values.gather(1, places.clamp(max=values.shape[1] - 1).flatten(1)).view(places.shape)

    def _numbers(self) -> AbstractContextManager[object]:
        """Return the context in which products are computed: in bf16 for mixed precision, unchanged
        otherwise.
        """
        return torch.autocast(self._lm_head.device.type, torch.bfloat16, enabled=self._mixed)


def write_block_head(directory: Path, head: LearningBlockHead, base: ModelConfig, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors, each whole or not at all.

    directory: created if missing. head: the head. base: config of the base. dtype: of the weights in the
        file.
    """
    write_directory(directory, dict(head.state_dict()), _config(head.frame, base, dtype), dtype)


def _config(head_format: BlockFormat, base_config: ModelConfig, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the head's config as it is published. head_format: of the head. base_config: of the base. dtype:
    of the weights.
    """
    sizes = head_format.sizes
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": head_format.block,
        "dflash_config": {
            "mask_token_id": head_format.mask,
            "target_layer_ids": [tap - 1 for tap in head_format.taps],
            "causal_head": head_format.causal,
        },
        "num_target_layers": base_config.layers,
        "num_hidden_layers": head_format.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": base_config.vocab,
        "max_position_embeddings": base_config.max_positions,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * head_format.layers,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
