"""The training-time test: a head drafts several steps from every row of a text at once, on its own outputs.

Row j pairs the base's state j with token j + 1. Its step k reads token j + 1 + k and the head's own output
of step k - 1, and is to say what the base says at position j + 1 + k, which is token j + 2 + k. (EAGLE-3's
training-time test, as its authors and SpecForge have it: the text's rows are seen causally, of the drafts
each row sees its own.) A P-EAGLE head reads its mask in all further steps: none waits for another.
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
from specsot_model.attention import AttentionPlan
from specsot_model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch as the base sees it.

    states: [batch, length, taps * hidden], the tapped layers' inputs side by side.
    hidden: [batch, length, hidden] behind the last layer.
    """

    states: Tensor
    hidden: Tensor


class Teacher:
    """A base with all its layers, and where it is tapped. decoder: the base. taps: layers whose input the
    head reads.
    """

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]) -> None:
        self.decoder = decoder
        self.taps = taps
        self._side_by_side = _tap_placements(decoder, taps)

    @property
    def embedding(self) -> Tensor:
        """Return the base's embedding table, [vocab_size, hidden_size]."""
        table = self.decoder.edges.embedding()
        assert isinstance(table, Tensor)
        return table

    def read(self, tokens: Tensor) -> TrainingBatch:
        """Return what the base computes of these texts.

        tokens: [batch, length], padded at the end: no row sees what comes after it.
        """
        batch, length = tokens.shape
        hidden, states = self._forward(tokens.reshape(-1), batch, length)
        # Copies: what was made in inference mode may not be kept for a gradient.
        return TrainingBatch(states.clone().view(batch, length, -1), hidden.clone().view(batch, length, -1))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Return hidden states [batch * length, hidden_size] and tapped states [batch * length, num_taps *
        hidden_size].

        tokens: [batch * length] of all texts, one after the other.
        """
        decoder = self.decoder
        device = self.decoder.device
        positions = torch.arange(length, device=device).repeat(batch)
        slots = torch.arange(batch * length, device=device)
        kv = decoder.make_kv(batch, length)
        hidden, states = decoder.forward(
            decoder.embed(tokens), positions, slots, causal_plan(batch), kv, self._side_by_side
        )
        assert states is not None, "every head taps at least one layer"
        return hidden, states


@torch.inference_mode()
def _tap_placements(decoder: Decoder, taps: tuple[int, ...]) -> dict[int, Tensor]:
    """Return for each tap the matrix [num_taps * hidden_size, hidden_size] that puts its state into columns
    of its own: the sum over the taps is all states side by side.

    Taps 2 and 5 -> tap 2 fills the first hidden_size columns, tap 5 the next ones.
    """
    hidden = decoder.config.hidden
    identity = torch.eye(len(taps) * hidden, dtype=decoder.dtype, device=decoder.device)
    return {tap: part.contiguous() for tap, part in zip(taps, identity.split(hidden, 1))}


def causal_plan(batch: int, first: int = 0) -> AttentionPlan:
    """Return a plan in which rows are `batch` whole sequences, one after the other; sequence i fills page
    `first` + i.
    """
    return AttentionPlan((), (), None, None, partial(_causal, pages=slice(first, first + batch)))


def next_plan(lengths: Tensor, max_columns: int) -> AttentionPlan:
    """Return a plan for one new row in each sequence, which sees the first rows of its page.

    lengths: [batch] rows that each sequence has, the new one included. max_columns: the largest of them at
        least.
    """
    visible = torch.arange(max_columns, device=lengths.device) < lengths[:, None]
    return AttentionPlan((), (), None, None, partial(_next, visible=visible[:, None, None]))


def _causal(q: Tensor, kv_layer: Tensor, pages: slice) -> Tensor:
    """Return causal attention over whole sequences, [num_rows, num_heads * head_dim].

    q: [num_rows, kv_heads, group, head_dim]. kv_layer: keys and values by page. pages: those of the
        sequences.
    """
    rows, kv_heads, group, dim = q.shape
    batch = pages.stop - pages.start
    keys, values = (part[pages, :, : rows // batch] for part in kv_layer)
    queries = q.reshape(batch, -1, kv_heads * group, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2).reshape(rows, -1)


def _next(q: Tensor, kv_layer: Tensor, visible: Tensor) -> Tensor:
    """Return attention of one row in each sequence, [batch, num_heads * head_dim].

    Spelled out, since torch's own may build a plan for every new number of columns, which takes longer. A KV
    head's queries are rows of one product, since they see the same.

    q: [batch, kv_heads, group, head_dim]. kv_layer: keys and values by page. visible: [batch, 1, 1, columns]
        which rows are seen.
    """
    batch = q.shape[0]
    columns = visible.shape[-1]
    keys, values = (part[:batch, :, :columns] for part in kv_layer)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~visible, -torch.inf)
    return (torch.softmax(scores, -1).to(q.dtype) @ values).reshape(batch, -1)


@dataclass(frozen=True, slots=True)
class UnrolledBatch:
    """Rows to learn from, padded. tokens: [batch, length] token ids. learned: [batch, length] which of them
    are to be guessed.
    """

    tokens: Tensor
    learned: Tensor


@dataclass(frozen=True, slots=True)
class UnrolledStep:
    """One step of the test.

    rows:    [batch, length], whose guess counts.
    outputs: the head's, of those rows. said: for each the position whose next token it must guess.
    """

    rows: Tensor
    outputs: Tensor
    said: Tensor


class Unrolling:
    """A head, its base, and the ids that it drafts: computes losses and greedy drafts of the training-time
    test.
    """

    def __init__(
        self, head: LearningHead, teacher: Teacher, draft_ids: Tensor, depth: int, mixed_precision: bool
    ) -> None:
        """Prepare the test.

        head: the head that learns. teacher: the base. draft_ids: [draft_vocab_size] ids of the base,
            ascending. depth: steps of the test. mixed_precision: multiply in bf16.
        """
        self._head = head
        self._teacher = teacher
        self._drafted = draft_ids
        self._depth = depth
        self._mixed = mixed_precision
        known = torch.zeros(teacher.decoder.config.vocab, dtype=torch.bool, device=draft_ids.device)
        self._known = known.index_fill(0, draft_ids, True)

    def loss(self, batch: UnrolledBatch, decay: float) -> Tensor:
        """Return the cross-entropy to the base's distribution over the draft vocabulary, weighted over the
        steps.

        Rows whose likeliest token the head cannot draft do not count.

        batch: tokens and which are learned. decay: weight of step k is decay**k.
        """
        training_batch = self._teacher.read(batch.tokens)
        targets = self._targets_of(training_batch, batch)
        total = torch.zeros((), device=batch.tokens.device)
        weight_sum = 0.0
        with self._numbers():
            for k, step in enumerate(self._steps(training_batch, batch, targets.rows)):
                target_probs = targets.chances[step.said]
                if len(target_probs):
                    logits = self._head.logits(step.outputs).float()
                    total = total + decay**k * F.cross_entropy(logits, target_probs)
                weight_sum += decay**k
        return total / weight_sum

    @torch.no_grad()
    def hits(self, batch: UnrolledBatch) -> Tensor:
        """Return [batch, length, depth]: whether row j's step k drafts token j + 2 + k, drafting greedily.
        batch: tokens and which are learned.
        """
        training_batch = self._teacher.read(batch.tokens)
        found = torch.zeros(*batch.tokens.shape, self._depth, dtype=torch.bool, device=batch.tokens.device)
        with self._numbers():
            for k, step in enumerate(self._steps(training_batch, batch, batch.learned.roll(-1, 1))):
                drafted_tokens = self._drafted[self._head.logits(step.outputs).argmax(-1)]
                found[..., k][step.rows] = drafted_tokens == batch.tokens.roll(-2 - k, 1)[step.rows]
        return found

    def _steps(
        self, training_batch: TrainingBatch, batch: UnrolledBatch, is_target: Tensor
    ) -> Iterator[UnrolledStep]:
        """Yield the steps of the test, `depth` of them.

        training_batch: what the base computed. batch: tokens. is_target: [batch, length] positions whose next
            token is to be guessed.
        """
        target_numbers = is_target.reshape(-1).cumsum(0).sub_(1).view(is_target.shape)
        table = self._teacher.embedding
        memories = self._head.memories()
        features = self._head.fc(training_batch.states.float())
        for k in range(self._depth):
            tokens = batch.tokens.roll(-1 - k, 1)
            if k:
                tokens, features = self._head.hide(tokens, features)
            features = self._head.step(F.embedding(tokens, table).clone(), features, memories)
            counted_rows = is_target.roll(-1 - k, 1)
            counted_rows[:, -1 - k :] = False  # came around from the text's begin
            yield UnrolledStep(
                counted_rows, features[counted_rows], target_numbers.roll(-1 - k, 1)[counted_rows]
            )

    def _targets_of(self, training_batch: TrainingBatch, batch: UnrolledBatch) -> _Targets:
        """Return what the base says wherever a learned token follows, if the head can draft the base's
        choice.
        """
        rows = batch.learned.roll(-1, 1)
        rows[:, -1] = False
        logits = self._teacher.logits(training_batch.hidden[rows]).clone()
        draftable = self._known[logits.argmax(-1)]
        rows = rows.masked_scatter(rows, draftable)
        return _Targets(rows, logits[draftable][:, self._drafted].float().softmax(-1))

    def _numbers(self) -> AbstractContextManager[object]:
        """Return the context in which products are computed: in bf16 for mixed precision, unchanged
        otherwise.
        """
        return torch.autocast(self._drafted.device.type, torch.bfloat16, enabled=self._mixed)


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the base says. rows: [batch, length] positions that count. chances: for each of them
    [draft_vocab_size] probabilities.
    """

    rows: Tensor
    chances: Tensor
