"""The training-time test: a head drafts several steps from every row of a text at once, on its own outputs.

Row j pairs the base's state j with token j + 1. Its step k reads token j + 1 + k and the head's own output
of step k - 1, and is to say what the base says at position j + 1 + k, which is token j + 2 + k. (EAGLE-3's
training-time test, as its authors and SpecForge have it: the text's rows are seen causally, of the drafts
each row sees its own.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot_lab.train.head import LearningHead, Memory
from specsot_lab.train.teacher import Lesson, Teacher


@dataclass(frozen=True, slots=True)
class UnrolledBatch:
    """tokens: [batch, length] ids; learned: which of them are to be guessed."""

    tokens: Tensor
    learned: Tensor


@dataclass(frozen=True, slots=True)
class Step:
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
        self._head, self._teacher, self._drafted, self._depth = head, teacher, drafted, depth
        self._mixed = mixed
        known = torch.zeros(teacher.decoder.config.vocab, dtype=torch.bool, device=drafted.device)
        self._known = known.index_fill(0, drafted, True)

    def loss(self, batch: UnrolledBatch, decay: float) -> Tensor:
        """Cross-entropy to the base's distribution over the draft vocabulary, weighted over the steps.

        Rows whose likeliest token the head cannot draft say nothing.
        """
        lesson = self._teacher.read(batch.tokens)
        taught = self._teach(lesson, batch)
        total, weights = torch.zeros((), device=batch.tokens.device), 0.0
        with self._numbers():
            for k, step in enumerate(self._steps(lesson, batch, taught.rows)):
                wanted = taught.chances[step.said]
                if len(wanted):
                    logits = self._head.logits(step.outputs).float()
                    total = total + decay**k * F.cross_entropy(logits, wanted)
                weights += decay**k
        return total / weights

    @torch.no_grad()
    def hits(self, batch: UnrolledBatch) -> Tensor:
        """[batch, length, depth]: whether row j's step k guessed token j + 2 + k, drafting greedily."""
        lesson = self._teacher.read(batch.tokens)
        found = torch.zeros(*batch.tokens.shape, self._depth, dtype=torch.bool, device=batch.tokens.device)
        with self._numbers():
            for k, step in enumerate(self._steps(lesson, batch, batch.learned.roll(-1, 1))):
                guessed = self._drafted[self._head.logits(step.outputs).argmax(-1)]
                found[..., k][step.rows] = guessed == batch.tokens.roll(-2 - k, 1)[step.rows]
        return found

    def _steps(self, lesson: Lesson, batch: UnrolledBatch, told: Tensor) -> Iterator[Step]:
        """told: [batch, length] positions whose next token is to be guessed."""
        numbers = told.reshape(-1).cumsum(0).sub_(1).view(told.shape)
        table, memory = self._teacher.embedding, Memory()
        features = self._head.fc(lesson.states.float())
        for k in range(self._depth):
            embeddings = F.embedding(batch.tokens.roll(-1 - k, 1), table).clone()
            features = self._head.step(embeddings, features, memory)
            rows = told.roll(-1 - k, 1)
            rows[:, -1 - k :] = False  # came around from the text's begin
            yield Step(rows, features[rows], numbers.roll(-1 - k, 1)[rows])

    def _teach(self, lesson: Lesson, batch: UnrolledBatch) -> _Taught:
        """What the base says wherever a learned token follows, if the head can draft what it says."""
        rows = batch.learned.roll(-1, 1)
        rows[:, -1] = False
        logits = self._teacher.logits(lesson.hidden[rows]).clone()
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
