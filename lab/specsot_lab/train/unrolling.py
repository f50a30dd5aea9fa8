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
    """A base with all its layers, and where it is tapped."""

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]) -> None:
        self.decoder = decoder
        self.taps = taps
        self._side_by_side = _side_by_side(decoder, taps)

    @property
    def embedding(self) -> Tensor:
        table = self.decoder.edges.embedding()
        assert isinstance(table, Tensor)
        return table

    def read(self, tokens: Tensor) -> TrainingBatch:
        """tokens: [batch, length], padded behind: no row sees what comes after it."""
        batch, length = tokens.shape
        hidden, states = self._forward(tokens.reshape(-1), batch, length)
        # Copies: what was made in inference mode may not be kept for a gradient.
        return TrainingBatch(states.clone().view(batch, length, -1), hidden.clone().view(batch, length, -1))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocabulary]."""
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
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
def _side_by_side(decoder: Decoder, taps: tuple[int, ...]) -> dict[int, Tensor]:
    """For each tap the matrix that puts its state into a place of its own: their sum is all of them."""
    hidden = decoder.config.hidden
    whole = torch.eye(len(taps) * hidden, dtype=decoder.dtype, device=decoder.device)
    return {tap: part.contiguous() for tap, part in zip(taps, whole.split(hidden, 1))}


def causal_plan(batch: int, first: int = 0) -> AttentionPlan:
    """Rows are `batch` whole sequences, one after the other; sequence i fills page `first` + i."""
    return AttentionPlan((), (), None, None, partial(_causal, pages=slice(first, first + batch)))


def next_plan(lengths: Tensor, columns: int) -> AttentionPlan:
    """One row a sequence, which sees the first `lengths` [batch] rows of its page: `columns` at most."""
    seen = torch.arange(columns, device=lengths.device) < lengths[:, None]
    return AttentionPlan((), (), None, None, partial(_next, seen=seen[:, None, None]))


def _causal(q: Tensor, kv_layer: Tensor, pages: slice) -> Tensor:
    rows, kv_heads, group, dim = q.shape
    batch = pages.stop - pages.start
    keys, values = (part[pages, :, : rows // batch] for part in kv_layer)
    queries = q.reshape(batch, -1, kv_heads * group, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2).reshape(rows, -1)


def _next(q: Tensor, kv_layer: Tensor, seen: Tensor) -> Tensor:
    """A KV head's queries are rows of one product: they see the same.

    Spelled out, since torch's own may build a plan for every new number of columns, which takes longer.
    """
    batch = q.shape[0]
    columns = seen.shape[-1]
    keys, values = (part[:batch, :, :columns] for part in kv_layer)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1).to(q.dtype) @ values).reshape(batch, -1)


@dataclass(frozen=True, slots=True)
class UnrolledBatch:
    """tokens: [batch, length] ids; learned: which of them are to be guessed."""

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
    """A head, its base, and the ids that it drafts."""

    def __init__(
        self, head: LearningHead, teacher: Teacher, drafted: Tensor, depth: int, mixed: bool
    ) -> None:
        """drafted: [draft vocabulary] ids of the base, ascending. mixed: multiply in bf16."""
        self._head = head
        self._teacher = teacher
        self._drafted = drafted
        self._depth = depth
        self._mixed = mixed
        known = torch.zeros(teacher.decoder.config.vocab, dtype=torch.bool, device=drafted.device)
        self._known = known.index_fill(0, drafted, True)

    def loss(self, batch: UnrolledBatch, decay: float) -> Tensor:
        """Cross-entropy to the base's distribution over the draft vocabulary, weighted over the steps.

        Rows whose likeliest token the head cannot draft say nothing.
        """
        training_batch = self._teacher.read(batch.tokens)
        taught = self._teach(training_batch, batch)
        total = torch.zeros((), device=batch.tokens.device)
        weights = 0.0
        with self._numbers():
            for k, step in enumerate(self._steps(training_batch, batch, taught.rows)):
                wanted = taught.chances[step.said]
                if len(wanted):
                    logits = self._head.logits(step.outputs).float()
                    total = total + decay**k * F.cross_entropy(logits, wanted)
                weights += decay**k
        return total / weights

    @torch.no_grad()
    def hits(self, batch: UnrolledBatch) -> Tensor:
        """[batch, length, depth]: whether row j's step k guessed token j + 2 + k, drafting greedily."""
        training_batch = self._teacher.read(batch.tokens)
        found = torch.zeros(*batch.tokens.shape, self._depth, dtype=torch.bool, device=batch.tokens.device)
        with self._numbers():
            for k, step in enumerate(self._steps(training_batch, batch, batch.learned.roll(-1, 1))):
                guessed = self._drafted[self._head.logits(step.outputs).argmax(-1)]
                found[..., k][step.rows] = guessed == batch.tokens.roll(-2 - k, 1)[step.rows]
        return found

    def _steps(
        self, training_batch: TrainingBatch, batch: UnrolledBatch, told: Tensor
    ) -> Iterator[UnrolledStep]:
        """told: [batch, length] positions whose next token is to be guessed."""
        numbers = told.reshape(-1).cumsum(0).sub_(1).view(told.shape)
        table = self._teacher.embedding
        memories = self._head.memories()
        features = self._head.fc(training_batch.states.float())
        for k in range(self._depth):
            tokens = batch.tokens.roll(-1 - k, 1)
            if k:
                tokens, features = self._head.hide(tokens, features)
            features = self._head.step(F.embedding(tokens, table).clone(), features, memories)
            rows = told.roll(-1 - k, 1)
            rows[:, -1 - k :] = False  # came around from the text's begin
            yield UnrolledStep(rows, features[rows], numbers.roll(-1 - k, 1)[rows])

    def _teach(self, training_batch: TrainingBatch, batch: UnrolledBatch) -> _Taught:
        """What the base says wherever a learned token follows, if the head can draft what it says."""
        rows = batch.learned.roll(-1, 1)
        rows[:, -1] = False
        logits = self._teacher.logits(training_batch.hidden[rows]).clone()
        draftable = self._known[logits.argmax(-1)]
        rows = rows.masked_scatter(rows, draftable)
        return _Taught(rows, logits[draftable][:, self._drafted].float().softmax(-1))

    def _numbers(self) -> AbstractContextManager[object]:
        return torch.autocast(self._drafted.device.type, torch.bfloat16, enabled=self._mixed)


@dataclass(frozen=True, slots=True)
class _Taught:
    """rows: [batch, length] positions; chances: for each of them [draft vocabulary]."""

    rows: Tensor
    chances: Tensor
