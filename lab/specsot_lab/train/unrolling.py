"""The training-time test: a head drafts several steps from every row of a sequence at once, on its own
outputs.

Row j pairs the base model's state j with token j + 1. Its step k reads token j + 1 + k and the head's own
output of step k - 1. It learns to predict the base model's distribution at position j + 1 + k, which is that
of token j + 2 + k. (This is the training-time test of EAGLE-3, as its authors and SpecForge implement it: the
rows of the sequence are seen causally, and of the drafts each row sees its own.) A P-EAGLE head reads its
mask in all steps after the first one, so that no step depends on a drafted token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot_lab.train.head import LearningHead
from specsot_lab.train.mtp import LearningMtp
from specsot_model.attention import AttentionPlan
from specsot_model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class BaseOutputs:
    """What the base model computes of a batch.

    states: [batch, length, num_taps * hidden] inputs of the tapped layers, next to each other.
    hidden: [batch, length, hidden] hidden states after the last layer.
    """

    states: Tensor
    hidden: Tensor


class Teacher:
    """A base model with all of its layers, whose states and distributions a head learns from.

    decoder: The base model.
    taps: Layers whose inputs the head reads.
    """

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]) -> None:
        """Prepare the matrices that put the taps' states next to each other, in the order of `taps`.

        decoder: The base model.
        taps: Layers whose inputs the head reads.
        """
        self.decoder = decoder
        self.taps = taps
        self._placements = _tap_placements(decoder, taps)

    @property
    def embedding(self) -> Tensor:
        """Return the base model's embedding table, [vocab_size, hidden_size].

        Fails with an AssertionError if the base model's table is not a plain tensor.
        """
        table = self.decoder.edges.embedding()
        assert isinstance(table, Tensor)
        return table

    def forward(self, tokens: Tensor) -> BaseOutputs:
        """Return what the base model computes of some sequences.

        tokens: [batch, length] token ids, padded at the end. No row sees later rows, so padding changes
            nothing.

        Nothing of the result requires a gradient. The rows of padding are computed, too.
        """
        batch, length = tokens.shape
        hidden, states = self._forward(tokens.reshape(-1), batch, length)
        # Tensors that were made in inference mode cannot be saved for a gradient; their copies can.
        return BaseOutputs(states.clone().view(batch, length, -1), hidden.clone().view(batch, length, -1))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, [num_rows, vocab_size].

        hidden: [num_rows, hidden_size] hidden states after the last layer.
        """
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Return hidden states [batch * length, hidden_size] and tapped states [batch * length, num_taps *
        hidden_size].

        tokens: [batch * length] token ids of all sequences, one sequence after the other.
        batch: Number of sequences.
        length: Number of tokens of each sequence, padding included.

        New KV with one page of `length` rows for each sequence is made in each call. Fails with an
        AssertionError if there are no taps.
        """
        decoder = self.decoder
        device = self.decoder.device
        positions = torch.arange(length, device=device).repeat(batch)
        slots = torch.arange(batch * length, device=device)
        kv = decoder.make_kv(batch, length)
        hidden, states = decoder.forward(
            decoder.embed(tokens), positions, slots, causal_plan(batch), kv, self._placements, tokens=tokens
        )
        assert states is not None, "every head taps at least one layer"
        return hidden, states


@torch.inference_mode()
def _tap_placements(decoder: Decoder, taps: tuple[int, ...]) -> dict[int, Tensor]:
    """Return for each tap the matrix [num_taps * hidden_size, hidden_size] that puts its state into columns
    of its own, so that the sum over all taps has the states next to each other.

        taps 2 and 5 -> tap 2 fills the first hidden_size columns, tap 5 the next ones

    decoder: The base model, for its width, data type and device.
    taps: Layers whose inputs the head reads.

    The matrices are parts of an identity matrix, in the order of the taps.
    """
    hidden = decoder.config.hidden
    identity = torch.eye(len(taps) * hidden, dtype=decoder.dtype, device=decoder.device)
    return {tap: part.contiguous() for tap, part in zip(taps, identity.split(hidden, 1))}


def causal_plan(batch: int, first: int = 0) -> AttentionPlan:
    """Return the attention plan of rows that are whole sequences, one after the other, each in a page of its
    own.

    batch: Number of sequences, all of the same length.
    first: Page of the first sequence; the others fill the following pages.
    """
    return AttentionPlan((), (), None, None, partial(_causal, pages=slice(first, first + batch)))


def next_plan(lengths: Tensor, max_columns: int) -> AttentionPlan:
    """Return the attention plan of one new row in each sequence. It sees the first rows of the sequence's
    page.

    lengths: [batch] number of rows of each sequence, the new one included.
    max_columns: Number of rows of a page that are read, at least the largest of the lengths.
    """
    visible = torch.arange(max_columns, device=lengths.device) < lengths[:, None]
    return AttentionPlan((), (), None, None, partial(_next, visible=visible[:, None, None]))


def _causal(q: Tensor, kv_layer: Tensor, pages: slice) -> Tensor:
    """Return causal attention over whole sequences, [num_rows, num_heads * head_dim].

    q: [num_rows, kv_heads, group, head_dim] queries.
    kv_layer: Keys and values of the layer, [2, num_pages, kv_heads, page_rows, head_dim].
    pages: Pages of the sequences; there are as many sequences as pages.

    The queries must be scaled already. The rows of `q` are those of all sequences, one sequence after the
    other, all equally long.
    """
    rows, kv_heads, group, dim = q.shape
    batch = pages.stop - pages.start
    keys, values = (part[pages, :, : rows // batch] for part in kv_layer)
    queries = q.reshape(batch, -1, kv_heads * group, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2).reshape(rows, -1)


def _next(q: Tensor, kv_layer: Tensor, visible: Tensor) -> Tensor:
    """Return attention of one row in each sequence, [batch, num_heads * head_dim].

    The products are written out, because torch's own attention may build a plan for every new number of
    columns, which takes longer. The queries of a KV head are rows of one product, since they see the same
    keys.

    q: [batch, kv_heads, group, head_dim] queries.
    kv_layer: Keys and values of the layer, [2, num_pages, kv_heads, page_rows, head_dim]; sequence i fills
        page i.
    visible: Bool [batch, 1, 1, columns], True for rows of the page that are seen.

    The result has the data type of `q`, whose queries must be scaled already; the softmax is computed in
    fp32.
    """
    batch = q.shape[0]
    columns = visible.shape[-1]
    keys, values = (part[:batch, :, :columns] for part in kv_layer)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~visible, -torch.inf)
    return (torch.softmax(scores, -1).to(q.dtype) @ values).reshape(batch, -1)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows to learn from, padded to one length.

    tokens: [batch, length] token ids.
    learned: [batch, length] True for tokens that are to be predicted.
    """

    tokens: Tensor
    learned: Tensor


@dataclass(frozen=True, slots=True)
class UnrolledStep:
    """One step of the training-time test.

    rows: Bool [batch, length], True for rows whose prediction counts.
    outputs: [num_counted_rows, hidden] the head's outputs of those rows.
    target_indexes: [num_counted_rows] for each of those rows, the index of its target among all target
        positions of the batch in their flat order. Target positions are those whose next token is to be
        predicted.
    """

    rows: Tensor
    outputs: Tensor
    target_indexes: Tensor


class Unrolling:
    """Computes losses and greedy drafts of an EAGLE-3 or P-EAGLE head, or of an MTP layer, by the
    training-time test, for `Trainer`.
    """

    def __init__(
        self,
        head: LearningHead | LearningMtp,
        teacher: Teacher,
        draft_ids: Tensor,
        depth: int,
        mixed_precision: bool,
    ) -> None:
        """Prepare the test.

        head: The head in training.
        teacher: The base model.
        draft_ids: [draft_vocab_size] token ids that the head drafts, ascending.
        depth: Number of steps of the test.
        mixed_precision: True to multiply in bf16, False to multiply in fp32.

        Token ids that are not in `draft_ids` cannot be drafted.
        """
        self._head = head
        self._teacher = teacher
        self._draft_ids = draft_ids
        self._depth = depth
        self._mixed_precision = mixed_precision
        known = torch.zeros(teacher.decoder.config.vocab, dtype=torch.bool, device=draft_ids.device)
        self._is_draftable = known.index_fill(0, draft_ids, True)

    def loss(self, batch: TokenBatch, decay: float) -> Tensor:
        """Return the cross-entropy to the base model's distribution over the draft vocabulary: for each step
        the mean over its rows, and of the steps the weighted mean. A step without rows counts as 0.

        Rows do not count if the head cannot draft the token that the base model finds most probable.

        batch: The token ids, and which of them are learned.
        decay: Step k, counted from 0, has the weight decay**k.

        Without any row that counts, the loss is 0. The weights of all steps count in the mean's denominator,
        also those of steps without rows.
        """
        base_outputs = self._teacher.forward(batch.tokens)
        targets = self._targets_of(base_outputs, batch)
        total = torch.zeros((), device=batch.tokens.device)
        weight_sum = 0.0
        with self._autocast():
            for k, step in enumerate(self._steps(base_outputs, batch, targets.rows)):
                target_probs = targets.probabilities[step.target_indexes]
                if len(target_probs):
                    logits = self._head.logits(step.outputs).float()
                    total = total + decay**k * F.cross_entropy(logits, target_probs)
                weight_sum += decay**k
        return total / weight_sum

    @torch.no_grad()
    def hits(self, batch: TokenBatch) -> Tensor:
        """Return bool [batch, length, depth]: entry [i, j, k] is True if step k of row j, drafting greedily,
        drafts token j + 2 + k of sequence i. It is False if that token is not learned. Entries for tokens
        after the end of the row mean nothing.

        batch: The token ids, and which of them are learned.

        No gradients are computed. Tokens that the head cannot draft are False.
        """
        base_outputs = self._teacher.forward(batch.tokens)
        all_hits = torch.zeros(*batch.tokens.shape, self._depth, dtype=torch.bool, device=batch.tokens.device)
        with self._autocast():
            for k, step in enumerate(self._steps(base_outputs, batch, batch.learned.roll(-1, 1))):
                drafted_tokens = self._draft_ids[self._head.logits(step.outputs).argmax(-1)]
                all_hits[..., k][step.rows] = drafted_tokens == batch.tokens.roll(-2 - k, 1)[step.rows]
        return all_hits

    def _steps(
        self, base_outputs: BaseOutputs, batch: TokenBatch, is_target: Tensor
    ) -> Iterator[UnrolledStep]:
        """Yield the steps of the test, as many as the depth.

        base_outputs: What the base model computed of the batch.
        batch: The token ids.
        is_target: Bool [batch, length], True for positions whose next token is to be predicted.

        A step after the first one reads the features that the step before returned, and the tokens one
        position further on; a P-EAGLE head reads its mask instead. A row does not count in step k if its
        target lies after the end of the row.
        """
        target_numbers = is_target.reshape(-1).cumsum(0).sub_(1).view(is_target.shape)
        table = self._teacher.embedding
        kv_by_layer = self._head.empty_kv()
        features = self._head.features(base_outputs.states.float())
        for k in range(self._depth):
            tokens = batch.tokens.roll(-1 - k, 1)
            if k:
                tokens, features = self._head.mask_inputs(tokens, features)
            features = self._head.forward_step(F.embedding(tokens, table).clone(), features, kv_by_layer)
            counted_rows = is_target.roll(-1 - k, 1)
            # roll() moved flags from the beginning of the row to its end.
            counted_rows[:, -1 - k :] = False
            yield UnrolledStep(
                counted_rows, features[counted_rows], target_numbers.roll(-1 - k, 1)[counted_rows]
            )

    def _targets_of(self, base_outputs: BaseOutputs, batch: TokenBatch) -> _Targets:
        """Return the base model's distributions at all positions that a learned token follows. Positions are
        left out if the head cannot draft the token that the base model finds most probable.

        base_outputs: What the base model computed of the batch.
        batch: The token ids, and which of them are learned.

        The last position of a row is never a target. The distributions are in fp32 and over the draft
        vocabulary alone, so that each sums to 1.
        """
        rows = batch.learned.roll(-1, 1)
        rows[:, -1] = False
        logits = self._teacher.logits(base_outputs.hidden[rows]).clone()
        draftable = self._is_draftable[logits.argmax(-1)]
        rows = rows.masked_scatter(rows, draftable)
        return _Targets(rows, logits[draftable][:, self._draft_ids].float().softmax(-1))

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the context in which matrices are multiplied: in bf16 for mixed precision, unchanged
        otherwise.
        """
        return torch.autocast(self._draft_ids.device.type, torch.bfloat16, enabled=self._mixed_precision)


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the base model predicts.

    rows: Bool [batch, length], True for positions that count as targets.
    probabilities: [num_targets, draft_vocab_size] the base model's distribution at each of these positions,
        in their flat order.
    """

    rows: Tensor
    probabilities: Tensor
