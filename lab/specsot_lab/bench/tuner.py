"""`specsot bench tuner`: the draft policy compared with fixed settings, by number of clients.

Every setting has a fleet in this process, and all fleets share the base model's weights. Settings answer the
same questions in turns of reversed order, as many questions at once as there are clients. Each setting is
compared with decoding without speculation, and with the best fixed setting.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
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
ROUNDS: Final = 3  # Counted rounds of every setting, at least. Untuned.
METHODS = (
    Method(PLAIN),
    Method(TUNER, "eagle"),
    *(Method(f"chain of {tokens}", "eagle", _chain(tokens)) for tokens in (1, 2, 3, 5)),
    *(
        Method(f"tree of {nodes}", "eagle", _tree(tokens, nodes))
        for tokens, nodes in ((3, 8), (4, 12), (6, 24))
    ),
)


async def _rates(
    models: ModelSet, questions: Sequence[str], tokens: int, clients: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Return tokens per second, by number of clients and by setting. Every setting answers as many questions
    at once as there are clients, with other questions in each round, until all have been asked, ROUNDS times
    at least; settings take turns in reversed order. The first round is not counted: it compiles kernels and
    captures graphs of sizes that are new.

    models: The base model, the head, and their precision.
    questions: The questions, from the first on again if there are fewer than needed.
    tokens: Number of tokens of an answer.
    clients: Numbers of simultaneous questions, at least one.

    A dot is printed on stderr after each round.
    """
    seconds: dict[int, dict[str, float]] = {}
    rounds: dict[int, int] = {}
    async with Runners(models, max(clients) * (PROMPT_ROWS + tokens)) as runners:
        for count in clients:
            seconds[count] = dict.fromkeys([method.name for method in METHODS], 0.0)
            rounds[count] = max(ROUNDS, len(questions) // count)
            for number in range(1 + rounds[count]):
                first = number * count
                asked = [questions[place % len(questions)] for place in range(first, first + count)]
                for method in order(METHODS, number):
                    taken = await runners.write_together(method, asked, tokens)
                    seconds[count][method.name] += taken if number else 0.0
                print(".", end="", file=sys.stderr, flush=True)
    return {
        count: {name: rounds[count] * count * tokens / taken for name, taken in found.items()}
        for count, found in seconds.items()
    }


def rows_of(rates: Mapping[int, Mapping[str, float]]) -> list[Row]:
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


COLUMNS = (
    text("clients: setting", "name"),
    figure("tokens/s", "tokens_per_second", 1),
    figure("of the baseline", "of_baseline", 2),
    figure("of the best fixed setting", "of_best", 2),
)


def measure(
    models: ModelSet,
    questions: Sequence[str],
    tokens: int,
    clients: Sequence[int],
    settings: Row,
    output: Path | None,
) -> int:
    """Measure all settings, and publish the ratios. Return the exit status 0.

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
    rows = rows_of(asyncio.run(_rates(models, questions, tokens, clients)))
    told = {"model": models.base, "draft_model": models.head, "dtype": models.dtype,
            "quantization": models.quantization, "max_new_tokens": tokens} | dict(settings)  # fmt: skip
    publish("tuner", told, named(rows, "name"), markdown(COLUMNS, rows), output)
    return 0
