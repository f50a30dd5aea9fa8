"""The training loop: optimiser steps, measurements and checkpoints."""

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
from specsot_lab.train.rows import Row, batches, endless_batches, pad
from specsot_lab.train.settings import Learning
from specsot_lab.train.unrolling import TokenBatch, Unrolling

# Name of the checkpoint in a run's folder.
CHECKPOINT_FILE = "state.safetensors"
# Names of what AdamW stores for each parameter.
OPTIMISER_STATE = ("exp_avg", "exp_avg_sq", "step")


def save(folder: Path, head: nn.Module, optimiser: AdamW, step: int, run_identity: Mapping[str, Any]) -> None:
    """Write a checkpoint as one file, whole or not at all.

    folder: Folder of the checkpoint; it is created if missing.
    head: The head, whose weights are stored.
    optimiser: The optimiser of the head, after at least one step.
    step: Number of steps done.
    run_identity: Settings, base model and rows of the run. A run that continues from the checkpoint must have
        the same.

    An earlier checkpoint is replaced. Raises KeyError if the optimiser has not made a step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        tensors[f"weights.{name}"] = parameter.detach().cpu().contiguous()
        for kind in OPTIMISER_STATE:
            tensors[f"{kind}.{name}"] = optimiser.state[parameter][kind].detach().cpu().contiguous()
    temporary = folder / f"{CHECKPOINT_FILE}.new"
    save_file(
        tensors, temporary, metadata={"step": str(step), "asked": json.dumps(run_identity, sort_keys=True)}
    )
    temporary.replace(folder / CHECKPOINT_FILE)


def restore(folder: Path, head: nn.Module, optimiser: AdamW, run_identity: Mapping[str, Any]) -> int:
    """Load the folder's checkpoint into the head and the optimiser, and return the number of steps done.
    Return 0, and change nothing, if there is no checkpoint.

    folder: Folder of the checkpoint.
    head: The head, whose weights are replaced.
    optimiser: The optimiser of the head, whose state is replaced.
    run_identity: Settings, base model and rows of this run.
    Raises ModelError if the checkpoint is damaged, or is that of another run.

    The advice of the errors is to name another --output or to remove the file.
    """
    file = folder / CHECKPOINT_FILE
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
    """Load an existing checkpoint into the head and the optimiser, and return the number of steps done.

    file: The checkpoint.
    head: The head, whose weights are replaced.
    optimiser: The optimiser of the head, whose state is replaced.
    run_identity: Settings, base model and rows of this run.
    Raises ModelError if the checkpoint is that of another run.

    A checkpoint without metadata counts as one of another run. SafetensorError is raised if the file is
    damaged.
    """
    with safe_open(file, framework="pt") as checkpoint:
        metadata: Mapping[str, str] = checkpoint.metadata() or {}
        if metadata.get("asked") != json.dumps(run_identity, sort_keys=True):
            raise ModelError(
                f"{file} is of a run that was asked for something else; name another --output, or remove it"
            )
        for name, parameter in head.named_parameters():
            parameter.copy_(checkpoint.get_tensor(f"weights.{name}"))
            optimiser.state[parameter] = {
                kind: _to_device_of(checkpoint.get_tensor(f"{kind}.{name}"), kind, parameter)
                for kind in OPTIMISER_STATE
            }
    return int(metadata["step"])


def _to_device_of(tensor: Tensor, kind: str, parameter: Tensor) -> Tensor:
    """Return a tensor of the optimiser's state on the device where AdamW expects it: that of the parameter,
    or the CPU for the count of steps.

    tensor: The tensor as it was loaded.
    kind: Name of the state, one of OPTIMISER_STATE.
    parameter: The weight to which the state belongs.
    """
    return tensor if kind == "step" else tensor.to(parameter.device)


# Flags, one for each token or drafted token.
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """The acceptance of greedy chains over sequences that the base model wrote.

    tested: For each depth, the number of drafted tokens that verification reached, because all earlier tokens
        of their chains were accepted.
    accepted: For each depth, the number of drafted tokens that were accepted.
    steps: Number of chains. Each commits its accepted tokens and one token more.
    """

    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    steps: int

    def __add__(self, other: ChainAcceptance) -> ChainAcceptance:
        """Return the sums of both, depth by depth.

        other: Acceptance of other chains of the same depth.
        """
        return ChainAcceptance(
            tuple(a + b for a, b in zip(self.tested, other.tested)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted)),
            self.steps + other.steps,
        )

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Return for each depth the fraction of the drafted tokens that verification reached and accepted;
        0.0 where it reached none.
        """
        return tuple(right / max(reached, 1) for right, reached in zip(self.accepted, self.tested))

    @property
    def per_step(self) -> float:
        """Return the fraction of the drafted tokens that verification reached and accepted, over all depths
        together; 0.0 if it reached none.
        """
        return sum(self.accepted) / max(sum(self.tested), 1)

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of tokens that a chain commits: its accepted tokens and one more; 1.0
        without chains.
        """
        return sum(self.accepted) / max(self.steps, 1) + 1


def zero_acceptance(depth: int) -> ChainAcceptance:
    """Return the acceptance of no chains, with which a sum begins.

    depth: Number of tokens of a chain.
    """
    return ChainAcceptance((0,) * depth, (0,) * depth, 0)


def chain_acceptance(hits: Bools, learned: Bools, depth: int) -> ChainAcceptance:
    """Return the acceptance if one sequence is drafted as decoding does: a chain, its accepted tokens, the
    bonus token, the next chain. Return zeros if no learned token can be drafted.

        learned tokens 1 .. 5, depth 3, row 0 (root 1) drafts token 2 rightly and token 3 wrongly
        -> tested [1, 1, 0], accepted [1, 0, 0]; token 3 is the bonus token and the next root

    hits: Bool [length, depth]: entry [j, k] is True if row j drafts token j + 2 + k rightly, see
        `Unrolling.hits`.
    learned: Bool [length], True for tokens that the base model wrote.
    depth: Number of tokens of a chain.

    Only tokens within the same run of learned tokens are drafted and counted; the first token of a sequence
    is never drafted. A chain near the end of a run is cut to the tokens that are left.
    """
    tested = np.zeros(depth, np.int64)
    accepted = np.zeros(depth, np.int64)
    steps = 0
    for first_learned, end in _learned_segments(learned):
        # The root is a committed token; row root - 1 drafts the tokens after it.
        root = max(first_learned, 1)
        while root + 1 < end:
            max_accepted = min(depth, end - root - 1)
            misses = np.flatnonzero(~hits[root - 1, :max_accepted])
            num_right = int(misses[0]) if len(misses) else max_accepted
            tested[: min(num_right + 1, max_accepted)] += 1
            accepted[:num_right] += 1
            steps += 1
            root += num_right + 1
    return ChainAcceptance(tuple(tested.tolist()), tuple(accepted.tolist()), steps)


def _learned_segments(learned: Bools) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of every run of learned tokens: [0, 1, 1, 0, 1] -> (1, 3), (4, 5). Yield nothing if
    no token is learned.

    learned: Bool [length], True for learned tokens.
    """
    changes = np.flatnonzero(np.diff(np.concatenate(([False], learned, [False])).astype(np.int8)))
    yield from zip(changes[::2].tolist(), changes[1::2].tolist())


@dataclass(frozen=True, slots=True)
class TrainingMeasurement:
    """One measurement of a run.

    step: Number of optimiser steps done.
    loss: Mean loss over the steps since the measurement before. None if there were no steps.
    seconds: Seconds since the run began, or was continued.
    acceptance: Acceptance of greedy chains over the rows that are held out.
    """

    step: int
    loss: float | None
    seconds: float
    acceptance: ChainAcceptance

    def as_json(self) -> dict[str, Any]:
        """Return the measurement as the object of one line of the log.

        The keys are "step", "loss" (null if there were no steps), "seconds", "per_step" and "by_depth"
        (rounded to 4 digits), and "tokens_per_step" (rounded to 3).
        """
        acceptance = self.acceptance
        return {
            **{name: value for name, value in asdict(self).items() if name != "acceptance"},
            "per_step": round(acceptance.per_step, 4),
            "tokens_per_step": round(acceptance.tokens_per_step, 3),
            "by_depth": [round(share, 4) for share in acceptance.by_depth],
        }


# Called after each step with (steps done, None), and after each measurement with (steps done, the
# measurement).
OnProgress = Callable[[int, TrainingMeasurement | None], object]


class Trainer:
    """Trains a head step by step, and measures it.

    objective: Computes losses and greedy drafts of the head.
    head: The head, whose weights are trained.
    learning: Number of steps, learning rate and limits.
    device: Device on which batches are put.
    """

    def __init__(
        self, objective: Unrolling | BlockLearning, head: nn.Module, learning: Learning, device: torch.device
    ) -> None:
        """Make the optimiser, AdamW without weight decay, over all weights of the head.

        objective: Computes losses and greedy drafts of the head.
        head: The head, whose weights are trained.
        learning: Number of steps, learning rate and limits.
        device: Device on which batches are put.
        """
        self._objective = objective
        self._head = head
        self._learning = learning
        self._device = device
        self._optimiser = AdamW(head.parameters(), lr=learning.rate, betas=(0.9, 0.95), weight_decay=0.0)

    def train(
        self,
        rows: Sequence[Row],
        held_out_rows: Sequence[Row],
        folder: Path,
        run_identity: Mapping[str, Any],
        on_progress: OnProgress,
        publish: Callable[[], object],
    ) -> TrainingMeasurement:
        """Train from the checkpoint of the folder, or from the first step if it has none, to the last step.
        Return the last measurement.

        rows: Rows to train on.
        held_out_rows: Rows to measure.
        folder: Folder of the checkpoint and of the log.
        run_identity: Settings, base model and rows of the run, by which a checkpoint of another run is
            recognised.
        on_progress: Called after each step, and with each measurement.
        publish: Called at each checkpoint, to write the head.
        Raises ModelError if the checkpoint is damaged, or is that of another run.

        The head is measured before the first step, after every `learning.every` steps, and after the last
        one. After each of these measurements but the first, a checkpoint is written and `publish` is called.
        If the checkpoint has all steps already, nothing is trained or published, and the first measurement is
        returned.
        """
        learning = self._learning
        start_time = time.monotonic()
        first_step = restore(folder, self._head, self._optimiser, run_identity)
        losses: list[torch.Tensor] = []
        measurement = self._measure(first_step, losses, held_out_rows, start_time, folder, on_progress)
        order = islice(
            endless_batches(rows, learning.batch_tokens, learning.seed), first_step, learning.steps
        )
        for step, batch_rows in enumerate(order, first_step):
            losses.append(self._learn(self._batch(batch_rows), learning.rate_at(step)))
            on_progress(step + 1, None)
            if (step + 1) % learning.every == 0 or step + 1 == learning.steps:
                measurement = self._measure(step + 1, losses, held_out_rows, start_time, folder, on_progress)
                save(folder, self._head, self._optimiser, step + 1, run_identity)
                publish()
        return measurement

    def measure(self, rows: Sequence[Row]) -> ChainAcceptance:
        """Return the acceptance of greedy chains over some rows.

        rows: The rows, at least one.

        All rows are measured, in batches, without changing the head.
        """
        depth = self._learning.depth
        total = zero_acceptance(depth)
        for numbers in batches(rows, self._learning.batch_tokens, 0, 0):
            batch_rows = [rows[number] for number in numbers]
            for row, hits in zip(batch_rows, self._objective.hits(self._batch(batch_rows)).cpu().numpy()):
                total += chain_acceptance(hits, row.learned, depth)
        return total

    def _learn(self, batch: TokenBatch, rate: float) -> torch.Tensor:
        """Take one optimiser step and return its loss, detached from the graph.

        batch: The rows of the step.
        rate: Learning rate of the step.

        The gradient is clipped to the norm `learning.clip`.
        """
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.zero_grad(set_to_none=True)
        loss = self._objective.loss(batch, self._learning.decay)
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
    ) -> TrainingMeasurement:
        """Measure the head, append a line to the folder's log, report the measurement and return it.

        step: Number of steps done.
        losses: Losses of the steps since the last measurement; the list is emptied.
        rows: Rows to measure.
        start_time: When the run began, in monotonic seconds.
        folder: Folder of the log; it is created if missing.
        on_progress: Called with the measurement.

        The loss is None if `losses` is empty. Seconds are rounded to one decimal place.
        """
        loss = float(torch.stack(losses).mean()) if losses else None
        losses.clear()
        measurement = TrainingMeasurement(
            step, loss, round(time.monotonic() - start_time, 1), self.measure(rows)
        )
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(measurement.as_json()) + "\n")
        on_progress(step, measurement)
        return measurement

    def _batch(self, rows: Sequence[Row]) -> TokenBatch:
        """Return rows as padded tensors on the device.

        rows: The rows of one batch, at least one.
        """
        tokens, learned = pad(rows)
        return TokenBatch(
            torch.from_numpy(tokens).long().to(self._device), torch.from_numpy(learned).to(self._device)
        )
