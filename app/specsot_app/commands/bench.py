"""`specsot bench`: measurements, each as a word of its own.

Refuses to know what is measured; specsot_app.bench does, and is imported only when asked for.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsot.errors import InvalidRequest
from specsot.members import Transport
from specsot.params import Mode
from specsot_app.commands import options
from specsot_app.fleets import Dtype, Wanted, models_of
from specsot_app.words import Word

if TYPE_CHECKING:
    from specsot_app.bench.policies import Reading


def place_for(file: Path | None) -> Path | None:
    """Known before anything is measured: that the file can be written, and is none that stands beside it."""
    if file is None:
        return None
    if file.is_dir() or file.suffix in (".md", ".tex", ".png"):
        raise typer.BadParameter(f"{file} is no name for JSON")
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written")
    return file


Output = Annotated[
    Path | None,
    typer.Option("--output", "--json", callback=place_for, help="Also write the figures to this file."),
]
Length = Annotated[int, typer.Option(help="Tokens of a piece; within the model's context.")]
Pieces = Annotated[int, typer.Option(min=1, help="How many are read, from the beginning.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Runs of each method, each of another question.")]
Minutes = Annotated[
    float | None, typer.Option(min=0, help="For all answers; what is not reached is a row that says so.")
]
SmallModel = Annotated[str | None, typer.Option(help="Directory of a small language model with its tokens.")]
Reference = Annotated[Path | None, typer.Option(help="Text for perplexity, if not the one it brings.")]
Against = Annotated[Path | None, typer.Option(help="A stored run to compare speedups with.")]
Tolerance = Annotated[float, typer.Option(min=0, max=1, help="By how much a speedup may be worse.")]

app = typer.Typer(help="Measure this machine.", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure this machine."""


@app.command("demo", cls=Word)
def demo(
    ctx: typer.Context,
    runs: Annotated[int, typer.Option(min=1, help="Paired runs of each comparison.")] = 30,
    dtype: options.Numbers = "auto",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    output: Output = None,
) -> int:
    """Plain, drafted and planned answers of the demo model, side by side."""
    from specsot_app.bench import demo as room

    return room.measure(runs, options.wanted_by(ctx.params), output)


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
    hostile: Annotated[
        str | None,
        typer.Option(
            help="Instead: 16 clients beside attacks, `all` or some of those that docs/bench.md lists."
        ),
    ] = None,
    output: Output = None,
) -> int:
    """Requests per second and waits of 1 to 64 clients at once, of a fleet of processes."""
    if hostile is not None:  # processes are started while calls are under way: gRPC would warn of each
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from specsot_app.bench import load as room
    from specsot_app.bench import memory as other_room

    wanted = options.wanted_by({**ctx.params, "fleet": "processes"})
    what = room.Load(counts_of(clients), requests, tokens, mode, wanted)
    if hostile is not None:
        from specsot_app.bench.attacks import KINDS
        from specsot_app.bench.hostile import measure

        return measure(what, KINDS if hostile == "all" else tuple(hostile.split(",")), memory, output)
    return (other_room if memory else room).measure(what, output)


@app.command("gpu", cls=Word)
def gpu(
    models: Annotated[
        str, typer.Option(help="Shapes to measure, with made-up weights.")
    ] = "Llama-3.1-8B,Qwen3-4B",
    text: Annotated[int, typer.Option(min=1, help="Rows in front of what is measured.")] = 1024,
    rivals: Annotated[bool, typer.Option("--rivals/--no-rivals", help="Transformers too.")] = True,
    only: Annotated[
        str, typer.Option(help="Parts of it; product and served are of Llama-3.1-8B alone.")
    ] = "laps,speculation,product,served,rivals",
    gpus: Annotated[int, typer.Option(min=1, help="Several: instead, layer ranges over so many.")] = 1,
    transport: Annotated[
        Transport | None, typer.Option(help="Between those, each in a process of its own; else all in one.")
    ] = None,
    output: Output = None,
) -> int:
    """Plain decoding, verification and drafting of real shapes on one GPU, against its bandwidth."""
    from specsot_app.bench import gpu as room
    from specsot_app.bench import gpu_ranges as other_room

    if gpus > 1:
        return other_room.measure(gpus, text, transport, output)
    asked = room.Asked(tuple(models.split(",")), text, rivals, only=tuple(only.split(",")))
    return room.measure(asked, output)


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
    output: Output = None,
) -> int:
    """Tokens a lap of plain, drafted and branched writing, on stages that are far from each other."""
    from specsot_app.bench import ring as room

    wanted = room.wanted(quick, rtt, stages, rounds, only)
    return room.measure(wanted, output)


@app.command("policies", cls=Word)
def policies(
    ctx: typer.Context,
    text: Reference = None,
    length: Length = 1024,
    pieces: Pieces = 16,
    find_heads: Annotated[
        bool, typer.Option("--find-heads", help="Instead: write what each head should keep to the model.")
    ] = False,
    gathering: Annotated[
        int | None, typer.Option(min=1, help="Recent tokens that heads keep which look everywhere; else all.")
    ] = None,
    model: options.Model = None,
    dtype: options.Numbers = "fp32",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    device: options.Device = "cpu",
    output: Output = None,
) -> int:
    """Perplexity of texts under each KV policy."""
    from specsot_app.bench import policies as room

    reading = _reading(options.wanted_by(ctx.params), text, length, pieces)
    return room.find_heads(reading, gathering) if find_heads else room.measure(reading, output)


@app.command("precision", cls=Word)
def precision(
    ctx: typer.Context,
    text: Reference = None,
    length: Length = 1024,
    pieces: Pieces = 16,
    tokens: Annotated[
        int, typer.Option(min=1, help="That the head helps to write behind each question.")
    ] = 64,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    dtype: Annotated[
        Dtype, typer.Option(help="What bases in fewer bits, and their heads, compute in.")
    ] = "fp32",
    device: options.Device = "cpu",
    output: Output = None,
) -> int:
    """Memory, perplexity and tokens a lap of a base and its head in every precision."""
    from specsot_app.bench import precision as room

    wanted = options.wanted_by(ctx.params)
    models, reading = models_of(wanted), _reading(wanted, text, length, pieces)
    writing = room.writing_of(models.base, models.draft, tokens, of_demo=model is None)
    return room.measure(reading, writing, output)


def _reading(wanted: Wanted, text: Path | None, length: int, pieces: int) -> Reading:
    from specsot_app.bench.policies import Reading

    held, kept = wanted.quantization, wanted.kv_cache_dtype or "auto"
    base = models_of(wanted).base
    return Reading(base, text, length, pieces, wanted.dtype, wanted.device, held, kept)


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
    text: Reference = None,
    against: Against = None,
    tolerance: Tolerance = 0.1,
    output: Output = None,
) -> int:
    """`quick` and `full` differ in the methods alone."""
    from specsot_app.bench import methods
    from specsot_app.bench import tables as room
    from specsot_app.bench.report import Wish, publish

    name = str(ctx.info_name)
    course = {"quick": methods.quick, "full": methods.full}[name](rounds)
    models = room.models_of(options.wanted_by(ctx.params), small_model)
    seconds = math.inf if minutes is None else 60 * minutes
    task = room.Task(course, models, room.questions_of(models), room.read_reference(text), seconds)
    return publish(task, Wish(name, output, against, tolerance))


app.command(
    "quick", cls=Word, help="Every family of methods side by side, short answers: minutes on two cores."
)(tables)
app.command("full", cls=Word, help="All methods, up to 2,000 tokens: tables, plots, recommended settings.")(
    tables
)


def counts_of(written: str) -> tuple[int, ...]:
    """ "1,2,4" as numbers. Raises InvalidRequest."""
    counts = [part.strip() for part in written.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in counts):
        raise InvalidRequest(f"clients must be numbers > 0, such as 1,2,4, got {written!r}", field="clients")
    return tuple(map(int, counts))
