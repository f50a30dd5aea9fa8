"""A DFlash or DSpark head in training, and its directory. It drafts blocks of tokens, each in one pass, from
many positions of a sequence.

A block consists of the token at its anchor and of masks after it. Its rows see the base model's features of
the tokens before the anchor, and each other; with `causal` (the `causal_head` of JetSpec) they only see the
earlier rows of the block. The row of a mask predicts the token at its position. A DSpark head also has a
Markov head, by which the token before a position changes the logits of the position. The layout of the
directory is that of z-lab (github.com/z-lab/dflash) or, with a Markov head, of SpecForge;
`specsot_drafter.heads.loading` and other systems read both.
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
from specsot_lab.train.unrolling import Teacher, TokenBatch

# Layers of a new head. Published heads have 5, for base models of 30 times the size.
DEFAULT_LAYERS = 3
# Columns of a new DSpark head's Markov head, or the base model's hidden size if that is less. Precedent:
# published heads.
MARKOV_RANK = 256
# Taps of a new head. Precedent: published heads have 5.
NUM_TAPS = 5
# Positions of a row for each block that is learned from the row. Untuned.
POSITIONS_PER_ANCHOR = 16
# Blocks of a row that are drafted in one pass when a head is measured. Bounds the memory. Untuned.
ANCHORS_PER_PASS = 64


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The properties of a block head that are fixed before training.

    sizes: Widths and counts.
    taps: Layers of the base model whose inputs the head reads, ascending.
    layers: Number of layers of the head.
    block: Number of rows of a block, its anchor included.
    mask: Token id that all rows but the anchor have.
    causal: True if a row of a block sees only the earlier rows of the block.
    rank: Columns of the Markov head of a DSpark head. 0: the head has none, which makes it a DFlash head.
    """

    sizes: HeadSizes
    taps: tuple[int, ...]
    layers: int
    block: int
    mask: int
    causal: bool
    rank: int = 0


def block_format(base_config: ModelConfig, plan: HeadPlan, depth: int, mask_id: int) -> BlockFormat:
    """Return the format of a new head that drafts `depth` tokens in a block.

    base_config: Config of the base model.
    plan: Format that the user asked for. Fields that are None take the base model's values or the defaults.
    depth: Number of drafted tokens of a block.
    mask_id: Token id that stands for tokens that are not known yet.
    Raises InvalidRequest if the taps do not ascend within the layers of the base model.

    The head has the base model's width, heads and vocabulary; `plan.layers` and `plan.intermediate` of None
    or 0 count as not given, and DEFAULT_LAYERS layers is the default. A block has depth + 1 rows, because its
    first row is the anchor. The error also covers duplicate taps and taps outside 1 .. layers. `plan.width`,
    `plan.vocabulary` and `plan.shared_lm_head` are not used.
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
    rank = min(MARKOV_RANK, base_config.hidden) if plan.kind == "dspark" else 0
    return BlockFormat(sizes, taps, plan.layers or DEFAULT_LAYERS, depth + 1, mask_id, plan.causal_head, rank)


def _usual_taps(layers: int) -> tuple[int, ...]:
    """Return ascending taps that are spread evenly from the second layer's output to that of the third last
    layer, as published heads have them. A small base model has fewer than NUM_TAPS different taps.

        36 layers -> taps 2, 10, 18, 26, 34

    layers: Number of layers of the base model.
    """
    last = max(layers - 3, 1)
    return tuple(sorted({1 + round(1 + number * (last - 1) / (NUM_TAPS - 1)) for number in range(NUM_TAPS)}))


class LearningBlockHead(nn.Module):
    """A block head in training, whose parameters have their published names.

    head_format: Sizes, number of layers, mask and taps of the head.
    """

    def __init__(self, head_format: BlockFormat) -> None:
        """Make the layers. Their weights are random until they are initialised. `fc` and `hidden_norm` make
        features of tapped states; the head has no embedding and no lm_head of its own.

        head_format: Sizes, number of layers, mask and taps of the head.
        """
        super().__init__()
        sizes = head_format.sizes
        self.head_format = head_format
        self.fc = nn.Linear(sizes.states, sizes.hidden, bias=False)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)
        self.layers = nn.ModuleList(_BlockLayer(head_format) for _ in range(head_format.layers))
        self.norm = RmsNorm(sizes.hidden, sizes.eps)
        self.markov_head = _MarkovHead(sizes.vocab, head_format.rank) if head_format.rank else None

    def forward(self, embeddings: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """Return the states that the lm_head reads, [batch, blocks, block, hidden].

        embeddings: [batch, blocks, block, hidden] embeddings of the anchors and masks.
        states: [batch, length, num_taps * hidden] tapped states of the base model.
        anchors: [batch, blocks] positions of the blocks' first tokens.

        The states pass through the head's last norm. The row of a mask at index i of a block is what predicts
        the token at position anchor + i.
        """
        features = self.hidden_norm(self.fc(states))
        x = embeddings
        for layer in self.layers:
            x = layer(x, features, anchors)
        return self.norm(x)


class _BlockLayer(nn.Module):
    """One layer of a block head.

    head_format: Format of the head.
    """

    def __init__(self, head_format: BlockFormat) -> None:
        """Make the two norms, the attention and the MLP.

        head_format: Format of the head.
        """
        super().__init__()
        sizes = head_format.sizes
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = _BlockAttention(head_format)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Return the layer's output, [batch, blocks, block, hidden].

        x: [batch, blocks, block, hidden] the layer's input.
        features: [batch, length, hidden] features of the sequences' tokens.
        anchors: [batch, blocks] positions of the blocks' first tokens.
        """
        x = x + self.self_attn(self.input_layernorm(x), features, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class _BlockAttention(nn.Module):
    """Attention of the rows of blocks to the tokens before their anchor, and to each other.

    head_format: Sizes of the head, and whether its blocks are causal.
    """

    def __init__(self, head_format: BlockFormat) -> None:
        """Make the projections without biases, and one norm each for the queries and the keys of a head.

        head_format: Sizes of the head, and whether its blocks are causal.
        """
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

        inputs: [batch, blocks, block, hidden] normed input of the layer.
        features: [batch, length, hidden] features of the sequences' tokens. A block sees those before its
            anchor.
        anchors: [batch, blocks] positions of the blocks' first tokens. Row i of a block has the position
            anchor + i.

        If the head is causal, row i sees the rows 0 .. i of its block, otherwise all rows of its block. Rows
        of other blocks are never seen. A block at position 0 sees no features, only itself.
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
        # [batch, blocks, length]
        precedes_anchor = torch.arange(length, device=inputs.device) < anchors[..., None]
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
        """Return a projection with its heads apart: [batch, .., heads * head_dim] -> [batch, heads, ..,
        head_dim].

        x: [batch, .., heads * head_dim] queries, keys or values.
        """
        return x.unflatten(-1, (-1, self.sizes.head_dim)).movedim(-2, 1)


class _MarkovHead(nn.Module):
    """The part of a DSpark head that makes a position depend on the token before it: W2 W1[token]."""

    def __init__(self, vocab: int, rank: int) -> None:
        """Make both matrices, with published names.

        vocab: Number of token ids.
        rank: Columns of W1 and W2.
        """
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what is added to the logits after each token, [num_rows, vocab].

        tokens: [num_rows] token ids.
        """
        return self.markov_w2(self.markov_w1(tokens))


class BlockLearning:
    """Computes losses and greedy drafts of a block head, for `Trainer`."""

    def __init__(
        self, head: LearningBlockHead, teacher: Teacher, lm_head: Tensor, mixed_precision: bool
    ) -> None:
        """Prepare losses and drafts.

        head: The head in training.
        teacher: The base model.
        lm_head: The base model's lm_head, [vocab_size, hidden]; it is not learned.
        mixed_precision: True to multiply in bf16, False to multiply in fp32.

        The lm_head is converted to bf16 or fp32 accordingly, and copied.
        """
        self._head = head
        self._teacher = teacher
        self._mixed_precision = mixed_precision
        # A tensor that was made in inference mode cannot be saved for a gradient; its copy can.
        self._lm_head = lm_head.to(torch.bfloat16 if mixed_precision else torch.float32).clone()
        self._depth = head.head_format.block - 1

    def loss(self, batch: TokenBatch, decay: float) -> Tensor:
        """Return the weighted mean cross-entropy to the base model's distributions, over the learned
        positions of blocks at random anchors. Return 0 if no position counts.

        batch: The token ids, and which of them are learned.
        decay: Position k of a block, counted from 0, has the weight decay**k.

        A position counts if its token and all earlier tokens of its block are learned, and its anchor is
        valid. The target of a position is the base model's distribution, given the tokens before it in the
        sequence. The sum of the weights in the denominator is at least 1.
        """
        base_outputs = self._teacher.forward(batch.tokens)
        anchors, valid = self._anchors(batch)
        positions = anchors[..., None] + torch.arange(1, self._depth + 1, device=anchors.device)
        learned = valid[..., None] & self._learned(batch, positions)
        weights = decay ** torch.arange(self._depth, device=anchors.device).expand(positions.shape)[learned]
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand(positions.shape)[
            learned
        ]
        target_probs = (
            self._teacher.logits(base_outputs.hidden[rows, positions[learned] - 1])
            .clone()
            .float()
            .softmax(-1)
        )
        with self._autocast():
            outputs = self._draft(batch, base_outputs.states, anchors)[..., 1:, :][learned]
            before = batch.tokens[rows, positions[learned] - 1]
            losses = F.cross_entropy(self._logits(outputs, before).float(), target_probs, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    @torch.no_grad()
    def hits(self, batch: TokenBatch) -> Tensor:
        """Return bool [batch, length, depth] as `Unrolling.hits` does: entry [i, j, k] is True if the greedy
        block whose anchor is token j + 1 drafts token j + 2 + k of sequence i. It is False if that token, or
        one before it in the block, is not learned.

        batch: The token ids, and which of them are learned.

        Entries whose block has no further positions within the row are False, as are all entries of the last
        index of `length`. The anchors of all positions but the first are tried, ANCHORS_PER_PASS at a time,
        without gradients. A DSpark head reads the sequence's own tokens before a position: these are its
        drafts, if those are hits.
        """
        base_outputs = self._teacher.forward(batch.tokens)
        (count, length) = batch.tokens.shape
        device = batch.tokens.device
        all_hits = torch.zeros(count, length, self._depth, dtype=torch.bool, device=device)
        for first in range(1, length, ANCHORS_PER_PASS):
            anchors = torch.arange(first, min(first + ANCHORS_PER_PASS, length), device=device)
            anchors = anchors.expand(count, -1)
            positions = anchors[..., None] + torch.arange(1, self._depth + 1, device=device)
            rows = self._learned(batch, positions)
            with self._autocast():
                outputs = self._draft(batch, base_outputs.states, anchors)[..., 1:, :][rows]
                drafted_tokens = torch.zeros_like(positions)
                before = self._values_at(batch.tokens, positions - 1)[rows]
                parts = zip(outputs.split(8192), before.split(8192))
                drafted_tokens[rows] = torch.cat([self._logits(*part).argmax(-1) for part in parts])
            is_hit = drafted_tokens == self._values_at(batch.tokens, positions)
            all_hits[:, first - 1 : first - 1 + anchors.shape[1]] = is_hit & rows
        return all_hits

    def _draft(self, batch: TokenBatch, states: Tensor, anchors: Tensor) -> Tensor:
        """Return the head's outputs for blocks, [batch, blocks, depth + 1, hidden]. The first row of a block
        is that of its anchor.

        batch: The token ids.
        states: [batch, length, num_taps * hidden] tapped states of the base model.
        anchors: [batch, blocks] positions of the blocks' first tokens.

        All rows of a block but the first get the embedding of the mask token. The base model's embeddings are
        not learned.
        """
        ids = batch.tokens.new_full((*anchors.shape, self._depth + 1), self._head.head_format.mask)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        embeddings = F.embedding(ids, self._teacher.embedding).clone().float()
        return self._head(embeddings, states.float(), anchors)

    def _logits(self, outputs: Tensor, before: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] by the base model's lm_head, and by the Markov head if there
        is one.

        outputs: [num_rows, hidden] outputs of the head.
        before: [num_rows] the token before each row's position.
        """
        logits = F.linear(outputs.to(self._lm_head.dtype), self._lm_head)
        markov = self._head.markov_head
        return logits if markov is None else logits + markov(before)

    def _anchors(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return int [batch, blocks] random anchors, which are positions that a learned token follows, and
        bool [batch, blocks] which of them are valid. Anchors are invalid where a row has too few such
        positions. The first position is never an anchor.

        The seed is made of the batch's tokens, so that an interrupted run continues as it would have without
        the interruption.

        batch: The token ids, and which of them are learned.

        There are max(length // POSITIONS_PER_ANCHOR, 1) anchors per row. The last position is never an anchor
        either, since no token follows it.
        """
        generator = torch.Generator(batch.tokens.device).manual_seed(int(batch.tokens.sum()))
        may_be_anchor = batch.learned.roll(-1, 1)
        may_be_anchor[:, -1] = may_be_anchor[:, 0] = False
        scores = torch.rand(
            may_be_anchor.shape, generator=generator, device=may_be_anchor.device
        ).masked_fill(~may_be_anchor, -1)
        best_scores, anchors = scores.topk(max(batch.tokens.shape[1] // POSITIONS_PER_ANCHOR, 1), 1)
        return anchors, best_scores >= 0

    def _learned(self, batch: TokenBatch, positions: Tensor) -> Tensor:
        """Return bool [batch, blocks, depth]: True where the position and all earlier positions of its block
        hold learned tokens.

        batch: The token ids, and which of them are learned.
        positions: [batch, blocks, depth] positions, ascending in each block; they may lie after the end of
            the row.
        """
        is_inside = positions < batch.tokens.shape[1]
        return (self._values_at(batch.learned, positions) & is_inside).cumprod(-1).bool()

    def _values_at(self, values: Tensor, positions: Tensor) -> Tensor:
        """Return the values at some positions, [batch, blocks, depth]. A position after the end has the last
        value of its row.

        values: [batch, length] one value for each position.
        positions: [batch, blocks, depth] positions.
        """
        return values.gather(1, positions.clamp(max=values.shape[1] - 1).flatten(1)).view(positions.shape)

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the context in which matrices are multiplied: in bf16 for mixed precision, unchanged
        otherwise.
        """
        return torch.autocast(self._lm_head.device.type, torch.bfloat16, enabled=self._mixed_precision)


def write_block_head(directory: Path, head: LearningBlockHead, base: ModelConfig, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors of a block head, each whole or not at all.

    directory: Directory of the head; it is created if missing.
    head: The head.
    base: Config of the base model.
    dtype: Data type of the weights in the file.
    """
    write_directory(directory, dict(head.state_dict()), _config(head.head_format, base, dtype), dtype)


def _config(head_format: BlockFormat, base_config: ModelConfig, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the config of a head as it is published.

    head_format: Format of the head.
    base_config: Config of the base model.
    dtype: Data type of the weights in the file.
    """
    sizes = head_format.sizes
    dspark = {"markov_rank": head_format.rank, "markov_head_type": "vanilla", "sample_from_anchor": False}
    return {
        "architectures": ["DSparkDraftModel" if head_format.rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": head_format.block,
        "dflash_config": {
            "mask_token_id": head_format.mask,
            "target_layer_ids": [tap - 1 for tap in head_format.taps],
            "causal_head": head_format.causal,
            **(dspark if head_format.rank else {}),
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
