"""Records what steps of a real model take on this machine, for `replay.py`.

    python -m tests.drafter.recording MODEL HEAD int8 steps.json [QUESTIONS]

The embedded fleet answers while sizes of trees take turns step by step, plain steps among them, so that a
neighbour slows down all of them alike. Written: the curves as the tuner is told them, the lower quartile of
what steps of each size took, what they took beside computing, and every step in times of its size's median.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from specsot.members import Curve, TreeShape
from specsot_bench.core.methods import Method
from specsot_bench.runners import ModelSet, Runners
from specsot_drafter import loader
from specsot_drafter.core.budget import UNKNOWN_SECONDS, BudgetPolicy, StepSeconds, TreeOutcome
from specsot_drafter.core.selection import Flags, Floats, KeepGrowing, best_each
from specsot_lab.eval.tasks import read_task

# Levels, width that is fed, nodes; None: a step without drafts.
SIZES = (
    None,
    (1, 1, 1),
    (2, 1, 2),
    None,
    (3, 1, 3),
    (5, 1, 5),
    None,
    (3, 4, 8),
    (4, 4, 12),
    None,
    (6, 4, 20),
)
Step = tuple[int, int, int, StepSeconds]  # levels, width, rows


class Recorder(BudgetPolicy):
    """Sizes in turns, whatever they bring."""

    adaptive = True

    def __init__(self, shape: TreeShape, step: Curve, level: Curve) -> None:
        super().__init__(shape)
        self.told, self.steps, self._sizes = (step, level), list[Step](), cycle(SIZES)
        self._size: tuple[int, int, int] | None = None

    @property
    def keep_growing(self) -> KeepGrowing:
        return lambda scores, depth: min(self._size[1] if self._size else 1, scores.shape[1])

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        self._size = next(self._sizes)
        self.paused_trees = 0 if self._size else live
        return min(self._size[0], most) if self._size else 0

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        return best_each(values, self._size[2] if self._size else 0)

    def record_step(self, trees: Sequence[TreeOutcome], spent: StepSeconds = UNKNOWN_SECONDS) -> None:
        if len(trees) == 1 and spent.computed and spent.wall:
            width = self._size[1] if self._size and trees[0].grown else 0
            self.steps.append((trees[0].grown, width, trees[0].rows, spent))


def summary(recorder: Recorder) -> dict[str, Any]:
    """See above. Growing is `growth` and so much a level, by least squares."""
    by_rows = defaultdict[int, list[StepSeconds]](list)
    for _, _, rows, spent in recorder.steps:
        by_rows[rows].append(spent)
    sizes = {rows: steps for rows, steps in sorted(by_rows.items()) if len(steps) >= 8}
    grown = [(levels, width, spent.growing) for levels, width, _, spent in recorder.steps if levels]
    columns = [(1, 1 + (levels - 1) * (width == 1), (levels - 1) * (width > 1)) for levels, width, _ in grown]
    growth, narrow, wide = np.linalg.lstsq(np.array(columns, float), np.array([one[2] for one in grown]))[0]
    hops = {rows: [one.wall - one.computed - one.growing for one in steps] for rows, steps in sizes.items()}
    hop, drafted = median(hops.pop(1)), median(sum(hops.values(), list[float]()))
    middles = {rows: median(one.computed for one in steps) for rows, steps in sizes.items()}
    noise = [
        round(spent.computed / middles[rows], 2) for _, _, rows, spent in recorder.steps if rows in middles
    ]
    return {
        "told": recorder.told,
        "step": [(rows, quantiles([one.computed for one in steps])[0]) for rows, steps in sizes.items()],
        "growth": growth, "level": [(1, narrow), (4, wide)],
        "hop": hop, "handover": drafted - hop, "noise": noise,
    }  # fmt: skip


async def record(models: ModelSet, questions: Sequence[str]) -> Recorder:
    recorders = list[Recorder]()

    def make(name: str, shape: TreeShape, step: Curve, level: Curve, *_: object) -> BudgetPolicy:
        recorders.append(Recorder(shape, step, level))
        return recorders[-1]

    loader.make_budget = make  # type: ignore[assignment]
    async with Runners(models) as runners:
        for question in questions:
            await runners.write(Method("recorded", "eagle"), question, 200)
            print(".", end="", file=sys.stderr, flush=True)
    return max(recorders, key=lambda one: len(one.steps))


def main(model: str, head: str, kind: str, output: str, questions: str = "6") -> None:
    numbers: dict[str, Any] = {"quantization": kind} if kind.startswith("int") else {"dtype": kind}
    asked = [prompt.turns[0] for prompt in read_task("mt_bench")[:: 80 // int(questions)]]
    recorder = asyncio.run(record(ModelSet(model=Path(model), head=Path(head), **numbers), asked))
    Path(output).write_text(json.dumps(summary(recorder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
