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

# Name of a checkpoint.
FILE = "state.safetensors"
# What AdamW keeps for every parameter.
OPTIMISER_STATE = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, for every parameter


def save(folder: Path, head: nn.Module, optimiser: AdamW, step: int, run_identity: Mapping[str, Any]) -> None:
    """Write a checkpoint as one file, whole or not at all.

    folder: created if missing. head: its weights. optimiser: has taken at least one step. step: steps done.
        run_identity: what the run was asked for, which a later run must equal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        tensors[f"weights.{name}"] = parameter.detach().cpu().contiguous()
        for kind in OPTIMISER_STATE:
            tensors[f"{kind}.{name}"] = optimiser.state[parameter][kind].detach().cpu().contiguous()
    temporary = folder / f"{FILE}.new"
    save_file(
        tensors, temporary, metadata={"step": str(step), "asked": json.dumps(run_identity, sort_keys=True)}
    )
    temporary.replace(folder / FILE)


def restore(folder: Path, head: nn.Module, optimiser: AdamW, run_identity: Mapping[str, Any]) -> int:
    """Load the checkpoint into head and optimiser, and return the steps done; 0 if there is no checkpoint.

    folder: of the checkpoint. head: its weights are replaced. optimiser: its state is replaced. run_identity:
        what this run was asked for.
    Raises ModelError for a checkpoint of another run, or a damaged one.
    """
    file = folder / FILE
    if not file.exists():
        return 0
    try:
        return _restore(file, head, optimiser, run_identity)
    except SafetensorError as error:
        raise ModelError(
            f"{file}: not a whole checkpoint ({error}); name another --output, or remove it"
        ) from None


@torch.no_grad()
def _restore(file: Path, head: nn.Module, optimiser: AdamW, run_identity: Mapping[str, Any]) -> int:
    """Load an existing checkpoint, and return the steps done. The arguments are those of `restore`."""
    with safe_open(file, framework="pt") as checkpoint:
        metadata: Mapping[str, str] = checkpoint.metadata() or {}
        if metadata.get("asked") != json.dumps(run_identity, sort_keys=True):
            raise ModelError(
                f"{file} is of a run that was asked for something else; name another --output, or remove it"
            )
        for name, parameter in head.named_parameters():
            parameter.copy_(checkpoint.get_tensor(f"weights.{name}"))
            optimiser.state[parameter] = {
                kind: _place(checkpoint.get_tensor(f"{kind}.{name}"), kind, parameter)
                for kind in OPTIMISER_STATE
            }
    return int(metadata["step"])


def _place(tensor: Tensor, kind: str, parameter: Tensor) -> Tensor:
    """Return a tensor of the optimiser on the device it belongs to: AdamW counts its steps on the CPU, unless
    fused.

    tensor: as loaded. kind: one of OPTIMISER_STATE. parameter: the weight it belongs to.
    """
    return tensor if kind == "step" else tensor.to(parameter.device)


Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """Acceptance of greedy chains over texts that the base wrote.

    tested: by depth, drafts that verification reached, since all before them were accepted.
    accepted: by depth, those that were right.
    steps: number of chains; each commits its accepted drafts and one token more.
    """

    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    steps: int

    def __add__(self, other: ChainAcceptance) -> ChainAcceptance:
        """Return the sums of both, depth by depth; both have the same depth."""
        return ChainAcceptance(
            tuple(a + b for a, b in zip(self.tested, other.tested)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted)),
            self.steps + other.steps,
        )

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Return, by depth, the fraction of the drafts that verification reached and accepted."""
        return tuple(right / max(reached, 1) for right, reached in zip(self.accepted, self.tested))

    @property
    def per_step(self) -> float:
        """Return the same fraction over all depths: of the drafts that verification reached, those that it
        accepted.
        """
        return sum(self.accepted) / max(sum(self.tested), 1)

    @property
    def tokens_per_step(self) -> float:
        """Return the mean tokens that a chain commits: its accepted drafts and one more; 1 without chains."""
        return sum(self.accepted) / max(self.steps, 1) + 1


def no_chains(depth: int) -> ChainAcceptance:
    """Return the acceptance of no chains, for sums."""
    return ChainAcceptance((0,) * depth, (0,) * depth, 0)


def chains(hits: Bools, learned: Bools, depth: int) -> ChainAcceptance:
    """Return the acceptance when one text is drafted as decoding does: a chain, its accepted drafts, the
    bonus token, the next chain.

    hits: [length, depth] as `Unrolling.hits` returns them. learned: [length] what the base wrote. depth:
        drafts of a chain.
    """
    tested = np.zeros(depth, np.int64)
    accepted = np.zeros(depth, np.int64)
    steps = 0
    for first_learned, end in _learned_segments(learned):
        root = max(first_learned, 1)  # a token that is committed; row root - 1 drafts what comes behind it
        while root + 1 < end:
            reach = min(depth, end - root - 1)
            missed = np.flatnonzero(~hits[root - 1, :reach])
            right = int(missed[0]) if len(missed) else reach
            tested[: min(right + 1, reach)] += 1
            accepted[:right] += 1
            steps += 1
            root += right + 1
    return ChainAcceptance(tuple(tested.tolist()), tuple(accepted.tolist()), steps)


def _learned_segments(learned: Bools) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of every run of learned tokens: [0, 1, 1, 0, 1] -> (1, 3), (4, 5)."""
    changes = np.flatnonzero(np.diff(np.concatenate(([False], learned, [False])).astype(np.int8)))
    yield from zip(changes[::2].tolist(), changes[1::2].tolist())


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement of a run.

    step: optimiser steps done. loss: mean over the steps since the measurement before; None at the beginning.
        seconds: since the run began. acceptance: of greedy chains over the held-out rows.
    """

    step: int
    loss: float | None
    seconds: float
    acceptance: ChainAcceptance

    def as_json(self) -> dict[str, Any]:
        """Return the measurement as an object for a line of the log."""
        acceptance = self.acceptance
        return {
            **{name: value for name, value in asdict(self).items() if name != "acceptance"},
            "per_step": round(acceptance.per_step, 4),
            "tokens_per_step": round(acceptance.tokens_per_step, 3),
            "by_depth": [round(share, 4) for share in acceptance.by_depth],
        }


# Called with the number of steps done, and a measurement or None.
OnProgress = Callable[[int, Measured | None], object]  # hears of every step, and of measurements


class Trainer:
    """Trains a head step by step, and measures it.

    unrolling: computes losses and drafts of the head. head: its weights. learning: steps, rates, limits.
        device: on which batches are put.
    """

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
        measured_rows: Sequence[Row],
        folder: Path,
        run_identity: Mapping[str, Any],
        on_progress: OnProgress,
        publish: Callable[[], object],
    ) -> Measured:
        """Train from the folder's checkpoint, if it has one of this run, to the last step; return the last
        measurement.

        rows: to train on. measured_rows: to measure on. folder: of checkpoint and log. run_identity: what
            makes a run this one. on_progress: called after each step, and with each measurement. publish:
            called at every checkpoint, to write the head.
        """
        learning = self._learning
        start_time = time.monotonic()
        first = restore(folder, self._head, self._optimiser, run_identity)
        losses: list[torch.Tensor] = []
        last = self._measure(first, losses, measured_rows, start_time, folder, on_progress)
        order = islice(endless(rows, learning.batch_tokens, learning.seed), first, learning.steps)
        for step, batch_rows in enumerate(order, first):
            losses.append(self._learn(self._batch(batch_rows), learning.rate_at(step)))
            on_progress(step + 1, None)
            if (step + 1) % learning.every == 0 or step + 1 == learning.steps:
                last = self._measure(step + 1, losses, measured_rows, start_time, folder, on_progress)
                save(folder, self._head, self._optimiser, step + 1, run_identity)
                publish()
        return last

    def measure(self, rows: Sequence[Row]) -> ChainAcceptance:
        """Return the acceptance of greedy chains over these rows."""
        depth = self._learning.depth
        total = no_chains(depth)
        for numbers in batches(rows, self._learning.batch_tokens, 0, 0):
            batch_rows = [rows[number] for number in numbers]
            for row, hits in zip(batch_rows, self._unrolling.hits(self._batch(batch_rows)).cpu().numpy()):
                total += chains(hits, row.learned, depth)
        return total

    def _learn(self, batch: UnrolledBatch, rate: float) -> torch.Tensor:
        """Take one step and return its loss, detached. batch: the step's rows. rate: learning rate."""
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
        start_time: float,
        folder: Path,
        on_progress: OnProgress,
    ) -> Measured:
        """Measure, append a line to the folder's log, report the measurement and return it; `losses` is
        emptied.

        step: steps done. losses: of the steps since the last measurement. rows: to measure on. start_time: of
            the run, in monotonic seconds. folder: of the log. on_progress: called with the measurement.
        """
        loss = float(torch.stack(losses).mean()) if losses else None
        losses.clear()
        measured = Measured(step, loss, round(time.monotonic() - start_time, 1), self.measure(rows))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(measured.as_json()) + "\n")
        on_progress(step, measured)
        return measured

    def _batch(self, rows: Sequence[Row]) -> UnrolledBatch:
        """Return rows as padded tensors on the device."""
        tokens, learned = pad(rows)
        return UnrolledBatch(
            torch.from_numpy(tokens).long().to(self._device), torch.from_numpy(learned).to(self._device)
        )
