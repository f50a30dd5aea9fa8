"""`specsot bench`: measurements, each as a word of its own.

Refuses to know what is measured; specsot_app.bench does, and is imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsot.errors import InvalidRequest
from specsot.members import Transport
from specsot.params import Mode
from specsot_app.commands import options
from specsot_app.words import Word

if TYPE_CHECKING:
    from specsot_app.bench.methods import Course

app = typer.Typer(help="Measure this machine.", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure this machine."""


@app.command("demo", cls=Word)
def demo(
    runs: Annotated[int, typer.Option(help="Paired runs of each comparison.")] = 30,
    output: Annotated[
        Path | None, typer.Option("--output", "--json", help="Also write the figures to this file.")
    ] = None,
) -> int:
    """Plain, drafted and planned answers of the demo model, side by side."""
    from specsot_app.bench import demo as room

    return room.measure(runs, output)


@app.command("load", cls=Word)
def load(
    ctx: typer.Context,
    clients: Annotated[str, typer.Option(help="How many ask at once, level by level.")] = "1,2,4,8,16,32,64",
    requests: Annotated[int, typer.Option(min=1, help="Of each level; at least four a client.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 32,
    mode: Annotated[Mode, typer.Option(help="direct: all answers are equally long.")] = "direct",
    master: options.Master = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    drafter: options.Drafter = None,
    stages: options.Stages = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Instead: what the processes hold after 2,000 short requests.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "--json", help="Also write the figures to this file.")
    ] = None,
) -> int:
    """Requests per second and waits of 1 to 64 clients at once, of a fleet of processes."""
    from specsot_app.bench import load as room
    from specsot_app.bench import memory as other_room

    wanted = options.wanted_by({**ctx.params, "fleet": "processes"})
    what = room.Load(counts_of(clients), requests, tokens, mode, wanted)
    return (other_room if memory else room).measure(what, output)


@app.command("gpu", cls=Word)
def gpu(
    models: Annotated[
        str, typer.Option(help="Shapes to measure, with made-up weights.")
    ] = "Llama-3.1-8B,Qwen3-4B",
    text: Annotated[int, typer.Option(min=1, help="Rows in front of what is measured.")] = 1024,
    rivals: Annotated[bool, typer.Option("--rivals/--no-rivals", help="Transformers too.")] = True,
    gpus: Annotated[int, typer.Option(min=1, help="Several: instead, layer ranges over so many.")] = 1,
    transport: Annotated[
        Transport | None, typer.Option(help="Between those, each in a process of its own; else all in one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--json", help="Also write the figures to this file.")
    ] = None,
) -> int:
    """Plain decoding, verification and drafting of real shapes on one GPU, against its bandwidth."""
    from specsot_app.bench import gpu as room
    from specsot_app.bench import gpu_ranges as other_room

    if gpus > 1:
        return other_room.measure(gpus, text, transport, output)
    return room.measure(room.Asked(tuple(models.split(",")), text, rivals), output)


@app.command("ring", cls=Word)
def ring(
    rtt: Annotated[
        list[float] | None, typer.Option(min=0, help="Round trip between neighbours, ms; may be repeated.")
    ] = None,
    stages: Annotated[list[int] | None, typer.Option(min=2, help="How many; may be repeated.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Paired runs of each way.")] = None,
    only: Annotated[str | None, typer.Option(help="mock or demo, if not both.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A look: two distances, two stages, one pair.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "--json", help="Also write the figures to this file.")
    ] = None,
) -> int:
    """Tokens a lap of plain, drafted and branched writing, on stages that are far from each other."""
    from specsot_app.bench import ring as room

    wanted = room.wanted(quick, rtt, stages, rounds, only)
    return room.measure(wanted, output)


@app.command("policies", cls=Word)
def policies(
    text: Annotated[Path | None, typer.Option(help="Text to read, if not the one it brings.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a piece; within the model's context.")] = 1024,
    pieces: Annotated[int, typer.Option(min=1, help="How many are read, from the beginning.")] = 16,
    find_heads: Annotated[
        bool, typer.Option("--find-heads", help="Instead: write what each head should keep to the model.")
    ] = False,
    gathering: Annotated[
        int | None, typer.Option(min=1, help="Recent tokens that heads keep which look everywhere; else all.")
    ] = None,
    model: options.Model = None,
    dtype: options.Numbers = "fp32",
    device: options.Device = "cpu",
    output: Annotated[
        Path | None, typer.Option("--output", "--json", help="Also write the figures to this file.")
    ] = None,
) -> int:
    """Perplexity of texts under each KV policy."""
    from specsot_app.bench import policies as room
    from specsot_app.fleets import Wanted, models_of

    reading = room.Reading(models_of(Wanted(model=model)).base, text, length, pieces, dtype, device)
    return room.find_heads(reading, gathering) if find_heads else room.measure(reading, output)


Rounds = Annotated[int | None, typer.Option(min=1, help="Runs of each method, each of another question.")]
SmallModel = Annotated[str | None, typer.Option(help="Directory of a small language model with its tokens.")]
Reference = Annotated[Path | None, typer.Option(help="Text for perplexity, if not the one it brings.")]
Against = Annotated[Path | None, typer.Option(help="A stored run to compare speedups with.")]
Tolerance = Annotated[float, typer.Option(min=0, max=1, help="By how much a speedup may be worse.")]
Output = Annotated[
    Path | None, typer.Option("--output", "--json", help="Also write the figures to this file.")
]


@app.command("quick", cls=Word)
def quick(
    ctx: typer.Context,
    rounds: Rounds = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    small_model: SmallModel = None,
    dtype: options.Numbers = "auto",
    device: options.Device = "cpu",
    text: Reference = None,
    against: Against = None,
    tolerance: Tolerance = 0.1,
    output: Output = None,
) -> int:
    """Every family of methods side by side, short answers: minutes on two cores."""
    from specsot_app.bench import methods

    return _tables("quick", methods.quick(rounds), ctx.params)


@app.command("full", cls=Word)
def full(
    ctx: typer.Context,
    rounds: Rounds = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    small_model: SmallModel = None,
    dtype: options.Numbers = "auto",
    device: options.Device = "cpu",
    text: Reference = None,
    against: Against = None,
    tolerance: Tolerance = 0.1,
    output: Output = None,
) -> int:
    """All methods, up to 2,000 tokens: tables, plots, recommended settings."""
    from specsot_app.bench import methods

    return _tables("full", methods.full(rounds), ctx.params)


def _tables(name: str, course: Course, given: Mapping[str, Any]) -> int:
    from specsot_app.bench.report import Wish, publish
    from specsot_app.bench.tables import Task, models_of, questions_of, read_reference

    directories = given["model"], given["draft_model"], given["small_model"]
    models = models_of(*directories, given["dtype"], given["device"])
    task = Task(course, models, questions_of(models), read_reference(given["text"]))
    return publish(task, Wish(name, given["output"], given["against"], given["tolerance"]))


def counts_of(written: str) -> tuple[int, ...]:
    """ "1,2,4" as numbers. Raises InvalidRequest."""
    counts = [part.strip() for part in written.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in counts):
        raise InvalidRequest(f"clients must be numbers > 0, such as 1,2,4, got {written!r}", field="clients")
    return tuple(map(int, counts))
