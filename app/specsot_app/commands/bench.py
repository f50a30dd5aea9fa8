"""`specsot bench`: `quick` and `full`, and whatever else the lab brings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from specsot_app.commands import options
from specsot_app.extensions import add_word, paths_below
from specsot_app.words import Word

Rounds = Annotated[int | None, typer.Option(min=1, help="Runs of each method, each of another question.")]
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
    quick = "Every family of methods side by side, short answers: minutes on two cores."
    command.command("quick", cls=Word, help=quick)(tables)
    full = "All methods, up to 2,000 tokens: tables, plots, recommended settings."
    command.command("full", cls=Word, help=full)(tables)
    return command


def tables(
    ctx: typer.Context,
    rounds: Rounds = None,
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
    from specsot_app.bench.core import methods
    from specsot_app.bench.report import ReportOptions, publish

    name = str(ctx.info_name)
    course = {"quick": methods.quick, "full": methods.full}[name](rounds)
    models = room.models_of(options.wanted_by(ctx.params), small_model)
    seconds = math.inf if minutes is None else 60 * minutes
    task = room.TableRun(course, models, room.questions_of(models), room.read_reference(text), seconds)
    return publish(task, ReportOptions(name, output, against, tolerance))
