"""The loop: steps, measurements, checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from specsot_lab.train import checkpoints
from specsot_lab.train.acceptance import ChainAcceptance, chains, none
from specsot_lab.train.head import LearningHead
from specsot_lab.train.rows import Row, batches, endless, pad
from specsot_lab.train.settings import Learning
from specsot_lab.train.unrolling import UnrolledBatch, Unrolling


@dataclass(frozen=True, slots=True)
class Measured:
    """Where a run stood. loss: mean over the steps since the measurement before; None at the begin."""

    step: int
    loss: float | None
    seconds: float
    acceptance: ChainAcceptance

    def as_json(self) -> dict[str, Any]:
        of = self.acceptance
        return {
            **{name: value for name, value in asdict(self).items() if name != "acceptance"},
            "per_step": round(of.per_step, 4),
            "tokens_per_lap": round(of.tokens_per_lap, 3),
            "by_depth": [round(share, 4) for share in of.by_depth],
        }


Told = Callable[[int, Measured | None], object]  # hears of every step, and of measurements


class Trainer:
    """One run."""

    def __init__(
        self, unrolling: Unrolling, head: LearningHead, learning: Learning, device: torch.device
    ) -> None:
        self._unrolling, self._head, self._learning, self._device = unrolling, head, learning, device
        self._optimiser = AdamW(head.parameters(), lr=learning.rate, betas=(0.9, 0.95), weight_decay=0.0)

    def train(
        self,
        rows: Sequence[Row],
        measured: Sequence[Row],
        folder: Path,
        asked: Mapping[str, Any],
        told: Told,
        publish: Callable[[], object],
    ) -> Measured:
        """From the folder's checkpoint, if it has one of this run, to the last step; what it came to.

        asked: what makes a run this one. publish: called at every checkpoint.
        """
        learning, began = self._learning, time.monotonic()
        first = checkpoints.restore(folder, self._head, self._optimiser, asked)
        losses: list[torch.Tensor] = []
        last = self._measure(first, losses, measured, began, folder, told)
        order = islice(endless(rows, learning.batch_tokens, learning.seed), first, learning.steps)
        for step, each in enumerate(order, first):
            losses.append(self._learn(self._batch(each), learning.rate_at(step)))
            told(step + 1, None)
            if (step + 1) % learning.every == 0 or step + 1 == learning.steps:
                last = self._measure(step + 1, losses, measured, began, folder, told)
                checkpoints.save(folder, self._head, self._optimiser, step + 1, asked)
                publish()
        return last

    def measure(self, rows: Sequence[Row]) -> ChainAcceptance:
        """Chains over these rows."""
        depth = self._learning.depth
        total = none(depth)
        for numbers in batches(rows, self._learning.batch_tokens, 0, 0):
            each = [rows[number] for number in numbers]
            for row, hits in zip(each, self._unrolling.hits(self._batch(each)).cpu().numpy()):
                total += chains(hits, row.learned, depth)
        return total

    def _learn(self, batch: UnrolledBatch, rate: float) -> torch.Tensor:
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.zero_grad(set_to_none=True)
        loss = self._unrolling.loss(batch, self._learning.decay)
        loss.backward()
        clip_grad_norm_(self._head.parameters(), self._learning.clip)
        self._optimiser.step()
        return loss.detach()

    def _measure(
        self,
        step: int,
        losses: list[torch.Tensor],
        rows: Sequence[Row],
        began: float,
        folder: Path,
        told: Told,
    ) -> Measured:
        loss = float(torch.stack(losses).mean()) if losses else None
        losses.clear()
        found = Measured(step, loss, round(time.monotonic() - began, 1), self.measure(rows))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(found.as_json()) + "\n")
        told(step, found)
        return found

    def _batch(self, rows: Sequence[Row]) -> UnrolledBatch:
        tokens, learned = pad(rows)
        return UnrolledBatch(
            torch.from_numpy(tokens).long().to(self._device), torch.from_numpy(learned).to(self._device)
        )
