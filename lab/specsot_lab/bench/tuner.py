"""`specsot bench tuner`: the draft policy compared with fixed settings, on questions.

Every setting has a fleet in this process, and all fleets share the base model's weights. All settings answer
each question in turns of reversed order. Seconds of this process's own CPU time are reported in addition to
wall-clock seconds, which other processes change more. Each setting is compared with decoding without
speculation of the same question.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specsot.drafting import DraftOptions
from specsot_app.runtime import quiet_logs
from specsot_bench.core.methods import Method
from specsot_bench.core.pairing import order
from specsot_bench.core.tables import figure, markdown, text
from specsot_bench.results import Row, named, publish
from specsot_bench.runners import ModelSet, Runners


def _chain(tokens: int) -> DraftOptions:
    """Return options of chains that are drafted in every step.

    tokens: Number of drafts of a chain.
    """
    return DraftOptions(mode="linear", depth=tokens, tuner="fixed")


def _tree(tokens: int, nodes: int) -> DraftOptions:
    """Return options of trees that are drafted in every step.

    tokens: Levels of a tree.
    nodes: Nodes of a tree, root included.
    """
    return DraftOptions(mode="tree", depth=tokens, nodes=nodes, tuner="fixed")


PLAIN = "plain"
TUNER = "the tuner"
PROMPT_ROWS: Final = 512  # Positions. Of a question's prompt at most, for KV of all clients. Untuned.
ROUNDS: Final = 3  # Counted rounds of every setting with several clients at once. Untuned.
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
    """The cost of one answer.

    cpu: Seconds of this process's processor time.
    wall: Wall-clock seconds.
    tokens: Number of tokens of the answer.
    steps: Forward passes of the base model.
    """

    cpu: float
    wall: float
    tokens: int
    steps: int


async def ask(runners: Runners, method: Method, question: str, tokens: int) -> Cost:
    """Return the cost of one answer.

    runners: Writes the answer.
    method: The setting in which it is written.
    question: What the user asks.
    tokens: Number of tokens of the answer.

    `tokens` of the result is the number that was asked for. Raises SpecsotError if the request fails.
    """
    cpu = time.process_time()
    record = await runners.write(method, question, tokens)
    return Cost(time.process_time() - cpu, record.seconds, tokens, record.samples[-1].steps)


async def _costs(models: ModelSet, questions: Sequence[str], tokens: int) -> dict[str, list[Cost]]:
    """Return, by setting, the cost of the answer to each question. One more answer in each setting comes
    first and is not counted.

    models: The base model, the head, and their precision.
    questions: The questions, at least one.
    tokens: Number of tokens of an answer.

    A dot is printed on stderr after each question. The order of the settings is reversed from question to
    question.
    """
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
    """Return a row for each setting: median and minimum of the ratios to decoding without speculation of the
    same question, for CPU time and wall-clock time.

    costs: The costs of all answers, by setting, question by question; PLAIN is among the settings.

    "cpu" and "wall" are the ratios of each question, "cpu_median", "cpu_least" and likewise for the wall
    clock their median and minimum, "cpu_whole" and "wall_whole" the ratios of the sums over all questions.
    Ratios above 1 mean that the setting is faster. Raises KeyError without PLAIN.
    """
    plain = costs[PLAIN]
    rows = list[Row]()
    for name, ours in costs.items():
        cpu = [base.cpu / one.cpu for base, one in zip(plain, ours)]
        wall = [base.wall / one.wall for base, one in zip(plain, ours)]
        whole = {"cpu_whole": _sum(plain, "cpu") / _sum(ours, "cpu"),
                 "wall_whole": _sum(plain, "wall") / _sum(ours, "wall")}  # fmt: skip
        rows.append({
            "name": name,
            "tokens_per_step": sum(one.tokens for one in ours) / sum(one.steps for one in ours),
            "cpu_median": statistics.median(cpu), "cpu_least": min(cpu), "cpu": cpu,
            "wall_median": statistics.median(wall), "wall_least": min(wall), "wall": wall,
            "tokens_per_second": statistics.median(one.tokens / one.wall for one in ours),
            **whole,
        })  # fmt: skip
    return rows


def _sum(costs: Sequence[Cost], name: str) -> float:
    """Return the sum of one figure over all answers; 0 without answers.

    costs: The costs of the answers.
    name: The figure, a field of `Cost` such as "cpu".
    """
    return sum(getattr(one, name) for one in costs)


COLUMNS = (
    text("setting", "name"),
    figure("tokens a step", "tokens_per_step", 2),
    figure("CPU: median", "cpu_median", 2),
    figure("least", "cpu_least", 2),
    figure("of all", "cpu_whole", 2),
    figure("clock: median", "wall_median", 2),
    figure("least", "wall_least", 2),
    figure("of all", "wall_whole", 2),
    figure("tokens/s", "tokens_per_second", 1),
)


async def _together(
    models: ModelSet, questions: Sequence[str], tokens: int, clients: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Return tokens per second, by number of clients and by setting. Every setting answers as many questions
    at once as there are clients, ROUNDS times with other questions; settings take turns in reversed order.
    The first round is not counted: it compiles kernels and captures graphs of sizes that are new.

    models: The base model, the head, and their precision.
    questions: The questions, from the first on again if there are fewer than needed.
    tokens: Number of tokens of an answer.
    clients: Numbers of simultaneous questions, at least one.

    A dot is printed on stderr after each round.
    """
    seconds: dict[int, dict[str, float]] = {}
    async with Runners(models, max(clients) * (PROMPT_ROWS + tokens)) as runners:
        for count in clients:
            seconds[count] = dict.fromkeys([method.name for method in METHODS], 0.0)
            for number in range(1 + ROUNDS):
                first = number * count
                asked = [questions[place % len(questions)] for place in range(first, first + count)]
                for method in order(METHODS, number):
                    taken = await runners.write_together(method, asked, tokens)
                    seconds[count][method.name] += taken if number else 0.0
                print(".", end="", file=sys.stderr, flush=True)
    return {
        count: {name: ROUNDS * count * tokens / taken for name, taken in found.items()}
        for count, found in seconds.items()
    }


def rows_together(rates: Mapping[int, Mapping[str, float]]) -> list[Row]:
    """Return a row for each number of clients and setting: tokens per second, relative to decoding without
    speculation, and to the best fixed setting, which may be that without speculation.

    rates: Tokens per second, by number of clients and by setting; PLAIN is among the settings.

    "of_baseline" is the ratio to PLAIN, and "of_best" that to the fastest setting other than TUNER, both
    above 1 if faster. The name is "<clients>: <setting>". Raises KeyError without PLAIN.
    """
    rows = list[Row]()
    for count, found in rates.items():
        fixed = max(rate for name, rate in found.items() if name != TUNER)
        rows += [
            {"name": f"{count}: {name}", "tokens_per_second": rate,
             "of_baseline": rate / found[PLAIN], "of_best": rate / fixed}
            for name, rate in found.items()
        ]  # fmt: skip
    return rows


TOGETHER = (
    text("clients: setting", "name"),
    figure("tokens/s", "tokens_per_second", 1),
    figure("of the baseline", "of_baseline", 2),
    figure("of the best fixed setting", "of_best", 2),
)


def measure_together(
    models: ModelSet,
    questions: Sequence[str],
    tokens: int,
    clients: Sequence[int],
    settings: Row,
    output: Path | None,
) -> int:
    """Measure with several clients at once, and publish the ratios. Return the exit status 0.

    models: The base model, the head, and their precision.
    questions: The questions, from the first on again if there are more clients.
    tokens: Number of tokens of an answer.
    clients: Numbers of simultaneous questions, at least one.
    settings: How the questions were chosen, for the results.
    output: The JSON file; None: the table is only printed.

    The entries of `settings` are added to those of the run: model, head, precision and number of tokens.
    Raises ModelError or HeadMismatch if a model cannot be loaded.
    """
    quiet_logs()
    rows = rows_together(asyncio.run(_together(models, questions, tokens, clients)))
    told = {"model": models.base, "draft_model": models.head, "dtype": models.dtype,
            "quantization": models.quantization, "max_new_tokens": tokens} | dict(settings)  # fmt: skip
    publish("tuner", told, named(rows, "name"), markdown(TOGETHER, rows), output)
    return 0


def measure(
    models: ModelSet, questions: Sequence[str], tokens: int, settings: Row, output: Path | None
) -> int:
    """Measure question by question, and publish the table. Return the exit status 0.

    models: The base model, the head, and their precision.
    questions: The questions, at least one.
    tokens: Number of tokens of an answer.
    settings: How the questions were chosen, for the results.
    output: The JSON file; None: the table is only printed.

    The entries of `settings` are added to those of the run: model, head, precision and number of tokens.
    Raises ModelError or HeadMismatch if a model cannot be loaded.
    """
    quiet_logs()
    rows = rows_of(asyncio.run(_costs(models, questions, tokens)))
    told = {"model": models.base, "draft_model": models.head, "dtype": models.dtype,
            "quantization": models.quantization, "max_new_tokens": tokens} | dict(settings)  # fmt: skip
    publish("tuner", told, named(rows, "name"), markdown(COLUMNS, rows), output)
    return 0
