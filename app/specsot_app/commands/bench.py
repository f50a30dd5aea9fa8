"""`specsot bench`: `quick` and `full`, and whatever else the lab brings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from specsot.errors import InvalidRequest
from specsot_app.bench.core.methods import FAMILIES, TableOptions, full, quick
from specsot_app.commands import options
from specsot_app.extensions import add_word, paths_below
from specsot_app.words import Word

Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        "--num-samples",
        "--num-runs",
        min=1,
        help="Runs of each method, each of another question.",
    ),
]
Lengths = Annotated[
    str | None, typer.Option("--max-new-tokens", help="Tokens of the answers, such as 500,1000,2000.")
]
Chains = Annotated[str | None, typer.Option("--k", "--k-value", help="K of the linear methods, such as 4,6.")]
Windows = Annotated[
    str | None,
    typer.Option("--windows", "--max-cache-lens", help="Tokens a windowed method attends to: 256,1024."),
]
Families = Annotated[
    str | None, typer.Option("--methods", help=f"Which, besides plain: {', '.join(FAMILIES[1:])}.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="For all answers; what is not reached is a row that says so.")
]
SmallModel = Annotated[str | None, typer.Option(help="Directory of a small language model with its tokens.")]
Against = Annotated[Path | None, typer.Option(help="A stored run to compare speedups with.")]
Tolerance = Annotated[float, typer.Option(min=0, max=1, help="By how much a speedup may be worse.")]


def group() -> typer.Typer:
    """The word with all its words."""
    command = typer.Typer(help="Measure this machine.", rich_markup_mode=None, no_args_is_help=True)

    @command.callback()
    def bench() -> None:
        """Measure this machine."""

    for path in paths_below("bench"):
        add_word(command, path)
    short = "Every family of methods side by side, short answers: minutes on two cores."
    command.command("quick", cls=Word, help=short)(tables)
    long = "All methods, up to 2,000 tokens: tables, plots, recommended settings."
    command.command("full", cls=Word, help=long)(tables)
    return command


def tables(
    ctx: typer.Context,
    rounds: Rounds = None,
    max_new_tokens: Lengths = None,
    k: Chains = None,
    windows: Windows = None,
    methods: Families = None,
    prompts: options.OwnQuestions = None,
    minutes: Minutes = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    small_model: SmallModel = None,
    dtype: options.Numbers = "auto",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    device: options.Device = "cpu",
    text: options.ReferenceText = None,
    against: Against = None,
    tolerance: Tolerance = 0.1,
    output: options.Output = None,
) -> int:
    """`quick` and `full` differ in the methods alone."""
    from specsot_app.bench import rounds as room
    from specsot_app.bench.report import ReportOptions, publish

    name = str(ctx.info_name)
    lengths = options.numbers_of(max_new_tokens, "max_new_tokens")
    chosen = TableOptions(
        rounds,
        lengths,
        options.numbers_of(k, "k"),
        options.numbers_of(windows, "windows"),
        families_of(methods),
    )
    course = {"quick": quick, "full": full}[name](chosen)
    models = room.models_of(options.wanted_by(ctx.params), small_model)
    seconds = math.inf if minutes is None else 60 * minutes
    questions = room.questions_of(models, prompts)
    task = room.TableRun(course, models, questions, room.read_reference(text), seconds)
    return publish(task, ReportOptions(name, output, against, tolerance))


def families_of(written: str | None) -> tuple[str, ...] | None:
    """ "linear,window" as families of methods. Raises InvalidRequest."""
    if written is None:
        return None
    names = tuple(part.strip() for part in written.split(","))
    if unknown := [name for name in names if name not in FAMILIES]:
        raise InvalidRequest(f"no methods are called {unknown[0]!r}, only {', '.join(FAMILIES)}", "methods")
    return names
