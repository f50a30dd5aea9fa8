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
from specsot_lab.train.head import HeadSizes, Mlp, RmsNorm, rotate, turns_at, write_directory
from specsot_lab.train.settings import HeadPlan
from specsot_lab.train.unrolling import Teacher, UnrolledBatch

# of a new head; published ones have 5 of both, for bases of 30 times the size
LAYERS = 3
TAPS = 5
ANCHORS_SHARE = 16  # positions of a row for each block that is learned from it; not tuned
MEASURED_ANCHORS = 64  # blocks of a row that are drafted at once when a head is measured


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What of a head is not learned. block: rows of one, its anchor included. mask: id of all others."""

    sizes: HeadSizes
    taps: tuple[int, ...]
    layers: int
    block: int
    mask: int
    causal: bool


def block_format(base: ModelConfig, plan: HeadPlan, depth: int, mask: int) -> BlockFormat:
    """A new head for this base, that drafts `depth` tokens. Raises InvalidRequest for taps that cannot be."""
    taps = plan.taps or _usual_taps(base.layers)
    if list(taps) != sorted(set(taps)) or not 1 <= taps[0] <= taps[-1] <= base.layers:
        raise InvalidRequest(
            f"aux_layers must ascend within 1..{base.layers}, got {list(taps)}", "aux_layers"
        )
    sizes = HeadSizes(
        base.hidden, base.hidden, len(taps) * base.hidden, base.heads, base.kv_heads, base.head_dim,
        plan.intermediate or base.intermediate, base.vocab, base.rope.theta, base.eps,
    )  # fmt: skip
    return BlockFormat(sizes, taps, plan.layers or LAYERS, depth + 1, mask, plan.causal_head)


def _usual_taps(layers: int) -> tuple[int, ...]:
    """Spread evenly from the second layer's output to the third last's, as published heads have them."""
    last = max(layers - 3, 1)
    return tuple(sorted({1 + round(1 + each * (last - 1) / (TAPS - 1)) for each in range(TAPS)}))


class LearningBlockHead(nn.Module):
    """Its parameters have their published names."""

    def __init__(self, frame: BlockFormat) -> None:
        super().__init__()
        sizes = frame.sizes
        self.frame = frame
        self.fc = nn.Linear(sizes.states, sizes.hidden, bias=False)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)
        self.layers = nn.ModuleList(_BlockLayer(frame) for _ in range(frame.layers))
        self.norm = RmsNorm(sizes.hidden, sizes.eps)

    def forward(self, embeddings: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """What lm_head reads, shaped as embeddings.

        embeddings: [batch, blocks, block, hidden]. states: [batch, length, taps * hidden].
        anchors: [batch, blocks] positions.
        """
        features = self.hidden_norm(self.fc(states))
        x = embeddings
        for layer in self.layers:
            x = layer(x, features, anchors)
        return self.norm(x)


class _BlockLayer(nn.Module):
    def __init__(self, frame: BlockFormat) -> None:
        super().__init__()
        sizes = frame.sizes
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _BlockAttention(frame)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), features, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class _BlockAttention(nn.Module):
    def __init__(self, frame: BlockFormat) -> None:
        super().__init__()
        sizes = frame.sizes
        self.sizes = frame.sizes
        self.causal = frame.causal
        width = sizes.heads * sizes.head_dim
        narrow = sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, width, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)
        self.q_norm = RmsNorm(sizes.head_dim, sizes.eps)
        self.k_norm = RmsNorm(sizes.head_dim, sizes.eps)

    def forward(self, inputs: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """inputs: [batch, blocks, block, hidden]; features: [batch, length, hidden]."""
        blocks, block, length = *inputs.shape[1:3], features.shape[1]
        steps = torch.arange(block, device=inputs.device)
        near = turns_at(anchors[..., None] + steps, self.sizes)  # [batch, blocks, block, head_dim]
        far = turns_at(torch.arange(length, device=inputs.device), self.sizes)
        near_heads = (near[0][:, None], near[1][:, None])
        q = rotate(self.q_norm(self._heads(self.q_proj(inputs))), near_heads)
        own = rotate(self.k_norm(self._heads(self.k_proj(inputs))), near_heads)
        text = rotate(self.k_norm(self._heads(self.k_proj(features))), far)
        group = self.sizes.heads // self.sizes.kv_heads
        q = q.unflatten(1, (-1, group)).to(inputs.dtype)  # [batch, kv_heads, group, blocks, block, head_dim]
        before = torch.arange(length, device=inputs.device) < anchors[..., None]  # [batch, blocks, length]
        scores = q.flatten(3, 4) @ text.unsqueeze(2).transpose(-1, -2).to(q.dtype)
        scores = scores.unflatten(3, (blocks, block)).float()
        scores = scores.masked_fill(~before[:, None, None, :, None], -torch.inf)
        inner = (q @ own.unsqueeze(2).transpose(-1, -2).to(q.dtype)).float()
        if self.causal:
            inner = inner.masked_fill(steps > steps[:, None], -torch.inf)
        shares = torch.softmax(torch.cat((scores, inner), -1) * self.sizes.head_dim**-0.5, -1)
        told = self._heads(self.v_proj(features))
        said = self._heads(self.v_proj(inputs))
        shares = shares.to(told.dtype)
        out = (shares[..., :length].flatten(3, 4) @ told.unsqueeze(2)).unflatten(3, (blocks, block))
        out = out + shares[..., length:] @ said.unsqueeze(2)
        return self.o_proj(out.flatten(1, 2).movedim(1, -2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, .., width] to [batch, heads, .., head_dim]."""
        return x.unflatten(-1, (-1, self.sizes.head_dim)).movedim(-2, 1)


class BlockLearning:
    """A head and its base, as `trainer` asks them."""

    def __init__(self, head: LearningBlockHead, teacher: Teacher, lm_head: Tensor, mixed: bool) -> None:
        """lm_head: the base's, [vocabulary, hidden]. mixed: multiply in bf16."""
        self._head = head
        self._teacher = teacher
        self._mixed = mixed
        self._lm_head = lm_head.to(torch.bfloat16 if mixed else torch.float32).clone()  # for a gradient
        self._depth = head.frame.block - 1

    def loss(self, batch: UnrolledBatch, decay: float) -> Tensor:
        """Cross-entropy to the base's distribution at every place of blocks behind random anchors; each
        further place of a block counts `decay` times as much.
        """
        training_batch = self._teacher.read(batch.tokens)
        anchors, valid = self._anchors(batch)
        places = anchors[..., None] + torch.arange(1, self._depth + 1, device=anchors.device)
        learned = valid[..., None] & self._learned(batch, places)
        weights = decay ** torch.arange(self._depth, device=anchors.device).expand(places.shape)[learned]
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand(places.shape)[learned]
        wanted = (
            self._teacher.logits(training_batch.hidden[rows, places[learned] - 1]).clone().float().softmax(-1)
        )
        with self._numbers():
            outputs = self._draft(batch, training_batch.states, anchors)[..., 1:, :][learned]
            losses = F.cross_entropy(self._logits(outputs).float(), wanted, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    @torch.no_grad()
    def hits(self, batch: UnrolledBatch) -> Tensor:
        """See `Unrolling.hits`: a block behind every token."""
        training_batch = self._teacher.read(batch.tokens)
        (count, length) = batch.tokens.shape
        device = batch.tokens.device
        found = torch.zeros(count, length, self._depth, dtype=torch.bool, device=device)
        for first in range(1, length, MEASURED_ANCHORS):
            anchors = torch.arange(first, min(first + MEASURED_ANCHORS, length), device=device)
            anchors = anchors.expand(count, -1)
            places = anchors[..., None] + torch.arange(1, self._depth + 1, device=device)
            rows = self._learned(batch, places)
            with self._numbers():
                outputs = self._draft(batch, training_batch.states, anchors)[..., 1:, :][rows]
                guessed = torch.zeros_like(places)
                guessed[rows] = torch.cat([self._logits(part).argmax(-1) for part in outputs.split(8192)])
            right = guessed == self._at(batch.tokens, places)
            found[:, first - 1 : first - 1 + anchors.shape[1]] = right & rows
        return found

    def _draft(self, batch: UnrolledBatch, states: Tensor, anchors: Tensor) -> Tensor:
        ids = batch.tokens.new_full((*anchors.shape, self._depth + 1), self._head.frame.mask)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        embeddings = F.embedding(ids, self._teacher.embedding).clone().float()
        return self._head(embeddings, states.float(), anchors)

    def _logits(self, outputs: Tensor) -> Tensor:
        return F.linear(outputs.to(self._lm_head.dtype), self._lm_head)

    def _anchors(self, batch: UnrolledBatch) -> tuple[Tensor, Tensor]:
        """[batch, blocks] positions with a learned token behind them, and which are.

        The dice are the batch's, so that a run that was interrupted goes on as it would have.
        """
        dice = torch.Generator(batch.tokens.device).manual_seed(int(batch.tokens.sum()))
        open_to = batch.learned.roll(-1, 1)
        open_to[:, -1] = open_to[:, 0] = False
        drawn = torch.rand(open_to.shape, generator=dice, device=open_to.device).masked_fill(~open_to, -1)
        best, anchors = drawn.topk(max(batch.tokens.shape[1] // ANCHORS_SHARE, 1), 1)
        return anchors, best >= 0

    def _learned(self, batch: UnrolledBatch, places: Tensor) -> Tensor:
        """Which places, and all before them in their block, are learned tokens."""
        inside = places < batch.tokens.shape[1]
        return (self._at(batch.learned, places) & inside).cumprod(-1).bool()

    def _at(self, values: Tensor, places: Tensor) -> Tensor:
        """[batch, length] at [batch, blocks, depth] places."""
        return values.gather(1, places.clamp(max=values.shape[1] - 1).flatten(1)).view(places.shape)

    def _numbers(self) -> AbstractContextManager[object]:
        return torch.autocast(self._lm_head.device.type, torch.bfloat16, enabled=self._mixed)


def write_block_head(directory: Path, head: LearningBlockHead, base: ModelConfig, dtype: torch.dtype) -> None:
    """config.json and model.safetensors, each whole or not at all."""
    write_directory(directory, dict(head.state_dict()), _config(head.frame, base, dtype), dtype)


def _config(frame: BlockFormat, base: ModelConfig, dtype: torch.dtype) -> Mapping[str, Any]:
    sizes = frame.sizes
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": frame.block,
        "dflash_config": {
            "mask_token_id": frame.mask,
            "target_layer_ids": [tap - 1 for tap in frame.taps],
            "causal_head": frame.causal,
        },
        "num_target_layers": base.layers,
        "num_hidden_layers": frame.layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": base.vocab,
        "max_position_embeddings": base.max_positions,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * frame.layers,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
