"""The loop: steps, measurements, checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from specsot.errors import ModelError
from specsot_lab.train.block import BlockLearning
from specsot_lab.train.rows import Row, batches, endless, pad
from specsot_lab.train.settings import Learning
from specsot_lab.train.unrolling import UnrolledBatch, Unrolling

FILE = "state.safetensors"
MEMORY = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, for every parameter


def save(folder: Path, head: nn.Module, optimiser: AdamW, step: int, asked: Mapping[str, Any]) -> None:
    """One file, whole or not at all. asked: what the run was asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        tensors[f"weights.{name}"] = parameter.detach().cpu().contiguous()
        for kind in MEMORY:
            tensors[f"{kind}.{name}"] = optimiser.state[parameter][kind].detach().cpu().contiguous()
    fresh = folder / f"{FILE}.new"
    save_file(tensors, fresh, metadata={"step": str(step), "asked": json.dumps(asked, sort_keys=True)})
    fresh.replace(folder / FILE)


def restore(folder: Path, head: nn.Module, optimiser: AdamW, asked: Mapping[str, Any]) -> int:
    """Steps done; 0 where there is no checkpoint. Raises ModelError for one of another run, or damaged."""
    file = folder / FILE
    if not file.exists():
        return 0
    try:
        return _restore(file, head, optimiser, asked)
    except SafetensorError as error:
        raise ModelError(
            f"{file}: not a whole checkpoint ({error}); name another --output, or remove it"
        ) from None


@torch.no_grad()
def _restore(file: Path, head: nn.Module, optimiser: AdamW, asked: Mapping[str, Any]) -> int:
    with safe_open(file, framework="pt") as held:
        about: Mapping[str, str] = held.metadata() or {}
        if about.get("asked") != json.dumps(asked, sort_keys=True):
            raise ModelError(
                f"{file} is of a run that was asked for something else; name another --output, or remove it"
            )
        for name, parameter in head.named_parameters():
            parameter.copy_(held.get_tensor(f"weights.{name}"))
            optimiser.state[parameter] = {
                kind: _place(held.get_tensor(f"{kind}.{name}"), kind, parameter) for kind in MEMORY
            }
    return int(about["step"])


def _place(tensor: Tensor, kind: str, parameter: Tensor) -> Tensor:
    """AdamW counts its steps on the CPU, unless fused."""
    return tensor if kind == "step" else tensor.to(parameter.device)


Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """Chains over texts that the base wrote.

    tested:   by depth, drafts that verification reached: all before them were accepted.
    accepted: by depth, those that were right.
    steps:     chains; each commits its accepted drafts and one token more.
    """

    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    steps: int

    def __add__(self, other: ChainAcceptance) -> ChainAcceptance:
        return ChainAcceptance(
            tuple(a + b for a, b in zip(self.tested, other.tested)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted)),
            self.steps + other.steps,
        )

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Share accepted of those reached."""
        return tuple(right / max(reached, 1) for right, reached in zip(self.accepted, self.tested))

    @property
    def per_step(self) -> float:
        """The same over all depths: of the drafts that verification reached, the share it accepted."""
        return sum(self.accepted) / max(sum(self.tested), 1)

    @property
    def tokens_per_step(self) -> float:
        return sum(self.accepted) / max(self.steps, 1) + 1


def none(depth: int) -> ChainAcceptance:
    return ChainAcceptance((0,) * depth, (0,) * depth, 0)


def chains(hits: Bools, learned: Bools, depth: int) -> ChainAcceptance:
    """Drafting one text as decoding does: a chain, its accepted drafts, the bonus token, the next chain.

    hits: [length, depth] as `Unrolling.hits` has them; learned: [length] what the base wrote.
    """
    tested = np.zeros(depth, np.int64)
    accepted = np.zeros(depth, np.int64)
    steps = 0
    for first, last in _stretches(learned):
        root = max(first, 1)  # a token that is committed; row root - 1 drafts what comes behind it
        while root + 1 < last:
            reach = min(depth, last - root - 1)
            missed = np.flatnonzero(~hits[root - 1, :reach])
            right = int(missed[0]) if len(missed) else reach
            tested[: min(right + 1, reach)] += 1
            accepted[:right] += 1
            steps += 1
            root += right + 1
    return ChainAcceptance(tuple(tested.tolist()), tuple(accepted.tolist()), steps)


def _stretches(learned: Bools) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], learned, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist())


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
            "tokens_per_step": round(of.tokens_per_step, 3),
            "by_depth": [round(share, 4) for share in of.by_depth],
        }


Told = Callable[[int, Measured | None], object]  # hears of every step, and of measurements


class Trainer:
    def __init__(
        self, unrolling: Unrolling | BlockLearning, head: nn.Module, learning: Learning, device: torch.device
    ) -> None:
        self._unrolling = unrolling
        self._head = head
        self._learning = learning
        self._device = device
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
        learning = self._learning
        began = time.monotonic()
        first = restore(folder, self._head, self._optimiser, asked)
        losses: list[torch.Tensor] = []
        last = self._measure(first, losses, measured, began, folder, told)
        order = islice(endless(rows, learning.batch_tokens, learning.seed), first, learning.steps)
        for step, each in enumerate(order, first):
            losses.append(self._learn(self._batch(each), learning.rate_at(step)))
            told(step + 1, None)
            if (step + 1) % learning.every == 0 or step + 1 == learning.steps:
                last = self._measure(step + 1, losses, measured, began, folder, told)
                save(folder, self._head, self._optimiser, step + 1, asked)
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
