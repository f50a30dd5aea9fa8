"""The tuner beside fixed settings, on questions: `python -m specsot_lab.bench.tuner --help`.

Every setting has a fleet in this process that shares the base's weights; all of them answer a question in
turns of reversed order. Seconds of this process's own CPU time stand beside those by the clock, which
neighbours change more. Each setting is compared with plain decoding of the same question.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specsot.drafting import DraftOptions
from specsot_app.bench.core.methods import Method
from specsot_app.bench.core.pairing import order
from specsot_app.bench.core.tables import figure, markdown, text
from specsot_app.bench.results import Row, named, publish
from specsot_app.bench.runners import ModelSet, Runners
from specsot_app.runtime import quiet_logs
from specsot_lab.eval.tasks import read_task


def _chain(tokens: int) -> DraftOptions:
    return DraftOptions(mode="linear", tokens=tokens, tuner="fixed")


def _tree(tokens: int, nodes: int) -> DraftOptions:
    return DraftOptions(mode="tree", tokens=tokens, nodes=nodes, tuner="fixed")


PLAIN, TUNER = "plain", "the tuner"
METHODS = (
    Method(PLAIN),
    Method(TUNER, "eagle"),
    *(Method(f"chain of {tokens}", "eagle", _chain(tokens)) for tokens in (1, 2, 3, 5)),
    *(
        Method(f"tree of {nodes}", "eagle", _tree(tokens, nodes))
        for tokens, nodes in ((3, 8), (4, 12), (6, 24))
    ),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one answer took: seconds of CPU and by the clock, tokens, laps."""

    cpu: float
    wall: float
    tokens: int
    laps: int


async def ask(runners: Runners, method: Method, question: str, tokens: int) -> Cost:
    cpu = time.process_time()
    record = await runners.write(method, question, tokens)
    return Cost(time.process_time() - cpu, record.seconds, tokens, record.moments[-1].laps)


async def measure(models: ModelSet, questions: Sequence[str], tokens: int) -> dict[str, list[Cost]]:
    """By setting, an answer a question; one more before all, which is not counted."""
    costs: dict[str, list[Cost]] = {method.name: [] for method in METHODS}
    async with Runners(models) as runners:
        for method in METHODS:
            await runners.write(method, questions[0], 16)
        for number, question in enumerate(questions):
            for method in order(METHODS, number):
                costs[method.name].append(await ask(runners, method, question, tokens))
            print(".", end="", file=sys.stderr, flush=True)
    return costs


def rows_of(costs: Mapping[str, Sequence[Cost]]) -> list[Row]:
    """Times plain decoding of the same question: median and least."""
    plain = costs[PLAIN]
    rows = list[Row]()
    for name, ours in costs.items():
        cpu = [base.cpu / one.cpu for base, one in zip(plain, ours)]
        wall = [base.wall / one.wall for base, one in zip(plain, ours)]
        whole = {"cpu_whole": _sum(plain, "cpu") / _sum(ours, "cpu"),
                 "wall_whole": _sum(plain, "wall") / _sum(ours, "wall")}  # fmt: skip
        rows.append({
            "name": name,
            "tokens_per_lap": sum(one.tokens for one in ours) / sum(one.laps for one in ours),
            "cpu_median": statistics.median(cpu), "cpu_least": min(cpu), "cpu": cpu,
            "wall_median": statistics.median(wall), "wall_least": min(wall), "wall": wall,
            "tokens_per_second": statistics.median(one.tokens / one.wall for one in ours),
            **whole,
        })  # fmt: skip
    return rows


def _sum(costs: Sequence[Cost], name: str) -> float:
    return sum(getattr(one, name) for one in costs)


COLUMNS = (
    text("setting", "name"),
    figure("tokens a lap", "tokens_per_lap", 2),
    figure("CPU: median", "cpu_median", 2),
    figure("least", "cpu_least", 2),
    figure("of all", "cpu_whole", 2),
    figure("clock: median", "wall_median", 2),
    figure("least", "wall_least", 2),
    figure("of all", "wall_whole", 2),
    figure("tokens/s", "tokens_per_second", 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft-model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--task", default="vicuna", help="whose questions")
    parser.add_argument("--every", type=int, default=4, help="of them one in so many")
    parser.add_argument("--first", type=int, default=0, help="of those that leaves, skip so many")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--output", "--json", type=Path)
    given = parser.parse_args()
    quiet_logs()
    left = [prompt.turns[0] for prompt in read_task(given.task)[:: given.every]]
    questions = left[given.first : given.first + given.prompts]
    models = ModelSet(
        model=given.model, head=given.draft_model, dtype=given.dtype, quantization=given.quantization,
        draft_quantization=given.quantization and "int8",
    )  # fmt: skip
    rows = rows_of(asyncio.run(measure(models, questions, given.max_new_tokens)))
    settings = {name: str(value) for name, value in vars(given).items()}
    publish("tuner", settings, named(rows, "name"), markdown(COLUMNS, rows), given.output)


if __name__ == "__main__":
    from specsot.service.runtime_env import set_runtime_defaults

    set_runtime_defaults()
    main()
