"""The lab's words of `specsot bench`, with their options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsot.errors import InvalidRequest
from specsot.members import Transport
from specsot.params import Mode
from specsot_app.commands import options
from specsot_app.fleets import Dtype, Wanted, models_of

if TYPE_CHECKING:
    from specsot_lab.bench.policies import ReadingOptions

Length = Annotated[int, typer.Option(help="Tokens of a piece; within the model's context.")]
Pieces = Annotated[int, typer.Option(min=1, help="How many are read, from the beginning.")]


def demo(
    ctx: typer.Context,
    runs: Annotated[int, typer.Option(min=1, help="Paired runs of each comparison.")] = 30,
    dtype: options.Numbers = "auto",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    output: options.Output = None,
) -> int:
    """Plain, drafted and planned answers of the demo model, side by side."""
    from specsot_lab.bench import demo as room

    return room.measure(runs, options.wanted_by(ctx.params), output)


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
    output: options.Output = None,
) -> int:
    """Requests per second and waits of 1 to 64 clients at once, of a fleet of processes."""
    if hostile is not None:  # processes are started while calls are under way: gRPC would warn of each
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from specsot_lab.bench import load as room
    from specsot_lab.bench import memory as other_room

    wanted = options.wanted_by({**ctx.params, "fleet": "processes"})
    what = room.LoadOptions(options.numbers_of(clients, "clients") or (), requests, tokens, mode, wanted)
    if hostile is not None:
        from specsot_lab.bench.attacks import KINDS
        from specsot_lab.bench.hostile import measure

        return measure(what, KINDS if hostile == "all" else tuple(hostile.split(",")), memory, output)
    return (other_room if memory else room).measure(what, output)


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
    output: options.Output = None,
) -> int:
    """Plain decoding, verification and drafting of real shapes on one GPU, against its bandwidth."""
    from specsot_lab.bench import gpu as room
    from specsot_lab.bench import gpu_ranges as other_room

    if gpus > 1:
        return other_room.measure(gpus, text, transport, output)
    asked = room.Asked(tuple(models.split(",")), text, rivals, only=tuple(only.split(",")))
    return room.measure(asked, output)


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
    output: options.Output = None,
) -> int:
    """Tokens a lap of plain, drafted and branched writing, on stages that are far from each other."""
    from specsot_lab.bench import ring as room

    wanted = room.wanted(quick, rtt, stages, rounds, only)
    return room.measure(wanted, output)


def policies(
    ctx: typer.Context,
    text: options.ReferenceText = None,
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
    output: options.Output = None,
) -> int:
    """Perplexity of texts under each KV policy."""
    from specsot_lab.bench import policies as room

    reading = _reading(options.wanted_by(ctx.params), text, length, pieces)
    return room.find_heads(reading, gathering) if find_heads else room.measure(reading, output)


def precision(
    ctx: typer.Context,
    text: options.ReferenceText = None,
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
    output: options.Output = None,
) -> int:
    """Memory, perplexity and tokens a lap of a base and its head in every precision."""
    from specsot_lab.bench import precision as room

    wanted = options.wanted_by(ctx.params)
    models, reading = models_of(wanted), _reading(wanted, text, length, pieces)
    writing = room.writing_of(models.base, models.draft, tokens, of_demo=model is None)
    return room.measure(reading, writing, output)


def ablation(
    ctx: typer.Context,
    samples: Annotated[
        int, typer.Option("--samples", "--num-samples", min=1, help="Pairs of each row, a question each.")
    ] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 128,
    only: Annotated[str | None, typer.Option(help="Some of them, such as drafting,adaptive,int8.")] = None,
    prompts: options.OwnQuestions = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    dtype: options.Numbers = "auto",
    device: options.Device = "cpu",
    output: options.Output = None,
) -> int:
    """What each optimisation brings by itself: on against off, on one page."""
    from specsot_app.bench.rounds import models_of, questions_of
    from specsot_lab.bench import ablation as room

    wanted = options.wanted_by(ctx.params)
    models = models_of(wanted, None)
    names = tuple(part.strip() for part in only.split(",")) if only else ()
    if unknown := set(names) - room.MEANING.keys():
        known = ", ".join(room.MEANING)
        raise InvalidRequest(f"only must be of {known}, got {min(unknown)!r}", field="only")
    asked = questions_of(models, prompts)
    has_head = models.head is not None
    what = room.AblationOptions(wanted, asked, samples, max_new_tokens, names, has_head)
    return room.measure(what, output)


def laps(
    ctx: typer.Context,
    count: Annotated[int, typer.Option("--laps", min=1, help="Laps that count, of each way.")] = 30,
    branches: Annotated[int, typer.Option(min=2, help="Texts side by side behind one prompt.")] = 6,
    prompts: options.OwnQuestions = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    dtype: options.Numbers = "fp32",
    quantization: options.Rounding = None,
    output: options.Output = None,
) -> int:
    """Where the time of a lap goes on a CPU: by phase, and by kind of work."""
    from specsot_app.bench.rounds import models_of, questions_of
    from specsot_lab.bench import lap_split as room

    models = models_of(options.wanted_by(ctx.params), None)
    return room.measure_models(models, questions_of(models, prompts)[0], count, branches, output)


def _reading(wanted: Wanted, text: Path | None, length: int, pieces: int) -> ReadingOptions:
    from specsot_lab.bench.policies import ReadingOptions

    held, kept = wanted.quantization, wanted.kv_cache_dtype or "auto"
    base = models_of(wanted).base
    return ReadingOptions(base, text, length, pieces, wanted.dtype, wanted.device, held, kept)
