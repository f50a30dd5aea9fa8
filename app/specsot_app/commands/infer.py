"""`specsot infer`: one question, answered before your eyes.

Refuses to know how a fleet works and how an answer is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from specsot.errors import InvalidRequest
from specsot.events import Numbered, Reason
from specsot.params import MAX_FORM_BYTES, Ask, refuse
from specsot_app.ask import ask_of
from specsot_app.commands import options
from specsot_app.event_loop import run_until_signal
from specsot_app.fleets import Opener, Wanted, models_of, open_fleet

if TYPE_CHECKING:
    from specsot_app.terminal.show import OutputFormat, Streams


def infer(
    ctx: typer.Context,
    question: Annotated[str | None, typer.Argument(help="The question; or through a pipe.")] = None,
    mode: options.AnyMode = "auto",
    drafter: options.Drafter = None,
    max_new_tokens: options.MaxNewTokens = None,
    max_branch_tokens: options.MaxBranchTokens = None,
    max_parallel: options.MaxParallel = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=VALUE: what a token's logit gains; repeatable.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: tokens' log-probabilities and so many others'.")
    ] = None,
    sinks: options.Sinks = None,
    recent: options.Recent = None,
    keep_ratio: options.KeepRatio = None,
    prune_every: options.PruneEvery = None,
    skip_layers: options.SkipLayers = None,
    head_aware: options.HeadAware = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    constraint: options.Constraint = True,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON of this schema: a file, or the schema itself.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this regex.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these texts; repeatable.")
    ] = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    draft_format: options.DraftFormat = "safetensors",
    model_format: options.ModelFormat = "safetensors",
    drafter_rope_theta: options.RopeTheta = None,
    aux_layers: options.AuxLayers = None,
    draft_mode: options.DraftShape = None,
    draft_tokens: options.DraftTokens = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_threshold: options.DraftThreshold = None,
    tuner: options.Tuner = "measured",
    blend: options.Blend = True,
    preset: options.AnyPreset = None,
    dtype: options.Numbers = "auto",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    kv_memory: options.KvMemory = None,
    batch_invariant: options.BatchInvariant = False,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    device: options.Device = "cpu",
    branch_layout: options.BranchLayout = "batched",
    stages: options.Stages = None,
    layers: options.Layers = None,
    transport: options.BetweenProcesses = None,
    comm_mode: options.Neighbours = None,
    fleet: options.FleetKind = "embedded",
    master: options.Master = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> int:
    """Answer one question: plan, branches side by side, merged answer, figures."""
    wanted = options.wanted_by(ctx.params)
    if master is None:
        models_of(wanted)  # what cannot be is told before anything is loaded
    asked = options.asked_by(ctx.params) | {
        "model": model if master else None,
        "json_schema": read_schema(json_schema) if json_schema is not None else None,
    }
    ask = ask_of(question if question not in (None, "-") else read_question(), **asked)
    from specsot_app.terminal.show import Streams, format_for, open_with_progress

    streams = Streams(sys.stdout, sys.stderr)
    return run_until_signal(
        answer(ask, wanted, streams, format_for(streams, json), open_with_progress(sys.stderr))
    )


def read_question() -> str:
    """The question from a pipe; a person at a terminal is told how to ask."""
    if sys.stdin.isatty():
        raise InvalidRequest(
            'a question is needed: specsot infer "How do I make Banana Pancakes?"', field="prompt"
        )
    return sys.stdin.read().strip()


def read_schema(given: str) -> str:
    """A schema as it was written on the command line, or the text of the file that was named there."""
    if given.lstrip().startswith("{"):
        return given
    try:
        with Path(given).open(encoding="utf-8") as file:
            return file.read(MAX_FORM_BYTES + 1)
    except (OSError, ValueError) as error:
        raise refuse(f"json_schema: {given!r} is neither a schema nor a file to read ({error})") from None


async def answer(
    ask: Ask, wanted: Wanted, streams: Streams, manner: OutputFormat, opener: Opener = open_fleet
) -> int:
    """Open the fleet, show the request, close the fleet; 1 when the request failed."""
    from specsot_app.terminal.show import show

    fleet = await opener(wanted)
    try:
        async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(ask))) as events:
            view = await show(events, manner, streams)
    finally:
        await fleet.close()
    return 1 if view.finished is None or view.finished.reason is Reason.FAILED else 0
